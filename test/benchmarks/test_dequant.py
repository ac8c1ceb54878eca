# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from benchmarks import dequant
from benchmarks.problem import tolerance_of, wrong
from benchmarks.runner import RIVALS_SLACK


@pytest.mark.parametrize("scheme", dequant.SCHEMES)
def test_the_case_that_gpus_run(scheme):
    case = dequant.case("cpu", dequant.SCHEMES[scheme], torch.bfloat16, 5, 40, 128)
    want = case.expected()
    assert wrong(case, case.ours, want, tolerance_of(torch.bfloat16))[1] == ""
    assert wrong(case, case.rivals["torch"](), want, RIVALS_SLACK * tolerance_of(torch.bfloat16))[1] == ""


def test_work_and_targets():
    found = {p.name: p for p in dequant.problems("cuda")}
    problem = found["dequant int4 g128 m16 bf16"]
    assert problem.flops == 2.0 * 16 * 16384**2 and problem.asked == {"cuBLAS": 3.4}
    assert problem.bytes == 16384**2 / 2 + 16384 * 128 * 2 + 2 * 2 * 16 * 16384
    assert not found["dequant int8 m16 bf16"].asked
