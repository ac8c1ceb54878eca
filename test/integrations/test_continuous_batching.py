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
HAS_PAGES = "page_size" in transformers.ContinuousBatchingConfig.__dataclass_fields__


def tokens(model, prompts, new: int) -> list[list[int]]:
    """Greedy tokens; few pages and few tokens a step, so that prompts come in chunks and requests wait."""
    kind = transformers.ContinuousBatchingConfig
    sizes = {"page_size": 8}
    if not HAS_PAGES:
        pytest.importorskip("psutil", reason="transformers asks it for the memory of a CPU")
        sizes = {"block_size": 8, "num_blocks": 64}
    how = kind(
        **sizes,
        max_batch_tokens=16,
        max_requests_per_batch=4,
        max_memory_percent=0.001,
        use_cuda_graph=False,
        default_compile_level=0,
    )
    generation = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=how)
    return [list(found[name].generated_tokens) for name in sorted(found, key=lambda n: int(n.rsplit("_", 1)[-1]))]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "GptOss"])
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
    # An older transformers gathers all keys itself; all layers of Mistral have a window.
    assert any(calls) == (HAS_PAGES and family != "Mistral")
