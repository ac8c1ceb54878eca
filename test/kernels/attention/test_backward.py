# SPDX-License-Identifier: Apache-2.0

from dataclasses import replace

import pytest
import torch
from rounding import Rounding

from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels import compute_dtype
from torch_tile.kernels.attention import backward as module
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.backward import (
    PADDING,
    Tilings,
    attention_backward,
    footprint,
    masks_queries,
    query_blocks,
    reference,
    seen_by,
    tilings_for,
)
from torch_tile.kernels.attention.forward import attention, reference as forward
from torch_tile.kernels.attention.spec import Config, Spec
from torch_tile.kernels.attention.tiling import Problem
from torch_tile.kernels.common import Machine
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret


@pytest.mark.parametrize("causal, window, q_offset", [(False, 0, 0), (True, 0, -2), (True, 3, 2), (False, 2, 1)])
def test_reference_is_what_autograd_finds(causal, window, q_offset):
    shapes = (2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    mask = torch.randn(2, 4, 5, 7, dtype=torch.float64, requires_grad=True)
    options = (mask, causal, 0.4, window, q_offset)
    out, lse = forward(q, k, v, *options)
    grad = torch.randn_like(out)
    got = reference(grad, q, k, v, out, lse, *options, keep="mask")
    assert not reference(grad, q, k, v, out, lse, *options)[3].numel()
    *found, kept = got
    for a, b in zip((*found, kept[0]), torch.autograd.grad(out, (q, k, v, mask), grad), strict=True):
        torch.testing.assert_close(a, b)


FORMS = {  # dtype, D, Dv, mask, causal, windowed
    "full": (torch.float32, 32, 32, None, False, False),
    "causal": (torch.float32, 32, 16, None, True, False),
    "window": (torch.float32, 32, 48, None, True, True),
    "window_only": (torch.float32, 40, 24, None, False, True),
    "bool_mask": (torch.float32, 16, 16, torch.bool, False, False),
    "float_mask": (torch.float32, 48, 16, torch.float32, True, False),
    "bfloat16": (torch.bfloat16, 64, 32, torch.bfloat16, False, False),
    "float16": (torch.float16, 32, 32, None, True, False),
    "float64": (torch.float64, 8, 5, torch.bool, True, True),
}
LEAST = 1.0  # terms of this size may cancel: a query that sees one key has no dq
SMALL = Config(block_q=32, block_kv=16, packed=False)
CUTS = (
    Tilings(SMALL, Config(16, 32, packed=False)),
    Tilings(SMALL, Config(16, 32, packed=False), Config(32, 16, packed=False, shared_probs=True)),
    Tilings(replace(SMALL, heavy_first=True, shared_probs=True), Config(32, 16, packed=False, heavy_first=True)),
    Tilings(replace(SMALL, staged=True), Config(16, 16, packed=False, staged=True, shared_probs=True)),
)


@pytest.mark.parametrize("spec", FORMS)
def test_random_problems(spec, rounds, problems, check):
    dtype, d, dv, mask_dtype, causal, windowed = FORMS[spec]
    for number in rounds(3):
        (batch, kv_heads), groups = problems.pick((1, 1), (2, 1), (1, 2), (1, 3)), problems.pick(1, 1, 2, 3)
        q_len, kv_len = problems.size(50), problems.size(60)
        q, grad = (problems.reordered(batch, kv_heads * groups, q_len, n, dtype=dtype) for n in (d, dv))
        k = problems.tensor(batch, kv_len, kv_heads, d, dtype=dtype).transpose(1, 2)
        v = problems.tensor(batch, kv_heads, kv_len, dv, dtype=dtype)
        mask = problems.mask(mask_dtype, batch, kv_heads * groups, q_len, kv_len) if mask_dtype else None
        window = problems.random.randint(1, 30) if windowed else 0
        options = (mask, causal, problems.pick(None, 0.3, -0.1), window, problems.pick(0, kv_len - q_len, -3, 5))
        out, lse = forward(q, k, v, *options)
        tilings, keep = problems.pick(*CUTS) if number % 4 else None, problems.pick("", "mask")
        got = attention_backward(grad, q, k, v, out, lse, *options, keep, tilings=tilings)
        exact = (*(x.double() for x in (grad, q, k, v)), out, lse, *options, keep)
        want, rounding = reference(*exact), Rounding(reference, *exact, dtype=compute_dtype(dtype))
        what = f"{spec} {tuple(q.shape)} {tuple(k.shape)} {options[1:]} {keep} {tilings}"
        for n, (name, like) in enumerate({"dq": q, "dk": k, "dv": v}.items()):
            layout = empty_beside(like, like.shape[3])
            check(got[n], want[n], f"{name} of {what}", dtype, layout, LEAST, rounding=rounding[n])
        check(got[3], want[3], f"ds of {what}", dtype, least=LEAST, rounding=rounding[3])


INFINITE_AT_0 = {  # value or slope, for scores above 0; of an operand, whose padding is 0 as well
    "sqrt": "v0=sqrt(acc0);ret v0",
    "rsqrt": "v0=rsqrt(acc0);ret v0",
    "reciprocal": "v0=div(1.0,acc0);ret v0",
    "log": "v0=log(acc0);ret v0",
    "negative reciprocal": "v0=div(-1.0,acc0);ret v0",
    "quotient": "v0=div(acc0,x0);ret v0",
    "sum": "v0=div(1.0,x0);v1=add(acc0,v0);ret v1",
}


@pytest.mark.parametrize("name", INFINITE_AT_0)
def test_padding_takes_part_in_no_sum(name, check):
    """Queries and keys that only fill a tile give no NaN, where a text makes infinities of zeros."""
    text = INFINITE_AT_0[name]
    for q_len, kv_len, causal, window in ((100, 60, False, 0), (50, 70, True, 0)):
        q, k = (torch.rand(1, 2, n, 16) + 0.5 for n in (q_len, kv_len))
        v, grad = torch.randn(1, 2, kv_len, 16), torch.randn(1, 2, q_len, 16)
        aux = [torch.rand(2, q_len, kv_len) + 0.5] if "x0" in text else []
        options = (None, causal, None, window, kv_len - q_len if causal else 0)
        out, lse = attention(q, k, v, *options, aux, text)
        check(out, forward(q.double(), k.double(), v.double(), *options, aux, text)[0], f"out {name}", torch.float32)
        keep = "x0" if name == "quotient" else ""
        for tilings in (None, CUTS[1]) if name == "rsqrt" else (None,):
            got = attention_backward(grad, q, k, v, out, lse, *options, keep, aux, text, tilings=tilings)
            exact = (*(x.double() for x in (grad, q, k, v)), out, lse, *options, keep, aux, text)
            rounding = Rounding(reference, *exact)
            for n, (part, a, b) in enumerate(zip(("dq", "dk", "dv", "kept"), got, reference(*exact), strict=True)):
                what = f"{part} of {name} {q_len} {kv_len} {options} {tilings}"
                check(a, b, what, torch.float32, least=LEAST, rounding=rounding[n])


@pytest.mark.parametrize("head_dim, v_dim", [(72, 80), (192, 128), (64, 1), (1, 64)])
def test_head_dims(head_dim, v_dim, problems, check):
    q, k, v, grad = (
        problems.tensor(1, h, n, e, layout="dense")
        for h, n, e in ((4, 30, head_dim), (2, 70, head_dim), (2, 70, v_dim), (4, 30, v_dim))
    )
    options = (None, True, None, 0, 40)
    got = attention_backward(grad, q, k, v, *attention(q, k, v, *options), *options)
    want = reference(*(x.double() for x in (grad, q, k, v)), None, None, *options)
    for a, b, like in zip(got[:3], want[:3], (q, k, v), strict=True):
        check(a, b, f"{head_dim} {v_dim}", None, empty_beside(like, a.shape[3]), LEAST)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
@pytest.mark.parametrize("keys", [0, 5])
def test_empty_problems(shape, keys, engine):
    q, k, v = torch.randn(shape), torch.randn(*shape[:2], keys, shape[3]), torch.randn(*shape[:2], keys, 6)
    out, lse = attention(q, k, v)
    both = (call(out, q, k, v, out, lse, keep="mask") for call in (attention_backward, reference))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want)


def test_large_scores_do_not_overflow(engine):
    q, k = torch.full((1, 1, 3, 16), 10.0), torch.full((1, 1, 20, 16), -10.0)
    v, grad = torch.randn(1, 1, 20, 16), torch.randn(1, 1, 3, 16)
    got = attention_backward(grad, q, k, v, *attention(q, k, v, scale=1.0), scale=1.0)
    want = reference(*(x.double() for x in (grad, q, k, v)), None, None, scale=1.0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("keep", ["", "mask"])
@pytest.mark.parametrize("score", ["", "v0=mul(acc0,0.5);v1=tanh(v0);v2=mul(v1,4.0);ret v2"], ids=["scores", "caps"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_numbers_that_stand_for_minus_infinity(engine, keep, score, causal):
    """Probabilities of such rows have a sum of 1, although their log-sum-exp has no digit for the number of keys."""
    q, k, v, grad = (torch.randn(1, 2, 70, 16) for _ in range(4))
    mask, low = torch.randn(1, 2, 70, 70), torch.finfo(torch.float32).min
    mask[:, :, :7], mask[..., :7] = low, low
    named = {"causal": causal, "score": score}
    out, lse = forward(q, k, v, mask, **named)
    got = attention_backward(grad, q, k, v, out, lse, mask, keep=keep, **named)
    want = reference(*(x.double() for x in (grad, q, k, v, out, lse, mask)), keep=keep, **named)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


HOPPER = Machine(Target("cuda", 90), 132)


@pytest.mark.parametrize(
    "heads, q_len, kv_len, width, causal, window, stages",
    [
        (1, 70, 200, 64, False, 0, 3),  # keys end inside a tile, and so do queries
        (1, 200, 200, 64, True, 0, 3),  # masks cut some tiles of each block
        (2, 150, 150, 64, True, 0, 2),  # two heads add up in one block's sums
        (1, 150, 220, 64, True, 50, 2),
        (2, 130, 140, 256, True, 0, 0),  # the cuts of wide heads: dk and dv by a kernel each
    ],
)
def test_values_on_hopper(monkeypatch, heads, q_len, kv_len, width, causal, window, stages):
    """The kernels as they are lowered, thread by thread."""

    def call(kernel, *args):
        flat = lower(kernel.program, cuda_passes(Build(HOPPER.target, PassOptions(fast_math=True))))
        assert not interpret(flat, kernel.program, args)

    g = torch.Generator().manual_seed(0)
    shapes = (1, heads, q_len, width), (1, 1, kv_len, width), (1, 1, kv_len, width), (1, heads, q_len, width)
    q, k, v, grad = (torch.randn(shape, generator=g).half() for shape in shapes)
    options = (None, causal, 0.125, window, kv_len - q_len)
    out, lse = attention(q, k, v, *options)
    monkeypatch.setattr(module, "machine_of", lambda x: HOPPER)
    monkeypatch.setattr(JITKernel, "__call__", call)
    cut = Config(64, 64, 128, stages, packed=False, staged=True, heavy_first=causal)
    got = attention_backward(grad, q, k, v, out, lse, *options, tilings=Tilings(cut, cut) if stages else None)
    want = reference(*(x.double() for x in (grad, q, k, v)), out, lse, *options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=6e-3, rtol=6e-3)


@pytest.mark.parametrize(
    "target, dtype, shape, kv_len, causal, stages",
    [
        (90, torch.float16, (1, 2, 70, 208), 203, False, 3),
        (90, torch.bool, (70, 208), 200, True, 2),
        (80, torch.float32, (1, 1, 70, 208), 203, True, 2),
    ],
)
def test_masks_come_by_tiles(monkeypatch, target, dtype, shape, kv_len, causal, stages):
    """Blocks of queries read them row by row, blocks of keys across."""
    machine = Machine(Target("cuda", target), 132)

    def call(kernel, *args):
        flat = lower(kernel.program, cuda_passes(Build(machine.target, PassOptions(fast_math=True))))
        assert not interpret(flat, kernel.program, args)
        assert target == 80 or any("operand_tile" in str(note) for note in kernel.schedule.remarks)

    g = torch.Generator().manual_seed(0)
    sizes = (2, 70), (1, kv_len), (1, kv_len), (2, 70)
    q, k, v, grad = (torch.randn(1, *size, 64, generator=g).half() for size in sizes)
    stored = torch.randn(shape, generator=g)
    mask = (stored > 0 if dtype == torch.bool else stored.to(dtype))[..., :kv_len]
    options = (mask, causal, 0.125, 0, kv_len - 70)
    out, lse = attention(q, k, v, *options)
    monkeypatch.setattr(module, "machine_of", lambda x: machine)
    monkeypatch.setattr(JITKernel, "__call__", call)
    cut = Config(64, 64, 128, stages, packed=False, tiled=True)
    got = attention_backward(grad, q, k, v, out, lse, *options, keep="mask", tilings=Tilings(cut, cut))
    want = reference(*(x.double() for x in (grad, q, k, v)), out, lse, *options, keep="mask")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=6e-3, rtol=6e-3)


GPUS = [Machine(Target("cuda", c), num_sms) for c, num_sms in ((80, 108), (89, 142), (90, 132), (120, 170))]
FORM = Spec(torch.float16, 128, 128, True, True, False, None, False, True, 8)


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: str(m.target))
@pytest.mark.parametrize("width", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_tiles_fit(machine, width, dtype):
    spec = replace(FORM, dtype=dtype, tile_d=width, tile_dv=width)
    tilings = tilings_for(spec, Problem(32, 4096, 4096), machine)
    if tilings is None:  # left to the reference
        assert width >= 192 and dtype == torch.float64
        return
    bulk = machine.target.has_wgmma and dtype.itemsize == 2
    for config, outputs in ((tilings.dq, ("dq",)), *tilings.of_keys):
        assert footprint(replace(config, staged=False), spec, outputs, bulk).fits(machine.target)
        assert PADDING % config.block_q == 0 and config.heavy_first and not config.packed


def test_wide_heads_have_a_kernel_for_each_sum_of_keys():
    """Twice the keys in a block, where no block has the registers for both sums."""
    wide = tilings_for(replace(FORM, tile_d=256, tile_dv=256), Problem(32, 4096, 4096), GPUS[2])
    assert [sums for _, sums in wide.of_keys] == [("dv",), ("dk",)]
    assert wide.dkv.block_kv == wide.dk.block_kv == 128
    for spec in (FORM, replace(FORM, tile_d=192)):
        assert [sums for _, sums in tilings_for(spec, Problem(32, 4096, 4096), GPUS[2]).of_keys] == [("dk", "dv")]


def test_heads_of_a_group_are_side_by_side():
    tilings = tilings_for(FORM, Problem(8, 4 * 4096, 4096, 4), GPUS[2])
    assert (tilings.dq.side, tilings.dkv.side) == (8, 4)


@pytest.mark.parametrize("causal, windowed", [(True, False), (True, True), (False, True)])
def test_which_queries_see_a_block_of_keys(causal, windowed):
    """Against the definition: blocks outside see nothing, and those that are not cut see all."""
    spec, config = replace(FORM, causal=causal, windowed=windowed), Config(8, 12)
    for q_len, kv_len, offset, window in ((50, 40, 0, 7), (30, 70, 40, 20), (70, 30, -40, 1), (9, 9, 3, 100)):
        keys, queries = torch.arange(kv_len), torch.arange(q_len)[:, None]
        sees = torch.ones(q_len, kv_len, dtype=torch.bool)
        if causal:
            sees &= keys <= queries + offset
        if windowed:
            sees &= keys > queries + offset - window
        for first_key in range(0, kv_len, config.block_kv):
            first, end = (_value(x) for x in query_blocks(spec, config, first_key, offset, window, q_len))
            mine = sees[:, first_key : first_key + config.block_kv]
            assert not mine[: max(0, first) * 8].any() and not mine[max(0, end) * 8 :].any()
            for step in range(max(0, first), end):
                block = mine[step * 8 : step * 8 + 8]
                if not _value(masks_queries(spec, config, step, first_key, offset, window, q_len)):
                    assert block.all()
                for (i, j), want in zip(
                    torch.cartesian_prod(*map(torch.arange, block.shape)).tolist(), block.flatten(), strict=True
                ):
                    got = seen_by(spec, first_key + j, step * 8, i, 8, offset, window, q_len)
                    assert bool(_value(got)) == bool(want)


def _value(x):
    """Of an expression of numbers."""
    from torch_tile.ir.simplify import simplify

    return getattr(simplify(x), "value", x) if hasattr(x, "dtype") else x
