# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
import torch.nn.functional as F

import torch_tile.ops as ops


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_is_torchs_sdpa(dtype, seed, maker):
    t = maker(seed, dtype)
    q, k, v = t(2, 6, 13, 16), t(2, 2, 13, 16), t(2, 2, 13, 16)
    mask = torch.rand(2, 1, 13, 13, generator=t.generator) > 0.2
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, options in (
        (ops.attention(q, k, v), {}),
        (ops.attention(q, k, v, None, True), {"is_causal": True}),
        (ops.attention(q, k, v, mask, scale=0.2), {"attn_mask": mask, "scale": 0.2}),
        (ops.attention(q, k, v, mask.to(dtype)), {"attn_mask": mask.to(dtype)}),
    ):
        options = {key: o.double() if getattr(o, "dtype", None) == dtype else o for key, o in options.items()}
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True, **options)
        torch.testing.assert_close(ours.double(), want, rtol=tolerance, atol=tolerance)


def test_window_and_offset_are_the_written_rule(maker):
    t = maker(1, torch.float64)
    q, k, v = t(1, 2, 5, 8), t(1, 2, 9, 8), t(1, 2, 9, 8)
    i, j = torch.arange(5)[:, None], torch.arange(9)[None, :]
    for window, offset in ((0, 4), (3, 4), (1, 0), (4, -2), (100, 4)):
        keep = j <= i + offset
        if window:
            keep &= j > i + offset - window
        want = ops.attention(q, k, v, keep)
        torch.testing.assert_close(ops.attention(q, k, v, None, True, None, window, offset), want)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("offset", [0, 4, -2, -(2**29)])
def test_a_window_wider_than_everything_hides_nothing(causal, offset, maker):
    t = maker(1, torch.float32, True)
    inputs = t(1, 2, 5, 16), t(1, 2, 9, 16), t(1, 2, 9, 16)
    wanted, found = ([], [])
    for window, results in ((0, wanted), (2**63 - 1, found)):
        out = ops.attention(*inputs, None, causal, None, window, offset)
        results += [out, *torch.autograd.grad(out.sum(), inputs)]
    torch.testing.assert_close(found, wanted)


def test_lse_is_the_logarithm_of_the_sum(maker):
    t = maker(2, torch.float64)
    q, k, v = t(1, 2, 5, 8), t(1, 1, 9, 8), t(1, 1, 9, 4)
    out, lse = ops.attention_lse(q, k, v, scale=0.5)
    torch.testing.assert_close(lse, torch.logsumexp(0.5 * q @ k.mT, -1))
    torch.testing.assert_close(out, ops.attention(q, k, v, scale=0.5))
    assert ops.attention_lse(q.half(), k.half(), v.half())[1].dtype == torch.float32


def test_lse_has_no_gradient_and_out_has(maker):
    t = maker(2, torch.float32, True)
    out, lse = ops.attention_lse(t(1, 2, 5, 8), t(1, 2, 5, 8), t(1, 2, 5, 8))
    assert out.requires_grad and not lse.requires_grad


def test_a_query_that_sees_nothing_gives_zero_and_no_nan_gradient(maker):
    t = maker(3, torch.float32, True)
    q, k, v = t(1, 2, 4, 8), t(1, 2, 6, 8), t(1, 2, 6, 8)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = False
    out, lse = ops.attention_lse(q, k, v, mask)
    assert not out[:, :, 1].any() and lse[:, :, 1].isneginf().all()
    out.sum().backward()
    assert not q.grad[:, :, 1].any() and all(x.grad.isfinite().all() for x in (q, k, v))
    hidden = torch.zeros(4, 6).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(ops.attention(q, k, v, hidden), out)


@pytest.mark.parametrize("lowest", [-1e9, -1e30, torch.finfo(torch.float32).min])
def test_hiding_by_large_numbers(lowest, maker):
    """As padding on the left is often hidden: in some rows all keys, in others whole blocks of them, first or last."""
    t = maker(5, torch.float32)
    q, k, v, grad = (t(2, 2, 150, 8).requires_grad_() for _ in range(4))
    first, place = torch.tensor([90, 0])[:, None, None, None], torch.arange(150)
    keep = (first <= place) & (place <= place[:, None])
    mask, score = torch.where(keep, 0.0, lowest), f"v0=where(x0,acc0,{lowest});ret v0"
    products = q.double() @ k.double().mT * 8**-0.5
    want = products.masked_fill(~keep, lowest).softmax(-1) @ v.double()
    sees = keep.any(-1, keepdim=True).expand_as(want)
    wanted = torch.autograd.grad(want, (q, k, v), grad * sees)
    for options in ((mask,), (None, False, None, 0, 0, [keep], score)):
        out = ops.attention(q, k, v, *options)
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
        for got, like in zip(torch.autograd.grad(out, (q, k, v), grad * sees), wanted, strict=True):
            torch.testing.assert_close(got, like, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "shapes", [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 0, 4, 5), (2, 2, 3, 0, 5), (2, 2, 3, 4, 0)]
)
def test_empty(shapes, maker):
    batch, heads, q_len, kv_len, d = shapes
    t = maker(4, torch.float32, True)
    q, k, v = t(batch, heads, q_len, d), t(batch, heads, kv_len, d), t(batch, heads, kv_len, 6)
    out, lse = ops.attention_lse(q, k, v, causal=True)
    assert out.shape == (batch, heads, q_len, 6) and lse.shape == (batch, heads, q_len)
    if kv_len == 0:
        assert not out.any() and lse.isneginf().all()
    out.sum().backward()
    assert q.grad.shape == q.shape and q.grad.isfinite().all()


def errors():
    def t(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype)

    q, k, v = t(2, 4, 5, 8), t(2, 2, 7, 8), t(2, 2, 7, 6)
    return [
        ((q[0], k, v), RuntimeError, r"q has 3 dimensions \[4, 5, 8\]; expected 4: \[B, H, Sq, D\]"),
        ((q, k[..., :7], v), RuntimeError, "k has size 7 in dimension 3 .* expected 8, q's head dimension"),
        ((q, k[:1], v), RuntimeError, "k has size 1 in dimension 0 .* expected 2, q's batch"),
        ((q, k, v[:, :, :6]), RuntimeError, "v has size 6 in dimension 2 .* expected 7, k's length"),
        ((q, k, v[:, :1]), RuntimeError, "v has size 1 in dimension 1 .* expected 2, k's heads"),
        ((q[:, :3], k, v), RuntimeError, "q has 3 heads; expected a multiple of k's and v's 2"),
        ((q, k[:, :0], v[:, :0]), RuntimeError, "q has 4 heads; expected a multiple of k's and v's 0"),
        ((q, k.half(), v), TypeError, "k has dtype torch.float16; expected torch.float32, as q"),
        ((q.int(), k.int(), v.int()), TypeError, "q has dtype torch.int32"),
        (
            (q, k, v, t(3, 5, 7)),
            RuntimeError,
            r"mask has shape \[3, 5, 7\], which does not broadcast to \[2, 4, 5, 7\]",
        ),
        ((q, k, v, t(5, 8)), RuntimeError, "mask has shape"),
        ((q, k, v, t(1, 1, 1, 5, 7)), RuntimeError, "mask has shape"),
        ((q, k, v, t(5, 7, dtype=torch.int64)), TypeError, "mask has dtype torch.int64; expected bool"),
        ((q, k, v, None, True, None, -1), ValueError, r"window is -1; expected 0 \(none\)"),
        ((q, k, v, None, True, None, 0, 2**31), ValueError, "q_offset is 2147483648; expected -536870912 to 536870912"),
        ((q, k.to("meta"), v), (RuntimeError, NotImplementedError), "k is on meta; expected cpu, as q"),
    ]


@pytest.mark.parametrize(("args", "error", "message"), errors())
def test_refuses(args, error, message):
    with pytest.raises(error, match=f"tile.attention: {message}"):
        ops.attention(*args)
    with pytest.raises(error, match=f"tile.attention: {message}"):
        ops.attention_lse(*args)
