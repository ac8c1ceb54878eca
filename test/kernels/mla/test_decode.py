# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.common import Machine, machine_of
from torch_tile.kernels.mla.args import MlaDecodeArgs
from torch_tile.kernels.mla.decode import flash_mla, mla_decode, reference, run
from torch_tile.kernels.mla.spec import Config, Problem, Spec, config_for


def by_hand(q, q_pe, kv, k_pe, block_table, seq_lens, scale):
    """One query at a time; the cache is read through the table row by row."""
    batch, q_len, heads, latent = q.shape
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    scale = (latent + q_pe.shape[3]) ** -0.5 if scale is None else scale
    page = kv.shape[1]
    for b in range(batch):
        capacity = page if block_table is None else block_table.shape[1] * page
        length = capacity if seq_lens is None else int(seq_lens[b])

        def row(cache, s, b=b):
            return cache[b, s] if block_table is None else cache[int(block_table[b, s // page]), s % page]

        for t in range(q_len):
            seen = range(max(length - q_len + t + 1, 0))
            for h in range(heads):
                scores = [scale * float(q[b, t, h] @ row(kv, s) + q_pe[b, t, h] @ row(k_pe, s)) for s in seen]
                total = sum(map(math.exp, scores))
                if total:
                    lse[b, t, h] = math.log(total)
                    out[b, t, h] = sum(math.exp(x) / total * row(kv, s) for x, s in zip(scores, seen, strict=True))
    return out, lse


@pytest.mark.parametrize("seed", range(16))
def test_reference_is_the_definition(seed):
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    def rand(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    batch, q_len, heads, latent, rotary = pick(1, 3), pick(1, 2, 4), pick(1, 3), pick(3, 8), pick(2, 5)
    q, q_pe = rand(batch, q_len, heads, latent), rand(batch, q_len, heads, rotary)
    scale = pick(None, 0.4)
    if pick(False, True):
        page, blocks = pick(1, 4), pick(1, 3)
        pages = batch * blocks + 2
        kv, k_pe = rand(pages, page, latent), rand(pages, page, rotary)
        table = torch.randperm(pages, generator=g)[: batch * blocks].reshape(batch, blocks).int()
        capacity = page * blocks
    else:
        capacity, table = pick(1, 7), None
        kv, k_pe = rand(batch, capacity, latent), rand(batch, capacity, rotary)
    lens = pick(None, torch.randint(0, capacity + 1, (batch,), generator=g, dtype=torch.int32))
    got = reference(q, q_pe, kv, k_pe, table, lens, scale, pick(0, 1, 3))
    for a, b in zip(got, by_hand(q, q_pe, kv, k_pe, table, lens, scale), strict=True):
        torch.testing.assert_close(a, b)


def test_what_lies_past_the_end_is_not_read():
    q, q_pe = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 4)
    kv, k_pe = torch.randn(1, 6, 8), torch.randn(1, 6, 4)
    lens = torch.tensor([4], dtype=torch.int32)
    want = reference(q, q_pe, kv[:, :4], k_pe[:, :4])
    kv[:, 4:], k_pe[:, 4:] = math.nan, math.inf
    for a, b in zip(reference(q, q_pe, kv, k_pe, None, lens), want, strict=True):
        torch.testing.assert_close(a, b)


def test_is_attention_with_one_key_head():
    from torch_tile.kernels.attention.forward import reference as attention

    q, q_pe = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 2)
    kv, k_pe = torch.randn(2, 7, 8), torch.randn(2, 7, 2)
    joined = torch.cat([q, q_pe], -1).transpose(1, 2), torch.cat([kv, k_pe], -1)[:, None], kv[:, None]
    want, _ = attention(*joined, causal=True, q_offset=4)
    torch.testing.assert_close(reference(q, q_pe, kv, k_pe)[0], want.transpose(1, 2))


@pytest.mark.parametrize("batch, q_len, heads, length", [(0, 1, 2, 3), (2, 0, 2, 3), (2, 1, 0, 3), (2, 1, 2, 0)])
def test_empty(batch, q_len, heads, length):
    q, q_pe = torch.randn(batch, q_len, heads, 8), torch.randn(batch, q_len, heads, 4)
    out, lse = reference(q, q_pe, torch.randn(batch, length, 8), torch.randn(batch, length, 4))
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    if length == 0:
        assert not out.any() and lse.isneginf().all()


@pytest.mark.parametrize("sequences", ["paged", "split", "listed"])
def test_no_position_of_a_cache_with_elements(sequences):
    q, q_pe, kv, k_pe = (torch.randn(2, 1, 3, n) for n in (16, 8, 16, 8))
    cache, none = (kv[:, 0], k_pe[:, 0]), torch.zeros(2, 0, dtype=torch.int32)
    if sequences == "listed":
        out, lse = torch.ops.tile.mla_sparse(q, q_pe, *cache, none[:, None])
    else:
        splits = 3 if sequences == "split" else 0
        out, lse = mla_decode(q, q_pe, *cache, none, none.new_zeros(2), None, splits)
    assert not out.any() and lse.isneginf().all()


FORMS = {  # dtype, latent, rotary, paged
    "dense": (torch.float32, 64, 16, False),
    "paged": (torch.float32, 64, 16, True),
    "odd_widths": (torch.float32, 24, 5, True),
    "bfloat16": (torch.bfloat16, 48, 32, False),
    "float16_paged": (torch.float16, 32, 16, True),
    "float64": (torch.float64, 16, 8, False),
}
SMALL = Config(block_h=16, block_kv=32)
CONFIGS = (SMALL, replace(SMALL, split=True), replace(SMALL, block_kv=16))


def random_cache(problems, spec):
    """Caches that hold NaN past each sequence's end, and in pages that no sequence uses."""
    dtype, latent, rotary, paged = FORMS[spec]
    batch, q_len, heads = problems.pick(1, 2), problems.pick(1, 1, 2, 5), problems.pick(1, 3, 9)
    q, q_pe = (problems.reordered(batch, q_len, heads, n, dtype=dtype) for n in (latent, rotary))
    if not paged:
        length = problems.size(100)
        seq_lens = torch.tensor([problems.random.randint(0, length) for _ in range(batch)], dtype=torch.int32)
        kv, k_pe = (problems.tensor(batch, length, n, dtype=dtype) for n in (latent, rotary))
        past = torch.arange(length)[None, :, None] >= seq_lens[:, None, None]
        kv, k_pe = (x.masked_fill(past, math.nan) for x in (kv, k_pe))
        return q, q_pe, kv, k_pe, None, seq_lens
    page, columns = problems.pick(1, 4, 16, 17), problems.pick(1, 3, 6)
    pages = batch * columns + 2
    table = torch.randperm(pages, generator=problems.generator)[: batch * columns].reshape(batch, columns)
    seq_lens = torch.tensor([problems.random.randint(0, page * columns) for _ in range(batch)], dtype=torch.int32)
    kv, k_pe = (torch.full((pages, page, n), math.nan, dtype=dtype) for n in (latent, rotary))
    for b in range(batch):
        for s in range(int(seq_lens[b])):
            kv[table[b, s // page], s % page] = problems.tensor(latent, dtype=dtype, layout="dense")
            k_pe[table[b, s // page], s % page] = problems.tensor(rotary, dtype=dtype, layout="dense")
    unused = torch.arange(columns)[None, :] * page >= seq_lens[:, None]
    table = table.masked_fill(unused, problems.pick(-1, 10_000)).int()
    return q, q_pe, kv, k_pe, table, seq_lens


@pytest.mark.parametrize("spec", FORMS)
def test_random_problems(spec, rounds, problems, check):
    dtype = FORMS[spec][0]
    for number in rounds(10):
        q, q_pe, kv, k_pe, table, seq_lens = random_cache(problems, spec)
        if table is None and problems.pick(True, False):
            seq_lens, kv, k_pe = None, kv.nan_to_num(), k_pe.nan_to_num()
        scale, splits = problems.pick(None, 0.2, -0.2), problems.pick(0, 1, 2, 5)
        got = mla_decode(
            q, q_pe, kv, k_pe, table, seq_lens, scale, splits, config=problems.pick(*CONFIGS) if number % 5 else None
        )
        want = reference(*(x.double() for x in (q, q_pe, kv, k_pe)), table, seq_lens, scale)
        assert got[0].dtype == dtype
        for name, a, b in zip(("out", "lse"), got, want, strict=True):
            what = f"{name} of {spec} {tuple(q.shape)} {tuple(kv.shape)} {seq_lens} {splits}"
            check(a, b, what, dtype, empty_beside(q, q.shape[3]) if name == "out" else None)


@pytest.mark.parametrize("spec", ["paged", "float16_paged"])
def test_one_stage(spec, engine, problems, check):
    """Tiles that are not copied ahead, over pages in whose rows loads are wide."""
    q, q_pe, kv, k_pe, table, seq_lens = random_cache(problems, spec)
    q, q_pe = q.contiguous(), q_pe.contiguous()
    got = mla_decode(q, q_pe, kv, k_pe, table, seq_lens, config=replace(SMALL, stages=1))
    want = reference(*(x.double() for x in (q, q_pe, kv, k_pe)), table, seq_lens)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        check(a, b, f"{name} of {spec} {tuple(q.shape)} {tuple(kv.shape)} {seq_lens}", FORMS[spec][0])


def test_the_size_of_deepseek(problems, check):
    q, q_pe = problems.tensor(2, 1, 16, 512, layout="dense"), problems.tensor(2, 1, 16, 64, layout="dense")
    kv, k_pe = problems.tensor(2, 700, 512, layout="dense"), problems.tensor(2, 700, 64, layout="dense")
    for a, b in zip(mla_decode(q, q_pe, kv, k_pe), reference(*(x.double() for x in (q, q_pe, kv, k_pe))), strict=True):
        check(a, b, "512 + 64")


@pytest.mark.parametrize("shape", [(0, 1, 2), (2, 0, 2), (2, 1, 0)])
def test_no_queries(shape, engine):
    q, q_pe, kv, k_pe = (
        torch.randn(*shape, 16),
        torch.randn(*shape, 8),
        torch.randn(shape[0], 5, 16),
        torch.randn(shape[0], 5, 8),
    )
    out, lse = mla_decode(q, q_pe, kv, k_pe)
    assert out.shape == (*shape, 16) and lse.shape == shape


def test_no_kernel_takes_more_positions_than_32_bits_number():
    """A table can name so many, since it may name a page again and again."""
    q, q_pe, kv, k_pe = (torch.zeros(s) for s in ((1, 1, 2, 32), (1, 1, 2, 16), (3, 16, 32), (3, 16, 16)))
    table = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**27)
    args = MlaDecodeArgs(q, q_pe, kv, k_pe, table, torch.tensor([5], dtype=torch.int32))
    assert not run(args, torch.empty(1, 1, 2, 32), torch.empty(1, 1, 2), machine_of(q))


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.4, -0.2, 30.0])
def test_scores_that_grow_along_the_sequence(slope, engine, check):
    """Maxima are followed by leaps: weights stay in float16 whether scores grow in each block, seldom, or not."""
    q, q_pe, kv = torch.randn(2, 1, 5, 32).half(), torch.randn(2, 1, 5, 16).half(), torch.randn(2, 200, 32).half()
    k_pe = torch.randn(2, 200, 16).half()
    q_pe[..., 0], k_pe[..., 0] = 8.0, torch.arange(200) * slope
    got = mla_decode(q, q_pe, kv, k_pe, config=SMALL)
    want = reference(*(x.double() for x in (q, q_pe, kv, k_pe)))
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        check(a, b, f"{name} of slope {slope}", torch.float16)


def test_latents_too_wide_for_hoppers_tiles(problems, check):
    """What runs there runs on other GPUs, too: fewer rows to a block, thread by thread."""
    spec = Spec(torch.float16, 1024, 64, 0, False, True, 8)
    config = config_for(spec, Problem(1, 32, 50), Machine(Target("cuda", 90), 132))
    kernel = flash_mla.on(Target("cuda", 90))(config, spec)
    shapes = ((1, n, d) for n in (32, 50) for d in (1024, 64))
    q, q_pe, kv, k_pe = (problems.tensor(*shape, dtype=spec.dtype, layout="dense") for shape in shapes)
    out, lse = torch.full((1, 32, 1024), math.nan).half(), torch.full((1, 1, 32), math.nan)
    length = torch.tensor([47], dtype=torch.int32)
    done = kernel.interpret(q, q_pe, kv, k_pe, length, out, lse, 0.03)
    assert not done.found, done
    want = reference(*(x.double() for x in (q[:, None], q_pe[:, None], kv, k_pe)), None, length, 0.03)
    check(out[:, None], want[0], "out", spec.dtype)
    check(lse, want[1], "lse", spec.dtype)
    assert not any(r.spills for r in kernel.resources.values())


@pytest.mark.parametrize("exponent", [3, 20, 25, 31, 60, 100])
def test_scores_of_any_magnitude(exponent):
    """Scores that are exact numbers, some of them equal."""
    q, q_pe, k_pe = torch.zeros(2, 1, 4, 64), torch.zeros(2, 1, 4, 16), torch.randn(2, 300, 16)
    q[..., 0] = 2.0**exponent * torch.tensor([1.0, -1.0, 0.5, 2.0])
    kv = torch.randn(2, 300, 64)
    kv[..., 0] = torch.randint(64, 73, (2, 300)) / 64
    out, lse = mla_decode(q, q_pe, kv, k_pe, num_splits=1, scale=0.3)
    want, want_lse = reference(*(x.double() for x in (q, q_pe, kv, k_pe)), scale=0.3)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)
