# SPDX-License-Identifier: Apache-2.0
"""Models and pieces of models as people write them, at real sizes with random weights; few layers, as all are alike.

Each case makes a module (or function) and its arguments, on the GPU in bfloat16; `in_float64` makes both again in
float64 with the same values. Models of transformers are left out where transformers is not installed.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.wan_vae import hidden

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ModelCase:
    """`make` gives what is called, its arguments, and its keyword arguments. `asked` maps rivals to the ratio wanted.

    `mode` is torch.compile's. `exact` says whether torch can do the same in float64 (its experts cannot). `training`:
    forward and backward are timed, and the gradient of the first parameter is compared. `spared`: the GiB of Inductor's
    peak memory that ours should not take.
    """

    name: str
    make: Callable[[], Made]
    asked: Mapping[str, float] = field(default_factory=lambda: {"Inductor": 0.98})
    mode: str | None = None
    exact: bool = True
    training: bool = False
    spared: float = 0.0


def in_float64(made: Made) -> Made:
    """The same in float64: parameters, buffers and floating arguments."""

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    call, args, kwargs = made
    call = copy.deepcopy(call).double() if isinstance(call, nn.Module) else call
    return call, tuple(map(wide, args)), {k: wide(v) for k, v in kwargs.items()}


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


# Pieces.


def norm_silu(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.rms_norm(x, (x.shape[-1],), w, 1e-6))


def make_norm_silu(m: int, n: int) -> Made:
    return norm_silu, (random(m, n), random(n)), {}


class SwiGLU(nn.Module):
    """The gated layer of Llama."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeluMLP(nn.Module):
    """The layer of GPT-2 with its residual."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class LatentAttention(nn.Module):
    """Absorbed multi-head latent attention over a cache, in plain torch (DeepSeek-V2, section 2.1)."""

    def forward(self, q: Tensor, q_pe: Tensor, kv: Tensor, k_pe: Tensor) -> Tensor:
        scores = torch.einsum("bhc,btc->bht", q, kv) + torch.einsum("bhr,btr->bht", q_pe, k_pe)
        weights = torch.softmax(scores.float() * 192**-0.5, dim=-1).to(q.dtype)
        return torch.einsum("bht,btc->bhc", weights, kv)


def make_latent(batch: int, length: int, heads: int = 128) -> Made:
    tensors = random(batch, heads, 512), random(batch, heads, 64), random(batch, length, 512), random(batch, length, 64)
    return LatentAttention(), tensors, {}


class EinsumAttention(nn.Module):
    """Self-attention by hand, as in many research repositories."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * (d // self.heads) ** -0.5).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d))


class DiTBlock(nn.Module):
    """A block of a diffusion transformer with adaptive norms (Peebles and Xie 2023, section 3.2)."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out, self.modulation = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 6 * d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        b, t, d = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c))[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).reshape(b, t, d)
        x = x + gate1 * self.out(seen)
        hidden = F.gelu(self.up(self.norm2(x) * (1 + scale2) + shift2), approximate="tanh")
        return x + gate2 * self.down(hidden)


class VideoBlock(nn.Module):
    """Two pointwise layers of a video decoder, norms over channels that come last: B, T, H, W, C."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c, eps=1e-6), nn.RMSNorm(c, eps=1e-6)
        self.first, self.second = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.norm2(self.first(F.silu(self.norm1(x))))))


class UNetAttention(nn.Module):
    """Attention among the pixels of a feature map, and a gated feed-forward layer."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.norm2 = heads, nn.GroupNorm(32, c), nn.LayerNorm(c)
        self.qkv, self.out = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, c)
        self.gated, self.down = nn.Linear(c, 8 * c), nn.Linear(4 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(y).view(b, h * w, 3, self.heads, -1).transpose(1, 3).unbind(2)
        y = y + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c))
        value, gate = self.gated(self.norm2(y)).chunk(2, -1)
        return x + (y + self.down(value * F.gelu(gate))).transpose(1, 2).view(b, c, h, w)


def make_module(module: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Made:
    with torch.device("cuda"):
        made = module().to(torch.bfloat16).eval()
    return made, tuple(random(*shape) for shape in shapes), {}


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(1024, 16, 4096, activation="gelu", batch_first=True, norm_first=True)


# Models of transformers.

WIDE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 1024, "max_position_embeddings": 8192,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
    "vocab_size": 1024, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "first_k_dense_replace": 9, "max_position_embeddings": 8192,
}  # fmt: skip
STEPS = 1500  # that there is room for in a cache: more than all that is run
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 8}


def make_transformer(family: str, layers: int, batch: int, length: int, config: Mapping[str, Any]) -> Made:
    """A base model (no head) of `family` on random tokens, or random features where it does not take tokens."""
    transformers = importlib.import_module("transformers")
    key = "encoder_layers" if family == "Whisper" else "n_layer" if family == "GPT2" else "num_hidden_layers"
    made_config = getattr(transformers, f"{family}Config")(**{key: layers, **config})
    if hasattr(made_config, "use_cache"):
        made_config.use_cache = False
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModel.from_config(made_config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model = model.eval().to("cuda", torch.bfloat16)
    if family == "Whisper":
        return model.encoder, (random(batch, made_config.num_mel_bins, length),), {}
    if family == "ViT":
        return model, (random(batch, 3, 224, 224),), {}
    tokens = torch.randint(0, made_config.vocab_size, (batch, length), device="cuda")
    return model, (tokens,), {}


def make_padded(family: str, layers: int, batch: int, length: int, config: Mapping[str, Any]) -> Made:
    """The same on sequences of different lengths, padded at the end to one: `length` the longest, half the shortest."""
    model, args, _ = make_transformer(family, layers, batch, length, config)
    lengths = torch.linspace(length, length // 2, batch, device="cuda").long()
    mask = torch.arange(length, device="cuda") < lengths[:, None]
    return model, args, {"attention_mask": mask.long()}


class Step(nn.Module):
    """One token for each sequence, against a cache of fixed size; each call is a step further."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        out = self.model(tokens, past_key_values=self.cache, position_ids=position[None])
        hidden: Tensor = out.last_hidden_state
        return hidden


def make_step(family: str, layers: int, batch: int, length: int, config: Mapping[str, Any]) -> Made:
    transformers = importlib.import_module("transformers")
    model, (tokens,), _ = make_transformer(family, layers, batch, length - STEPS, config)
    assert isinstance(model, nn.Module)
    model.config.use_cache = True  # type: ignore[union-attr]
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    return Step(model, cache), (tokens[:, :1], torch.tensor([length - STEPS], device="cuda")), {}


class Loss(nn.Module):
    """What a causal model loses on its own tokens; nobody asks for its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def make_loss(layers: int, batch: int, length: int, config: Mapping[str, Any]) -> Made:
    """Make a Llama with its head and its loss, in training."""
    transformers = importlib.import_module("transformers")
    made_config = transformers.LlamaConfig(num_hidden_layers=layers, use_cache=False, **config)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(made_config).to(torch.bfloat16).train()
    return Loss(model), (torch.randint(0, made_config.vocab_size, (batch, length), device="cuda"),), {}


def delta_layer(**sizes: Any) -> nn.Module:
    """Make a gated delta layer of Qwen3-Next in torch: kernels of other packages do not take float64."""
    from transformers import Qwen3NextConfig

    with hidden("fla", "causal_conv1d"):  # transformers takes their functions while it is imported
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
    layer: Any = Qwen3NextGatedDeltaNet
    made: nn.Module = layer(Qwen3NextConfig(**sizes), 0)
    return made


def make_delta_layer(batch: int, length: int) -> Made:
    """Make a gated delta layer of its real size."""
    from transformers import Qwen3NextConfig

    return make_module(delta_layer, (batch, length, Qwen3NextConfig().hidden_size))


def cases() -> list[ModelCase]:
    """Everything, pieces first."""
    found = [
        *(
            ModelCase(f"rms_norm silu {m}x{n}", partial(make_norm_silu, m, n))
            for m, n in ((1209600, 160), (1209600, 512), (302400, 1024), (302400, 4096))
        ),
        ModelCase("swiglu 64", partial(make_module, partial(SwiGLU, 4096, 14336), (64, 4096)), {"Inductor": 1.4}),
        ModelCase("swiglu 4096", partial(make_module, partial(SwiGLU, 4096, 14336), (4096, 4096))),
        ModelCase("gelu 4096", partial(make_module, partial(GeluMLP, 4096, 16384), (4096, 4096)), {"Inductor": 1.08}),
        ModelCase("mla b64 s4096", partial(make_latent, 64, 4096), {"Inductor": 2.2}),
        ModelCase("mla b128 s8192", partial(make_latent, 128, 8192), {"Inductor": 1.8}, exact=False),
        ModelCase("einsum attention", partial(make_module, partial(EinsumAttention, 2048, 16), (4, 1024, 2048))),
        ModelCase(
            "einsum attention training",
            partial(make_module, partial(EinsumAttention, 2048, 16), (16, 1024, 2048)),  # of 4, the host takes longer
            training=True,
        ),
        ModelCase("encoder layer", partial(make_module, encoder_layer, (16, 512, 1024))),
        ModelCase("dit block", partial(make_module, partial(DiTBlock, 1152, 16), (8, 1024, 1152), (8, 1152))),
        ModelCase("video block", partial(make_module, partial(VideoBlock, 320), (1, 8, 180, 320, 320))),
        ModelCase("unet attention", partial(make_module, partial(UNetAttention, 640, 10), (4, 640, 64, 64))),
    ]
    if importlib.util.find_spec("transformers") is None:
        return found

    def model(
        name: str, family: str, layers: int, batch: int, length: int, exact: bool = True, **config: Any
    ) -> ModelCase:
        asked = {"Inductor": {"llama": 1.1, "deepseek": 1.15}.get(name.split()[0], 0.98)}
        return ModelCase(name, partial(make_transformer, family, layers, batch, length, config), asked, exact=exact)

    encoder = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    return [
        *found,
        model("llama 1x4096", "Llama", 4, 1, 4096, **WIDE),
        model("llama 8x512", "Llama", 4, 8, 512, **WIDE),
        model("qwen3 1x4096", "Qwen3", 2, 1, 4096, **{**WIDE, "intermediate_size": 12288, "head_dim": 128}),
        model("mistral 1x8192", "Mistral", 2, 1, 8192, **WIDE, sliding_window=4096),
        model("gemma 1x4096", "Gemma", 2, 1, 4096, **{**WIDE, "hidden_size": 3072, "num_attention_heads": 16,
                                                    "num_key_value_heads": 16, "head_dim": 256}),
        model("phi 2x2048", "Phi3", 2, 2, 2048, **{**WIDE, "hidden_size": 3072, "intermediate_size": 8192,
                                                 "num_key_value_heads": 32, "pad_token_id": 0}),
        model("gpt2 8x1024", "GPT2", 4, 8, 1024, n_embd=1600, n_head=25, vocab_size=1024),
        model("bert 16x512", "Bert", 4, 16, 512, **encoder, vocab_size=1024),
        model("vit 64", "ViT", 4, 64, 0, **encoder),
        model("whisper 4", "Whisper", 4, 4, 3000, d_model=1280, encoder_attention_heads=20, decoder_attention_heads=20,
              encoder_ffn_dim=5120, decoder_layers=1, num_mel_bins=128, vocab_size=1024, pad_token_id=0,
              bos_token_id=0, eos_token_id=0, decoder_start_token_id=0),
        model("mixtral 1x2048", "Mixtral", 1, 1, 2048, exact=False, **WIDE, **EXPERTS),
        model("qwen3 moe 1x2048", "Qwen3Moe", 1, 1, 2048, exact=False, **{**WIDE, "hidden_size": 2048, "head_dim": 128},
              num_experts=32, num_experts_per_tok=8, moe_intermediate_size=768),
        model("deepseek 1x4096", "DeepseekV3", 1, 1, 4096, **LATENT),
        ModelCase("llama training 2x4096", partial(make_transformer, "Llama", 2, 2, 4096, WIDE), training=True),
        ModelCase("llama training padded 4x2048", partial(make_padded, "Llama", 2, 4, 2048, WIDE), training=True),
        ModelCase("bert training padded 16x512",
                  partial(make_padded, "Bert", 4, 16, 512, {**encoder, "vocab_size": 1024}), training=True),
        ModelCase("gemma2 training 2x4096", partial(make_transformer, "Gemma2", 2, 2, 4096, {
            **WIDE, "hidden_size": 3584, "num_attention_heads": 16, "head_dim": 256, "attn_implementation": "eager",
        }), training=True),
        ModelCase("qwen3 next delta layer 1x4096", partial(make_delta_layer, 1, 4096), {"Inductor": 3.0}),
        # In float64 the scores of attention alone are 69 GB.
        ModelCase("llama loss training 1x8192", partial(make_loss, 4, 1, 8192, {**WIDE, "vocab_size": 128256}),
                  {"Inductor": 1.15}, exact=False, training=True, spared=2.0),
        ModelCase("llama decode 8x4096", partial(make_step, "Llama", 4, 8, 4096, WIDE), mode="reduce-overhead",
                  exact=False),
    ]  # fmt: skip
