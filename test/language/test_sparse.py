# SPDX-License-Identifier: Apache-2.0
"""T.gemm_sp, and the matrices of torch_tile.utils.sparse."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.cuda.intrinsics.sparse_layout import GROUP_CONFIG, get_e_factor, get_e_replicate_factor
from torch_tile.diagnostics.errors import TileError
from torch_tile.utils.sparse import compress, randn_semi_sparse


def product(rows, columns, depth, kind, word, total, turned=(False, False, False), held=False):
    """A sparse product over the depth in two steps; `held`: the operands of A come in fragments."""
    turned_a, turned_e, turned_b = turned
    half, count = depth // 2, depth * 4 // ((2 if kind == "float32" else 4) * getattr(torch, word).itemsize * 8)

    def flip(shape, is_turned):
        return shape[::-1] if is_turned else shape

    @T.prim_func
    def kernel(
        A: T.Tensor(flip((rows, 2 * half), turned_a), kind), E: T.Tensor(flip((rows, 2 * count), turned_e), word),
        B: T.Tensor(flip((2 * depth, columns), turned_b), kind), C: T.Tensor((rows, columns), total),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            alloc = T.alloc_fragment if held else T.alloc_shared
            a, e = alloc(flip((rows, half), turned_a), kind), alloc(flip((rows, count), turned_e), word)
            b = T.alloc_shared(flip((depth, columns), turned_b), kind)
            c = T.alloc_fragment((rows, columns), total)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[k * half, 0] if turned_a else A[0, k * half], a)
                T.copy(E[k * count, 0] if turned_e else E[0, k * count], e)
                T.copy(B[0, k * depth] if turned_b else B[k * depth, 0], b)
                T.gemm_sp(a, e, b, c, turned_a, turned_e, turned_b, clear_accum=k == 0)
            T.copy(c, C)

    return kernel


CASES = {
    "half": ("float16", "int16", "float32", (False, False, False), False),
    "bf16 in fragments": ("bfloat16", "int32", "float32", (False, False, True), True),
    "turned": ("float16", "uint8", "float32", (True, True, False), False),
    "int8": ("int8", "int32", "int32", (False, True, True), False),
    "fp32": ("float32", "int16", "float32", (False, False, False), False),
    "turned fp32": ("float32", "int8", "float32", (True, False, True), False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sparse_product(way, name):
    kind, word, total, turned, held = CASES[name]
    rows, columns, depth = 64, 32, 64
    dense = randn_semi_sparse(rows, 2 * depth, torch.float32, "cpu")
    if kind != "float32":
        dense = randn_semi_sparse(rows, 2 * depth, torch.float16, "cpu")
    dense = (dense * 10).round().to(torch.int8) if kind == "int8" else dense.to(getattr(torch, kind))
    a, e = compress(dense, meta_dtype=getattr(torch, word))
    b = torch.randint(-9, 9, (2 * depth, columns)) if kind == "int8" else torch.randn(2 * depth, columns)
    b, c = b.to(dense.dtype), torch.zeros(rows, columns).to(getattr(torch, total)) + 7
    given = [x.mT.contiguous() if is_turned else x for x, is_turned in zip((a, e, b), turned, strict=True)]
    way(product(rows, columns, depth, kind, word, total, turned, held), *given, c)
    torch.testing.assert_close(c.double(), dense.double() @ b.double(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90a"])
def test_machine_code(chip):
    made = torch_tile.compile(product(64, 32, 64, "float16", "int16", "float32"), target=f"cuda:{chip}")
    (found,) = made.resources.values()
    assert not made.cubin.warnings and not found.spills, (made.cubin.warnings, found)
    assert "tile::mma_" in made.source or "wgmma" in made.source


def test_metadata_is_that_of_mma_sp():
    a, e = compress(torch.tensor([[0, 5, 0, 7, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0]]).half())
    assert a.tolist() == [[5, 7, 1, 2, 0, 0, 0, 9]] and e.dtype == torch.int16
    nibbles = [int(e) >> shift & 15 for shift in (0, 4, 8, 12)]
    assert nibbles == [0b1101, 0b0100, 0b0100, 0b1000]
    kept, e = compress(torch.tensor([[1.0, 0, 0, 2]]), meta_dtype=torch.uint8)
    assert kept.tolist() == [[1, 2]] and int(e) == 0b11100100


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_turned_matrices_and_those_that_are_not_sparse(dtype):
    dense = randn_semi_sparse(16, 64, dtype, "cpu", transposed=True)
    assert dense.shape == (64, 16)
    turned, straight = compress(dense, transposed=True), compress(dense.mT.contiguous())
    for x, y in zip(turned, straight, strict=True):
        assert torch.equal(x.float(), y.mT.float())
    with pytest.raises(ValueError, match="nonzeros"):
        compress(torch.ones(4, 64))
    with pytest.raises(ValueError, match="a multiple of"):
        compress(torch.zeros(4, 12))


@pytest.mark.parametrize("shape", [(64, 3), (32, 4), (64, 8)])
def test_metadata_of_another_size(shape):
    with pytest.raises(TileError, match="4 bits for each 4 columns") as caught:

        @T.prim_func
        def kernel(B: T.Tensor((64, 32), "float16")):
            with T.Kernel(1, threads=128):
                a, e = T.alloc_shared((64, 32), "float16"), T.alloc_shared(shape, "int16")
                T.gemm_sp(a, e, B, T.alloc_fragment((64, 32), "float32"))

    assert caught.value.code == "bad_argument"


def test_words_of_metadata_are_counted():
    assert get_e_factor("float16", "int16") == 16 and get_e_factor(T.float32, T.int8) == 4
    assert get_e_factor(T.float8_e4m3fn, torch.int32) == 32 and GROUP_CONFIG[T.int8] == (2, 4)
    assert [get_e_replicate_factor(t) for t in ("int8", "bfloat16", "float32")] == [1, 2, 2]
