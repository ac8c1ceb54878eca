# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError
from torch_tile.jit import compile_program


@pytest.fixture(scope="module")
def kernel():
    @T.prim_func
    def double(x: T.Tensor((6,), "float32"), out: T.Tensor((6,), "float32")):
        with T.Kernel(2) as b:
            for i in T.Parallel(3):
                out[b * 3 + i] = x[b * 3 + i] * 2.0

    return torch_tile.compile(double, out_idx=-1)


def test_inspection(kernel, tmp_path, capsys):
    source = kernel.get_kernel_source()
    assert "static int64_t block_0(float* x, float* out" in source and "#pragma omp parallel" in source
    assert kernel.get_host_source() == source
    kernel.show_source()
    assert capsys.readouterr().out.strip() == source.strip()
    kernel.export_sources(tmp_path / "kernel.cpp")
    assert (tmp_path / "kernel.cpp").read_text() == source
    kernel.print_source_code(file=tmp_path / "again.cpp")
    assert (tmp_path / "again.cpp").read_text() == source and (kernel.n_regs, kernel.n_spills) == (0, 0)
    assert "def double(x: T.Tensor((6,), T.float32)" in kernel.script()
    assert repr(kernel) == "<JITKernel double for cpu>" and kernel.__name__ == "double"
    assert [p.name for p in kernel.params] == ["x", "out"] and kernel.out_idx == [1]
    assert isinstance(kernel, torch_tile.JITKernel)


def test_source_tells_the_authors_lines(kernel):
    line = next(x for x in kernel.get_kernel_source().splitlines() if "out[" in x)
    file, number = line.rsplit("// ", 1)[1].split(":")
    assert file == "test_kernel.py"
    assert "out[b * 3 + i]" in Path(__file__).read_text().splitlines()[int(number) - 1]


@pytest.mark.parametrize("calls", [0, 2])
def test_arguments_that_are_no_call(kernel, calls):
    x, fresh = torch.ones(6), compile_program(kernel.program, kernel.out_idx, "cpu")
    for _ in range(calls):
        fresh(x)
    with pytest.raises(LaunchError, match=r"double takes 1 argument \(x\), all by position, got x by name"):
        fresh(x=x)
    with pytest.raises(LaunchError, match=r"takes 1 argument \(x\), got 2; the kernel allocates out itself"):
        fresh(x, x)
    with pytest.raises(LaunchError, match=r"takes 1 argument \(x\), got 3; .* not what it was compiled for"):
        fresh(x, 3, 4)
    with pytest.raises(LaunchError, match=r"takes 1 argument \(x\), got 0"):
        fresh()
    with pytest.raises(LaunchError, match="argument `x` must be a tensor, got int"):
        fresh(4)


def test_profiler(kernel):
    profiler = kernel.get_profiler()
    profiler.assert_allclose(lambda x: x * 2, atol=0, rtol=0)
    with pytest.raises(AssertionError, match=r"100\.00% of 6 elements differ"):
        profiler.assert_allclose(lambda x: x * 2 + 1)
    assert 0 < profiler.do_bench(warmup=1, rep=5) < 1e3


def test_a_kernel_made_by_its_class():
    """As TileLang's JITKernel compiles a function."""

    @T.prim_func
    def twice(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = A[i] * 2

    kernel = torch_tile.JITKernel(twice, out_idx=[-1], target="cpu")
    a = torch.randn(8)
    assert isinstance(kernel, torch_tile.JITKernel) and torch.equal(kernel(a), a * 2)
    with pytest.raises(TileError, match="prim_func"):
        torch_tile.JITKernel(twice.program.name)
