# SPDX-License-Identifier: Apache-2.0
"""Attention over keys in pages against float64; unused pages, and rows past a length, hold NaN."""

import math
from dataclasses import replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels.attention import forward, paged
from torch_tile.kernels.attention.args import AppendArgs, PagedArgs, dense_args
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.paged import append_reference, append_to_pages, attention_paged, reference
from torch_tile.kernels.attention.spec import Config
from torch_tile.kernels.attention.varlen import by_head
from torch_tile.kernels.common import Machine

PAGES = {
    "fp32 16": (torch.float32, 16), "fp16 64": (torch.float16, 64), "fp32 24": (torch.float32, 24),
    "bf16 32": (torch.bfloat16, 32), "fp32 256": (torch.float32, 256),
}  # fmt: skip


def problem(problems, dtype, page, longest=200, head_size=32):
    """Arguments of a call; dense queries, or ragged ones with rows of no sequence."""
    count, columns = problems.pick(1, 3), problems.random.randint(1, max(1, longest // page))
    kv_heads, groups = problems.pick(1, 2), problems.pick(1, 4)
    lengths = [problems.pick(0, problems.random.randint(0, columns * page)) for _ in range(count)]
    pages = count * columns + 2
    k, v = (problems.tensor(pages, page, kv_heads, head_size, dtype=dtype, layout="dense") for _ in range(2))
    table = torch.randperm(pages, generator=problems.generator)[: count * columns].view(count, columns)
    used = torch.zeros(pages, page, dtype=torch.bool)
    for b, n in enumerate(lengths):
        for s in range(n):
            used[table[b, s // page], s % page] = True
    k[~used], v[~used] = math.nan, math.nan
    lengths = torch.tensor(lengths).int()
    table = table.masked_fill(torch.arange(columns) * page >= lengths[:, None], problems.pick(-1, 10_000)).int()
    heads, starts, most = kv_heads * groups, None, 0
    if problems.pick(True, False):
        q = problems.reordered(count, problems.pick(1, 2, 5, 16, 40), heads, head_size, dtype=dtype)
    else:
        new = [problems.pick(0, 1, problems.random.randint(0, 40)) for _ in range(count)]
        starts, most = torch.tensor([0, *new]).cumsum(0).int(), max(new)
        q = problems.reordered(sum(new) + problems.pick(1, 3), heads, head_size, dtype=dtype)
    options = problems.pick(True, True, False), problems.pick(None, 0.3), problems.pick(0, 0, 9)
    return PagedArgs(q, k, v, table, lengths, starts, most, *options, problems.pick(0, 1, 3))


def in_double(args):
    return args._replace(**{name: getattr(args, name).double() for name in ("q", "k_pages", "v_pages")})


def test_reference_is_dense_attention_of_each_sequence(problems):
    for _ in range(8):
        args = in_double(problem(problems, torch.float64, problems.pick(1, 3, 16), 50, 8))
        out, _ = reference(*args)
        for b, n in enumerate(args.lengths.tolist()):
            at = [(int(args.block_tables[b, s // args.k_pages.shape[1]]), s % args.k_pages.shape[1]) for s in range(n)]
            k, v = (torch.stack([x[i] for i in at]) if n else x.new_zeros(0, *x.shape[2:]) for x in args[1:3])
            rows = b if args.cu_seqlens_q is None else slice(*args.cu_seqlens_q[b : b + 2].tolist())
            dense = [x.transpose(0, 1)[None] for x in (args.q[rows], k, v)]
            options = None, args.causal, args.scale, args.window, n - dense[0].shape[2]
            torch.testing.assert_close(out[rows], forward.reference(*dense, *options)[0][0].transpose(0, 1))


@pytest.mark.parametrize("form", PAGES)
def test_random_problems(form, rounds, problems, check, monkeypatch):
    def by_torch(*args, **named):
        raise AssertionError("no kernel ran")

    monkeypatch.setattr(paged, "reference", by_torch)
    for _ in rounds(5):
        args = problem(problems, *PAGES[form], longest=100)
        out, lse = attention_paged(*args)
        want, want_lse = reference(*in_double(args))
        what = f"{form} {tuple(args.q.shape)} {args.lengths} {args.cu_seqlens_q} {args[6:]}"
        check(out, want, what, args.q.dtype, empty_beside(args.q, want.shape[-1]))
        check(lse, want_lse, what, args.q.dtype)


@pytest.mark.parametrize("engine", ["interpreter", "threads", "text"], indirect=True)
@pytest.mark.parametrize("page", [8, 16, 64])
def test_splits_in_turns(page, engine, problems, check):
    """Splits hold the page numbers of all of their tiles, which are several pages, one page or a part of one."""
    dtype, target = problems.pick(torch.float16, torch.bfloat16), Target("cuda", problems.pick(80, 90))
    for _ in range(3):
        args = problem(problems, dtype, page, longest=problems.pick(100, 300))
        if args.cu_seqlens_q is None:
            break
    config = Config(16, problems.pick(16, 32), 128, problems.pick(1, 2, 3), split=True, shared_probs=True)
    config = replace(config, packed=problems.pick(True, False))
    rows, splits = args.q.shape[1] * args.q.shape[2] // args.k_pages.shape[2], problems.pick(1, 2, 3, 5, 16)
    one_tile = args.cu_seqlens_q is None and rows <= config.block_q
    machine, config = Machine(target, 132), replace(config, one_tile=one_tile and problems.pick(True, False))
    out, lse = (torch.full_like(x, math.nan) for x in paged._empty_results(args))
    view = by_head if args.cu_seqlens_q is not None else paged._heads_first
    dense = dense_args(view(args.q), args.k_pages.transpose(1, 2), args.v_pages.transpose(1, 2), args)
    sums = lse if args.cu_seqlens_q is None else lse[None]
    assert forward.run(dense, view(out), sums, machine, config, splits, sequences=paged.sequences_of(args))
    want, want_lse = reference(*in_double(args))
    what = f"{tuple(args.q.shape)} {args.lengths} {args.cu_seqlens_q} {args[6:]} {config} {splits} {target}"
    check(out, want, what, dtype, empty_beside(args.q, want.shape[-1]))
    check(lse, want_lse, what, dtype)


HOPPER = Machine(Target("cuda", 90), 132)


@pytest.mark.parametrize("page", [16, 256])
def test_values_on_hopper(page, monkeypatch):
    """A tile of several pages, and of a part of one, by bulk copies. Thread by thread."""
    notes = []

    def call(kernel, *args):
        notes.extend(str(note) for note in kernel.schedule.remarks)
        assert not kernel.interpret(*args)

    for module in (forward, paged):
        monkeypatch.setattr(module, "machine_of", lambda x: HOPPER)
    monkeypatch.setattr(JITKernel, "__call__", call)
    g = torch.Generator().manual_seed(0)
    columns = 256 // page
    q, k, v = (torch.randn(*n, 64, generator=g).half() for n in ((2, 70, 2), *[(2 * columns + 1, page, 1)] * 2))
    table = torch.randperm(2 * columns + 1, generator=g)[: 2 * columns].view(2, columns).int()
    lengths = torch.tensor([203, 0], dtype=torch.int32)
    for s in range(256):
        for b in range(2):
            if s >= lengths[b]:
                k[table[b, s // page], s % page] = v[table[b, s // page], s % page] = math.nan
    out, lse = attention_paged(q, k, v, table, lengths)
    want, want_lse = reference(q, k, v, table, lengths)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-3)
    assert any("k_tile: bulk copies" in note for note in notes), notes


def test_appended_rows(engine, problems):
    """What lies in the pages otherwise, and rows that stand nowhere, are left alone."""
    args = problem(problems, torch.float32, 16, 60)
    heads, width = args.k_pages.shape[2:]
    k, v = (problems.tensor(*args.q.shape[:-2], heads, n) for n in (width, width))
    pages = [x.clone() for x in args[1:3]]
    want = append_reference(AppendArgs(k, v, *args[1:6]))
    append_to_pages(AppendArgs(k, v, *pages, *args[3:7]))
    for got, exact in zip(pages, want, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


E4M3 = torch.float8_e4m3fn


def in_float8(args, problems):
    """The same call on pages of float8, whose scales are of one of the kinds; unused rows have scales of NaN."""
    page_shape = args.k_pages.shape[:3]
    scales = []
    for pages in args[1:3]:
        kind = problems.pick((1, 1, 1), (1, 1, page_shape[2]), tuple(page_shape))
        scale = torch.rand(kind, generator=problems.generator) + 0.1
        if kind == tuple(page_shape):
            scale = torch.where(pages.isnan().any(-1), math.nan, scale)
        scales.append(scale)
    values = [(x.float() / scale[..., None]).to(E4M3) for x, scale in zip(args[1:3], scales, strict=True)]
    return args._replace(k_pages=values[0], v_pages=values[1], k_scale=scales[0], v_scale=scales[1])


@pytest.mark.parametrize("form", ["fp16 64", "bf16 16", "fp32 24"])
def test_pages_of_float8(form, rounds, problems, check, monkeypatch):
    def by_torch(*args, **named):
        raise AssertionError("no kernel ran")

    monkeypatch.setattr(paged, "reference", by_torch)
    dtype, page = {**PAGES, "bf16 16": (torch.bfloat16, 16)}[form]
    for _ in rounds(3):
        args = in_float8(problem(problems, dtype, page, longest=100), problems)
        out, lse = attention_paged(*args)
        want, want_lse = reference(*args._replace(q=args.q.double()))
        what = f"{form} {tuple(args.q.shape)} {args.lengths} {args.cu_seqlens_q} {args[6:]}"
        check(out, want, what, dtype, empty_beside(args.q, want.shape[-1]))
        check(lse, want_lse, what, dtype)


def value_scales(problems, shape):
    """Scales from 2^-20 or 2^-140 to 1, or all alike, maybe tiny, some of them 0 or negative or neither."""
    spread = problems.pick(0.0, 20.0, 140.0)
    least = problems.pick(0.0, 65.0, 100.0)
    scales = 2.0 ** (torch.rand(shape, generator=problems.generator) * -spread - least)
    signs = torch.randint(problems.pick(-1, 1), 2, shape, generator=problems.generator)
    return scales * signs


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float8_is_widened_in_registers(capability, dtype, problems, monkeypatch):
    """Few rows over pages of float8, thread by thread; scales beyond the lengths are NaN, those of values any size and
    sign, or 0. Rows of queries are of any size, too.
    """
    notes = []

    def call(kernel, *args):
        notes.extend(str(note) for note in kernel.schedule.remarks)
        assert not kernel.interpret(*args)

    machine = Machine(Target("cuda", capability), 132)
    for module in (forward, paged):
        monkeypatch.setattr(module, "machine_of", lambda x: machine)
    monkeypatch.setattr(JITKernel, "__call__", call)
    page, width, groups = problems.pick(16, 64), problems.pick(32, 64), problems.pick(1, 5)
    columns = 128 // page
    g = problems.generator
    large = problems.pick(1.0, 2.0**-12, 2.0**12 if dtype == torch.float16 else 2.0**60)
    q = (torch.randn(2, 1, 2 * groups, width, generator=g) * large).to(dtype)
    q[:, :, 0] *= problems.pick(0.0, 1.0)
    k, v = (torch.randn(2 * columns + 1, page, 2, width, generator=g).to(E4M3) for _ in range(2))
    table = torch.randperm(2 * columns + 1, generator=g)[: 2 * columns].view(2, columns).int()
    lengths = torch.tensor([problems.pick(1, 71, 128), 0], dtype=torch.int32)
    shape = (2 * columns + 1, page, 2)
    scales = [torch.rand(shape, generator=g) / large, value_scales(problems, shape)]
    for s in range(128):
        for b in range(2):
            if s >= lengths[b]:
                place = table[b, s // page], s % page
                k.view(torch.uint8)[place] = v.view(torch.uint8)[place] = 0x7F
                scales[0][place] = scales[1][place] = math.nan
    out, lse = attention_paged(q, k, v, table, lengths, k_scale=scales[0], v_scale=scales[1])
    want, want_lse = reference(q.double(), k, v, table, lengths, k_scale=scales[0], v_scale=scales[1])
    least = 2.0**-24 if dtype == torch.float16 else 2.0**-82  # what is stored; where a LEAST_SCALE is lost, times v
    close = {"atol": 1e-2 * want.abs().max().item() + least, "rtol": 1e-2}
    torch.testing.assert_close(out.double(), want, **close)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-2, rtol=1e-2)
    assert sum("widened in registers" in note for note in notes) >= 2, notes


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("of_values", [False, True])
@pytest.mark.parametrize("machine", [None, Machine(Target("cuda", 90), 132), Machine(Target("cuda", 80), 108)])
def test_scales_that_are_no_numbers_reach_the_result(machine, of_values, odd, problems, monkeypatch):
    """One infinite scale of a visible key or value makes all rows of its head infinite or NaN, and no other."""
    if machine is not None:
        for module in (forward, paged):
            monkeypatch.setattr(module, "machine_of", lambda x: machine)
        monkeypatch.setattr(JITKernel, "__call__", lambda kernel, *args: kernel.interpret(*args))
    g, dtype = problems.generator, problems.pick(torch.float16, torch.bfloat16)
    q = torch.randn(1, problems.pick(1, 3), 4, 32, generator=g).to(dtype)
    k, v = (torch.randn(4, 16, 2, 32, generator=g).to(E4M3) for _ in range(2))
    lengths, table = torch.tensor([problems.random.randint(17, 64)]).int(), torch.randperm(4, generator=g)[None].int()
    scales = [torch.rand(4, 16, 2, generator=g) + 0.1 for _ in range(2)]
    scales[of_values][table[0, 0], problems.random.randrange(10), 1] = odd
    out, _ = attention_paged(q, k, v, table, lengths, k_scale=scales[0], v_scale=scales[1])
    assert out[:, :, :2].isfinite().all() and not out[:, :, 2:].isfinite().any()


def test_a_contiguous_cache_of_float8_has_a_page_a_sequence(problems, check):
    q, k, v = problems.tensor(3, 1, 4, 32), *(problems.tensor(3, 2, 70, 32, layout="dense") for _ in range(2))
    k, v = (x.transpose(1, 2).to(E4M3) for x in (k, v))
    lengths, table = torch.tensor([70, 0, 33]).int(), torch.arange(3).int()[:, None]
    scales = torch.rand(1, 1, 2, generator=problems.generator), torch.rand(3, 70, 2, generator=problems.generator)
    out, _ = attention_paged(q, k, v, table, lengths, k_scale=scales[0], v_scale=scales[1])
    for b, n in enumerate(lengths.tolist()):
        wide = [(x[b : b + 1, :n].double() * s.expand(3, 70, 2)[b : b + 1, :n, :, None]).transpose(1, 2)
                for x, s in zip((k, v), scales, strict=True)]  # fmt: skip
        want = forward.reference(q[b : b + 1].transpose(1, 2).double(), *wide)[0].transpose(1, 2)
        check(out[b : b + 1].contiguous(), want.contiguous(), f"{n} keys", torch.float32)


def test_appended_rows_of_float8(engine, problems):
    """Scales of heads are read, scales of positions are made; what is stored is within 2^-4 of what was given."""
    args = problem(problems, torch.float32, 16, 60)
    page_shape, heads, width = args.k_pages.shape[:3], *args.k_pages.shape[2:]
    k, v = (problems.tensor(*args.q.shape[:-2], heads, n) for n in (width, width))
    pages = [torch.zeros(args.k_pages.shape).to(E4M3) for _ in range(2)]
    shared = torch.rand(1, 1, heads, generator=problems.generator) + 0.1
    each = torch.full(page_shape, math.nan)
    want = append_reference(AppendArgs(k, v, *pages, *args[3:7], shared, each))
    append_to_pages(AppendArgs(k, v, *pages, *args[3:7], shared, each))
    for got, exact in zip((*pages, each), (*want[:2], want[3]), strict=True):
        torch.testing.assert_close(got.float(), exact.float(), rtol=1e-6, atol=0, equal_nan=True)
    plain = [torch.zeros(args.k_pages.shape) for _ in range(2)]
    append_to_pages(AppendArgs(k, v, *plain, *args[3:7]))
    for stored, scale, given in zip(pages, (shared.expand(page_shape), each), plain, strict=True):
        found = stored.float() * scale.nan_to_num(1.0)[..., None]
        bound = given.abs() * 2**-4 + scale.nan_to_num(1.0)[..., None] * 2**-10
        inside = given.abs() <= 448 * scale.nan_to_num(1.0)[..., None]
        assert ((found - given).abs() <= bound * 1.0001)[inside].all()
