# SPDX-License-Identifier: Apache-2.0
"""Functions of torch after reports on compilers of graphs, compiled with every match replaced: as eager has them.

Results, strides, aliases of arguments, arguments that change and gradients are compared. Numbers behind a name are
those of the report (github.com/pytorch/pytorch).
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

Function = tuple[Callable[..., Any], list[Any]]
CASES: list[Callable[[], Function]] = []
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Torch's own: Inductor has them under its own backend as well.
OF_TORCH = {
    "copy_then_mutated_source": "pytorch #198131: the copy of an input reads what is written later",
    "identity_of_dropout_is_an_alias": "pytorch #195422: the tensor that dropout returns counts as a new one",
}
ROUNDED_ONCE = {"lerp_of_gradients", "rounding_before_wide_sums"}  # docs/torch-integration.md: widened products
NO_KEY = {"attention_written_with_masked_rows"}  # docs/torch-integration.md: a query that sees no key gives 0


def case(make: Callable[[], Function]) -> Callable[[], Function]:
    """Add a case to the test."""
    CASES.append(make)
    return make


def r(*shape: int, dtype: torch.dtype = torch.float32, g: bool = False) -> torch.Tensor:
    """Random numbers, which may want a gradient."""
    return torch.randn(*shape).to(dtype).requires_grad_(g)


@case
def product_then_mutated_input() -> Function:  # 94777
    def f(x, w):
        y = x @ w
        x.add_(1)
        return y, x @ w

    return f, [r(33, 40), r(40, 24)]


@case
def copy_then_mutated_source() -> Function:  # 198131
    def f(dst, src, w):
        dst[0:, :] = src[0:, :]
        src.add_(1)
        return src @ w, dst @ w

    return f, [r(20, 40), r(20, 40), r(40, 24)]


@case
def view_of_bits_then_mutated() -> Function:  # 198101
    def f(x, w):
        y = x.view(torch.int32) * 2
        y.sub_(-4)
        z = x @ w
        x[:, 2:5] = 2
        return y, z, F.softmax(x, -1)

    return f, [r(20, 40), r(40, 24)]


@case
def lerp_of_gradients() -> Function:  # 183575
    def f(p1, p2, x, m1, m2):
        y = x.bfloat16() @ p1.bfloat16()
        g = (y @ p2.bfloat16()).float()
        m1.lerp_(g[:40, :24], 0.05)
        p1.add_(m1, alpha=-0.01)
        m2.lerp_(p2 * 2, 0.05)
        p2.add_(m2, alpha=-0.01)
        return g

    return f, [r(40, 24), r(24, 24), r(48, 40), r(40, 24), r(24, 24)]


@case
def update_by_index_of_a_product() -> Function:  # 138908
    def f(i, y, w):
        i = i + 10
        y[i] += y[i] @ w
        return y

    return f, [torch.tensor([[-10, -9]]), r(2, 32), r(32, 32)]


@case
def softmax_written_back() -> Function:
    def f(x):
        y = F.softmax(x, -1)
        x.copy_(F.softmax(x * 2, -1))
        return y

    return f, [r(9, 130)]


@case
def identity_of_dropout_is_an_alias() -> Function:  # 195422
    def f(x, w):
        y = F.dropout(x, 0.5, False)
        y += y
        return F.linear(y, w), x

    return f, [r(9, 40), r(24, 40)]


@case
def weight_changes_between_uses() -> Function:
    def f(x, w):
        a = F.linear(x, w)
        w.mul_(2)
        return a, F.linear(x, w)

    return f, [r(9, 40), r(24, 40)]


@case
def product_into_out() -> Function:
    def f(x, w, o):
        torch.mm(x, w, out=o)
        return F.gelu(o) + 1

    return f, [r(9, 40), r(40, 24), r(9, 24)]


@case
def addmm_in_place() -> Function:
    def f(c, x, w):
        d = c.clone()
        c.addmm_(x, w, beta=0.5, alpha=-2)
        return c + d

    return f, [r(9, 24), r(9, 40), r(40, 24)]


@case
def addmm_without_its_addend() -> Function:  # beta 0 ignores NaN
    def f(c, x, w):
        return torch.addmm(c, x, w, beta=0, alpha=1.5), torch.baddbmm(c[None], x[None], w[None], beta=0)

    return f, [torch.full((9, 24), math.nan), r(9, 40), r(40, 24)]


@case
def addends_of_all_shapes() -> Function:
    def f(a, b, c, d, x, w):
        return [torch.addmm(t, x, w, beta=2, alpha=3) for t in (a, b, c, d)]

    return f, [r(1), r(24), r(9, 1), r(1, 24), r(9, 40), r(40, 24)]


@case
def sum_of_products_of_other_shapes() -> Function:  # 100679
    def f(a, b, c, d):
        return a @ b + c @ d

    return f, [r(9, 40), r(40, 24), r(1, 30), r(30, 24)]


@case
def windows_that_overlap() -> Function:
    def f(x, w):
        return x.unfold(0, 40, 3) @ w

    return f, [r(100), r(40, 24)]


@case
def strided_output_parts() -> Function:
    def f(x, w):
        y = x @ w
        return y[::2, 1::3], y.t()[3:], y.flip(0)

    return f, [r(33, 40), r(40, 24)]


@case
def products_without_elements() -> Function:
    def f(x, w, b, e, z):
        return (
            x[:, :0] @ w[:0] + b,
            F.gelu(x[:0] @ w),
            x @ w[:, :0],
            F.linear(e, z, b),
            F.linear(x[:, :0], w.t()[:, :0], b),
        )

    return f, [r(9, 40), r(40, 24), r(24), r(0, 3, 40), r(24, 40)]


@case
def rows_without_elements() -> Function:
    def f(x, e):
        return (
            F.softmax(e, 0),
            F.softmax(e, 1),
            F.layer_norm(e, (40,)),
            F.softmax(x[:0], 1),
            x[:, :0].sum(1),
            F.log_softmax(e.t(), 0),
        )

    return f, [r(9, 40), r(0, 40)]


@case
def means_of_nothing() -> Function:
    def f(x):
        return x[:0].mean(0), x[:, :0].mean(1), x[:0].sum(), x[:0].prod(0), x[:, :0].logsumexp(1)

    return f, [r(9, 40)]


@case
def softmax_of_masked_rows() -> Function:
    def f(x, m):
        y = x.masked_fill(m, -math.inf)
        return F.softmax(y, -1), F.log_softmax(y, -1), y.logsumexp(-1), y.amax(-1)

    m = torch.rand(9, 130) < 0.3
    m[3] = True
    return f, [r(9, 130), m]


@case
def attention_of_masked_rows() -> Function:  # 100318
    def f(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m)

    m = torch.rand(2, 1, 17, 19) < 0.7
    m[0, 0, 3] = False
    return f, [r(2, 3, 17, 16), r(2, 3, 19, 16), r(2, 3, 19, 16), m]


@case
def attention_written_with_masked_rows() -> Function:  # 103749
    def f(q, k, v, m):
        s = q @ k.mT / 4
        s = s.masked_fill(~m, -math.inf)
        return F.softmax(s, -1) @ v

    m = torch.rand(2, 1, 17, 19) < 0.7
    m[0, 0, 3] = False
    return f, [r(2, 3, 17, 16), r(2, 3, 19, 16), r(2, 3, 19, 16), m]


@case
def attention_masked_by_the_least_number() -> Function:  # 109517
    def f(q, k, v, m):
        s = q @ k.mT * 0.25 + torch.where(m, 0.0, torch.finfo(torch.float32).min)
        return F.softmax(s, -1) @ v

    m = torch.rand(2, 1, 17, 19) < 0.7
    m[0, 0, 3] = False
    return f, [r(2, 3, 17, 16), r(2, 3, 19, 16), r(2, 3, 19, 16), m]


@case
def causal_attention_of_other_lengths() -> Function:
    def f(q, k, v):
        return [
            F.scaled_dot_product_attention(q[:, :, :n], k, v, is_causal=True, scale=s)
            for n, s in ((17, None), (5, -0.3), (1, 0.0))
        ]

    return f, [r(2, 4, 17, 16), r(2, 4, 9, 16), r(2, 4, 9, 20)]


@case
def grouped_attention_of_slices() -> Function:
    def f(x):
        q, k, v = x[..., :128].view(2, 17, 8, 16), x[..., 128:160].view(2, 17, 2, 16), x[..., 160:].view(2, 17, 2, 16)
        return (
            F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True, is_causal=True
            )
            .transpose(1, 2)
            .flatten(2)
        )

    return f, [r(2, 17, 192, g=True)]


@case
def attention_of_nothing() -> Function:
    def f(q, k, v):
        return F.scaled_dot_product_attention(q[:, :, :0], k, v), F.scaled_dot_product_attention(q[:0], k[:0], v[:0])

    return f, [r(2, 4, 17, 16), r(2, 4, 9, 16), r(2, 4, 9, 16)]


@case
def dropped_weights_of_attention_without_training() -> Function:
    def f(q, k, v):
        p = F.dropout(F.softmax(q @ k.mT, -1), 0.4, training=False)
        return p @ v, p

    return f, [r(2, 4, 17, 16), r(2, 4, 9, 16), r(2, 4, 9, 16)]


@case
def norm_of_constant_rows() -> Function:
    def f(x, w):
        c = torch.full_like(x, 3.0)
        return (
            F.layer_norm(c, (40,), eps=0.0),
            F.layer_norm(c, (40,), w),
            F.rms_norm(x * 0, (40,), w, eps=0.0),
            F.rms_norm(x * 0, (40,), w),
        )

    return f, [r(9, 40), r(40)]


@case
def norm_far_from_zero() -> Function:
    def f(x):
        return F.layer_norm(x + 30000, (640,)), torch.var_mean(x + 30000, -1)

    return f, [r(9, 640)]


@case
def norm_of_half_rows() -> Function:
    def f(x, w, b):
        return F.layer_norm(x, (640,), w, b), F.rms_norm(x, (640,), w), F.layer_norm(x.float(), (640,)).to(x.dtype)

    return f, [r(9, 640, dtype=torch.float16) * 200, r(640, dtype=torch.float16), r(640, dtype=torch.float16)]


@case
def norm_over_two_dimensions() -> Function:
    def f(x, w):
        return F.layer_norm(x, (5, 40), w), F.layer_norm(x.transpose(0, 1), (3, 40)), F.rms_norm(x, (5, 40), w)

    return f, [r(3, 5, 40, g=True), r(5, 40, g=True)]


@case
def loss_with_weights_and_ignored() -> Function:
    def f(x, y, w):
        return (
            F.cross_entropy(x, y, w, ignore_index=3, label_smoothing=0.1),
            F.cross_entropy(x, y, reduction="sum", ignore_index=3),
            F.cross_entropy(x, y, reduction="none"),
            F.cross_entropy(x, torch.full_like(y, -100)),
        )

    y = torch.randint(0, 70, (33,))
    y[::4] = 3
    return f, [r(33, 70, g=True), y, torch.rand(70)]


@case
def loss_of_probabilities() -> Function:
    def f(x, y):
        return (
            F.cross_entropy(x, y.softmax(1)),
            F.cross_entropy(x.t()[None], torch.zeros(1, 33, dtype=torch.long)),
            F.nll_loss(F.log_softmax(x, 1), torch.arange(33)),
        )

    return f, [r(33, 70, g=True), r(33, 70)]


@case
def promotion_beside_products() -> Function:
    def f(x, w, b, s):
        y = x.bfloat16() @ w.bfloat16()
        return y + b, y * 3, y * s, y / 2, y + torch.tensor(1.5, dtype=torch.float64), y > 0, y * (y > 0), y // 1

    return f, [r(9, 40), r(40, 24), r(24), torch.tensor(2.0)]


@case
def rounding_before_wide_sums() -> Function:
    def f(x, w, b):
        return (x @ w).float() + b, torch.addmm(b.half(), x, w).double()

    return f, [r(9, 40, dtype=torch.half), r(40, 24, dtype=torch.half), r(24)]


@case
def overflow_of_a_half_product() -> Function:
    def f(x, w):
        y = x @ w
        return y.clamp(max=5.0), torch.where(y > 60000, 0.0, y), y * 0.001, F.relu(y) - y

    return f, [r(9, 40, dtype=torch.half) * 300, r(40, 24, dtype=torch.half) * 300]


@case
def whole_numbers_wrap() -> Function:
    def f(x, y):
        z = x * 3 + y
        return z, z // 7, z % 7, z >> 1, ~z, x.sum(), x.cumsum(0), x.float() @ y.float().t()

    return f, [torch.randint(0, 256, (9, 40), dtype=torch.uint8), torch.randint(0, 256, (9, 40), dtype=torch.uint8)]


@case
def products_of_integers() -> Function:
    def f(x, y):
        return x @ y, torch.mm(x, y) + 1, (x.int() @ y.int()).float()

    return f, [torch.randint(-128, 128, (9, 40)), torch.randint(-128, 128, (40, 24))]


@case
def autocast_regions() -> Function:
    def f(x, w, v):
        with torch.autocast("cpu", torch.bfloat16):
            a = F.linear(x, w)
            b = F.softmax(a, -1)
            with torch.autocast("cpu", enabled=False):
                c = F.linear(x, w)
            d = F.layer_norm(a @ v, (24,))
            e = x.double() @ w.double().t()
        return a, b, c, d, e

    return f, [r(9, 40), r(24, 40), r(24, 24)]


@case
def autocast_with_gradients() -> Function:
    l = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 24))

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(l(x), torch.arange(9)), l[0](x)

    f.parameters = list(l.parameters())
    return f, [r(9, 40, g=True)]


@case
def one_product_with_three_readers() -> Function:
    def f(x, w, b):
        y = x @ w
        return F.gelu(y + b), y.sum(0), F.softmax(y, -1), y

    return f, [r(33, 40, g=True), r(40, 24, g=True), r(24, g=True)]


@case
def gates_from_one_product() -> Function:
    def f(x, w):
        a, b = F.linear(x, w).chunk(2, -1)
        c, d = F.linear(x, w).unflatten(-1, (-1, 2)).unbind(-1)
        return F.silu(a) * b, F.silu(c) * d, F.glu(F.linear(x, w), -1)

    return f, [r(3, 9, 40, g=True), r(48, 40, g=True)]


@case
def vectors_and_broadcast_batches() -> Function:
    def f(v, m, x, y):
        return v @ v, m @ v, v @ m.t(), x @ v, x @ y, torch.mv(m, v), torch.outer(v, v), x @ m.t()

    return f, [r(40), r(24, 40), r(5, 1, 3, 40), r(2, 40, 7)]


@case
def sums_of_einstein() -> Function:
    def f(a, b, c):
        return (
            torch.einsum("bij,bjk->bki", a, b),
            torch.einsum("bij,bjk->ik", a, b),
            torch.einsum("ii->i", c),
            torch.einsum("ij,ij->", c, c),
            torch.einsum("bij,kj->kbi", a, c[:, :8]),
            torch.einsum("i,j->ij", c[0], c[1]),
            torch.einsum("b...j,bjk->b...k", a, b),
        )

    return f, [r(3, 5, 8), r(3, 8, 6), r(12, 12)]


@case
def outputs_that_alias_inputs() -> Function:
    def f(x, w):
        y = x @ w
        return x.t(), y, y.view(-1), x[1:], w

    return f, [r(9, 40), r(40, 24)]


@case
def output_strides() -> Function:  # 116433
    def f(x, w):
        y = x @ w
        return (
            (y + 1).view(-1, 1, 2),
            y.t().contiguous().t(),
            F.linear(x.t().contiguous().t(), w.t()).transpose(0, 1),
            y[None].expand(3, 9, 24),
        )

    return f, [r(9, 40), r(40, 24)]


@case
def channels_last_through_norms() -> Function:
    def f(x, w):
        y = F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)
        return y, F.softmax(x, 1), F.conv2d(x, w), F.group_norm(x, 2)

    return f, [r(2, 8, 6, 7).to(memory_format=torch.channels_last), r(4, 8, 1, 1)]


@case
def gradients_of_expanded_ones() -> Function:
    def f(x, w, b):
        return F.linear(x, w, b).sum(), F.layer_norm(x, (40,)).mean(), F.softmax(x, 0).sum(1)

    return f, [r(3, 9, 40, g=True), r(24, 40, g=True), r(24, g=True)]


@case
def tied_weights_and_detached_parts() -> Function:
    def f(x, w):
        h = F.embedding(torch.arange(9) % 5, w)
        return (h * x) @ w.t(), (h.detach() @ w.t()).tanh()

    return f, [r(9, 40, g=True), r(24, 40, g=True)]


@case
def reductions_with_ties_and_nan() -> Function:
    def f(x, i):
        return (
            x.argmax(1),
            x.max(1),
            x.median(1).values,
            i.argmin(0),
            x.nansum(1),
            i.cumsum(0),
            (i > 0).sum(0),
            i.int().prod(0),
            x.aminmax(dim=1),
        )

    x = r(9, 40).round()
    x[2, 5] = math.nan
    return f, [x, torch.randint(-2, 3, (9, 5))]


@case
def scatter_of_a_product() -> Function:
    def f(x, w, i):
        y = x @ w
        z = torch.zeros(6, 24).index_add_(0, i, y)
        u = torch.zeros(6, 24)
        u.index_put_((i,), y, accumulate=True)
        return z, u, torch.zeros(9, 24).scatter_reduce(1, (y > 0).long(), y, "amax")

    return f, [r(9, 40), r(40, 24), torch.randint(0, 6, (9,))]


@case
def powers_and_remainders() -> Function:
    def f(x, i, j):
        return (
            x.pow(2.0),
            x**3,
            x**-1,
            2**x,
            x % 0.7,
            torch.fmod(x, 0.7),
            i % j,
            i // j,
            torch.fmod(i, j),
            torch.div(i, j, rounding_mode="trunc"),
            i**2,
            torch.sign(x),
            x.round(decimals=1),
            torch.copysign(x, -x),
        )

    j = torch.randint(-5, 5, (9, 40))
    j[j == 0] = 7
    return f, [r(9, 40), torch.randint(-50, 50, (9, 40)), j]


@case
def choices_between_types() -> Function:
    def f(x, h, i, m):
        return (
            torch.where(m, x, 1),
            torch.where(m, h, x),
            torch.where(m, i, 2.5),
            torch.where(m, h, torch.tensor(2.0)),
            x.clamp(0.5, -0.5),
            torch.maximum(x, x.new_full((), math.nan)),
            torch.clamp(i, 0, 10.5),
        )

    return f, [r(9, 40), r(9, 40, dtype=torch.half), torch.randint(-50, 50, (9, 40)), torch.rand(9, 40) < 0.5]


@case
def recomputed_block_with_random_numbers() -> Function:
    l = nn.Linear(40, 40)

    def f(x):
        return checkpoint(lambda z: F.gelu(l(z)) + F.softmax(l(z), -1), x, use_reentrant=False)

    f.parameters = list(l.parameters())
    return f, [r(9, 40, g=True)]


@case
def batched_by_vmap() -> Function:
    def f(x, w):
        return torch.vmap(lambda a, b: F.softmax(a @ b, -1))(x, w), torch.vmap(F.linear, in_dims=(0, None))(x, w[0].t())

    return f, [r(3, 9, 40), r(3, 40, 24)]


@case
def jacobians_inside() -> Function:
    def f(x, w):
        return torch.func.jacrev(lambda z: F.softmax(z @ w, -1))(x), torch.func.grad(lambda z: F.gelu(z @ w).sum())(x)

    return f, [r(3, 8), r(8, 5)]


@case
def chains_of_transposes() -> Function:
    def f(x, w):
        a = (x.t() @ x).t() @ w
        return a.mT @ a, (x @ w).t() @ (x @ w), torch.linalg.multi_dot([x, w, w.t()])

    return f, [r(33, 40, g=True), r(40, 24, g=True)]


@case
def layers_of_torch() -> Function:
    m = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def f(x, m_):
        return m(x, src_key_padding_mask=m_)

    f.parameters = list(m.parameters())
    return f, [r(3, 9, 32, g=True), torch.arange(9)[None] >= torch.tensor([[9], [4], [7]])]


@case
def rotary_in_place() -> Function:
    def f(q, c, s):
        q = q.clone()
        a, b = q[..., :8].clone(), q[..., 8:].clone()
        q[..., :8] = a * c - b * s
        q[..., 8:] = b * c + a * s
        return q @ q.mT

    return f, [r(2, 4, 17, 16), r(17, 8), r(17, 8)]


@case
def cache_of_keys_in_place() -> Function:
    def f(q, k, v, ck, cv, at):
        ck[:, :, at] = k
        cv.index_copy_(2, at, v)
        return F.scaled_dot_product_attention(q, ck, cv, attn_mask=(torch.arange(32) <= at[-1])[None, None, None])

    return f, [r(2, 4, 3, 16), r(2, 4, 3, 16), r(2, 4, 3, 16), r(2, 4, 32, 16), r(2, 4, 32, 16), torch.arange(5, 8)]


@case
def numbers_of_double_precision() -> Function:
    def f(x, w, b):
        return torch.addmm(b, x, w), F.softmax(x, -1), F.layer_norm(x, (40,)), F.gelu(x @ w), x.float() @ w.float()

    return f, [
        r(9, 40, dtype=torch.double, g=True),
        r(40, 24, dtype=torch.double, g=True),
        r(24, dtype=torch.double, g=True),
    ]


@case
def scalars_from_tensors() -> Function:
    def f(x, w):
        y = x @ w
        return y * y.shape[0], y / math.sqrt(x.shape[-1]), y * float(3), y + x.size(0), y.mul(x.mean()), y.div(w.norm())

    return f, [r(9, 40), r(40, 24)]


@case
def losses_through_numbers_of_rows() -> Function:
    def f(x, w, y):
        return (
            F.cross_entropy(x @ w.t(), y) * 3 + 1,
            F.cross_entropy((x @ w.t())[:-1], y[1:]),
            F.cross_entropy(F.linear(x, w).float(), y, reduction="none"),
        )

    return f, [r(33, 40, g=True), r(70, 40, g=True), torch.randint(0, 70, (33,))]


@case
def gradient_of_a_mutated_result() -> Function:
    def f(x, w):
        y = x @ w
        y[2:5] = 0
        y.mul_(2).relu_()
        return y

    return f, [r(9, 40, g=True), r(40, 24, g=True)]


@case
def causal_convolution() -> Function:
    def f(x, w, b):
        return F.silu(F.conv1d(F.pad(x, (3, 0)), w, b, groups=8)), F.conv1d(x, w, b, padding=3, groups=8)[..., :17]

    return f, [r(2, 8, 17, g=True), r(8, 1, 4, g=True), r(8, g=True)]


@case
def experts_without_tokens() -> Function:
    def f(x, w, i):
        out = torch.zeros_like(x)
        for e in range(4):
            t = torch.where(i == e)[0]
            out.index_add_(0, t, F.silu(x[t] @ w[e]))
        return out

    return f, [r(9, 40), r(4, 40, 40), torch.tensor([0, 0, 2, 2, 2, 0, 2, 0, 0])]


@case
def symmetric_softmax_over_other_dimensions() -> Function:
    def f(x):
        return [F.softmax(x, d) for d in (0, 1, 2, -3)] + [
            F.log_softmax(x.transpose(0, 2), 1),
            F.softmax(x.half(), 1),
            F.softmax(x.half(), 1, dtype=torch.float32),
        ]

    return f, [r(5, 9, 70, g=True)]


def copied(args: list[Any]) -> list[Any]:
    """The arguments in memory of their own, with their strides."""

    def copy(t: torch.Tensor) -> torch.Tensor:
        new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.detach())
        return new.requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, copy, args)


def ran(f: Callable[..., Any], args: list[Any], weights: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """The results of a call, and the gradients of a sum of them with different weights."""
    results = [t for t in tree_leaves(f(*args)) if isinstance(t, torch.Tensor)]
    wanting = [t for t in (*args, *weights) if isinstance(t, torch.Tensor) and t.requires_grad]
    given = [t for t in results if t.requires_grad]
    factors = [torch.linspace(-1, 1, t.numel()).reshape(t.shape).to(t.dtype) for t in given]
    return results, list(torch.autograd.grad(given, wanting, factors, allow_unused=True)) if given else []


def same(a: Any, b: Any, what: str, least: float = 0) -> None:
    """Both are as large, of one type and equal, but for rounding by the largest element."""
    if a is None or b is None or not isinstance(b, torch.Tensor):
        assert (a is None) == (b is None)
        return
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    a, b, tolerance = a.detach(), b.detach(), max(TOLERANCE.get(a.dtype, 0), least)
    if not tolerance or not a.numel():
        assert torch.equal(a, b), what
        return
    finite = b.double()[b.isfinite()]
    largest = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True, msg=what)


def aliases(t: torch.Tensor, args: list[Any]) -> list[int]:
    """Which arguments have the memory of a tensor."""
    given = [(n, x) for n, x in enumerate(args) if isinstance(x, torch.Tensor) and x.numel() and t.numel()]
    return [n for n, x in given if x.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()]


@pytest.mark.slow
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_reported_graphs(make: Callable[[], Function], seed: int, request: pytest.FixtureRequest) -> None:
    if why := OF_TORCH.get(make.__name__):
        request.applymarker(pytest.mark.xfail(reason=why))
    torch.manual_seed(seed)
    f, args = make()
    ours, weights = copied(args), getattr(f, "parameters", [])
    wanted = ran(f, args, weights)
    got = ran(torch.compile(f, backend="tile", options={"select": "tile"}), ours, weights)
    least = 2**-7 if make.__name__ in (*ROUNDED_ONCE, "autocast_with_gradients") else 0
    for n, (a, b) in enumerate(zip(got[0], wanted[0], strict=True)):
        b = b.nan_to_num() if make.__name__ in NO_KEY else b
        same(a, b, f"result {n}", 2e-3 if make.__name__ == "norm_far_from_zero" else least)
        assert not a.numel() or a.stride() == b.stride(), n
        assert aliases(a, ours) == aliases(b, args) or make.__name__ in NO_KEY, n
    for n, (a, b) in enumerate(zip(ours, args, strict=True)):
        same(a, b, f"argument {n}", least)
    for n, (a, b) in enumerate(zip(got[1], wanted[1], strict=True)):
        same(a, b, f"gradient {n}", least)
