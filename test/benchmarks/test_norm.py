# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from benchmarks import norm
from benchmarks.problem import error_of, tolerance_of, wrong


@pytest.mark.parametrize("kind", norm.OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_and_torch_agree_with_float64(kind, dtype):
    case = norm.case(kind, 300, 40, dtype, "cpu")
    want = case.expected()
    assert want.shape == (256, 40)
    assert wrong(case, case.ours, want, tolerance_of(dtype))[1] == ""
    assert error_of(case.sample(case.rivals["torch"]()()), want) < 8 * tolerance_of(dtype)


def test_the_copy_is_a_yardstick():
    case = norm.case("softmax", 5, 40, torch.float32, "cpu")
    assert case.yardsticks["copy"]().shape == (5, 40)


def test_rows_of_the_targets():
    found = {p.name: p for p in norm.problems("cuda")}
    assert sum(name.startswith("rms_norm silu") for name in found) == 7
    row = found["rms_norm silu 302400x1024 bf16"]
    assert row.bytes == 4.0 * 302400 * 1024 and row.asked == {"copy": 0.9} and row.traffic == "copy"
