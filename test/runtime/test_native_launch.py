# SPDX-License-Identifier: Apache-2.0
"""Lazily negated views never get past the native launch, whichever way it asks torch about them."""

import pytest
import torch
from fake_cuda import OnCpu

import torch_tile.language as T
from torch_tile.codegen.cuda import CudaSource, Entry
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import Target
from torch_tile.ir.dtype import to_dtype
from torch_tile.runtime import native_launch


@pytest.fixture(params=["torch's function", "Python's method"])
def way(request, fake_cuda, monkeypatch):
    assert native_launch.native() is not None and native_launch.negative_test() != (0, 0)
    if request.param == "Python's method":
        monkeypatch.setattr(native_launch, "negative_test", lambda: (0, 0))


def launcher_of(shape, dtype):
    @T.prim_func
    def kernel(x: T.StridedTensor(shape, tuple(T.dynamic(f"s{d}") for d in range(len(shape))), to_dtype(dtype))):
        with T.Kernel(1) as _:
            pass

    entry = Entry("kernel_0", (0,), kernel.program.kernels[0].grid, 32, 0, None, "P", False)
    return OnCpu(kernel.program, CudaSource("", (entry,), (1,)), b"\x7fELF", Target("cuda", 90))


def accepts(launcher, tensor):
    """Whether it does, twice."""
    taken = []
    for _ in range(2):
        try:
            taken.append(launcher.begin(tensor) is None)
        except LaunchError as problem:
            assert "argument `x` must be a plain dense tensor; pass .to_dense() or .resolve_neg()" in str(problem)
            taken.append(False)
    assert taken[0] == taken[1]
    return taken[0]


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_views_with_a_sign_to_turn(rank, dtype, way, fake_cuda):
    fake_cuda.number("slots").value = 1
    launcher = launcher_of((2,) * rank, dtype)
    plain = torch.ones((2,) * rank, dtype=dtype)
    for shown in (
        plain,
        torch.nn.Parameter(plain),
        plain.clone().requires_grad_(),
        plain.transpose(0, -1) if rank else plain,
    ):
        assert accepts(launcher, shown)
        assert not accepts(launcher, torch._neg_view(shown))
        assert accepts(launcher, torch._neg_view(torch._neg_view(shown)))
    with torch.inference_mode():
        assert not accepts(launcher, torch._neg_view(plain.clone()))
        assert accepts(launcher, plain.clone())


def test_the_imaginary_part_of_a_conjugate(way, fake_cuda):
    fake_cuda.number("slots").value = 1
    launcher = launcher_of((6,), torch.float32)
    values = torch.randn(6, dtype=torch.complex64)
    assert accepts(launcher, values.imag) and accepts(launcher, values.conj().real)
    assert not accepts(launcher, values.conj().imag)
    assert accepts(launcher, values.conj().imag.resolve_neg()) and accepts(launcher, values.conj_physical().imag)


def test_a_tensor_that_becomes_another(way, fake_cuda):
    """In place: the same object, another form and another sign."""
    fake_cuda.number("slots").value = 1
    launcher = launcher_of((1, 4), torch.float32)
    x = torch.ones(1, 1, 1, 1, 1, 4)
    for _ in range(4):
        x.squeeze_(0)
    assert x.shape == (1, 4) and accepts(launcher, x)
    x.data = torch._neg_view(x)
    assert not accepts(launcher, x)
    x.data = torch.ones(1, 4)
    assert accepts(launcher, x)


def test_nothing_is_asked_that_torch_does_not_have(monkeypatch):
    for name, value in (("IS_NEGATIVE", "_no_such_function"), ("MOST_OFFSET", 8)):
        with monkeypatch.context() as patch:
            patch.setattr(native_launch, name, value)
            assert native_launch.negative_test.__wrapped__() == (0, 0)
    with torch.device("meta"):
        assert native_launch.negative_test.__wrapped__() == native_launch.negative_test()


def test_sizes_of():
    module, exchange = native_launch.native(), torch.Tensor.__dlpack_c_exchange_api__
    x = torch.empty(2, 3)
    assert module.sizes_of(exchange, x) == module.sizes_of(exchange, x) != 0
    assert module.sizes_of(exchange, torch.eye(3).to_sparse()) == 0
    with pytest.raises(ValueError, match="invalid PyCapsule"):
        module.sizes_of(object(), x)


def test_a_module_that_is_there_needs_no_compiler(monkeypatch):
    assert native_launch.native() is not None

    def missing():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(native_launch, "find_compiler", missing)
    assert native_launch._build().is_file()
    monkeypatch.setattr(native_launch, "FLAGS", (*native_launch.FLAGS, "-DOTHER"))
    assert native_launch.native.__wrapped__() is None
