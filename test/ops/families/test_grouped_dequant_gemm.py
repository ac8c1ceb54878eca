# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows by matrices of few bits: what they refuse, and gradients of activations."""

import pytest
import torch

import torch_tile.ops as ops
from torch_tile.kernels.gemm.dequant import dequantize

F32, ENDS = torch.float32, torch.tensor([2, 5], dtype=torch.int32)
X, WORDS, SCALE = torch.ones(5, 64), torch.ones(2, 9, 32, dtype=torch.uint8), torch.ones(2, 9, 2)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X.int(), [WORDS], [], [], ENDS, 4), {}, TypeError, "a has dtype torch.int32"),
        ((X, [], [], [], ENDS, 4), {}, ValueError, "bs is empty"),
        ((X, [WORDS[0]], [], [], ENDS, 4), {}, RuntimeError, r"bs\[0\] has 2 dimensions .* \[G, N, K \* bits / 8\]"),
        ((X, [WORDS[..., :8]], [], [], ENDS, 4), {}, RuntimeError, ".*expected 4 bits for each of a's 64 columns"),
        ((X, [WORDS, WORDS[:1]], [], [], ENDS, 4), {}, RuntimeError, r"bs\[1\] has size 1 in dimension 0"),
        ((X, [WORDS], [SCALE[0]], [], ENDS, 4), {}, RuntimeError, r"scales\[0\] has 2 .* expected 3: \[G, N, runs\]"),
        ((X, [WORDS], [SCALE[:1]], [], ENDS, 4), {}, RuntimeError, r"scales\[0\] has size 1 in dimension 0"),
        ((X, [WORDS], [], [SCALE], ENDS, 4), {"format": "e2m1"}, ValueError, ".*there are 1 zeros"),
        ((X, [WORDS], [], [], ENDS.long(), 4), {}, TypeError, "offsets has dtype torch.int64"),
        ((X, [WORDS], [], [], ENDS[:1], 4), {}, RuntimeError, r"offsets has size 1 in dimension 0"),
    ],
)
def test_few_bits_refuse(args, options, error, message):
    with pytest.raises(error, match=f"tile.grouped_dequant_gemm: {message}"):
        ops.grouped_dequant_gemm(*args, dtype=F32, **options)


@pytest.mark.parametrize("format", ["", "e2m1", "nf4"])
def test_activations_have_gradients_through_frozen_experts(format, seed):
    """As of a product with the widened weights, and under torch.compile."""
    x = torch.randn(5, 64, requires_grad=True)
    words = torch.randint(0, 256, (2, 9, 32), dtype=torch.uint8)

    def loss(x):
        out = ops.grouped_dequant_gemm(x, [words], [SCALE / 8], [], ENDS, 4, dtype=F32, format=format)
        return out.square().sum()

    wide = dequantize(words, SCALE / 8, None, 4, False, 0, F32, format)
    want = torch.cat([x[:2] @ wide[0].T, x[2:] @ wide[1].T]).square().sum()
    (wanted,) = torch.autograd.grad(want, x)
    torch.testing.assert_close(torch.autograd.grad(loss(x), x)[0], wanted, rtol=1e-4, atol=1e-3)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], wanted, rtol=1e-4, atol=1e-3)
