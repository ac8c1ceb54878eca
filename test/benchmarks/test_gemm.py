# SPDX-License-Identifier: Apache-2.0
import sys

import pytest
import torch

import torch_tile
from benchmarks import gemm
from benchmarks.problem import error_of, tolerance_of, wrong
from benchmarks.runner import RIVALS_SLACK


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("m", [1, 256])  # more than are sampled
def test_the_case_that_gpus_run(monkeypatch, turned, m):
    """On the CPU, with our compiler in TileLang's place."""
    monkeypatch.setitem(sys.modules, "tilelang", torch_tile)
    case = gemm.plain("cpu", torch.float16, turned, m, 256, 128)
    want = case.expected()
    assert wrong(case, case.ours, want, tolerance_of(torch.float16))[1] == ""
    assert ("tilelang" in case.rivals) == (m == 256), "tiles of 128 rows"
    for name in ("cuBLAS", "tilelang"):
        if name in case.rivals:
            assert wrong(case, case.rivals[name](), want, RIVALS_SLACK * tolerance_of(torch.float16))[1] == ""


def test_work_and_targets():
    problem = next(p for p in gemm.problems("cuda") if p.name == "gemm M5 bf16 nxk")
    assert problem.flops == 2.0 * 8192**3 and problem.bytes == 3 * 2 * 8192.0**2 and problem.asked == {"cuBLAS": 1.02}
    groups = {p.group for p in gemm.problems("cuda")}
    assert {f"gemm {s} {d} {o}" for s in "MV" for d in ("fp16", "bf16") for o in ("kxn", "nxk")} <= groups


@pytest.mark.parametrize("name", ["tiny_linear_gelu", "tiny_swiglu"])
def test_epilogues_on_the_cpu(name):
    dtype, m, n, k = gemm.ON_CPU[name]
    case = gemm.small(name, dtype, m, n, k)
    assert error_of(case.sample(case.rivals["torch"]()()), case.expected()) < RIVALS_SLACK * tolerance_of(dtype)
