# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile.ops as ops


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def paged(t, kv, k_pe, page):
    """The contiguous cache cut into shuffled pages, with its block table."""
    batch, length = kv.shape[:2]
    blocks = -(-length // page)
    order = torch.randperm(batch * blocks + 1, generator=t.generator)[: batch * blocks].reshape(batch, blocks)
    caches = []
    for cache in (kv, k_pe):
        pages = torch.full((batch * blocks + 1, page, cache.shape[2]), float("nan"), dtype=cache.dtype)
        for b in range(batch):
            for s in range(length):
                pages[order[b, s // page], s % page] = cache[b, s]
        caches.append(pages)
    return *caches, order.int()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_is_attention_over_the_joined_heads(dtype, seed, maker):
    t = maker(seed, dtype)
    q, q_pe, kv, k_pe = t(2, 2, 5, 32), t(2, 2, 5, 16), t(2, 11, 32), t(2, 11, 16)
    keys, values = torch.cat([kv, k_pe], -1)[:, None].double(), kv[:, None].double()
    queries = torch.cat([q, q_pe], -1).transpose(1, 2).double()
    want, want_lse = ops.attention_lse(queries, keys, values, None, True, 0.1, 0, 9)
    out, lse = ops.mla_decode_lse(q, q_pe, kv, k_pe, scale=0.1)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double(), want.transpose(1, 2), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse.transpose(1, 2), rtol=1e-4, atol=1e-4)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(
        ops.mla_decode(q, q_pe, kv, k_pe, scale=0.1, num_splits=3), out, rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(  # no more parts than there are blocks
        ops.mla_decode(q, q_pe, kv, k_pe, scale=0.1, num_splits=2**40), out, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("page", [1, 4, 16])
def test_pages_and_lengths_are_the_contiguous_cache(page, maker):
    t = maker(page, torch.float32)
    q, q_pe, kv, k_pe = t(3, 2, 5, 16), t(3, 2, 5, 16), t(3, 9, 16), t(3, 9, 16)
    lens = int32([9, 4, 1])
    want = ops.mla_decode(q, q_pe, kv, k_pe, None, lens)
    pages, rotary, table = paged(t, kv, k_pe, page)
    table[2, 1:] = -1  # the third sequence needs one page
    torch.testing.assert_close(ops.mla_decode(q, q_pe, pages, rotary, table, lens), want)
    alone = ops.mla_decode(q[1:2], q_pe[1:2], kv[1:2, :4], k_pe[1:2, :4])
    torch.testing.assert_close(want[1:2], alone)
    assert not want[2, 0].any()  # two queries, one position: the first stands before the start


def test_gradient_of_a_shared_page_adds_up(maker):
    t = maker(3, torch.float64, True)
    q, q_pe, kv, k_pe = t(2, 1, 3, 8), t(2, 1, 3, 4), t(1, 6, 8), t(1, 6, 4)
    table = int32([[0], [0]])
    ops.mla_decode(q, q_pe, kv, k_pe, table).sum().backward()
    got, kv.grad = kv.grad, None
    ops.mla_decode(q, q_pe, kv.expand(2, 6, 8), k_pe.expand(2, 6, 4)).sum().backward()
    torch.testing.assert_close(got, kv.grad)


@pytest.mark.parametrize(
    ("batch", "q_len", "heads", "length"), [(0, 1, 2, 3), (2, 0, 2, 3), (2, 1, 0, 3), (2, 1, 2, 0)]
)
def test_empty(batch, q_len, heads, length, maker):
    t = maker(5, torch.float32, True)
    q, q_pe, kv, k_pe = t(batch, q_len, heads, 8), t(batch, q_len, heads, 4), t(batch, length, 8), t(batch, length, 4)
    out, lse = ops.mla_decode_lse(q, q_pe, kv, k_pe)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    if length == 0:
        assert not out.any() and lse.isneginf().all()
    out.sum().backward()
    assert kv.grad.shape == kv.shape


def errors():
    q, q_pe, kv, k_pe = torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 4), torch.zeros(2, 9, 8), torch.zeros(2, 9, 4)
    pages, rotary, table, lens = torch.zeros(6, 4, 8), torch.zeros(6, 4, 4), int32([[0, 1], [2, 5]]), int32([8, 5])
    plan = ops.mla_schedule(lens, 3, 2)
    return [
        ((q[0], q_pe, kv, k_pe), RuntimeError, r"q has 3 dimensions .* \[B, Sq, H, C\]"),
        ((q, q_pe[:, :, :2], kv, k_pe), RuntimeError, "q_pe has size 2 in dimension 2 .* expected 3, as q"),
        ((q, q_pe, kv[..., :7], k_pe), RuntimeError, "kv has size 7 in dimension 2 .* expected 8, q's last"),
        ((q, q_pe, kv, k_pe[..., :3]), RuntimeError, "k_pe has size 3 in dimension 2 .* expected 4, q_pe's last"),
        ((q, q_pe, kv, k_pe[:, :8]), RuntimeError, "k_pe has size 8 in dimension 1 .* expected 9, as kv"),
        ((q, q_pe, pages, rotary), RuntimeError, "kv has size 6 in dimension 0 .* expected 2, q's batch"),
        ((q, q_pe, pages[0], rotary, table), RuntimeError, r"kv has 2 dimensions .* \[pages, page, C\]"),
        ((q, q_pe.half(), kv, k_pe), TypeError, "q_pe has dtype torch.float16; expected torch.float32, as q"),
        (
            (q, q_pe, pages, rotary, table.long(), lens),
            TypeError,
            "block_table has dtype torch.int64; expected torch.int32",
        ),
        (
            (q, q_pe, pages, rotary, table[:1], lens),
            RuntimeError,
            "block_table has size 1 in dimension 0 .* expected 2",
        ),
        ((q, q_pe, pages, rotary, table[0], lens), RuntimeError, "block_table has 1 dimensions"),
        ((q, q_pe, kv, k_pe, None, lens.float()), TypeError, "seq_lens has dtype torch.float32; expected torch.int32"),
        ((q, q_pe, kv, k_pe, None, lens[:1]), RuntimeError, "seq_lens has size 1 in dimension 0 .* expected 2"),
        ((q, q_pe, kv, k_pe, None, int32([10, 1])), RuntimeError, "seq_lens has values from 1 to 10; expected 0 to 9"),
        ((q, q_pe, kv, k_pe, None, int32([-1, 1])), RuntimeError, "seq_lens has values from -1 to 1"),
        (
            (q, q_pe, pages, rotary, int32([[0, 6], [1, 2]]), lens),
            RuntimeError,
            "block_table has pages from 0 to 6 within seq_lens; expected 0 to 5",
        ),
        ((q, q_pe, pages, rotary, int32([[0, 1], [-2, 2]]), lens), RuntimeError, "block_table has pages from -2 to 2"),
        ((q, q_pe, kv, k_pe, None, None, None, -1), ValueError, "num_splits is -1"),
        ((q, q_pe, kv, k_pe, None, lens, None, 0, plan.long()), TypeError, "schedule has dtype torch.int64; expected"),
        (
            (q, q_pe, kv, k_pe, None, lens, None, 0, plan[0]),
            RuntimeError,
            r"schedule has 1 dimensions .* \[units \+ B, 4",
        ),
        ((q, q_pe, kv, k_pe, None, lens, None, 0, plan[:, :3]), RuntimeError, "schedule has size 3 in dimension 1"),
        (
            (q, q_pe, kv, k_pe, None, lens, None, 0, plan[:2]),
            RuntimeError,
            "schedule has 2 entries; expected more than",
        ),
        ((q, q_pe, kv, k_pe, None, None, None, 0, plan), ValueError, "schedule is given without seq_lens"),
        ((q, q_pe, kv, k_pe, None, lens, None, 2, plan), ValueError, "num_splits is 2; expected 0 with a schedule"),
        (
            (q, q_pe, kv, k_pe, None, lens + 1, None, 0, plan + 1),
            RuntimeError,
            "schedule is not what tile.mla_schedule",
        ),
    ]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((torch.ones(2), 3), TypeError, "seq_lens has dtype torch.float32; expected torch.int32"),
        ((int32([[1]]), 3), RuntimeError, r"seq_lens has 2 dimensions .* \[B\]"),
        ((int32([1]), -1), ValueError, "rows is -1"),
        ((int32([1]), 3, -2), ValueError, "units is -2"),
        ((int32([1]), 3, 2**40), ValueError, "units is 1099511627776; expected 0 .automatic. to 65535"),
        ((int32([9, -5]), 3, 2), RuntimeError, "seq_lens has the value -5; expected 0 or more"),
    ],
)
def test_no_schedule(args, error, message):
    with pytest.raises(error, match=f"tile.mla_schedule: {message}"):
        ops.mla_schedule(*args)


@pytest.mark.parametrize(("args", "error", "message"), errors())
def test_refuses(args, error, message):
    with pytest.raises(error, match=f"tile.mla_decode: {message}"):
        ops.mla_decode(*args)
    with pytest.raises(error, match=f"tile.mla_decode: {message}"):
        ops.mla_decode_lse(*args)


def test_a_fixed_number_of_splits_gives_the_same_bits_on_any_number_of_threads(seed):
    torch.manual_seed(seed)
    q, q_pe = torch.randn(1, 1, 16, 64), torch.randn(1, 1, 16, 16)
    kv, k_pe, threads = torch.randn(1, 900, 64), torch.randn(1, 900, 16), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(torch.ops.tile.mla_decode(q, q_pe, kv, k_pe, num_splits=3))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
