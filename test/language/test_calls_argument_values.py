# SPDX-License-Identifier: Apache-2.0
"""Values of arguments that TileLang refuses are refused here, with the reason and the class that its files expect."""

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def in_kernel(body, dtype="float32", target="cpu"):
    """Compile a kernel whose body is `body(A, B)`, of two tensors."""
    body = T.macro(body)

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), dtype), B: T.Tensor((64, 64), dtype)):
        with T.Kernel(1, threads=128) as _:
            body(A, B)

    return tilelang.compile(kernel, target=target)


def product(k_pack):
    def body(A, B):
        a, c = T.alloc_shared((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
        T.copy(A, a)
        T.gemm(a, a, c, clear_accum=True, k_pack=k_pack)
        T.copy(c, B)

    return body


@pytest.mark.parametrize("k_pack", [0, -1, 3, True, 2.0, "2", None])
def test_k_pack(k_pack):
    with pytest.raises(ValueError, match=r"T\.gemm k_pack must be an int equal to 1 or 2, got "):
        in_kernel(product(k_pack))


@pytest.mark.parametrize("k_pack", [1, 2])
def test_k_pack_has_no_effect(k_pack):
    a, b = torch.randn(64, 64), torch.zeros(64, 64)
    in_kernel(product(k_pack))(a, b)
    torch.testing.assert_close(b.double(), a.double() @ a.double(), rtol=1e-4, atol=1e-4)


def test_neighbours_for_dp4a():
    """The types are checked before the place."""
    for kinds in [("float16", "int8", "int32"), ("int8", "int8", "float32"), ("uint8", "uint8", "int32")]:
        with pytest.raises(ValueError, match="dp4a requires int8"):

            @T.prim_func
            def kernel(A: T.Tensor((4,), kinds[0]), B: T.Tensor((4,), kinds[1]), C: T.Tensor((1,), kinds[2])):
                T.dp4a(A, B, C)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"round": "rs"}, "rbits is required"),
        ({"round": "rn", "rbits": 3}, "rbits is only valid"),
        ({"round": "up"}, "Invalid round: give one of rn, rz"),
        ({"sat": "no"}, "Invalid sat: give True, False"),
        ({"round": "rs", "rbits": 3, "sat": False}, "stays below infinity"),
    ],
)
def test_roundings_of_casts(given, words):
    with pytest.raises(ValueError, match=words):
        T.cast(1.0, "float8_e4m3fn", **given)


def test_results_are_named_once():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        B = T.empty((4,), "float32")
        with T.Kernel(1):
            T.copy(A, B)
        return B

    with pytest.raises(ValueError, match="Out index conflict"):
        tilelang.compile(kernel, out_idx=[-1], target="cpu")
    assert tilelang.compile(kernel, target="cpu")(torch.ones(4)).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 3.4028235e38), ("float16", 65504.0), ("bfloat16", 3.3895314e38)]
)
def test_starts_of_variables_fit(dtype, most):
    def body(A, B):
        v = T.alloc_var(dtype, -most)
        B[0, 0] = v

    def beyond(A, B):
        v = T.alloc_var(dtype, most * 1.01)
        B[0, 0] = v

    def infinite(A, B):
        v = T.alloc_var(dtype, float("inf"))
        B[0, 0] = v

    b = torch.zeros(64, 64)
    in_kernel(body)(b, b)
    assert b[0, 0] == torch.tensor(-most).to(getattr(torch, dtype)).float()
    in_kernel(infinite)(b, b)
    assert b[0, 0] == torch.inf
    with pytest.raises(ValueError, match=f"exceeds maximum of {dtype}"):
        in_kernel(beyond)


def test_asynchronous_copies_fill_shared_memory():
    def shared(A, B):
        one, two = T.alloc_shared((64, 64), "float32"), T.alloc_shared((64, 64), "float32")
        T.copy(A, one)
        T.async_copy(one, two)
        T.copy(two, B)

    def back(A, B):
        one = T.alloc_shared((64, 64), "float32")
        T.copy(A, one)
        T.async_copy(one, B)

    for body in (shared, back):
        with pytest.raises(TileError, match=r"T\.async_copy only supports global->shared"):
            in_kernel(body)


@pytest.mark.parametrize("dtype", ["float64", "int64", "float16", "int32", "float32x2"])
def test_types_that_a_tma_adds(dtype):
    def body(A, B):
        a = T.alloc_shared((64, 64), dtype)
        T.copy(A, a)
        T.atomic_add(B, a, use_tma=True)

    if dtype in ("float16", "int32"):
        assert in_kernel(body, dtype, "cuda:sm_90a")
    else:
        with pytest.raises(TileError, match=f"TMA atomic add does not support dtype {dtype}.*supported scalar dtypes"):
            in_kernel(body, dtype)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_targets_without_a_tma(target):
    def body(A, B):
        a = T.alloc_shared((64, 64), "float32")
        T.copy(A, a)
        T.atomic_add(B, a, use_tma=asked)

    asked = False
    assert in_kernel(body, "float32", target)
    asked = True
    with pytest.raises(TileError, match=r"`use_tma` is True: TMA atomic add requires a CUDA target with TMA support"):
        in_kernel(body, "float32", target)


def test_a_tma_gives_no_previous_value():
    def body(A, B):
        B[0, 0] = T.atomic_add(A[0, 0], 1.0, return_prev=True, use_tma=True)

    with pytest.raises(TileError, match="a TMA gives no previous value"):
        in_kernel(body, "float32")


def test_neighbours_by_a_ramp(way):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32"), out: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=1):
            out[2:4] = T.atomic_addx2(A[T.Ramp(2, 1, 2)], B[T.Ramp(4, 1, 2)], return_prev=True)

    a, b, out = torch.randn(8), torch.randn(8), torch.zeros(8)
    before, wanted = a.clone(), a.clone()
    wanted[2:4] += b[4:6]
    way(kernel, a, b, out)
    assert torch.equal(a, wanted) and torch.equal(out[2:4], before[2:4])
    with pytest.raises(TileError, match="give 2"):

        @T.prim_func
        def other(A: T.Tensor((8,), "float32")):
            with T.Kernel(1):
                T.atomic_addx2(A[T.Ramp(0, 1, 4)], A[T.Ramp(4, 1, 2)])
