# SPDX-License-Identifier: Apache-2.0
"""Products of warpgroups against those of matrices, and a pipeline of TMA, products and a TMA store made by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from mutation import removals

from torch_tile.intrinsics import bulk, memory as tm, wgmma
from torch_tile.intrinsics.wgmma import A_8, A_16, A_32, PRODUCTS, Descriptor
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, cast, const
from torch_tile.kernels.mla import decode as mla_decode, scheduler as mla_schedule
from torch_tile.kernels.mla.spec import Config
from torch_tile.simulator.simt.interpreter import run_threads

K_BYTES = 32  # of one instruction


def number(n):
    return const(n, dt.int32)


def kind(name):
    return "float32" if name == "tf32" else name


def random(rng, shape, name):
    low = 0 if name == "uint8" else -5
    return torch.from_numpy(rng.integers(low, 6, shape).astype(np.float64)).to(getattr(torch, kind(name)))


def in_panels(matrix, span, across=False):
    """The bytes of a matrix `[row, k]` as shared memory has them, swizzled in panels of `span` bytes."""
    x = matrix.T.contiguous() if across else matrix
    wide = span // x.element_size()
    panels = x.reshape(x.shape[0], -1, wide).swapaxes(0, 1).contiguous()
    raw = panels.view(torch.uint8).reshape(-1).numpy()
    address = np.arange(len(raw))
    row = {32: address // 128 % 2, 64: address // 128 % 4, 128: address // 128 % 8}[span]
    out = np.empty_like(raw)
    out[address ^ row * 16] = raw
    return torch.from_numpy(out).view(matrix.dtype)


def fill(b, name, values):
    """A shared buffer and the loop that fills it."""
    x = b.tensor(name + "_", values)
    s, i = b.shared(name, values.numel(), str(values.dtype)[6:]), Var("i" + name, dt.int32, "loop")
    at = i * b.threads + b.thread
    return s, b.loop(i, 0, values.numel() // b.threads, b.store(s, at, b.load(x, at)))


def put_out(b, d, n, dtype):
    """Store the accumulators of the warpgroups, one above the other, to a new matrix."""
    y = b.tensor("y", torch.zeros(b.threads // 2 * n, dtype=dtype))
    r, t = Var("r", dt.int32, "loop"), b.thread % 128
    row = b.thread // 128 * 64 + t // 32 * 16 + t % 32 // 4 + r // 2 % 2 * 8
    column = r // 4 * 8 + t % 4 * 2 + r % 2
    out = b.loop(r, 0, n // 2, b.store(y, row * n + column, b.load(d, r), line=9))
    return b.when(b.thread >= 0, wgmma.wgmma_results(b.address(d, 0), n // 2), out)


def fenced(*products, pending=0):
    return [wgmma.wgmma_fence(), *products, wgmma.wgmma_commit(), wgmma.wgmma_wait(pending)]


def zero(b, d, count):
    r = Var("z", dt.int32, "loop")
    return b.loop(r, 0, count, b.store(d, r, 0.0 if d.dtype.is_float else 0))


@pytest.mark.parametrize("types", sorted(PRODUCTS), ids="-".join)
@pytest.mark.parametrize("span", [32, 64, 128])
def test_products_of_panels_along_k(build, types, span, rng):
    b, n, size = build(128), 24 if "int32" not in types else 32, dt.to_dtype(kind(types[0])).itemsize
    k = 2 * span // size  # two panels
    a_, b_ = random(rng, (64, k), types[0]), random(rng, (n, k), types[1])
    (a, fill_a), (x, fill_b) = fill(b, "a", in_panels(a_, span)), fill(b, "b", in_panels(b_, span))
    d = b.local("d", n // 2, types[2])
    walk, products = Descriptor(span, 16, 8 * span), []
    for step in range(0, k * size, K_BYTES):
        panel, within = divmod(step, span)
        steps = panel * 64 * span + within, panel * n * span + within
        products.append(
            b.at(5, wgmma.wgmma(b.address(d, 0), b.address(a, 0), b.address(x, 0), n, types, walk, walk, *steps,
                                step > 0))
        )  # fmt: skip
    findings = b.run(
        fill_a, fill_b, bulk.fence_proxy_async(), tm.barrier(), *fenced(*products),
        put_out(b, d, n, getattr(torch, types[2])),
    )  # fmt: skip
    assert not findings, findings.report()
    assert torch.equal(b.tensors[-1].view(64, n).double(), a_.double() @ b_.double().T)


@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("clear", [False, True])
def test_products_of_panels_across_k(build, span, clear, rng):
    """A lies as [k, m], B as [k, n], each in panels of columns."""
    b, n, k, types = build(128), 2 * span // 2, 32, ("bfloat16", "bfloat16", "float32")
    a_, b_ = random(rng, (64, k), types[0]), random(rng, (n, k), types[1])
    (a, fill_a), (x, fill_b) = fill(b, "a", in_panels(a_, span, True)), fill(b, "b", in_panels(b_, span, True))
    d = b.local("d", n // 2)
    walk = Descriptor(span, k * span, 8 * span, True)
    products = [
        wgmma.wgmma(b.address(d, 0), b.address(a, 0), b.address(x, 0), n, types, walk, walk, s * 16 * span,
                    s * 16 * span, s > 0 or not clear)
        for s in range(k // 16)
    ]  # fmt: skip
    i = Var("i", dt.int32, "loop")
    ones = b.loop(i, 0, n // 2, b.store(d, i, 1.0))
    findings = b.run(
        fill_a, fill_b, ones, bulk.fence_proxy_async(), tm.barrier(), *fenced(*products),
        put_out(b, d, n, torch.float32),
    )  # fmt: skip
    assert not findings, findings.report()
    assert torch.equal(b.tensors[-1].view(64, n).double(), a_.double() @ b_.double().T + (not clear))


def test_operands_without_a_swizzle(build, rng):
    """Along K: blocks of 8 rows of 16 bytes, the two halves of K side by side."""
    b, n, types = build(128), 16, ("float16", "float16", "float32")
    a_, b_ = random(rng, (64, 16), types[0]), random(rng, (n, 16), types[1])

    def blocks(x):
        return x.reshape(-1, 8, 2, 8).permute(0, 2, 1, 3).reshape(-1)  # group of 8 rows, half of K, row, 8 elements

    (a, fill_a), (x, fill_b) = fill(b, "a", blocks(a_)), fill(b, "b", blocks(b_))
    d, walk = b.local("d", n // 2), Descriptor(0, 128, 256)
    do = wgmma.wgmma(b.address(d, 0), b.address(a, 0), b.address(x, 0), n, types, walk, walk, keep=False)
    assert not b.run(
        fill_a, fill_b, bulk.fence_proxy_async(), tm.barrier(), *fenced(do), put_out(b, d, n, torch.float32)
    )
    assert torch.equal(b.tensors[-1].view(64, n).double(), a_.double() @ b_.double().T)


@pytest.mark.parametrize(("types", "digits"), [
    (("float16", "float16", "float16"), A_16), (("int8", "uint8", "int32"), A_8), (("tf32", "tf32", "float32"), A_32),
], ids=["16", "8", "32"])  # fmt: skip
def test_factors_in_registers(build, types, digits, rng):
    """Each warpgroup of two has rows of its own and shares B."""
    b, n = build(256), 32
    k = PRODUCTS[types]
    count = 64 * k // 128
    a_, b_ = random(rng, (128, k), types[0]), random(rng, (n, k), types[1])
    x, fill_b = fill(b, "b", in_panels(b_, 32))
    source, a, d = b.tensor("a", a_.reshape(-1)), b.local("a", count, kind(types[0])), b.local("d", n // 2, types[2])

    def index(dim, r):
        found = number(0)
        for digit in dim:
            axis = b.thread % 128 if digit.axis == "t" else number(r)
            found = found * digit.size + axis // digit.stride % digit.size
        return found

    place = [(b.thread // 128 * 64 + index(digits[0], r)) * k + index(digits[1], r) for r in range(count)]
    load = [b.store(a, r, b.load(source, at)) for r, at in enumerate(place)]
    walk = Descriptor(32, 16, 256)
    do = wgmma.wgmma(b.address(d, 0), b.address(a, 0), b.address(x, 0), n, types, None, walk, keep=False)
    out = put_out(b, d, n, getattr(torch, types[2]))
    findings = b.run(fill_b, *load, bulk.fence_proxy_async(), tm.barrier(), *fenced(do), out)
    assert not findings, findings.report()
    assert torch.equal(b.tensors[-1].view(128, n).double(), a_.double() @ b_.double().T)


def test_tf32_drops_bits_and_bad_places_are_reported(build):
    for start, lines in ((0, []), (16, [("misaligned", 5)]), (1024, [("out_of_bounds", 5)])):
        b, types = build(128), ("tf32", "tf32", "float32")
        (a, fill_a), (x, fill_b) = fill(b, "a", torch.full((512,), 1 + 2**-12)), fill(b, "b", torch.ones(128))
        d, walk = b.local("d", 4), Descriptor(32, 16, 256)
        do = wgmma.wgmma(b.address(d, 0), b.address(a, 0), b.address(x, 0), 8, types, walk, walk, 0, start * 4, False)
        findings = b.run(
            fill_a, fill_b, bulk.fence_proxy_async(), tm.barrier(), *fenced(b.at(5, do)),
            put_out(b, d, 8, torch.float32),
        )  # fmt: skip
        assert b.lines(findings) == lines
        assert b.tensors[-1].unique().tolist() == ([8.0] if not lines or "mis" in lines[0][0] else [0.0])


def test_a_part_of_a_warpgroup(build):
    b = build(128)
    assert b.lines(b.run(b.when(b.thread < 96, b.at(3, wgmma.wgmma_fence())))) == [("deadlock", 3)]


def pipeline(b, steps, stages, rng, n=32):
    """y = x @ z.T in fp16: one warp loads, one warpgroup multiplies and stores its tile over stage 0.

    Lines: 10 and up of the consumers, 20 and up of the producer.
    """
    k, types, walk = 64, ("float16", "float16", "float32"), Descriptor(128, 16, 1024)
    x, z = (b.tensor(name, random(rng, (m, steps * k), "float16").reshape(-1)) for name, m in (("x", 64), ("z", n)))
    y = b.tensor("y", torch.zeros(64 * n).half())
    a, bb = b.shared("a", stages * 64 * k, "float16"), b.shared("b", stages * n * k, "float16")
    out = b.shared("out", 64 * n, "float16", a.offset)
    full, empty = b.barrier("full", stages, 1), b.barrier("empty", stages, 4)
    d = b.local("d", n // 2)
    i, j, r = (Var(name, dt.int32, "loop") for name in "ijr")
    steps_of_k = [
        b.at(13, wgmma.wgmma(b.address(d, 0), b.address(a, i % stages * 64 * k), b.address(bb, i % stages * n * k), n,
                             types, walk, walk, s * 32, s * 32))
        for s in range(4)
    ]  # fmt: skip
    multiply = b.loop(
        i, 0, steps, b.at(11, bulk.mbarrier_wait(b.address(full, i % stages), i // stages % 2)),
        b.at(12, wgmma.wgmma_fence()), *steps_of_k, wgmma.wgmma_commit(), b.at(14, wgmma.wgmma_wait(0)),
        b.at(15, bulk.warp_arrive(b.address(empty, i % stages))),
    )  # fmt: skip
    t = b.thread
    place = (t // 32 * 16 + t % 32 // 4 + r // 2 % 2 * 8) * n + r // 4 * 8 + t % 4 * 2 + r % 2
    epilogue = (
        wgmma.wgmma_results(b.address(d, 0), n // 2), b.at(16, bulk.named_barrier(1, 128)),
        b.loop(r, 0, n // 2, b.store(out, place, cast(b.load(d, r), dt.float16), line=17)),
        b.at(18, bulk.fence_proxy_async()), b.at(19, bulk.named_barrier(1, 128)),
        b.when(t == 0, bulk.tma_store(b.map(y, (64, n), (64, n)), b.address(out, 0), [number(0), number(0)]),
               bulk.bulk_commit(), b.at(20, bulk.bulk_wait(0))),
    )  # fmt: skip
    signal = b.address(full, j % stages)
    load = [
        bulk.tma_load(b.address(tile, j % stages * m * k), b.map(tensor, (m, steps * k), (m, k), 128),
                      [number(0), j * k], signal)
        for tile, tensor, m in ((a, x, 64), (bb, z, n))
    ]  # fmt: skip
    produce = b.loop(
        j, 0, steps, b.at(21, bulk.mbarrier_wait(b.address(empty, j % stages), (j // stages + 1) % 2)),
        b.when(t == 128, bulk.mbarrier_expect(signal, (64 + n) * k * 2), *load, b.at(22, bulk.mbarrier_arrive(signal))),
    )  # fmt: skip
    return *b.ready(full, empty), b.role(0, 128, zero(b, d, n // 2), multiply, *epilogue), b.role(128, 32, produce)


@pytest.mark.parametrize(("steps", "stages"), [(1, 2), (5, 1), (7, 3)])
def test_a_pipeline(build, steps, stages, rng):
    b = build(160)
    findings = b.run(*pipeline(b, steps, stages, rng))
    assert not findings, findings.report()
    x, z, y = b.tensors
    want = x.view(64, -1).double() @ z.view(32, -1).double().T
    torch.testing.assert_close(y.view(64, 32).double(), want, rtol=1e-3, atol=1e-3)


def test_each_removal_is_reported(build, rng):
    b = build(160)
    program = b.program(*pipeline(b, 7, 2, rng))
    tensors = dict(zip(b.params, b.tensors, strict=True))
    found = {}
    for removal in removals(program):
        found[removal.name, removal.span.line if removal.span else 0] = run_threads(removal.program, tensors, {}).kinds
    wanted = {
        ("fence_barrier_init", 0): "missing_fence", ("barrier", 0): "race", ("mbarrier_wait", 11): "missing_wait",
        ("wgmma_fence", 12): "missing_fence", ("wgmma_wait", 14): "race", ("wgmma_wait, one laxer", 14): "race",
        ("warp_arrive", 15): "deadlock", ("named_barrier", 16): "race", ("fence_proxy_async", 18): "missing_fence",
        ("named_barrier", 19): "race", ("bulk_wait", 20): "missing_wait", ("bulk_wait, one laxer", 20): "missing_wait",
        ("mbarrier_wait", 21): "missing_wait", ("mbarrier_arrive", 22): "deadlock",
    }  # fmt: skip
    assert set(found) == set(wanted)
    for key, kind_ in wanted.items():
        assert kind_ in found[key], (key, found[key])


# Latent attention: a tile that two products read, and that threads change where a sequence ends.

HOPPER = Config(64, 64, 256, parts=2, partial_sums=16, staged=True)
CASES = {  # queries, heads, paged, splits
    "ragged": (1, 64, False, 1),
    "few heads in pages": (1, 16, True, 1),
    "several queries": (2, 40, False, 1),
    "shares": (1, 64, False, 2),
    "queries in pages": (3, 64, True, 1),
    "scheduled": (1, 64, True, None),
}


def pages_of(cache, lengths, table):
    """The rows of `[B, S, C]` in pages of 64, and NaN where no sequence has any."""
    pages = torch.full((table.numel() + 2, 64, cache.shape[2]), math.nan, dtype=cache.dtype)
    for sequence, length in enumerate(lengths):
        for s in range(length):
            pages[table[sequence, s // 64], s % 64] = cache[sequence, s]
    return pages


@pytest.mark.parametrize("case", CASES)
def test_latent_attention_by_warpgroups(case, on_gpu):
    queries, heads, paged, splits = CASES[case]
    lengths = [200, 131]

    def randn(*shape):
        return torch.randn(shape, dtype=torch.float32).half()

    q, q_pe, kv, k_pe = (
        randn(2, queries, heads, 128),
        randn(2, queries, heads, 64),
        randn(2, 200, 128),
        randn(2, 200, 64),
    )
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    want = mla_decode.reference(*(x.double() for x in (q, q_pe, kv, k_pe)), None, seq_lens)
    table = torch.randperm(10)[:8].view(2, 4).int() if paged else None
    if table is None:
        kv[1, 131:], k_pe[1, 131:] = math.nan, math.nan
    else:
        kv, k_pe = (pages_of(x, lengths, table) for x in (kv, k_pe))
    config = replace(HOPPER, split=bool(splits) and splits > 1)
    schedule = None if splits else mla_schedule.reference(seq_lens, heads, 2)  # each takes parts of both
    got = mla_decode.mla_decode(q, q_pe, kv, k_pe, table, seq_lens, None, splits or 0, schedule, config=config)
    assert "wgmma" in repr(on_gpu[0].flat)
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-3, atol=1e-3)
