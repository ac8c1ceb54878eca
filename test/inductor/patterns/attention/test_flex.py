# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's flex_attention become tile.attention where the language has words for them."""

import operator

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from torch_tile.inductor import compat
from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import nested_compile, no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.graph import flex_backend
from torch_tile.inductor.patterns.attention import flex
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import benchmark, decide

S = 130


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i >= j) & (i - j < 20)


def prefix(b, h, i, j):
    return (i >= j) | (j < 30)


def soft_cap(s, b, h, i, j):
    return torch.tanh(s / 3) * 3


def distance(s, b, h, i, j):
    return s - (i - j).abs() * 0.1


SLOPES = torch.rand(4) + 0.1


def alibi(s, b, h, i, j):
    return s + SLOPES[h] * (j - i)


def reach_of_heads(b, h, i, j):
    return i - j < 10 * h + 5


FORMS = [  # score_mod, mask_mod, what the call says
    (None, causal, "causal)"),
    (soft_cap, window, "causal, window 20, score v0=tanh(acc0);v1=mul(v0,3.0);ret v1)"),
    (soft_cap, None, "score v0=tanh(acc0);v1=mul(v0,3.0);ret v1)"),
    (alibi, causal, "causal, score "),
    (distance, prefix, "abs"),
    (None, prefix, "where("),
    (None, reach_of_heads, "where("),
]


def test_lists_of_blocks_are_walked(light, generator):
    """What no list names is not read; lists without a mask_mod say what is visible."""
    q, k, v = problem(generator)
    prefixed = create_block_mask(prefix, None, None, S, S, device="cpu", BLOCK_SIZE=32)
    counts = torch.tensor([[[1, 2, 0, 1, 2]]], dtype=torch.int32)
    indices = torch.zeros(1, 1, 5, 5, dtype=torch.int32)
    indices[..., :2] = torch.tensor([[3, 0], [4, 1], [0, 0], [2, 0], [0, 4]])
    alone = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, seq_lengths=(S, S))
    for block_mask in (prefixed, alone):
        given = [k, v]
        if block_mask is prefixed:
            shown = block_mask.to_dense()[0, 0].any(0).repeat_interleave(32)[:S, None]
            given = [torch.where(shown.bool(), x, float("nan")) for x in given]

        def f(q, k, v, block_mask=block_mask):
            return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

        with torch.no_grad():
            got, report = light(f, q, *given)
            heads = [x.repeat_interleave(2, 1) for x in (k, v)]
            seen = prefix(0, 0, torch.arange(S)[:, None], torch.arange(S))
            if block_mask is alone:
                blocks = torch.zeros(5, 5, dtype=torch.bool)
                for i, n in enumerate(counts[0, 0].tolist()):
                    blocks[i, indices[0, 0, i, :n].long()] = True
                seen = blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)[:S, :S]
            want = torch.nn.functional.scaled_dot_product_attention(q, *heads, seen).nan_to_num()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        (row,) = report.replaced("attention")
        assert row.what.startswith("tile.attention_block_sparse(") and "blocks 32 x 32" in row.what, row


def problem(generator):
    return (torch.randn(2, h, S, 16, generator=generator) for h in (4, 2, 2))


@pytest.mark.parametrize(("score_mod", "mask_mod", "what"), FORMS)
def test_forms(score_mod, mask_mod, what, light, generator):
    q, k, v = problem(generator)
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, S, S, device="cpu")

    def f(q, k, v):
        return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)

    with torch.no_grad():
        got, report = light(f, q, k, v)
        torch.testing.assert_close(got, f(q, k, v), rtol=2e-5, atol=2e-5)
    (row,) = report.replaced("attention")
    assert what in row.what, row


def test_lengths_that_are_not_known(light, generator):
    """Without a block mask, torch makes one of a block that is longer than all."""
    for n in (S, 77):
        q, k, v = (x[:, :, :n] for x in problem(generator))

        def f(q, k, v):
            return flex_attention(q, k, v, soft_cap, enable_gqa=True)

        with torch.no_grad():
            got, report = light(f, q, k, v, dynamic=True)
            torch.testing.assert_close(got, f(q, k, v), rtol=2e-5, atol=2e-5)
        assert report.replaced("attention"), report


def test_what_stays(light, generator):
    q, k, v = problem(generator)
    document = (torch.arange(S) // 50).int()
    documents = create_block_mask(lambda b, h, i, j: document[i] == document[j], None, None, S, S, device="cpu")
    ones, firsts = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    lists = BlockMask.from_kv_blocks(ones, firsts, BLOCK_SIZE=40, seq_lengths=(S, S))
    for options, reason in (
        ({"block_mask": documents}, "torch.int32, which float32 may not hold"),
        ({"block_mask": lists}, "only its lists say what is visible"),
        ({"return_lse": True}, "log-sum-exp"),
    ):
        with torch.no_grad():
            _, report = light(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, **options), q, k, v)  # noqa: B023
        assert not report.replaced("attention")
        assert reason in report.missed("attention")[0].reason, report


@pytest.fixture
def contests(monkeypatch):
    """What is timed, old and new; ours is always faster."""
    found = []

    def measure(new, old, *rest):
        with nested_compile():
            found.append((new, old, [benchmark.example(n) for n in old.graph.find_nodes(op="placeholder")]))
        return decide.Outcome(1, 2)

    monkeypatch.setattr(decide, "_measure", measure)
    monkeypatch.setattr(decide, "_outcomes", {})
    return found


@pytest.mark.parametrize("inside", [False, True], ids=["made before", "made in the model"])
def test_competes_with_what_the_mask_shows(inside, contests, generator):
    """Inductor's side has lists of blocks as the mask_mod makes them, which are there already."""
    q, k, v = problem(generator)
    blocks = create_block_mask(window, None, None, S, S, device="cpu", BLOCK_SIZE=32)

    def f(q, k, v):
        mask = create_block_mask(window, None, None, S, S, device="cpu", BLOCK_SIZE=32) if inside else blocks
        return flex_attention(q, k, v, soft_cap, mask, enable_gqa=True)

    with torch.no_grad(), no_graph_caches(), collect() as report:
        got = torch.compile(f, backend=dry_run)(q, k, v)
        torch.testing.assert_close(got, f(q, k, v), rtol=2e-5, atol=2e-5)
    assert report.replaced("attention"), report
    ((_, old, given),) = contests
    (call,) = old.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    placeholders = old.graph.find_nodes(op="placeholder")
    lists = {name: given[placeholders.index(x)] for name, x in zip(flex.LISTS, call.args[4][2:10], strict=True) if x}
    assert "kv_num_blocks" in lists
    for name, value in lists.items():
        assert torch.equal(value, getattr(blocks, name)), name
    kinds = {n.target for n in old.graph.nodes if n.op == "call_function"}
    assert kinds <= {call.target, operator.getitem}, kinds


def test_masks_by_values_have_no_contest(contests, generator):
    q, k, v = problem(generator)
    limits = torch.tensor([100.0, 70.0])
    blocks = create_block_mask(lambda b, h, i, j: j < limits[b], 2, None, S, S, device="cpu")
    with torch.no_grad(), no_graph_caches(), collect() as report:
        torch.compile(lambda q, k, v: flex_attention(q, k, v, None, blocks, enable_gqa=True), backend=dry_run)(q, k, v)
    assert not contests and "depends on values" in report.missed("attention")[0].reason, report


def test_modifications_are_part_of_what_is_remembered(contests, generator):
    q, k, v = problem(generator)
    for score_mod in (soft_cap, distance, soft_cap):
        torch._dynamo.reset()
        with torch.no_grad(), no_graph_caches():
            torch.compile(
                lambda q, k, v, mod=score_mod: flex_attention(q, k, v, mod, enable_gqa=True), backend=dry_run
            )(q, k, v)
    assert len(contests) == 2


def test_is_timed_for_real(generator, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path))
    q, k, v = problem(generator)
    blocks = create_block_mask(causal, None, None, S, S, device="cpu")
    with torch.no_grad(), no_graph_caches(), collect() as report:
        f = lambda q, k, v: flex_attention(q, k, v, distance, blocks, enable_gqa=True)  # noqa: E731
        torch.testing.assert_close(torch.compile(f, backend=tile)(q, k, v), f(q, k, v), rtol=2e-5, atol=2e-5)
    (row,) = report.select("attention")
    assert row.status in ("kept", "replaced") and "us, Inductor" in row.reason, report


@pytest.mark.parametrize("takes", [True, False], ids=["takes it", "does not take it"])
@pytest.mark.parametrize("wins", [True, False], ids=["tile", "Inductor"])
@pytest.mark.parametrize("asked", [None, "TRITON"])
def test_the_rival_is_flash_where_it_is_there(asked, wins, takes, generator, monkeypatch, tmp_path):
    """Inductor's FLASH backend is timed if the machine has it, it takes the call and the user names no backend. The
    call that is kept is the one that was timed, and the report names it.
    """
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decide, "_outcomes", {})
    monkeypatch.setattr(compat, "has_flex_flash", lambda device: True)
    monkeypatch.setattr(flex_backend, "_device", lambda call: torch.device("cuda"))
    timed = []

    def times(new, old, options):
        (call,) = flex_backend.flex_calls(old.graph)
        timed.append(call.args[flex_backend.OPTIONS]["BACKEND"])
        if timed[-1] == "FLASH" and not takes:
            raise RuntimeError("no FLASH for this score_mod")
        return (1.0, 2.0) if wins else (2.0, 1.0)

    monkeypatch.setattr(benchmark, "times", times)
    kept = []
    keep = flex.set_backend
    monkeypatch.setattr(flex, "set_backend", lambda calls, name: (kept.append(name), keep(calls, name)))
    q, k, v = problem(generator)
    f = lambda q, k, v: flex_attention(q, k, v, soft_cap, enable_gqa=True, kernel_options=options)  # noqa: E731
    options = {"BACKEND": asked} if asked else None
    with torch.no_grad(), no_graph_caches(), collect() as report:
        torch.compile(f, backend=dry_run)(q, k, v)
    (row,) = report.select("attention")
    by_flash = asked is None and takes
    assert timed == ([asked] if asked else ["FLASH"] if takes else ["FLASH", "AUTO"])
    assert row.times.rival == f"Inductor's {'FLASH' if by_flash else 'Triton'}"
    assert row.status == ("replaced" if wins else "kept") and f"{row.times.rival} {2 - (not wins):.1f} us" in row.reason
    assert kept == ["FLASH"] * (by_flash and not wins)
    (stored,) = tmp_path.glob("select/*.json")
    assert decide._outcome(stored.read_text()) == row.times
