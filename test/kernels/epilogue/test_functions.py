# SPDX-License-Identifier: Apache-2.0
import torch

from torch_tile.kernels.epilogue.functions import FUNCTIONS


def test_rows_are_well_formed():
    for name, row in FUNCTIONS.items():
        assert row.name == name and len(row.gradient) in (0, row.arity)
        assert not (row.bounded and row.singular) and (row.arity == 2 or not row.commutative)


def test_each_spelling_is_an_operator_of_one_row():
    spellings = [spelling for row in FUNCTIONS.values() for spelling in row.aten]
    assert len(set(spellings)) == len(spellings)
    assert all(hasattr(torch.ops.aten, spelling.removesuffix(".default")) for spelling in spellings)
