# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from benchmarks import scan
from benchmarks.problem import error_of, tolerance_of, wrong

KINDS = [(scan.ssd_case, kind) for kind in scan.SSD_KINDS] + [(scan.delta_case, kind) for kind in scan.DELTA_KINDS]


@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_ours_and_torch_agree_with_float64(make, kind):
    dtype = torch.bfloat16 if kind == "forward" else torch.float32
    case = make(kind, scan.Shape(2, 128, 2, 16, 8), dtype, "cpu")
    want = case.expected()
    assert wrong(case, case.ours, want, case.leeway * tolerance_of(dtype))[1] == ""
    for prepare in case.rivals.values():
        assert error_of(case.sample(case.read(prepare()())), want) < 8 * tolerance_of(dtype)


def test_rows_of_the_targets():
    found = {p.name: p for p in scan.problems("cuda")}
    assert found["ssd chunk_scan b1 s8192 h64 128x64 bf16"].asked == {"mamba-ssm": 2.0}
    row = found["delta gradients b1 s4096 h16 128x128 bf16"]
    assert row.asked == {"fla": 1.5} and row.flops == 2 * 4.0 * 4096 * 16 * 128 * 128
