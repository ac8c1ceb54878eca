# SPDX-License-Identifier: Apache-2.0
"""Latent attention over float8 caches and over lists of positions, against float64; what is not listed is NaN."""

import math

import pytest
import torch

from torch_tile import ops
from torch_tile.kernels.mla import packed
from torch_tile.kernels.mla.packed import (
    GROUP,
    bytes_of,
    dequantize_cache,
    fp8_reference,
    mla_decode_fp8,
    mla_sparse,
    pack,
    sparse_reference,
    unpack,
)
from torch_tile.kernels.mla.spec import Config


def problem(problems, dtype, latent, longest):
    """Queries, a cache in pages or not whose unused rows are NaN, its table and lengths, and lists."""
    batch, q_len, heads = problems.pick(1, 3), problems.pick(1, 2, 5), problems.pick(1, 3, 17)
    rotary = problems.pick(16, 32)
    q, q_pe = (problems.tensor(batch, q_len, heads, n, dtype=dtype) for n in (latent, rotary))
    page, columns = problems.pick((16, 3), (24, 2), (64, 1), (longest, 1))
    lengths = torch.tensor([problems.pick(0, problems.random.randint(1, page * columns)) for _ in range(batch)]).int()
    table = None
    if page != longest:
        table = torch.randperm(batch * columns + 2, generator=problems.generator)[: batch * columns]
        table = table.view(batch, columns).int()
    slabs = batch if table is None else batch * columns + 2
    kv, k_pe = (problems.tensor(slabs, page, n, dtype=dtype, layout="dense") for n in (latent, rotary))
    count = problems.random.randint(1, 80)
    lists = torch.randint(-2, page * columns + 3, (batch, q_len, count), generator=problems.generator).int()
    used = torch.zeros(slabs, page, dtype=torch.bool)
    for b, n in enumerate(lengths.tolist()):
        for s in range(n):
            used[(b, s) if table is None else (table[b, s // page], s % page)] = True
    kv[~used], k_pe[~used] = math.nan, math.nan
    return (q, q_pe), (kv, k_pe), table, lengths, lists


def in_double(*tensors):
    return [x.double() for x in tensors]


def by_torch(*args, **named):
    raise AssertionError("no kernel ran")


def test_sparse_reference_is_the_definition(problems):
    """One query and head at a time, row by row."""
    (q, q_pe), (kv, k_pe), table, lengths, lists = problem(problems, torch.float64, 8, 20)
    out, lse = sparse_reference(q, q_pe, kv, k_pe, lists, table, lengths, 0.3)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = [s for s in lists[b, t].tolist() if 0 <= s < lengths[b]]
        places = [(b, s) if table is None else (int(table[b, s // kv.shape[1]]), s % kv.shape[1]) for s in seen]
        scores = [0.3 * float(q[b, t, h] @ kv[x] + q_pe[b, t, h] @ k_pe[x]) for x in places]
        total = sum(map(math.exp, scores))
        want = sum(
            (math.exp(x) / total * kv[at] for x, at in zip(scores, places, strict=True)), torch.zeros(8).double()
        )
        torch.testing.assert_close(out[b, t, h], want)
        torch.testing.assert_close(lse[b, t, h].item(), math.log(total) if total else -math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_listed_positions(dtype, rounds, problems, check, monkeypatch):
    monkeypatch.setattr(packed, "sparse_reference", by_torch)
    for _ in rounds(2):
        queries, cache, table, lengths, lists = problem(problems, dtype, 16, 50)
        options = table, lengths, problems.pick(None, 0.2, -0.1), problems.pick(0, 1, 2)
        config = problems.pick(None, Config(16, 16, 128, stages=1, split=options[3] > 1))
        out, lse = mla_sparse(*queries, *cache, lists, *options, config=config)
        want, want_lse = sparse_reference(*in_double(*queries, *cache), lists, *options)
        what = f"{tuple(queries[0].shape)} {tuple(lists.shape)} {lengths} {options[2:]} {config}"
        check(out, want, what, dtype)
        check(lse, want_lse, what, dtype)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_caches_of_float8(dtype, listed, rounds, problems, check, monkeypatch):
    monkeypatch.setattr(packed, "fp8_reference", by_torch)
    for _ in rounds(2):
        queries, cache, table, lengths, lists = problem(problems, dtype, GROUP, 50)
        lists = lists if listed else None
        options = problems.pick(None, 0.1), problems.pick(0, 1, 2)
        stored = pack(*cache)
        out, lse = mla_decode_fp8(*queries, stored, table, lengths, lists, *options)
        want, want_lse = fp8_reference(*in_double(*queries), stored, table, lengths, lists, *options)
        what = f"{tuple(queries[0].shape)} {table} {lengths} {options}"
        check(out, want, what, dtype)
        check(lse, want_lse, what, dtype)


def test_what_is_packed(problems):
    """Each number within 2^-4 of itself, or 2^-10 scales; rotary parts as bfloat16 has them; 656 bytes for DeepSeek."""
    kv, k_pe = problems.tensor(3, 5, 512) * 10.0 ** problems.random.randint(-6, 4), problems.tensor(3, 5, 64)
    kv[0, 0] = 0
    stored = pack(kv, k_pe)
    assert stored.shape == (3, 5, 656) and bytes_of(512, 64) == 656 and stored.dtype == torch.uint8
    values, rotary, scales = unpack(stored, 512)
    assert values.shape == kv.shape and torch.equal(rotary, k_pe.bfloat16()) and scales.shape == (3, 5, 4)
    bound = kv.abs() * 2**-4 + scales.repeat_interleave(GROUP, -1) * 2**-10
    assert ((dequantize_cache(stored, 512, torch.float32)[0] - kv).abs() <= bound * 1.0001).all()


def test_appended_positions(engine, problems):
    """Byte for byte what is packed; the other bytes of the pages are left alone."""
    kv, k_pe = problems.tensor(2, 3, GROUP), problems.tensor(2, 3, 16)
    cache = torch.randint(0, 256, (5, 4, bytes_of(GROUP, 16)), dtype=torch.uint8, generator=problems.generator)
    table, lengths = torch.tensor([[4, 0], [2, 3]]).int(), torch.tensor([5, 2]).int()
    want = cache.clone()
    stored = pack(kv, k_pe)
    for b, n in enumerate(lengths.tolist()):
        for t, s in enumerate(range(n - 3, n)):
            if s >= 0:
                want[table[b, s // 4], s % 4] = stored[b, t]
    ops.append_latents(kv, k_pe, cache, table, lengths)
    assert torch.equal(cache, want)


def test_appended_scales_keep_their_bits(engine):
    """The lower half of this scale would be a NaN with a payload if it were a bfloat16."""
    kv, k_pe = torch.zeros(1, 1, GROUP), torch.zeros(1, 1, 16)
    kv[..., 0] = torch.tensor([0x3BDC7FF2], dtype=torch.int32).view(torch.float32) * 448
    want = pack(kv, k_pe)
    assert want[0, 0, GROUP : GROUP + 2].view(torch.bfloat16).isnan()
    cache = torch.zeros(1, 4, bytes_of(GROUP, 16), dtype=torch.uint8)
    ops.append_latents(kv, k_pe, cache, torch.zeros(1, 1).int(), torch.ones(1).int())
    assert torch.equal(cache[0, 0], want[0, 0])


@pytest.mark.parametrize("stride", [0, 1, 7, 1001])
@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (1, 1)], ids=str)
def test_the_stride_of_a_single_page_or_position_means_nothing(shape, stride, problems):
    pages, page = shape
    cache = pack(problems.tensor(pages, page, GROUP), problems.tensor(pages, page, 16))
    odd = [stride if n == 1 else step for n, step in zip(shape, cache.stride(), strict=False)]
    seen = cache.as_strided(cache.shape, [*odd, 1])
    table, lengths = torch.arange(pages)[None].int(), torch.tensor([pages * page]).int()
    queries = problems.tensor(1, 2, 3, GROUP), problems.tensor(1, 2, 3, 16)
    got, want = (ops.mla_decode_fp8(*queries, x, block_table=table, seq_lens=lengths) for x in (seen, cache))
    assert all(map(torch.equal, got, want))
    want = cache.clone()
    new = problems.tensor(1, pages * page, GROUP), problems.tensor(1, pages * page, 16)
    for x in (seen, want):  # `seen` is a view of `cache`
        ops.append_latents(*new, x, table, lengths)
    assert torch.equal(cache, want)
