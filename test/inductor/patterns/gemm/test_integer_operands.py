# SPDX-License-Identifier: Apache-2.0
"""Operands that torch refuses: the user reads torch's error, not a failure of a pattern."""

import pytest
import torch

import torch_tile


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_the_error_is_torchs(dtype: torch.dtype, caplog) -> None:
    with pytest.raises(RuntimeError, match="dtype|floating"):
        torch_tile.explain(torch.nn.Linear(8, 8), torch.ones(2, 8, dtype=dtype))
    assert "its subgraphs are left to Inductor" not in caplog.text
