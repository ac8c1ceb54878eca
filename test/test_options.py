# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.options import PassConfigKey


def test_keys_are_tilelangs_names():
    assert PassConfigKey.TL_ENABLE_FAST_MATH == "tl.enable_fast_math"
    assert PassConfigKey.TIR_DISABLE_VECTORIZE == "tir.disable_vectorize"
    assert PassConfigKey.TL_NOT_YET_KNOWN == "tl.not_yet_known"


def test_dunder_names_are_not_keys():
    with pytest.raises(AttributeError):
        PassConfigKey.__wrapped__
