# SPDX-License-Identifier: Apache-2.0
"""Generate with transformers: a Llama whose decoding step is compiled once, over a cache of fixed size."""

import torch

try:
    import transformers
except ImportError:
    raise SystemExit('this example needs transformers: pip install "torch_tile[transformers]"') from None

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 200, "max_position_embeddings": 64,
}  # fmt: skip
PROMPT, NEW = 6, 8

config = transformers.LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=None, pad_token_id=0)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(1, 200, (1, PROMPT))


def generate(step):
    """Greedy tokens: the prompt in eager mode, then one call of `step` for each token."""
    cache = transformers.StaticCache(config=config, max_cache_len=PROMPT + NEW)
    positions = torch.arange(PROMPT)
    logits = model(ids, past_key_values=cache, cache_position=positions, use_cache=True).logits[:, -1:]
    found = [logits.argmax(-1)]
    for n in range(NEW - 1):
        position = torch.tensor([PROMPT + n])
        logits = step(found[-1], past_key_values=cache, cache_position=position, use_cache=True).logits
        found.append(logits[:, -1:].argmax(-1))
    return torch.cat(found, dim=1), logits


with torch.no_grad():
    wanted, exact = generate(model)
    step = torch.compile(model, backend="tile", options={"select": "tile"})  # "fastest", the default, times each match
    tokens, logits = generate(step)
torch.testing.assert_close(logits, exact, rtol=1e-3, atol=1e-4)
print(f"eager  {wanted.tolist()[0]}\ntile   {tokens.tolist()[0]}")
print(f"largest difference of the last logits: {(logits - exact).abs().max():.1e}")
