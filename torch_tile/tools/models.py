# SPDX-License-Identifier: Apache-2.0
"""Models with random weights for the tools: transformers' own classes, or plain torch where it is not installed.

Models map token ids `[B, S]` to logits `[B, S, V]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
CACHED = 256  # positions before the one that plain-torch latent attention decodes
PLAIN = "plain torch"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder: features, features inside of its MLPs, layers, heads of queries, of keys, token ids."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        """Return the features of one head."""
        return self.width // self.heads


SMALL = Sizes(width=256, inner=688, layers=2, heads=4, kv_heads=2, vocabulary=1024)
LLAMA_8B = Sizes(width=4096, inner=14336, layers=2, heads=32, kv_heads=8, vocabulary=32768)  # 2 of its 32 layers


@dataclass(frozen=True)
class Sample:
    """A model in evaluation mode; `source` says whose classes it is made of, `vocabulary` which token ids it takes."""

    name: str
    source: str
    model: nn.Module
    vocabulary: int
    decodes: bool = False  # one token over a cache of its own, not a whole sequence

    def arguments(self, ids: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Return the positional and keyword arguments of the model, for tokens `[B, S]`."""
        return (ids[:, :1] if self.decodes else ids,), {} if self.source == PLAIN else {"use_cache": False}

    def run(self, model: Any, ids: Tensor) -> Tensor:
        """Compute the logits `[B, S, V]`, or `[B, 1, V]`, of the model or of a compiled form of it."""
        args, kwargs = self.arguments(ids)
        out = model(*args, **kwargs)
        logits: Tensor = out if isinstance(out, torch.Tensor) else out.logits
        return logits


def has_transformers() -> bool:
    """Return whether transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def plain_llama(sizes: Sizes = SMALL) -> Sample:
    """Build grouped-query attention, SwiGLU, RMS norms, in plain torch."""
    return Sample("Llama", PLAIN, PlainModel(PlainAttention, sizes).eval(), sizes.vocabulary)


def llama(sizes: Sizes = SMALL) -> Sample:
    """Build grouped-query attention, SwiGLU, RMS norms."""
    if not has_transformers():
        return plain_llama(sizes)
    import transformers

    return _from_config("Llama", transformers.LlamaConfig(head_dim=sizes.head_dim, **_arguments(sizes)))


def deepseek(sizes: Sizes = SMALL) -> Sample:
    """Build latent attention, a dense and a mixture-of-experts layer; a decoding step in plain torch has no experts."""
    if not has_transformers():
        return Sample("DeepSeek-V3, decoding", PLAIN, PlainModel(PlainMLA, sizes).eval(), sizes.vocabulary, True)
    import transformers

    config = transformers.DeepseekV3Config(
        **_arguments(sizes) | {"num_key_value_heads": sizes.heads}, q_lora_rank=96, kv_lora_rank=128,
        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=128, first_k_dense_replace=1, n_shared_experts=1,
    )  # fmt: skip
    config._experts_implementation = "batched_mm"  # the default has no float64, which the error is measured with
    return _from_config("DeepSeek-V3", config)


SAMPLES: dict[str, Callable[[], Sample]] = {"llama": llama, "deepseek": deepseek}


def _arguments(sizes: Sizes) -> dict[str, int]:
    """Return sizes as transformers' config arguments."""
    return {
        "hidden_size": sizes.width, "intermediate_size": sizes.inner, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "vocab_size": sizes.vocabulary,
    }  # fmt: skip


def _from_config(name: str, config: Any) -> Sample:
    """Make a sample from a config of transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return Sample(name, f"transformers {transformers.__version__}", model, config.vocab_size)


def _rotate(x: Tensor, start: int = 0) -> Tensor:
    """Apply the rotary position embedding to `[B, H, S, R]`, positions from `start`."""
    half, exact = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    angles = torch.arange(start, start + x.shape[-2], device=x.device, dtype=exact)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class PlainNorm(nn.Module):
    """RMS norm, written out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the rows of `[..., N]`."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class PlainAttention(nn.Module):
    """Causal attention with fewer heads of keys."""

    q: nn.Linear
    o: nn.Linear
    k: nn.Linear
    v: nn.Linear

    def __init__(self, sizes: Sizes = SMALL) -> None:
        super().__init__()
        self.dim: int = sizes.head_dim
        width, keys = sizes.width, sizes.kv_heads * self.dim
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position of x, `[B, S, N]`, to the positions up to it; return the same shape."""
        q, k, v = (p(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class PlainMLA(nn.Module):
    """A step of multi-head latent attention with absorbed weights (arXiv:2405.04434), over a cache of its own."""

    kv: nn.Linear
    pe: nn.Linear
    kv_cache: Tensor
    pe_cache: Tensor

    def __init__(self, sizes: Sizes = SMALL, latent: int = 128, nope: int = 64, rope: int = 32) -> None:
        super().__init__()
        width, heads = sizes.width, sizes.heads
        self.heads: int = heads
        self.sizes: list[int] = [nope, rope]
        self.q: nn.Linear = nn.Linear(width, heads * (nope + rope), bias=False)
        self.kv, self.pe = nn.Linear(width, latent, bias=False), nn.Linear(width, rope, bias=False)
        self.key: nn.Parameter = nn.Parameter(torch.randn(heads, nope, latent) * nope**-0.5)
        self.value: nn.Parameter = nn.Parameter(torch.randn(heads, nope, latent) * latent**-0.5)
        self.o: nn.Linear = nn.Linear(heads * nope, width, bias=False)
        self.register_buffer("kv_cache", torch.randn(1, CACHED, latent))
        self.register_buffer("pe_cache", torch.randn(1, CACHED, rope))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, 1, N]` to the same: the token after the cached ones, which sees them all."""
        q, q_pe = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).split(self.sizes, dim=-1)
        kv, k_pe = self.kv(x), _rotate(self.pe(x)[:, None], CACHED)[:, 0]
        kv = torch.cat([self.kv_cache.expand(x.shape[0], -1, -1), kv], dim=1)
        k_pe = torch.cat([self.pe_cache.expand(x.shape[0], -1, -1), k_pe], dim=1)
        q, q_pe = torch.einsum("bhsd,hdc->bhsc", q, self.key), _rotate(q_pe, CACHED)
        scores = torch.einsum("bhsc,btc->bhst", q, kv) + torch.einsum("bhsr,btr->bhst", q_pe, k_pe)
        weights = (scores * sum(self.sizes) ** -0.5).softmax(-1)
        out = torch.einsum("bhst,btc->bhsc", weights, kv)
        return self.o(torch.einsum("bhsc,hdc->bshd", out, self.value).flatten(2))  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """SwiGLU."""

    gate: nn.Linear
    up: nn.Linear

    def __init__(self, sizes: Sizes = SMALL) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.inner
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down: nn.Linear = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, S, N]` to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A layer over normalised input, added to its input."""

    norm: PlainNorm

    def __init__(self, part: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.part = PlainNorm(width), part

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, S, N]` to the same."""
        out: Tensor = x + self.part(self.norm(x))
        return out


class PlainModel(nn.Module):
    """A decoder whose attention layers are made by `attention(sizes)`."""

    norm: PlainNorm
    head: nn.Linear

    def __init__(self, attention: Callable[[Sizes], nn.Module], sizes: Sizes = SMALL) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Embedding(sizes.vocabulary, sizes.width),
            PlainNorm(sizes.width),
            nn.Linear(sizes.width, sizes.vocabulary),
        )
        self.layers = nn.ModuleList(
            Residual(part, sizes.width) for _ in range(sizes.layers) for part in (attention(sizes), PlainMLP(sizes))
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Map `[B, S]` to `[B, S, V]`."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
