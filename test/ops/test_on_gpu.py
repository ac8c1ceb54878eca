# SPDX-License-Identifier: Apache-2.0
"""Run every op on a GPU: its sample arguments, and random problems of the sizes that kernels tile."""

import random

import pytest
import torch
from torch.utils._pytree import tree_map_only

import torch_tile  # noqa: F401  (registers the ops)
from torch_tile.ops.registration import SCHEMAS

pytestmark = pytest.mark.cuda
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-4}
# Their results have dtypes of their own.
BYTES_OUT = {"quantize_fp8", "quantize_int8", "silu_mul_quantize", "fused_norm_quantize"}
ROUNDED = {"attention_fp8": 0.12}  # weights are float8 of linear codes there
UNORDERED = {"nsa_select", "lightning_index"}  # torch lists equal scores in any order
# A plan of mla_schedule has a row for each unit of the machine.


def to_gpu(args):
    """Return the arguments on the GPU, in the memory order that they have."""
    return tree_map_only(torch.Tensor, lambda t: _moved(t.detach()), args)


def _moved(t):
    """Copy a tensor's whole storage to the GPU and view it as the tensor does."""
    stored = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).cuda()
    return stored.as_strided(t.shape, t.stride(), t.storage_offset())


def compare(to_double, name, args, dtype, scale=1.0):
    """Compare the op's results on the GPU with its results in float64 on the CPU."""
    op = getattr(torch.ops.tile, name).default
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh tensors hold NaN
    try:
        got = op(*to_gpu(args))
    finally:
        torch.use_deterministic_algorithms(False)
    want = op(*to_double(args))
    as_tuple = lambda x: x if isinstance(x, tuple) else (x,)  # noqa: E731
    for g, w in zip(as_tuple(got), as_tuple(want), strict=True):
        g, w = (x.sort(-1).values if name in UNORDERED else x for x in (g, w))
        tolerance = max(TOLERANCE[dtype] * scale, ROUNDED.get(name, 0.0))
        size = max(1.0, float(w.double().abs().nan_to_num(0, 0, 0).max()) ** 0.5) if w.numel() else 1.0
        torch.testing.assert_close(g.cpu().double(), w.double(), rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", sorted(set(SCHEMAS) - BYTES_OUT - {"mla_schedule"}))
def test_samples(name, dtype, samples, to_double):
    for seed in range(2):
        for i, args in enumerate(samples(name, seed, dtype)):
            print("sample", i)
            compare(to_double, name, args, dtype)


class Drawn:
    """Random tensors and sizes from one seed."""

    def __init__(self, seed, dtype, to_double):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.to_double = dtype, to_double
        self.pick = lambda *values: self.random.choice(values)
        self.size = self.random.randint

    def __call__(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def ends(self, groups, rows):
        return torch.tensor(sorted(self.size(0, rows) for _ in range(groups)), dtype=torch.int32)

    def starts(self, count, total):
        inner = sorted(self.size(0, total) for _ in range(count - 1))
        return torch.tensor([0, *inner, total], dtype=torch.int32)

    def classes(self, rows, count):
        target = torch.randint(0, count, (rows,), generator=self.generator)
        return torch.where(torch.rand(rows, generator=self.generator) < 0.1, -100, target)


def varlen(t):
    d = t.pick(64, 128)
    heads, kv_heads = t.pick((8, 2), (4, 4))
    count, rows = t.size(1, 6), t.size(50, 900)
    starts = t.starts(count, rows)
    longest = int(starts.diff().max())
    window = t.pick(0, 0, 50)
    tensors = t(rows, heads, d), t(rows, kv_heads, d), t(rows, kv_heads, d)
    return (*tensors, starts, starts, longest, longest, True, None, window)


def varlen_backward(t):
    args = varlen(t)
    out, lse = torch.ops.tile.attention_varlen_lse(*t.to_double(args))
    return (t(*out.shape), *args[:3], out.to(t.dtype), lse.float(), *args[3:])


def paged(t):
    d, page = t.pick(64, 128), t.pick(16, 64, 128)
    heads, kv_heads = t.pick((8, 2), (16, 2), (4, 4))
    count, most = t.size(1, 5), t.size(1, 12)
    table = torch.randperm(count * most, generator=t.generator).view(count, most).int()
    lengths = torch.tensor([t.size(0, most * page) for _ in range(count)], dtype=torch.int32)
    pages = t(count * most, page, kv_heads, d), t(count * most, page, kv_heads, d)
    return t(count, t.pick(1, 1, 4), heads, d), *pages, table, lengths


def delta(t, longest=(400, 1500)):  # a scan of more than 1024 times is cut into segments
    batch, heads, d, dv = t.size(1, 2), t.pick(1, 4), t.pick(64, 128), t.pick(64, 128)
    length = t.size(1, t.pick(*longest))
    unit = torch.nn.functional.normalize
    q, k = (unit(t(batch, length, heads, d, dtype=torch.float32), dim=-1).to(t.dtype) for _ in range(2))
    decay = -torch.rand(batch, length, heads, generator=t.generator)
    beta = torch.rand(batch, length, heads, generator=t.generator)
    state = t.pick(None, t(batch, heads, d, dv, dtype=torch.float32))
    return q, k, t(batch, length, heads, dv), decay, beta.to(t.dtype), state


def delta_backward(t):
    args = delta(t, (400,))
    return t(*args[2].shape), t.pick(None, t(args[0].shape[0], *args[0].shape[2:], args[2].shape[3])), *args


def ssd(t):
    batch, length, groups = t.size(1, 2), t.size(1, 700), t.pick(1, 2)
    heads, d, n = groups * t.size(1, 4), t.pick(32, 64), t.pick(64, 128)
    dt = torch.rand(batch, length, heads, generator=t.generator) * 0.3
    decay = -torch.rand(heads, generator=t.generator) - 0.1
    b, c = (t(batch, length, groups, n) / 4 for _ in range(2))
    return t(batch, length, heads, d), dt.to(t.dtype), decay, b, c, t.pick(None, t(heads, dtype=torch.float32))


def ssd_backward(t):
    args = ssd(t)
    return t(*args[0].shape), None, *args


def loss(t):
    rows, classes = t.size(1, 300), t.size(2, 9000)
    return t(rows, classes), t.classes(rows, classes), None, -100, t.pick(0.0, 0.1), t.pick(0.0, 1e-3)


def head_loss(t):
    rows, hidden, classes = t.size(1, 300), 8 * t.size(1, 60), t.size(2, 5000)
    return t(rows, hidden), t(classes, hidden) / hidden**0.5, t.classes(rows, classes)


def head_gradients(t):
    hidden, weight, target = head_loss(t)
    return torch.rand(len(target), generator=t.generator), hidden, weight, target


def routes(t):
    experts = t.pick(8, 64, 128, 256)
    if t.pick(True, False):
        return t(t.size(1, 600), experts), None, t.size(1, 8)
    return t(t.size(1, 600), experts), t(experts, dtype=torch.float32) / 8, 4, "sigmoid", 4, 2, 2, True, 2.5


def grouped_words(t):
    groups, rows, n, k = t.size(1, 9), t.size(1, 400), 16 * t.size(1, 40), 128 * t.size(1, 6)
    words = torch.randint(0, 256, (groups, n, k // 2), generator=t.generator, dtype=torch.uint8)
    form, group = t.pick(("nf4", 64), ("e2m1", 32), ("", 128))
    scale = torch.rand(groups, n, k // group, generator=t.generator).to(t.dtype) / k
    offset = 0 if form else 8
    return t(rows, k), [words], [scale], [], t.ends(groups, rows), 4, True, offset, [], "", "", t.dtype, form


def grouped_scaled(t):
    groups, rows, n, k = t.size(1, 9), t.size(1, 400), 16 * t.size(1, 40), 16 * t.size(1, 60)
    cut = lambda size: -(-size // 128)  # noqa: E731
    a, b = t(rows, k).to(torch.float8_e4m3fn), t(groups, n, k).to(torch.float8_e4m3fn)
    random_scale = lambda *shape: torch.rand(shape, generator=t.generator) + 0.5  # noqa: E731
    of_a, of_b = t.pick(((1, 1), (1, 1)), ((rows, 1), (1, n)), ((rows, cut(k)), (cut(k), cut(n))))
    return a, b.mT, random_scale(*of_a), random_scale(groups, *of_b), t.ends(groups, rows), [], "", "", t.dtype


def whole_numbers(t):
    m, n, k = t.pick(1, t.size(1, 300)), 8 * t.size(1, 80), 16 * t.size(1, 60)
    a, b = (torch.randint(-128, 128, s, generator=t.generator, dtype=torch.int8) for s in ((m, k), (n, k)))
    scale = lambda *shape: torch.rand(shape, generator=t.generator) / k**0.5 / 64  # noqa: E731
    return a, b.mT, scale(m, 1), scale(1, n), [], "", "", t.dtype


def convolution(t):
    d = 8 * t.size(1, 90)
    return t(t.size(1, 3), t.size(1, 500), d), t(d, t.pick(2, 3, 4)), t.pick(None, t(d)), None, t.pick("silu", "none")


def images(t):
    dims = t.pick(1, 2, 3)
    sizes, taps = [t.size(3, (400, 60, 24)[dims - 1]) for _ in range(dims)], [t.size(1, 3) for _ in range(dims)]
    channels, filters = t.pick(t.size(1, 40), 8 * t.size(1, 40)), t.pick(t.size(1, 40), 8 * t.size(1, 40))
    window = [t.size(1, 2) for _ in taps], [t.size(0, 2) for _ in (*taps, *taps)], [t.size(1, 2) for _ in taps]
    x, weight = t(t.size(1, 2), *sizes, channels), t(filters, *taps, channels) / (channels * len(taps)) ** 0.5
    window[1][::2] = [max(n, 4 - size) for n, size in zip(window[1][::2], sizes, strict=True)]
    return x, weight, t.pick(None, t(filters)), None, *window, t.pick("silu", "none")


LARGE = {
    "conv": images,
    "attention_varlen": varlen,
    "attention_varlen_backward": varlen_backward,
    "attention_paged": paged,
    "gated_delta_rule": delta,
    "gated_delta_rule_backward": delta_backward,
    "ssd_chunk_scan": ssd,
    "ssd_chunk_scan_backward": ssd_backward,
    "cross_entropy": loss,
    "linear_cross_entropy": head_loss,
    "linear_cross_entropy_gradients": head_gradients,
    "route": routes,
    "grouped_dequant_gemm": grouped_words,
    "grouped_scaled_gemm": grouped_scaled,
    "scaled_gemm": whole_numbers,
    "causal_conv1d": convolution,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_random_problems(name, dtype, seed, to_double):
    for turn in range(6):
        print("turn", turn)
        compare(to_double, name, LARGE[name](Drawn(seed + turn, dtype, to_double)), dtype, scale=2.0)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("width", [64, 128])
def test_float8_attention_of_many_keys(width, mean, seed):
    """Sums of many products lose nothing. Tensor cores cut off digits of long sums, of values with a mean above all."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, width, device="cuda") for n in (64, 16384, 16384))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v + mean))
    out, lse = torch.ops.tile.attention_fp8(q, k, v, dtype=torch.float32)
    scores = q.double() @ k.double().mT * width**-0.5
    want = scores.softmax(-1) @ v.double()
    error = (out.double() - want).square().mean().sqrt()
    noise = (scores.softmax(-1).square() @ v.double().square()).mean().sqrt()  # of weights with errors of their own
    assert error < 0.05 * noise + 0.003 * mean
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=0.01)
