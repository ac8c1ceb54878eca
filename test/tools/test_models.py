# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.tools import models


@pytest.mark.parametrize("name", models.SAMPLES)
@pytest.mark.parametrize("installed", [True, False])
def test_samples_are_causal_language_models(name: str, installed: bool, monkeypatch, seed: int) -> None:
    if installed:
        pytest.importorskip("transformers")
    monkeypatch.setattr(models, "has_transformers", lambda: installed)
    sample = models.SAMPLES[name]()
    assert (sample.source == models.PLAIN) is not installed
    ids = torch.randint(0, sample.vocabulary, (2, 9))
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % sample.vocabulary
    model = sample.model.double()
    with torch.no_grad():
        logits, changed = sample.run(model, ids), sample.run(model, other)
        first = sample.run(model, other[:, 6:])
    assert logits.shape == (2, 1 if sample.decodes else 9, sample.vocabulary)
    torch.testing.assert_close(changed[:, :6], logits[:, :6], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(first[:, :1], logits[:, :1], rtol=1e-3, atol=1e-3)


def test_plain_latent_attention_is_attention(seed: int) -> None:
    """Against expanded keys and values, head by head."""
    layer, x = models.PlainMLA().double(), torch.randn(2, 1, models.SMALL.width, dtype=torch.float64)
    with torch.no_grad():
        q, q_pe = layer.q(x).view(2, layer.heads, 96).split([64, 32], -1)
        kv = torch.cat([layer.kv_cache.expand(2, -1, -1), layer.kv(x)], 1)
        turned = models._rotate(torch.cat([torch.zeros(2, 1, models.CACHED, 32), layer.pe(x)[:, None]], 2))[:, 0, -1:]
        k_pe = torch.cat([layer.pe_cache.expand(2, -1, -1), turned], 1)
        far = torch.cat([torch.zeros(2, layer.heads, models.CACHED, 32), q_pe[:, :, None]], 2)
        q_pe = models._rotate(far)[:, :, -1]
        heads = []
        for h in range(layer.heads):
            k = torch.cat([kv @ layer.key[h].T, k_pe], -1)
            scores = torch.cat([q[:, h], q_pe[:, h]], -1)[:, None] @ k.mT * 96**-0.5
            heads.append(scores.softmax(-1) @ (kv @ layer.value[h].T))
        torch.testing.assert_close(layer(x), layer.o(torch.cat(heads, -1)))
