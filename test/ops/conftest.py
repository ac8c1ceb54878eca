# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of every op, shared by the tests of registration and of the families; and a stand-in for a GPU."""

import sys
from pathlib import Path

import pytest
import torch
from shared_kernels import modules_of_kernels
from torch.utils._pytree import tree_map_only

from torch_tile.hardware import Target
from torch_tile.kernels import common
from torch_tile.ops import eager, matrix_units, pack_latents

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # for fake_cuda.py

from fake_cuda import count_as_gpu, install


class Maker:
    """Random tensors of one dtype from one seed; `requires_grad` makes them leaves that want gradients."""

    def __init__(self, seed: int, dtype: torch.dtype, requires_grad: bool = False) -> None:
        print(f"seed {seed}")
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.requires_grad = dtype, requires_grad

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        t = torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)
        return t.requires_grad_(self.requires_grad)

    def strided(self, *shape: int) -> torch.Tensor:
        """As `self(*shape)`, but a view with the dimensions in reverse order and every other element of the last."""
        base = self(*reversed((*shape[:-1], 2 * shape[-1])))
        return base.permute(*reversed(range(len(shape))))[..., ::2]


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gemm_samples(t: Maker) -> list[tuple]:
    tiny = "v0=add(acc0,x0);v1=silu(v0);v2=mul(v1,acc1);v3=add(v2,x1);v4=mul(v3,x2);v5=mul(v4,x3);ret v5"
    aux = [t(9), t(5, 9), t(5, 1), t()]
    return [
        (t(5, 7), [t(7, 9)], [], "", "", t.dtype),
        (t.strided(5, 7), [t.strided(7, 9)], [], "", "ret acc0", torch.float32),
        (t(5, 7), [t(7, 9), t(7, 9)], aux, "rtcs", tiny, t.dtype),
        (t(2, 5, 7), [t(1, 7, 9)], [t(2, 5, 9)], "t", "v0=gelu_tanh(acc0);v1=sub(v0,x0);ret v1", t.dtype),
        (t(2, 5, 7), [t(2, 9, 7).mT], [t(2, 5, 1)], "c", "v0=div(acc0,2.5);v1=max(v0,x0);ret v1", t.dtype),
    ]


def grouped_gemm_samples(t: Maker) -> list[tuple]:
    swiglu, text = (
        "v0=silu(acc0);v1=mul(v0,acc1);ret v1",
        "v0=mul(acc0,x0);v1=add(v0,x1);v2=add(v1,x2);v3=mul(v2,x3);ret v3",
    )
    offsets, aux = int32([2, 2, 6]), [t(7, 1), t(7, 9), t(9), t(3, 9)]
    return [
        (t(7, 5), [t(3, 5, 9)], offsets, [], "", "", t.dtype),
        (t(7, 5), [t(3, 9, 5).mT, t(3, 9, 5).mT], int32([0, 5, 7]), [], "", swiglu, t.dtype),
        (t.strided(7, 5), [t.strided(3, 5, 9)], offsets, aux, "ctrg", text, torch.float32),
    ]


def k_grouped_gemm_samples(t: Maker) -> list[tuple]:
    return [
        (t(7, 5), t(7, 9), int32([2, 2, 6]), t.dtype),
        (t.strided(7, 5), t.strided(7, 9), int32([7]), torch.float32),
    ]


def dequant_gemm_samples(t: Maker) -> list[tuple]:
    def words(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=t.generator, dtype=torch.uint8).view(dtype)

    whole, nibbles = words(torch.int8, 9, 7), [words(torch.uint8, 9, 32) for _ in range(2)]
    scales, zeros = [t(9, 2) / 16 for _ in range(2)], [t(9, 2) for _ in range(2)]
    swiglu = "v0=silu(acc0);v1=mul(v0,acc1);ret v1"
    leaves = [x.detach().requires_grad_(t.requires_grad) for x in (*scales, *zeros)]
    return [
        (t(5, 7) / 64, [whole], [], [], 8, False, 0, [], "", "", t.dtype),
        (t.strided(5, 64), nibbles[:1], leaves[:1], [], 4, True, 8, [t(9)], "r", "v0=add(acc0,x0);ret v0", t.dtype),
        (t(5, 64), nibbles, leaves[:2], leaves[2:], 4, False, 3, [], "", swiglu, t.dtype),
        (t(5, 64), nibbles[:1], leaves[:1], [], 4, True, 0, [], "", "", t.dtype, "nf4"),
        (t(5, 64), nibbles[:1], leaves[:1], [], 4, False, 8, [], "", "", t.dtype, "", t(64), 1e-5),
    ]


def scaled_gemm_samples(t: Maker) -> list[tuple]:
    def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=t.generator).to(dtype)

    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=t.generator) + 0.5

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, generator=t.generator, dtype=torch.int8)

    a, b = of(torch.float8_e4m3fn, 5, 130), of(torch.float8_e4m3fn, 9, 130).mT
    bias, text = torch.randn(9, generator=t.generator), "v0=add(acc0,x0);ret v0"
    return [
        (a, b, scale(1, 1), scale(1, 1), [], "", "", t.dtype),
        (a, of(torch.float8_e5m2, 130, 9), scale(5, 1), scale(1, 9), [bias], "r", text, t.dtype),
        (a, b, scale(5, 2), scale(2, 1), [], "", "", t.dtype),
        (a, b, scale(5, 2), scale(2, 9), [bias], "r", text, t.dtype),
        (whole(5, 130), whole(9, 130).mT, scale(5, 1) / 64, scale(1, 9) / 64, [bias], "r", text, t.dtype),
        (whole(5, 64), whole(9, 32).mT, scale(5, 1) / 64, scale(1, 9) / 64, [bias], "r", text, t.dtype, 4),
        (whole(5, 64), whole(9, 16).view(torch.uint8).mT, scale(5, 1), scale(1, 9), [], "", "", t.dtype, 2, 1),
    ]


def grouped_dequant_gemm_samples(t: Maker) -> list[tuple]:
    def words(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=t.generator, dtype=torch.uint8)

    whole, nibbles = words(3, 9, 7).view(torch.int8), [words(3, 18, 32)[:, i::2] for i in range(2)]
    leaves = [x.detach().requires_grad_(t.requires_grad) for x in (t(3, 9, 2) / 16, t(3, 9, 2))]
    gated = "v=add(acc0,x0);w=silu(v);y=mul(w,acc1);ret y"
    return [
        (t(7, 7) / 64, [whole], [], [], int32([2, 2, 6]), 8, False, 0, [], "", "", t.dtype),
        (
            *(t.strided(7, 64), nibbles[:1], leaves[:1], leaves[1:], int32([0, 5, 7]), 4, True, 8),
            *([t(7, 1)], "c", "v0=mul(acc0,x0);ret v0", t.dtype),
        ),
        (t(7, 64), nibbles, leaves, [], int32([3, 4, 6]), 4, False, 0, [t(3, 9)], "g", gated, t.dtype, "e2m1"),
    ]


def grouped_scaled_gemm_samples(t: Maker) -> list[tuple]:
    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=t.generator).to(torch.float8_e4m3fn)

    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=t.generator) + 0.5

    a, b, bias = of(7, 130), of(3, 9, 130).mT, torch.randn(3, 9, generator=t.generator)
    return [
        (a, b, scale(1, 1), scale(3, 1, 1), int32([2, 2, 6]), [], "", "", t.dtype),
        (a, b, scale(7, 1), scale(3, 1, 9), int32([0, 5, 7]), [bias], "g", "v0=add(acc0,x0);ret v0", t.dtype),
        (a, b, scale(7, 2), scale(3, 2, 1), int32([7, 7, 7]), [], "", "", t.dtype),
    ]


def k_grouped_scaled_gemm_samples(t: Maker) -> list[tuple]:
    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=t.generator).to(torch.float8_e4m3fn)

    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=t.generator) + 0.5

    a, b = of(7, 280), of(9, 280).mT
    return [
        (a, b, scale(1, 1, 1), scale(1, 1, 1), int32([2, 2, 260]), t.dtype),
        (a, b.contiguous(), scale(3, 7, 1), scale(3, 1, 9), int32([0, 50, 280]), t.dtype),
        (a, b, scale(1, 7, 3), scale(1, 3, 9), int32([128, 128, 280]), t.dtype),
    ]


def masked_scaled_gemm_samples(t: Maker) -> list[tuple]:
    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=t.generator).to(torch.float8_e4m3fn)

    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=t.generator) + 0.5

    a, b, bias = of(3, 7, 130), of(3, 9, 130).mT, torch.randn(3, 9, generator=t.generator)
    return [
        (a, b, scale(3, 1, 1), scale(3, 1, 1), int32([2, 0, 7]), [], "", "", t.dtype),
        (a, b, scale(3, 7, 1), scale(3, 1, 9), int32([0, 5, 7]), [bias], "g", "v0=add(acc0,x0);ret v0", t.dtype),
        (a, b, scale(3, 7, 2), scale(3, 2, 1), int32([7, 1, 7]), [], "", "", t.dtype),
    ]


def quantize_fp8_samples(t: Maker) -> list[tuple]:
    return [
        (t(5, 7).detach(), 0, torch.float8_e4m3fn),
        (t.strided(5, 150).detach(), 128, torch.float8_e5m2),
        (t(2, 3, 64).detach(), 32, torch.float8_e4m3fn),
    ]


def silu_mul_quantize_samples(t: Maker) -> list[tuple]:
    gate, up = t(5, 300).detach().chunk(2, -1)
    return [
        (gate, up, 128, torch.float8_e4m3fn),
        (t(5, 7).detach(), t.strided(5, 7).detach(), 0, torch.int8),
        (t(2, 3, 64).detach(), t(2, 3, 64).detach(), 32, torch.float8_e5m2),
    ]


def linear_samples(t: Maker) -> list[tuple]:
    return [
        (t(5, 7), t(9, 7)),
        (t(2, 3, 7), t(9, 7), t(9), t(2, 3, 9), "gelu"),
        (t(7), t(9, 7), t(9), None, "relu"),
        (t.strided(2, 3, 7), t.strided(9, 7), None, t.strided(2, 3, 9), "gelu_tanh"),
        (t(1, 6), t(1, 6), t(1), None, "silu"),
    ]


def swiglu_samples(t: Maker) -> list[tuple]:
    return [
        (t(5, 7), t(9, 7), t(9, 7)),
        (t.strided(2, 3, 7), t.strided(9, 7), t.strided(9, 7), "gelu_tanh"),
        (t(7), t(9, 7), t(9, 7), "none"),
    ]


def attention_samples(t: Maker) -> list[tuple]:
    q, k, v = t(2, 4, 5, 8), t(2, 2, 7, 8), t(2, 2, 7, 6)
    mask = torch.rand(2, 1, 5, 7, generator=t.generator) > 0.4
    return [
        (t(2, 2, 6, 8), t(2, 2, 6, 8), t(2, 2, 6, 8)),
        (q, k, v, None, True),
        (q, k, v, mask, False, 0.3),
        (q, k, v, t(4, 5, 7), True, None, 3, 2),
        (t.strided(2, 4, 5, 8), t.strided(2, 1, 7, 8), t.strided(2, 1, 7, 6), None, True, None, 0, 2),
        (q, k, v, None, True, None, 0, -3),  # the first three queries see nothing
        (t(2, 5, 4, 8).transpose(1, 2), t(2, 7, 2, 8).transpose(1, 2), t(2, 7, 2, 6).transpose(1, 2), None, True),
        (t(5, 2, 4, 8).permute(1, 2, 0, 3), k, v),
        (q, k, v, None, True, None, 0, 2, [], "v0=div(acc0,2.0);v1=tanh(v0);v2=mul(v1,2.0);ret v2"),
        (q, k, v, mask, False, 0.3, 0, 0, [t(4, 1, 1), t(2, 1, 5, 7)], "v=sub(i3,i2);w=mul(x0,v);y=add(w,x1);ret y"),
        (q, k, v, None, False, None, 3, 2, [t(7), mask], "v=mul(acc0,x0);w=where(x1,v,-inf);ret w"),
    ]


def attention_backward_samples(t: Maker) -> list[tuple]:
    made = []
    samples = attention_samples(t)  # grouped and causal; a window and a mask; strided; turned
    for q, k, v, *options in (samples[n] for n in (1, 3, 4, 6, -3, -2, -1)):  # the last with texts
        out, lse = (x.detach() for x in torch.ops.tile.attention_lse(q, k, v, *options))
        rule, text = (options[:5], ["", *options[5:]]) if len(options) > 5 else (options, [])
        made.append((torch.randn_like(out).requires_grad_(q.requires_grad), q, k, v, out, lse, *rule, *text))
    made.append((*made[1], "mask"))  # gradients of scores are kept
    made.append((*made[-3][:11], "x1,mask,x0", *made[-3][12:]))
    return made


def attention_varlen_samples(t: Maker) -> list[tuple]:
    q, k, v = t(9, 4, 8), t(12, 2, 8), t(12, 2, 6)
    starts = int32([0, 3, 3, 8]), int32([0, 5, 6, 11])
    slopes = [t(4, 1, 1).detach(), t(3, 1, 1, 1).detach()], "v=sub(i3,i2);w=mul(x0,v);y=add(w,x1);z=add(y,acc0);ret z"
    return [
        (q, k, v, *starts, 5, 5),
        (q, k, v, int32([0, 4, 9]), int32([0, 0, 12]), 5, 12, True, 0.3),  # the first sequence has no keys
        (t.strided(9, 4, 8), t.strided(12, 1, 8), t.strided(12, 1, 6), *starts, 6, 7, True, None, 3),
        (t(4, 9, 8).transpose(0, 1), k, v, *starts, 5, 5, True, None, 0, *slopes),
        (q, k, v, *starts, 5, 5, True, None, 0, [], "v0=div(acc0,2.0);v1=tanh(v0);v2=mul(v1,2.0);ret v2"),
    ]  # fmt: skip


def attention_varlen_backward_samples(t: Maker) -> list[tuple]:
    made = []
    for q, k, v, *options in attention_varlen_samples(t):
        out, lse = (x.detach() for x in torch.ops.tile.attention_varlen_lse(q, k, v, *options))
        made.append((torch.randn_like(out).requires_grad_(q.requires_grad), q, k, v, out, lse, *options))
    return made


def attention_block_sparse_samples(t: Maker) -> list[tuple]:
    q, k, v = t(2, 4, 35, 8), t(2, 2, 50, 8), t(2, 2, 50, 6)
    each = int32([[[2, 0, 1]]]), int32([[[[3, 0], [-1, -1], [1, -1]]]])
    own = int32([[[1], [0]], [[1], [1]]]), int32([[[[1]], [[7]]], [[[0]], [[1]]]])
    bias = t(35, 50).detach()
    return [
        (q, k, v, *each, None, None, 16, 16),
        (q, k, v, *each, None, None, 16, 16, True, 0.3, 0, 15),
        (t.strided(2, 2, 30, 8), k, v, *own, None, None, 32, 32, True, None, 20, 20),
        (q, k, v, *each, int32([[[0, 2, 1]]]), int32([[[[0, 0], [2, 0], [2, 9]]]]), 16, 16),
        (q, k, v, *each, None, None, 16, 16, False, None, 0, 0, [bias], "y=add(x0,acc0);ret y"),
    ]


def attention_block_sparse_backward_samples(t: Maker) -> list[tuple]:
    made = []
    for q, k, v, *options in attention_block_sparse_samples(t):
        out, lse = (x.detach() for x in torch.ops.tile.attention_block_sparse_lse(q, k, v, *options))
        made.append((torch.randn_like(out).requires_grad_(q.requires_grad), q, k, v, out, lse, *options))
    return made


def attention_fp8_samples(t: Maker) -> list[tuple]:
    q, k, v = (t(*shape).detach().to(torch.float8_e4m3fn) for shape in ((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 6)))
    scales = t(2, 4).detach().float(), t(1, 2).detach().float().abs(), t(2, 1).detach().float()
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    return [
        (q, k, v, None, None, None, False, None, 0, 0, t.dtype),
        (turned, k, v, *scales, True, 0.3, 3, 4, t.dtype),
        (q, k[:, :, :0], v[:, :, :0], scales[0], None, None, True, None, 0, 0, t.dtype),
    ]


def nsa_select_samples(t: Maker) -> list[tuple]:
    # Scores are small integers, exact in any dtype, and no two sums of a query alike: keys of growing size.
    q = torch.ones(2, 4, 9, 8, dtype=t.dtype)
    k = (torch.arange(4.0) - 2).to(t.dtype)[None, None, :, None].expand(2, 2, 4, 8)
    lse = torch.zeros(2, 4, 9, dtype=torch.float64 if t.dtype == torch.float64 else torch.float32)
    return [(q, k, lse, 21, 3, 4, 4, 4), (q, k.contiguous(), lse, 21, 9, 8, 8, 4, 0, 1, 0.5)]


def attention_paged_samples(t: Maker) -> list[tuple]:
    k, v, table, lengths = t(6, 4, 2, 8), t(6, 4, 2, 6), int32([[5, 0, -1], [3, 5, 1]]), int32([7, 12])
    slopes = "v=sub(i3,i2);w=mul(x0,v);y=add(w,acc0);ret y"
    float8 = [x.detach().to(torch.float8_e4m3fn) for x in (k, v)]
    scales = t(1, 1, 2).detach().float().abs(), t(6, 4, 2).detach().float().abs()
    return [
        (t(2, 1, 4, 8), k, v, table, lengths),
        (t(2, 3, 4, 8), k, v, table, int32([2, 0]), None, 0, False, 0.3),
        (t.strided(2, 2, 4, 8), t.strided(6, 4, 1, 8), t.strided(6, 4, 1, 6), table, lengths, None, 0, True, None, 3),
        (t(6, 4, 8), k, v, table, lengths, int32([0, 1, 5]), 4, True, None, 0, 2),
        (t(2, 4, 3, 8).transpose(1, 2), k, v, table, lengths, None, 0, True, None, 0, 0, [t(4, 1, 1).detach()], slopes),
        (t(2, 1, 4, 8), *float8, table, lengths, None, 0, True, None, 0, 0, None, "", *scales),
    ]


def mla_decode_samples(t: Maker) -> list[tuple]:
    return [
        (t(2, 1, 3, 8), t(2, 1, 3, 4), t(2, 9, 8), t(2, 9, 4)),
        (t(2, 3, 3, 8), t(2, 3, 3, 4), t(2, 9, 8), t(2, 9, 4), None, int32([9, 2]), 0.2, 2),
        (
            t.strided(2, 2, 3, 8),
            t(2, 2, 3, 4),
            t.strided(6, 4, 8),
            t(6, 4, 4),
            int32([[5, 0, -1], [3, 5, 1]]),
            int32([7, 12]),
        ),
        (t(1, 2, 3, 8), t(1, 2, 3, 4), t(3, 4, 8), t(3, 4, 4), int32([[2, 1]])),
        (
            t(2, 1, 3, 8),
            t(2, 1, 3, 4),
            t(2, 200, 8),
            t(2, 200, 4),
            None,
            int32([7, 200]),
            None,
            0,
            torch.ops.tile.mla_schedule(int32([7, 200]), 3, 2),
        ),
        (
            t(3, 2, 2, 8).permute(1, 2, 0, 3),
            t(2, 2, 3, 4),
            t(2, 9, 8),
            t(2, 9, 4),
        ),  # heads outermost, as bmm leaves them
    ]


def mla_decode_fp8_samples(t: Maker) -> list[tuple]:
    def cache(*shape: int) -> torch.Tensor:
        return pack_latents(t(*shape, 128).detach(), t(*shape, 4).detach())

    q, q_pe = t(2, 2, 3, 128).detach(), t(2, 2, 3, 4).detach()
    table, lengths = int32([[5, 0, -1], [3, 5, 1]]), int32([7, 12])
    listed = int32([[[0, 6, 2, -1], [3, -1, 1, 0]], [[11, 4, 7, 0], [-1, -1, -1, -1]]])
    return [
        (q, q_pe, cache(2, 9), None, int32([9, 2]), None, 0.2, 2),
        (q, q_pe, cache(6, 4), table, lengths),
        (q, q_pe, cache(6, 4), table, lengths, listed),
    ]


def mla_sparse_samples(t: Maker) -> list[tuple]:
    table, lengths = int32([[5, 0, -1], [3, 5, 1]]), int32([7, 12])
    listed = int32([[[0, 6, 2, -1], [3, -1, 1, 0]], [[11, 4, 7, 0], [-1, -1, -1, -1]]])
    heads_first = t(3, 2, 2, 8).permute(1, 2, 0, 3)
    return [
        (heads_first, t(2, 2, 3, 4), t(2, 12, 8), t(2, 12, 4), listed),
        (t(2, 2, 3, 8), t(2, 2, 3, 4), t.strided(6, 4, 8), t(6, 4, 4), listed, table, lengths, 0.2, 2),
    ]


def lightning_index_samples(t: Maker) -> list[tuple]:
    # Small integers, whose scores are exact in any dtype, and no two of a query alike: keys of growing size.
    q, weights = torch.ones(2, 3, 4, 8, dtype=t.dtype), torch.ones(2, 3, 4, dtype=torch.float32)
    k = (torch.randperm(9, generator=t.generator) - 2).to(t.dtype)[None, :, None].expand(2, 9, 8)
    return [(q, k, weights, 4), (q, k.contiguous(), weights, 12, int32([9, 2]))]


def index_scores_samples(t: Maker) -> list[tuple]:
    return [
        tuple(x.detach() for x in given)
        for given in (
            (t(2, 3, 4, 8), t(2, 9, 8), t(2, 3, 4)),
            (t.strided(1, 2, 5, 16), t(1, 7, 16), t(1, 2, 5, dtype=torch.float32)),
        )
    ]


def mla_schedule_samples(t: Maker) -> list[tuple]:
    return [(int32([700, 0, 90]), 3), (int32([5000, 64]), 128, 7), (int32([]), 1, 2)]


def rms_norm_samples(t: Maker) -> list[tuple]:
    return [
        (t(3, 7),),
        (t(2, 3, 7), t(7), 1e-5, "silu", 1.0, False),
        (t.strided(2, 3, 7), t.strided(7), 1e-6, "none", 0.0, True),
        (t(5), t(5, dtype=torch.promote_types(t.dtype, torch.float32)), 1e-6, "gelu"),
    ]


def add_rms_norm_samples(t: Maker) -> list[tuple]:
    return [
        (t(3, 7), t(3, 7)),
        (t(2, 3, 7), t(2, 3, 7), t(7), 1e-5, "silu", 1.0, False),
        (t.strided(2, 3, 7), t(2, 3, 7), t.strided(7)),
    ]


def layer_norm_samples(t: Maker) -> list[tuple]:
    return [
        (t(3, 7),),
        (t(2, 3, 7), t(7), t(7), 1e-3),
        (t.strided(2, 3, 7), t(7, dtype=torch.promote_types(t.dtype, torch.float32)), None),
        (t(5), None, t(5)),
    ]


def fused_norm_samples(t: Maker) -> list[tuple]:
    gate, modulate = "v0=mul(x2,x3);v1=add(acc0,v0);ret v1", "v0=add(x0,1.0);v1=mul(acc0,v0);v2=add(v1,x1);ret v2"
    runs, column = [t(2, 1, 7) for _ in range(3)], "v0=mul(acc0,x0);v1=mul(v0,x1);v2=add(v1,x2);ret v2"
    return [
        (t(3, 7), [t(7)], "r", "", "v0=mul(acc0,x0);v1=silu(v0);ret v1", False, 1e-5, False, t.dtype),
        (t(2, 3, 7), [*runs, t(2, 3, 7)], "gggt", gate, modulate, True, 1e-3, True, t.dtype),
        (t.strided(2, 3, 7), [t(2, 3, 1), t(), t.strided(7)], "csr", "", column, False, 1e-2, False, t.dtype),
        (t(2, 3, 7), [t(7)], "r", "v0=mul(acc0,x0);ret v0", "", True, 1e-2, True, t.dtype),
    ]


def fused_norm_quantize_samples(t: Maker) -> list[tuple]:
    forms = (0, torch.float8_e4m3fn), (4, torch.float8_e5m2), (16, torch.int8), (3, torch.float8_e4m3fn)
    norms = [[[y.detach() for y in x] if isinstance(x, list) else x for x in norm] for norm in fused_norm_samples(t)]
    return [(norm[0].detach(), *norm[1:], *form) for norm, form in zip(norms, forms, strict=True)]


def softmax_samples(t: Maker) -> list[tuple]:
    wide = torch.promote_types(t.dtype, torch.float32)
    return [(t(3, 7),), (t.strided(2, 3, 7), 1), (t(2, 3, 4), 0, wide), (t(),)]


def cross_entropy_samples(t: Maker) -> list[tuple]:
    def classes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 7, shape, generator=t.generator)

    some, weight = torch.where(classes(2, 3) < 3, -100, classes(2, 3)), t(7).detach().abs()
    return [
        (t(3, 7), classes(3)),
        (t.strided(2, 3, 7), some, weight),
        (t(2, 3, 7), some.int(), weight.float(), -100, 0.1, 1e-2),
        (t(5, 7), classes(5), None, 3, 0.2, 0.5),
        (t(7), classes()),
    ]


def cross_entropy_backward_samples(t: Maker) -> list[tuple]:
    made = []
    for logits, target, *options in cross_entropy_samples(t):
        loss, lse = (x.detach() for x in torch.ops.tile.cross_entropy(logits, target, *options))
        made.append((torch.randn_like(loss).requires_grad_(t.requires_grad), logits, target, lse, *options))
    return made


def linear_cross_entropy_samples(t: Maker) -> list[tuple]:
    def classes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 7, shape, generator=t.generator)

    some, weight = torch.where(classes(2, 3) < 3, -100, classes(2, 3)), t(7).detach().abs()
    return [
        (t(3, 5), t(7, 5), classes(3)),
        (t.strided(2, 3, 5), t.strided(7, 5), some, t(7), weight, -100, 0.1, 1e-2, 2.0),
        (t(2, 3, 5), t(7, 5), some.int(), None, None, -100, 0.0, 0.0, 1.5),
        (t(5), t(7, 5), classes(), t(7), None, 3, 0.2, 0.5),
    ]


def linear_cross_entropy_gradients_samples(t: Maker) -> list[tuple]:
    made = []
    for n, (hidden, weight, target, *more) in enumerate(linear_cross_entropy_samples(t)):
        dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
        options = [None, None, -100, 0.0, 0.0, None]
        options[: len(more)] = more
        made.append((t(*target.shape, dtype=dtype), hidden, weight, target, *options, n != 1, n != 2))
    return made


def route_samples(t: Maker) -> list[tuple]:
    return [
        (t(5, 7), None, 3),
        (t.strided(2, 3, 12), t(12).detach(), 4, "sigmoid", 4, 2, 2, True, 2.5),
        (t(3, 12), None, 2, "softmax", 3, 2, 1, False),
        (t(9), t(9).detach(), 1, "sigmoid"),
    ]


def group_tokens_samples(t: Maker) -> list[tuple]:
    def experts(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 7, shape, generator=t.generator)

    return [(experts(5, 2), 6), (experts(301).int(), 5), (experts(3), 0)]


def conv_samples(t: Maker) -> list[tuple]:
    return [
        (t(2, 9, 7), t(5, 3, 7)),
        (t(1, 5, 6, 7), t(9, 3, 2, 7), t(9), t(1, 5, 4, 9), [], [1, 0], [1, 2], "silu"),
        (t.strided(2, 3, 5, 6, 4), t(3, 3, 2, 3, 4), t(3), None, [1, 2, 3], [2, 0, 0, 1, 1, 1], [], "relu"),
    ]


def causal_conv1d_samples(t: Maker) -> list[tuple]:
    return [
        (t(2, 5, 7), t(7, 4)),
        (t.strided(2, 3, 7), t(7, 3), t(7), t(2, 2, 7), "silu"),
        (t(1, 6, 7), t(7, 2), t(7), None, "silu"),
        (t(1, 6, 7), t(7, 3), t(7), None, "silu", torch.tensor([[0, 0, 1, 1, 1, 4]])),
    ]


def causal_conv1d_backward_samples(t: Maker) -> list[tuple]:
    return [(torch.randn_like(args[0]).requires_grad_(t.requires_grad), *args) for args in causal_conv1d_samples(t)]


def causal_conv1d_update_samples(t: Maker) -> list[tuple]:
    return [(t(2, 7), t(2, 7, 4), t(7, 4), t(7), "silu"), (t.strided(3, 5), t.strided(3, 5, 2), t(5, 3))]


def ssd_chunk_scan_samples(t: Maker) -> list[tuple]:
    def small(*shape: int) -> torch.Tensor:
        return (t(*shape).detach() / 4).requires_grad_(t.requires_grad)

    decay = (-t(4).detach().abs() - 0.1).requires_grad_(t.requires_grad)
    sizes = small(1, 3, 4).detach().abs().add(0.1).requires_grad_(t.requires_grad)  # no limit is met
    return [
        (small(1, 3, 4, 3), sizes, decay, small(1, 3, 1, 5), small(1, 3, 1, 5)),
        (
            *(small(2, 5, 4, 3), small(2, 5, 4), decay, small(2, 5, 2, 4), small(2, 5, 2, 4), small(4)),
            *(small(2, 5, 4, 3), small(4), small(2, 4, 3, 4), True),
        ),
        (
            *(small(1, 4, 2, 3), sizes[:, [0, 1, 2, 0], :2], decay[:2], small(1, 4, 1, 5), small(1, 4, 1, 5)),
            *(None, None, None, None, False, 0.0, None, torch.tensor([[0, 0, 1, 1]])),
        ),
    ]


def ssd_chunk_scan_backward_samples(t: Maker) -> list[tuple]:
    made = []
    for args in ssd_chunk_scan_samples(t):
        state = torch.randn(*args[0].shape[::2], args[0].shape[3], args[3].shape[3]).requires_grad_(t.requires_grad)
        grads = torch.randn_like(args[0]).requires_grad_(t.requires_grad) / 4, None if args[4].shape[0] == 1 else state
        made.append((*grads, *args[:6], *args[7:]))
    return made


def selective_state_update_samples(t: Maker) -> list[tuple]:
    def small(*shape: int) -> torch.Tensor:
        return (t(*shape).detach() / 4).requires_grad_(t.requires_grad)

    of_heads = small(4)[:, None].expand(-1, 3)
    return [
        (small(2, 4, 3, 5), small(2, 4, 3), small(2, 4, 3), small(4, 3, 5), small(2, 1, 5), small(2, 1, 5)),
        (
            *(small(2, 4, 3, 5), small(2, 4, 3), small(2, 4, 1).expand(-1, -1, 3)),
            *(small(4)[:, None, None].expand(-1, 3, 5), small(2, 2, 5), small(2, 2, 5)),
            *(of_heads, small(2, 4, 3), of_heads, True),
        ),
    ]


def gated_delta_rule_samples(t: Maker) -> list[tuple]:
    def small(*shape: int) -> torch.Tensor:
        return (t(*shape).detach() / 4).requires_grad_(t.requires_grad)

    def between(*shape: int) -> torch.Tensor:
        return t(*shape).detach().sigmoid().requires_grad_(t.requires_grad)

    decay = (-t(1, 5, 4).detach().abs()).requires_grad_(t.requires_grad)
    starts = torch.tensor([0, 2, 5])
    return [
        (small(1, 5, 2, 3), small(1, 5, 2, 3), small(1, 5, 4, 6), decay, between(1, 5, 4)),
        (
            *(small(1, 5, 2, 3), small(1, 5, 2, 3), small(1, 5, 4, 6), decay, between(1, 5, 4)),
            *(small(2, 4, 3, 6), starts, 0.7, True),
        ),
        with_channels(t, (small(1, 5, 2, 3), small(1, 5, 2, 3), small(1, 5, 4, 6), decay, between(1, 5, 4))),
    ]


def gated_delta_rule_backward_samples(t: Maker) -> list[tuple]:
    made = []
    for args in gated_delta_rule_samples(t):
        state = None if len(args) == 5 else torch.randn(2, 4, 3, 6).requires_grad_(t.requires_grad)
        made.append((torch.randn_like(args[2]).requires_grad_(t.requires_grad), state, *args))
    return made


def gated_delta_rule_step_samples(t: Maker) -> list[tuple]:
    q, k, v, g, beta = gated_delta_rule_samples(t)[0]
    return [
        (t(1, 4, 3, 6), q, k, v, g, beta, None, True),
        (t(1, 4, 3, 6), q[:, :1], k[:, :1], v[:, :1], g[:, :1], beta[:, :1]),
        (t(1, 4, 3, 6), *gated_delta_rule_samples(t)[2]),
    ]


def with_channels(t: Maker, args: tuple) -> tuple:
    """Arguments of a delta rule whose keys decay channel by channel, with a head of keys for each head of values."""
    _, _, v, _, *more = args
    decay = (-t(1, v.shape[1], 4, 3).detach().abs()).requires_grad_(t.requires_grad)
    q, k = ((t(1, v.shape[1], 4, 3).detach() / 4).requires_grad_(t.requires_grad) for _ in range(2))
    return (q, k, v, decay, *more)


def gated_linear_attention_samples(t: Maker) -> list[tuple]:
    first, second = gated_delta_rule_samples(t)[:2]
    return [first[:4], with_channels(t, (*second[:4], *second[5:8]))]


def gated_linear_attention_backward_samples(t: Maker) -> list[tuple]:
    made = []
    for args in gated_linear_attention_samples(t):
        state = None if len(args) == 4 else torch.randn(2, 4, 3, 6).requires_grad_(t.requires_grad)
        made.append((torch.randn_like(args[2]).requires_grad_(t.requires_grad), state, *args))
    return made


def gated_linear_attention_step_samples(t: Maker) -> list[tuple]:
    return [(t(1, 4, 3, 6), *args[:4], 0.5) for args in gated_linear_attention_samples(t)]


def rwkv7_samples(t: Maker) -> list[tuple]:
    def small(*shape: int) -> torch.Tensor:
        return (t(*shape).detach() / 4).requires_grad_(t.requires_grad)

    def some(length: int) -> tuple:
        keys, decay = (1, length, 2, 3), (-t(1, length, 2, 3).detach().abs() / 4).requires_grad_(t.requires_grad)
        return small(*keys), small(*keys), small(1, length, 2, 4), decay, small(*keys), small(*keys)

    return [(*some(3),), (*some(5), small(2, 2, 3, 4), torch.tensor([0, 2, 5]), 0.5)]


def rwkv7_backward_samples(t: Maker) -> list[tuple]:
    return [(torch.randn_like(args[2]).requires_grad_(t.requires_grad) / 4, None, *args) for args in rwkv7_samples(t)]


def rwkv7_step_samples(t: Maker) -> list[tuple]:
    return [(t(1, 2, 3, 4), *args[:6], 0.5) for args in rwkv7_samples(t)]


SAMPLES = {
    "gated_linear_attention": gated_linear_attention_samples,
    "gated_linear_attention_backward": gated_linear_attention_backward_samples,
    "gated_linear_attention_step": gated_linear_attention_step_samples,
    "rwkv7": rwkv7_samples,
    "rwkv7_backward": rwkv7_backward_samples,
    "rwkv7_step": rwkv7_step_samples,
    "gated_delta_rule": gated_delta_rule_samples,
    "gated_delta_rule_backward": gated_delta_rule_backward_samples,
    "gated_delta_rule_step": gated_delta_rule_step_samples,
    "conv": conv_samples,
    "causal_conv1d": causal_conv1d_samples,
    "causal_conv1d_backward": causal_conv1d_backward_samples,
    "causal_conv1d_update": causal_conv1d_update_samples,
    "ssd_chunk_scan": ssd_chunk_scan_samples,
    "ssd_chunk_scan_backward": ssd_chunk_scan_backward_samples,
    "selective_state_update": selective_state_update_samples,
    "cross_entropy": cross_entropy_samples,
    "cross_entropy_backward": cross_entropy_backward_samples,
    "group_tokens": group_tokens_samples,
    "route": route_samples,
    "index_scores": index_scores_samples,
    "lightning_index": lightning_index_samples,
    "linear_cross_entropy": linear_cross_entropy_samples,
    "linear_cross_entropy_gradients": linear_cross_entropy_gradients_samples,
    "gemm": gemm_samples,
    "grouped_gemm": grouped_gemm_samples,
    "k_grouped_gemm": k_grouped_gemm_samples,
    "dequant_gemm": dequant_gemm_samples,
    "scaled_gemm": scaled_gemm_samples,
    "grouped_dequant_gemm": grouped_dequant_gemm_samples,
    "grouped_scaled_gemm": grouped_scaled_gemm_samples,
    "k_grouped_scaled_gemm": k_grouped_scaled_gemm_samples,
    "masked_scaled_gemm": masked_scaled_gemm_samples,
    "quantize_fp8": quantize_fp8_samples,
    "quantize_int8": lambda t: [(t(5, 7).detach(), 0), (t.strided(5, 150).detach(), 128)],
    "silu_mul_quantize": silu_mul_quantize_samples,
    "linear": linear_samples,
    "swiglu": swiglu_samples,
    "attention": attention_samples,
    "attention_lse": attention_samples,
    "attention_backward": attention_backward_samples,
    "attention_block_sparse": attention_block_sparse_samples,
    "attention_block_sparse_backward": attention_block_sparse_backward_samples,
    "attention_block_sparse_lse": attention_block_sparse_samples,
    "attention_fp8": attention_fp8_samples,
    "attention_paged": attention_paged_samples,
    "attention_paged_lse": attention_paged_samples,
    "attention_varlen": attention_varlen_samples,
    "attention_varlen_backward": attention_varlen_backward_samples,
    "attention_varlen_lse": attention_varlen_samples,
    "mla_decode": mla_decode_samples,
    "mla_decode_lse": mla_decode_samples,
    "mla_decode_fp8": mla_decode_fp8_samples,
    "mla_schedule": mla_schedule_samples,
    "nsa_select": nsa_select_samples,
    "mla_sparse": mla_sparse_samples,
    "rms_norm": rms_norm_samples,
    "add_rms_norm": add_rms_norm_samples,
    "layer_norm": layer_norm_samples,
    "fused_norm": fused_norm_samples,
    "fused_norm_quantize": fused_norm_quantize_samples,
    "softmax": softmax_samples,
}


@pytest.fixture
def samples():
    """`samples(op, seed, dtype, requires_grad=False)`: tuples of positional arguments of the op."""

    def make(op: str, seed: int, dtype: torch.dtype, requires_grad: bool = False) -> list[tuple]:
        return SAMPLES[op](Maker(seed, dtype, requires_grad))

    return make


SCALES_OF_PAGES = slice(13, 15)  # of attention_paged: float32 beside pages of float8, whatever q's dtype


@pytest.fixture
def to_double():
    """`to_double(args)`: the arguments on the CPU, with every floating tensor and dtype in float64."""

    def convert(args: tuple) -> tuple:
        of_tensor = lambda t: (t.double() if t.is_floating_point() and t.itemsize > 1 else t).detach().cpu()  # noqa: E731
        wide = tree_map_only(torch.Tensor, of_tensor, args)
        wide = tree_map_only(torch.dtype, lambda d: torch.float64 if d.itemsize > 1 else d, wide)
        scales = args[SCALES_OF_PAGES]  # no other op has tensors there beside float8
        kept = len(scales) == 2 and all(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in scales)
        return (*wide[:13], *(t.detach().cpu() for t in scales), *wide[15:]) if kept else wide

    return convert


@pytest.fixture
def maker():
    """`maker(seed, dtype)(*shape)`: random tensors."""
    return Maker


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of the CPU count as a Hopper GPU's; the driver keeps a diary."""
    fake = install(monkeypatch)
    count_as_gpu(monkeypatch)
    monkeypatch.setattr(matrix_units, "torch_has_matrix_units", lambda: False)  # or torch's CPU kernels would run
    machine = common.Machine(Target("cuda", 90), 132)
    for module in modules_of_kernels():
        monkeypatch.setattr(module, "machine_of", lambda x: machine)
    eager.forget()
    yield fake
    eager.forget()
