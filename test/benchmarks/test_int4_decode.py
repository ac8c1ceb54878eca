# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmarks import int4_decode


@pytest.mark.slow
def test_forms_agree_with_float64(capsys):
    """The program fails where a form is wrong."""
    assert int4_decode.main(["--layers", "1", "--scale", "16", "--length", "40", "--seconds", "0.1"]) == 0
    assert capsys.readouterr().out.count("us a layer") == 3
