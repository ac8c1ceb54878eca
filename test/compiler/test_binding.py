# SPDX-License-Identifier: Apache-2.0
"""What only the shared rules say; launchers and the interpreter have tests of their own."""

import re

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.binding import Binding, scalar
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.ir.dtype import to_dtype
from torch_tile.ir.expr import Var

m, n, s = T.dynamic("m, n, s")
k = Var("k", to_dtype("int32"), "dim", multiple=8)


def binding(**params):
    """The binding of a program with these parameters, which touches none of them."""
    from torch_tile.ir.stmt import Program
    from torch_tile.language.program import make_param

    return Binding(Program("f", tuple(make_param(name, kind) for name, kind in params.items()), (), (), ()))


def sizes(bound, *args):
    return {v.name: number for v, number in bound.sizes_of(bound.in_order(args)).items()}


def test_sizes_follow_in_any_order():
    bound = binding(x=T.Tensor((m + n,), "int8"), y=T.Tensor((3 * m - 1, T.ceildiv(n, 4)), "int8"))
    x, y = torch.zeros(9, dtype=torch.int8), torch.zeros(5, 2, dtype=torch.int8)
    assert sizes(bound, x, y) == {"m": 2, "n": 7}
    with pytest.raises(LaunchError, match="`y` has size 6 in dimension 0, from which m of"):
        sizes(bound, x, torch.zeros(6, 2, dtype=torch.int8))
    with pytest.raises(LaunchError, match=r"`y` must have size 2 \(.*\) in dimension 1, got 3"):
        sizes(bound, x, torch.zeros(5, 3, dtype=torch.int8))


def test_an_error_tells_which_argument_gave_the_size():
    bound = binding(x=T.Tensor((n, m), "int8"), y=T.Tensor((m, n + 1), "int8"), z=T.Tensor((3,), "int8"))
    x, y, z = torch.zeros(5, 3, dtype=torch.int8), torch.zeros(3, 6, dtype=torch.int8), torch.zeros(3, dtype=torch.int8)
    assert sizes(bound, x, y, z) == {"n": 5, "m": 3}
    told = r"`y` must have size 3 \(m\) in dimension 0, got 4; m is 3 by the size of `x` in dimension 1$"
    with pytest.raises(LaunchError, match=told):
        sizes(bound, x, torch.zeros(4, 6, dtype=torch.int8), z)
    with pytest.raises(LaunchError, match=r"in dimension 1, got 9; n is 5 by the size of `x` in dimension 0$"):
        sizes(bound, x, torch.zeros(3, 9, dtype=torch.int8), z)
    with pytest.raises(LaunchError, match=r"`z` must have size 3 in dimension 0, got 4$"):
        sizes(bound, x, y, torch.zeros(4, dtype=torch.int8))
    strided = binding(x=T.StridedTensor((n, m), (s, 1), "int8"), y=T.StridedTensor((n, m), (s, 1), "int8"))
    with pytest.raises(LaunchError, match=r"got 7; s is 9 by the stride of `x` in dimension 0$"):
        sizes(strided, *(torch.zeros(2, k, dtype=torch.int8)[:, :3] for k in (9, 7)))


def test_rounded_sizes_tell_nothing():
    """One group may stand for one to four elements."""
    bound = binding(x=T.Tensor((T.ceildiv(n, 4),), "int8"), y=T.Tensor((n,), "int8"))
    assert sizes(bound, torch.zeros(1, dtype=torch.int8), torch.zeros(3, dtype=torch.int8)) == {"n": 3}


def test_idle_strides():
    bound = binding(x=T.StridedTensor((m, n), (s, 1), "float32"), y=T.StridedTensor((m, n), (s, 1), "float32"))
    base = torch.zeros(4, 9)
    row = torch.zeros(1, 5).as_strided((1, 5), (99, 1))
    assert sizes(bound, row, row)["s"] == 99
    assert sizes(bound, base[:, :5], base[:, :5])["s"] == 9
    with pytest.raises(LaunchError, match=r"`y` must have stride 9 \(s\) in dimension 0, got 5"):
        sizes(bound, base[:, :5], torch.zeros(4, 5))


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("stride", [0, 1, 7, 12])
def test_strides_of_tensors_without_elements_are_idle(shape, stride):
    empty, rows = torch.zeros(shape).as_strided(shape, (stride, 1)), torch.zeros(4, 9)[:, :5]
    bound = binding(x=T.StridedTensor((m, n), (n, 1), "float32"), y=T.StridedTensor((4, 5), (s, 1), "float32"))
    assert sizes(bound, empty, rows) == {"m": shape[0], "n": shape[1], "s": 9}
    bound = binding(x=T.StridedTensor((m, n), (s, 1), "float32"), y=T.StridedTensor((4, 5), (s, 1), "float32"))
    assert sizes(bound, empty, rows)["s"] == 9
    bound = binding(x=T.StridedTensor((m, n), (k, 1), "float32"))
    assert sizes(bound, empty)["k"] % 8 == 0


def test_idle_strides_need_not_be_multiples():
    """No address depends on the stride of a single row; a size or a stride between rows must be a multiple."""
    bound = binding(x=T.StridedTensor((m, n), (k, 1), "float32"))
    assert sizes(bound, torch.zeros(1, 5).as_strided((1, 5), (99, 1)))["k"] % 8 == 0
    with pytest.raises(LaunchError, match="size `k`, the stride of argument `x` in dimension 0, must be a multiple"):
        sizes(bound, torch.zeros(2, 99)[:, :5])
    bound = binding(x=T.StridedTensor((m, k), (k, 1), "float32"))
    with pytest.raises(LaunchError, match="size `k`, the size of argument `x` in dimension 1, must be a multiple"):
        sizes(bound, torch.zeros(1, 5).as_strided((1, 5), (16, 1)))


def test_multiples():
    bound = binding(x=T.Tensor((m, k), "float16"))
    assert sizes(bound, torch.zeros(3, 16).half()) == {"m": 3, "k": 16}
    assert sizes(bound, torch.zeros(3, 0).half()) == {"m": 3, "k": 0}
    message = "size `k`, the size of argument `x` in dimension 1, must be a multiple of 8, got 12"
    with pytest.raises(LaunchError, match=re.escape(message)):
        sizes(bound, torch.zeros(3, 12).half())


def test_devices():
    bound = binding(x=T.Tensor((4,), "float32"))
    with pytest.raises(LaunchError, match="`x` must be on a CUDA device, got a tensor on cpu"):
        bound.sizes_of([torch.zeros(4)], "cuda")
    with pytest.raises(LaunchError, match="`x` must be on cpu, got a tensor on meta"):
        bound.sizes_of([torch.zeros(4, device="meta")])


def test_scalars():
    number = Var("a", to_dtype("uint8"), "param")
    assert scalar(number, 255) == 255 and scalar(number, torch.tensor(7)) == 7
    for bad in (256, -1, 1.0, "1", torch.zeros(1)):
        with pytest.raises(LaunchError, match="`a`"):
            scalar(number, bad)
    assert scalar(Var("f", to_dtype("float32"), "param"), True) == 1.0


@pytest.mark.parametrize("with_bias", [False, True])
def test_none_for_a_tensor_that_nothing_uses(with_bias, way):
    n, m = T.dynamic("n, m")

    @T.prim_func
    def kernel(
        A: T.Tensor((n, 32), "float32"), bias: T.Tensor((m,), "float32"), mask: T.Tensor((n, 32), "int4"),
        B: T.Tensor((n, 32), "float32"),
    ):  # fmt: skip
        with T.Kernel(n, threads=32) as bx:
            for i in T.Parallel(32):
                B[bx, i] = A[bx, i]
                if with_bias:
                    B[bx, i] += bias[i]

    a, b = torch.randn(5, 32), torch.zeros(5, 32)
    bias = torch.randn(32) if with_bias else None
    way(kernel, a, bias, None, b)
    assert torch.equal(b, a + bias if with_bias else a)


def test_none_for_a_tensor_that_is_used():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            T.copy(A, B)

    with pytest.raises(LaunchError, match="`A` must be a tensor, got NoneType"):
        torch_tile.compile(kernel, target="cpu")(None, torch.zeros(32))
