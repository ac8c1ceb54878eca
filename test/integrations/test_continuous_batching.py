# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching over our paged attention: eager's tokens."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers

import torch_tile.integrations.transformers  # noqa: F401  # registers "tile"
from torch_tile.integrations import continuous_batching

pytest.importorskip("transformers.generation.continuous_batching")
if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this version of transformers has another interface", allow_module_level=True)

PROMPTS = [5, 1, 20, 9]


def tokens(model, prompts, new: int) -> list[list[int]]:
    """Greedy tokens; few pages and few tokens a step, so that prompts come in chunks and requests wait."""
    kind = transformers.ContinuousBatchingConfig
    pages = "page_size" if "page_size" in kind.__dataclass_fields__ else "block_size"  # older versions
    how = kind(
        **{pages: 8},
        max_batch_tokens=16,
        max_requests_per_batch=4,
        max_memory_percent=0.001,
        use_cuda_graph=False,
        default_compile_level=0,
    )
    generation = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=how)
    return [list(found[name].generated_tokens) for name in sorted(found, key=lambda n: int(n.rsplit("_", 1)[-1]))]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "GptOss"])
def test_tokens_are_eagers(family: str, build, seed: int, monkeypatch) -> None:
    model = build(family)
    prompts = [torch.randint(1, 96, (n,)).tolist() for n in PROMPTS]
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    wanted = [model.generate(torch.tensor([p]), **arguments)[0, len(p) :].tolist() for p in prompts]
    calls = []

    def counted(*args, **kwargs):
        found = tables(*args, **kwargs)
        calls.append(found is not None)
        return found

    tables = continuous_batching._tables
    monkeypatch.setattr(continuous_batching, "_tables", counted)
    model.set_attn_implementation("tile")
    assert tokens(model, prompts, 10) == wanted
    assert model.config._attn_implementation == "tile"
    assert any(calls) == (family != "Mistral")  # all of whose layers have a window
