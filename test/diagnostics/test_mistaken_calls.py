# SPDX-License-Identifier: Apache-2.0
"""Edits of valid calls of public functions and layers, drawn by the seed: answers name an argument and its need."""

import functools
import random
import tempfile
import time
from typing import Any

import pytest
import torch
from edited_calls import edits_of, fault_of, launch_nothing

import torch_tile
import torch_tile.language as T
from torch_tile import nn
from torch_tile.inductor.report.rows import Report
from torch_tile.integrations import serving
from torch_tile.nn import functional, packing

SECONDS = 0.35  # of a place, whose edits are drawn
R, LINEAR = torch.randn, torch.nn.Linear
PLACED: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def chosen(*shape: int) -> torch.Tensor:
    return torch.randint(0, shape[-1], shape[:-1])


def words(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 99, shape, dtype=dtype)


def experts() -> tuple[torch.Tensor, ...]:
    both, down = (packing.quantize_4bit(R(3 * 64, k), "e2m1", 32) for k in (64, 32))
    return tuple(x.view(3, 64, -1) for x in (*both, *down))


def cached(**more: Any) -> dict[str, Any]:
    table, lengths = int32([0, 1, 2], [3, 4, 5]), int32(20, 40)
    return {"query": R(2, 4, 32), "kv_cache": R(8, 2, 16, 2, 32), "block_table": table, "seq_lens": lengths, **more}


def recurrence(*names: str, **more: Any) -> dict[str, Any]:
    tensors = {name: R(1, 20, 2, 16) for name in names}
    return {**tensors, "scale": 0.5, "initial_state": R(1, 2, 16, 16), "output_final_state": True, **more}


def decay(*more: int) -> torch.Tensor:
    return -torch.rand(1, 20, 2, *more)


@functools.cache
def kernel() -> Any:
    """Compile a kernel that doubles 64 numbers."""

    @torch_tile.jit(target="cpu")
    def double(A):
        A: T.Tensor((64,), "float32")
        B = T.empty((64,), "float32")
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                B[i] = A[i] * 2
        return B

    return double.compile()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


ROTARY = R(1, 5, 16), R(1, 5, 16)
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
ATTENDED = {"q": R(1, 4, 24, 32), "k": R(1, 2, 40, 32), "v": R(1, 2, 40, 32)}
PACKED = {"q": R(24, 4, 32), "k": R(24, 2, 32), "v": R(24, 2, 32)}
STARTS = {"q_starts": int32(0, 10, 24), "k_starts": int32(0, 10, 24), "most_queries": 14, "most_keys": 14}
LOSS: dict[str, Any] = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.1, "z_loss": 0.1}
EACH: dict[str, Any] = {"hidden_states": R(5, 64), "top_k_index": chosen(5, 2, 3), "top_k_weights": torch.rand(5, 2)}

CALLS = {
    "Linear": lambda: (nn.Linear, {"in_features": 48, "out_features": 32, "activation": "relu", **PLACED}),
    "Linear()": lambda: (nn.Linear(48, 32), {"input": R(5, 48), "residual": R(5, 32)}),
    "GatedMLP": lambda: (nn.GatedMLP, {"hidden_size": 48, "intermediate_size": 32, "activation": "silu", **PLACED}),
    "LayerNorm": lambda: (nn.LayerNorm, {"normalized_shape": 48, "eps": 1e-5, "bias": True, **PLACED}),
    "LayerNorm()": lambda: (nn.LayerNorm(48), {"input": R(5, 48)}),
    "RMSNorm": lambda: (nn.RMSNorm, {"normalized_shape": 48, "eps": 1e-5, "activation": "silu", "cast_first": True}),
    "Attention": lambda: (nn.Attention, {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "window": 4, **PLACED}),
    "Attention()": lambda: (nn.Attention(64, 4), {"hidden_states": R(2, 5, 64), "position_embeddings": ROTARY}),
    "MLAAttention": lambda: (nn.MLAAttention, {"hidden_size": 64, "num_heads": 4, **LATENT, **PLACED}),
    "MLAAttention()": lambda: (
        nn.MLAAttention(64, 4, **LATENT), {"hidden_states": R(2, 5, 64), "position_embeddings": ROTARY},
    ),
    "PagedLatents": lambda: (
        nn.PagedLatents,
        {"layers": 2, "pages": 8, "page": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "block_table": int32([0, 1])},
    ),
    "LinearCrossEntropyLoss": lambda: (
        nn.LinearCrossEntropyLoss, {"in_features": 16, "num_classes": 30, **LOSS, "softcap": 3.0, **PLACED},
    ),
    "CrossEntropyLoss()": lambda: (nn.CrossEntropyLoss(), {"input": R(6, 30), "target": chosen(6, 30)}),
    "cross_entropy": lambda: (
        nn.cross_entropy, {"input": R(6, 30), "target": chosen(6, 30), "weight": torch.rand(30), **LOSS},
    ),
    "linear_cross_entropy": lambda: (
        nn.linear_cross_entropy,
        {"input": R(6, 16), "linear_weight": R(30, 16), "target": chosen(6, 30), "linear_bias": R(30), **LOSS},
    ),
    "Float8Linear()": lambda: (nn.Float8Linear.from_linear(LINEAR(48, 32)), {"input": R(5, 48)}),
    "Float8Linear.from_linear": lambda: (nn.Float8Linear.from_linear, {"linear": LINEAR(48, 32)}),
    "Int8Linear": lambda: (
        nn.Int8Linear, {"weight": words(torch.int8, 32, 48), "scale": torch.rand(32, 1), "bias": R(32)},
    ),
    "Int8Linear()": lambda: (nn.Int8Linear.from_linear(LINEAR(48, 32)), {"input": R(5, 48)}),
    "QuantizedLinear": lambda: (
        nn.QuantizedLinear,
        {"words": words(torch.uint8, 32, 32), "scales": torch.rand(32, 2), "bias": R(32), "bits": 4, "offset": 8},
    ),
    "QuantizedLinear()": lambda: (nn.QuantizedLinear.from_linear(LINEAR(64, 32)), {"input": R(5, 64)}),
    "QuantizedLinear.from_linear": lambda: (
        nn.QuantizedLinear.from_linear, {"linear": LINEAR(64, 32), "format": "nf4", "group": 64},
    ),
    "QuantizedLinear.dequantize": lambda: (
        nn.QuantizedLinear.from_linear(LINEAR(64, 32)).dequantize, {"dtype": torch.float32},
    ),
    "QuantizedExperts()": lambda: (nn.QuantizedExperts(*experts(), format="e2m1", high_first=True), EACH),
    "attend": lambda: (functional.attend, {**ATTENDED, "causal": True, "scale": 0.5, "window": 8, "sinks": R(4)}),
    "attend, dropout": lambda: (functional.attend, {**ATTENDED, "dropout": 0.5, "softcap": 20.0, "sinks": R(4)}),
    "attend_varlen": lambda: (functional.attend_varlen, {**PACKED, **STARTS, "causal": True, "sinks": R(4)}),
    "rotate": lambda: (functional.rotate, {"x": R(1, 4, 5, 16), "cos": ROTARY[0], "sin": ROTARY[1]}),
    "with_sinks": lambda: (functional.with_sinks, {"out": R(24, 4, 32), "lse": R(24, 4), "sinks": R(4)}),
    "pack_fields": lambda: (packing.pack_fields, {"numbers": chosen(4, 8, 16), "bits": 4, "high_first": True}),
    "unpack_fields": lambda: (packing.unpack_fields, {"words": words(torch.uint8, 4, 8), "bits": 4}),
    "quantize_4bit": lambda: (packing.quantize_4bit, {"weight": R(16, 64), "format": "nf4", "group": 32}),
    "split_cache": lambda: (serving.split_cache, {"kv_cache": R(8, 2, 16, 2, 32), "kv_dim": 1, "heads_first": False}),
    "paged_attention": lambda: (serving.paged_attention, cached(scale=0.5, window=5, softcap=3.0)),
    "paged_attention, packed": lambda: (
        serving.paged_attention, cached(query=R(7, 4, 32), query_start_loc=int32(0, 3, 7), max_query_len=4),
    ),
    "split_latents": lambda: (serving.split_latents, {"kv_cache": R(8, 16, 576), "kv_lora_rank": 512}),
    "causal_conv1d_fn": lambda: (
        nn.causal_conv1d_fn, {"x": R(2, 16, 20), "weight": R(16, 4), "bias": R(16), "activation": "silu"},
    ),
    "chunk_gated_delta_rule": lambda: (
        nn.chunk_gated_delta_rule, recurrence("q", "k", "v", g=decay(), beta=torch.rand(1, 20, 2)),
    ),
    "chunk_gla": lambda: (nn.chunk_gla, recurrence("q", "k", "v", g=decay(16))),
    "fused_recurrent_gla": lambda: (nn.fused_recurrent_gla, recurrence("q", "k", "v", gk=decay(16))),
    "chunk_rwkv7": lambda: (nn.chunk_rwkv7, recurrence("r", "k", "v", "a", "b", w=decay(16))),
    "chunk_dplr_delta_rule": lambda: (nn.chunk_dplr_delta_rule, recurrence("q", "k", "v", "a", "b", gk=decay(16))),
    "replace_layers": lambda: (torch_tile.replace_layers, {"model": torch.nn.Sequential(LINEAR(4, 4)), "linear": True}),
    "MatmulTemplate": lambda: (torch_tile.carver.MatmulTemplate, {"M": 64, "N": 64, "K": 64, "in_dtype": "float16"}),
    "ElementwiseTemplate": lambda: (torch_tile.carver.ElementwiseTemplate, {"shape": [64, 64], "dtype": "float16"}),
    "inductor_configs": lambda: (
        torch_tile.inductor_configs, {"options": {"select": "tile", "families": ["norm"], "max_autotune": True}},
    ),
    "Report.save": lambda: (Report().save, {"path": f"{tempfile.mkdtemp()}/page.html"}),
    "Report.replaced": lambda: (Report().replaced, {"family": "gemm"}),
    "Report.missed": lambda: (Report().missed, {"family": "norm"}),
    "do_bench": lambda: (
        torch_tile.do_bench, {"fn": lambda: None, "warmup": 0.1, "rep": 0.1, "return_mode": "min", "backend": "wall"},
    ),
    "Profiler": lambda: (torch_tile.Profiler, {"kernel": kernel(), "supply": torch_tile.TensorSupplyType.One}),
    "Profiler.do_bench": lambda: (
        kernel().get_profiler().do_bench,
        {"warmup": 0.1, "rep": 0.1, "return_mode": "min", "quantiles": [0.5], "n_repeat": 1},
    ),
    "Profiler.assert_allclose": lambda: (
        kernel().get_profiler().assert_allclose,
        {"reference": doubled, "atol": 0.1, "rtol": 0.1, "max_mismatched_ratio": 0.01},
    ),
    "Profiler.assert_consistent": lambda: (kernel().get_profiler().assert_consistent, {"repeat": 2}),
    "autotune": lambda: (
        torch_tile.autotune,
        {
            "configs": lambda A: [{"block": 32}], "warmup": 1.0, "rep": 1.0, "timeout": 9.0, "ref_prog": doubled,
            "supply_type": torch_tile.TensorSupplyType.Auto, "max_mismatched_ratio": 0.01,
        },
    ),
    "custom_op": lambda: (torch_tile.custom_op, {"kernel": kernel(), "backward": lambda ctx, grad: grad * 2}),
    "explain": lambda: (
        functools.partial(torch_tile.explain, LINEAR(4, 4), R(2, 4)),
        {"select": "tile", "options": {"families": ["gemm"]}, "backward": False},
    ),
    "next_power_of_2": lambda: (torch_tile.next_power_of_2, {"x": 7}),
    "torch_assert_close": lambda: (
        torch_tile.testing.torch_assert_close, {"actual": torch.ones(4), "expected": torch.ones(4), "rtol": 0.1},
    ),
}  # fmt: skip
"""Valid calls, by their place: what is called, and its arguments by name."""


@pytest.mark.parametrize("place", CALLS)
def test_answers_to_mistakes_in_calls(place: str, seed: int, monkeypatch) -> None:
    launch_nothing(monkeypatch)
    torch.manual_seed(seed)
    function, given = CALLS[place]()
    function(**given)  # it is valid
    drawn = list(edits_of(function, given))
    random.Random(seed).shuffle(drawn)
    end, bad = time.monotonic() + SECONDS, []
    for edit in drawn:
        if fault := fault_of(function, edit):
            bad.append(f"{edit.name} {edit.kind} {edit.what}: {fault}")
        if time.monotonic() > end:
            break
    assert not bad, "\n".join(bad)
