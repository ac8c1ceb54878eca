# SPDX-License-Identifier: Apache-2.0
"""torch_tile.transform: unused tensors leave the parameters, as TileLang's pass has it."""

import torch

import torch_tile
import torch_tile.language as T
from torch_tile.transform import apply_simplify, simplify_prim_func


def made(with_bias):
    n = T.dynamic("n")

    @T.prim_func
    def main(
        A: T.Tensor((8,), "float32"), Bias: T.Tensor((8,), "float32"), Sized: T.Tensor((n,), "float32"), x: T.int32,
        B: T.Tensor((8,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = A[i] + n + (Bias[i] if with_bias else 0.0)

    return main


def test_unused_tensors_are_dropped():
    """Scalars stay, and so does a tensor that alone tells a size."""
    func = apply_simplify(made(False))
    assert [p.name for p in func.program.params] == ["A", "Sized", "x", "B"]
    a, b = torch.randn(8), torch.zeros(8)
    torch_tile.compile(func, target="cpu")(a, torch.zeros(3), 0, b)
    assert torch.equal(b, a + 3)


def test_what_is_used_stays():
    func = made(True)
    assert apply_simplify(func) is func and apply_simplify(7) == 7
    assert [p.name for p in simplify_prim_func(made)(False).program.params] == ["A", "Sized", "x", "B"]
    assert simplify_prim_func(made).__name__ == "made"
