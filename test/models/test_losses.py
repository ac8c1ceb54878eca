# SPDX-License-Identifier: Apache-2.0
"""Training steps of tiny models of transformers: the head and its loss are one operator, with eager's numbers."""

import functools

import pytest
import torch

from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect

transformers = pytest.importorskip("transformers")

SIZE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "llama tied": lambda: transformers.LlamaConfig(**SIZE, tie_word_embeddings=True),
    "gemma2": lambda: transformers.Gemma2Config(**SIZE, head_dim=16, final_logit_softcapping=1.5),
}


@pytest.mark.parametrize("items", [None, 11], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("name", MODELS)
def test_training_step(name, items, seed):
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).train()
    ids = torch.randint(1, 97, (2, 9))
    labels = torch.where(torch.rand(2, 9) < 0.2, -100, ids)
    more = {} if items is None else {"num_items_in_batch": items}

    def step():
        return model(input_ids=ids, labels=labels, use_cache=False, **more).loss

    want = step()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(want, parameters)
    with collect() as report:
        got = torch.compile(step, backend=functools.partial(dry_run, options={"select": "tile"}))()
        found = torch.autograd.grad(got, parameters)
    rows = report.select("loss")
    assert [(r.status, r.what.split("(")[0]) for r in rows] == [("replaced", "tile.linear_cross_entropy")], report
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for (parameter, _), ours, eager in zip(model.named_parameters(), found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-5, msg=lambda m, p=parameter: f"{p}: {m}")
