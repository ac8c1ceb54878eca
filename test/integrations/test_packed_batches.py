# SPDX-License-Identifier: Apache-2.0
"""Packed batches of transformers: each sequence as if it were alone, in training too, without a mask of all pairs."""

import functools

import pytest
import torch

from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect
from torch_tile.nn import functional
from torch_tile.nn.functional import attend, attend_varlen

pytest.importorskip("transformers")

from torch_tile.integrations import packed_batches, transformers as integration

LENGTHS = (7, 1, 12, 3)
FAMILIES = ["Llama", "Mistral", "Gemma2", "GptOss"]


@pytest.fixture
def packed(seed: int) -> dict:
    """Ids, positions that restart, and labels, which the first token of a sequence has none of."""
    ids = torch.randint(0, 96, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def kwargs_of() -> dict:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    most = max(LENGTHS)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": most, "max_length_k": most}


def forbid_masks(monkeypatch) -> None:
    def sdpa_mask(*args, **kwargs):
        raise AssertionError("a mask of all pairs")

    monkeypatch.setattr(integration, "sdpa_mask", sdpa_mask)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("by", ["positions", "kwargs"])
def test_logits_are_each_sequence_alone(family: str, by: str, build, packed: dict, monkeypatch) -> None:
    model = build(family)
    with torch.no_grad():
        wanted = torch.cat([model(x, use_cache=False).logits for x in packed["input_ids"].split(LENGTHS, 1)], 1)
        model.set_attn_implementation("tile")
        if family != "GptOss":
            forbid_masks(monkeypatch)
        elif by == "positions":
            pytest.skip("transformers does not look at its positions")
        named = kwargs_of() if by == "kwargs" else {}
        ids, positions = packed["input_ids"], packed["position_ids"]
        ours = model(ids, position_ids=positions, use_cache=False, **named).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("by", ["positions", "kwargs"])
def test_a_training_step_is_that_of_the_padded_batch(family: str, by: str, build, packed: dict) -> None:
    model = build(family)
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([x[0] for x in packed[name].split(LENGTHS, 1)], True, value)
        for name, value in (("input_ids", 0), ("labels", -100))
    }
    present = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    named = kwargs_of() if by == "kwargs" else {}
    steps = ("eager", {**padded, "attention_mask": present.long()}), ("tile", {**packed, **named})
    gradients = []
    for implementation, batch in steps:
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("by", ["positions", "kwargs"])
def test_compiled(family: str, by: str, build, packed: dict) -> None:
    """The lengths in kwargs are inputs of the graph; positions alone make a mask there."""
    model = build(family, num_hidden_layers=1).train()
    model.set_attn_implementation("tile")
    named = kwargs_of() if by == "kwargs" else {}
    wanted = model(**packed, use_cache=False).loss
    torch._dynamo.reset()
    with no_graph_caches(), collect() as report:
        fast = torch.compile(model, backend=functools.partial(dry_run, options={"select": "tile"}), fullgraph=True)
        loss = fast(**packed, use_cache=False, **named).loss
        loss.backward()
    torch.testing.assert_close(loss, wanted)
    rows = report.replaced("attention")
    assert len(rows) == 2, report
    assert all(("attention_varlen" in row.what) == (by == "kwargs") for row in rows), rows


def test_rows_of_a_batch_may_each_be_packed(build, seed: int) -> None:
    model, ids = build("Mistral"), torch.randint(0, 96, (2, 14))
    positions = torch.stack([torch.cat([torch.arange(n) for n in part]) for part in ((3, 11), (14,))])
    wanted = model(ids, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("tile")
    ours = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def test_padding_hides_more_than_kwargs(build, packed: dict) -> None:
    model = build("Llama")
    model.set_attn_implementation("tile")
    mask = torch.ones_like(packed["input_ids"])
    mask[:, -2:] = 0
    whole, part = (
        model(packed["input_ids"], x, packed["position_ids"], use_cache=False, **kwargs_of()).logits
        for x in (None, mask)
    )
    torch.testing.assert_close(part[:, :-2], whole[:, :-2], rtol=1e-4, atol=1e-4)


def test_starts_of_keys_alone_are_refused(build, packed: dict) -> None:
    model = build("Llama")
    model.set_attn_implementation("tile")
    with pytest.raises(ValueError, match="one of cu_seq_lens_q and cu_seq_lens_k is None"):
        model(packed["input_ids"], use_cache=False, cu_seq_lens_k=kwargs_of()["cu_seq_lens_k"])


@pytest.mark.parametrize("window", [None, 1, 4, 40])
def test_first_keys(window: int | None) -> None:
    numbers = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])

    def seen(b, h, i, j):
        return (numbers[b, i] == numbers[b, j]) & (j <= i) & (j > i - (window or 100))

    first = packed_batches.first_keys(seen, 2, 9, "cpu", window)
    place = torch.arange(9)
    wanted = seen(torch.arange(2)[:, None, None], 0, place[:, None], place)
    assert torch.equal(packed_batches.as_mask(first)[:, 0], wanted)
    found = packed_batches.sequences_of(first)
    expanded = functional.visible(found.q_starts, found.k_starts, 18, 18, True, found.window)
    assert torch.equal(expanded, torch.block_diag(*wanted).bool())


@pytest.mark.parametrize(
    "options", [{}, {"window": 2}, {"softcap": 2.0}, {"sinks": True}, {"sinks": True, "train": True}]
)
@pytest.mark.parametrize("causal", [True, False])
def test_attend_varlen_is_attend_for_each(options: dict, causal: bool, seed: int) -> None:
    options = dict(options)
    q, k, v = torch.randn(9, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    train = options.pop("train", False)
    if options.get("sinks"):
        options["sinks"] = torch.randn(4, requires_grad=train)
    q_starts, k_starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.tensor([0, 5, 6, 10], dtype=torch.int32)
    found = attend_varlen(q, k, v, q_starts, k_starts, 5, 5, causal=causal, **options)
    wanted = torch.zeros(9, 4, 8)
    for (a, b), (c, d) in zip(*(x.unfold(0, 2, 1).tolist() for x in (q_starts, k_starts)), strict=True):
        parts = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        wanted[a:b] = attend(*parts, causal=causal, **options)[0].transpose(0, 1)
    torch.testing.assert_close(found, wanted)
