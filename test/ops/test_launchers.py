# SPDX-License-Identifier: Apache-2.0
"""Sites of every op, on a stand-in for a GPU: from the third call on the driver alone is asked, as before."""

import functools
from pathlib import Path

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_tile.inductor.backend import tile
from torch_tile.inductor.codegen.cpp_wrapper import embedded
from torch_tile.inductor.codegen.symbolic_launch import Symbols, TensorMeta, record
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.ops import launchers
from torch_tile.ops.registry import OPERATORS
from torch_tile.runtime.launch_plan import LaunchPlan, planning
from torch_tile.runtime.replay import LongWay

BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn


def half(*shape):
    return torch.randn(shape).to(BF16)


def gemm_call(a, b, x, out):
    launchers.gemm(a, [launchers.view(b, (64, 96), (1, 64), 0)], [x], "t", "v0=add(acc0,x0);ret v0", BF16, out=out)


def grouped_call(a, b, offsets, x, out):
    launchers.grouped_gemm(a, [b.mT], offsets, [x], "c", "v0=mul(acc0,x0);ret v0", BF16, out=out)


def k_grouped_call(a, b, offsets, out):
    launchers.k_grouped_gemm(a, b, offsets, BF16, out=out)


def dequant_call(a, b, scale, x, out):
    launchers.dequant_gemm(a, [b], [scale], [], 4, False, 8, [x], "r", "v0=add(acc0,x0);ret v0", BF16, out=out)


def scaled_call(a, b, scale_a, scale_b, x, out):
    launchers.scaled_gemm(a, b.mT, scale_a, scale_b, [x], "r", "v0=add(acc0,x0);ret v0", BF16, out=out)


def grouped_dequant_call(a, b, scale, offsets, x, out):
    fields, text = (4, False, 8), "v0=add(acc0,x0);ret v0"
    launchers.grouped_dequant_gemm(a, [b], [scale], [], offsets, *fields, [x], "g", text, BF16, out=out)


def grouped_scaled_call(a, b, scale_a, scale_b, offsets, x, out):
    text = "v0=add(acc0,x0);ret v0"
    launchers.grouped_scaled_gemm(a, b.mT, scale_a, scale_b, offsets, [x], "g", text, BF16, out=out)


def k_grouped_scaled_call(a, b, scale_a, scale_b, offsets, out):
    launchers.k_grouped_scaled_gemm(a, b.mT, scale_a, scale_b.mT, offsets, BF16, out=out)


def masked_scaled_call(a, b, scale_a, scale_b, counts, out):
    launchers.masked_scaled_gemm(a, b.mT, scale_a, scale_b, counts, [], "", "", BF16, out=out)


def attention_call(qkv, out):
    q, k, v = (launchers.view(qkv, (2, 4, 40, 32), (15360, 32, 384, 1), n * 128) for n in range(3))
    launchers.attention(q, k, v, None, True, out=out)


def decode_call(q, k, v, out, offset):
    launchers.attention(q, k, v, None, True, 0.2, 0, offset, out=out)


def mla_call(q, q_pe, kv, k_pe, table, lengths, out):
    launchers.mla_decode(q, q_pe, kv, k_pe, table, lengths, out=out)


def scheduled_mla_call(q, q_pe, kv, k_pe, lengths, schedule, out):
    launchers.mla_decode(q, q_pe, kv, k_pe, None, lengths, None, 0, schedule, out=out)


def whole_mla_call(q, q_pe, kv, k_pe, out):
    launchers.mla_decode(q, q_pe, kv, k_pe, out=out)


def whole_mla_lse_call(q, q_pe, kv, k_pe, out, lse):
    launchers.mla_decode_lse(q, q_pe, kv, k_pe, out=(out, lse))


def attention_lse_call(q, k, v, out, lse):
    launchers.attention_lse(q, k, v, None, True, out=(out, lse))


def starts(*values):
    return torch.tensor(values, dtype=torch.int32)


def varlen_call(q, k, v, cu_q, cu_k, *out):
    made = out[0] if len(out) == 1 else out
    name = "attention_varlen" if len(out) == 1 else "attention_varlen_lse"
    getattr(launchers, name)(q, k, v, cu_q, cu_k, 40, 40, True, out=made)


def varlen_backward_call(g, q, k, v, o, lse, cu_q, cu_k, *out):
    launchers.attention_varlen_backward(g, q, k, v, o, lse, cu_q, cu_k, 40, 40, True, out=out)


def sparse_call(q, k, v, counts, indices, *out):
    made = out[0] if len(out) == 1 else out
    name = "attention_block_sparse" if len(out) == 1 else "attention_block_sparse_lse"
    getattr(launchers, name)(q, k, v, counts, indices, out=made)


def sparse_backward_call(g, q, k, v, o, lse, counts, indices, *out):
    launchers.attention_block_sparse_backward(g, q, k, v, o, lse, counts, indices, out=out)


def float8_call(q, k, v, q_scale, k_scale, v_scale, out, lse):
    scales = q_scale, k_scale, v_scale
    launchers.attention_fp8(q, k, v, *scales, True, None, 0, 50, torch.float16, out=(out, lse))


def block_lists():
    return starts(1, 2).view(1, 1, 2), starts(1, 0, 0, 1).view(1, 1, 2, 2)


def paged_call(q, k, v, table, lengths, *out):
    made = out[0] if len(out) == 1 else out
    name = "attention_paged" if len(out) == 1 else "attention_paged_lse"
    getattr(launchers, name)(q, k, v, table, lengths, out=made)


def linear_call(x, w, b, r, out):
    launchers.linear(x, w, b, r, "gelu", out=out)


def swiglu_call(x, gate, up, out):
    launchers.swiglu(x, gate, up, out=out)


def add_norm_call(x, r, w, y, total):
    launchers.add_rms_norm(x, r, w, 1e-5, out=(y, total))


def fused_norm_quantize_call(x, shift, r, values, scales, total):
    texts, out = ("v0=add(acc0,x1);ret v0", "v0=add(acc0,x0);ret v0"), (values, scales, total)
    launchers.fused_norm_quantize(x, [shift, r], "gt", *texts, True, 1e-5, True, x.dtype, 32, FLOAT8, out=out)


def fused_norm_call(x, shift, r, y, total):
    texts = "v0=add(acc0,x1);ret v0", "v0=add(acc0,x0);ret v0"
    launchers.fused_norm(x, [shift, r], "gt", *texts, True, 1e-5, True, x.dtype, out=(y, total))


CALLS = {
    "gemm": ("tttt", gemm_call, lambda: (half(48, 64), half(96, 64), half(48, 96), half(48, 96))),
    "gemm, few rows": ("tttt", gemm_call, lambda: (half(1, 64), half(96, 64), half(1, 96), half(1, 96))),
    "gemm, strides": ("tttt", gemm_call, lambda: (half(64, 51)[:, 3:].t()[:48], half(96, 64), half(48, 97)[:, 1:],
                                                 half(48, 96))),
    "grouped_gemm": (
        "ttttt", grouped_call,
        lambda: (half(48, 64), half(3, 96, 64), torch.tensor([3, 30, 48], dtype=torch.int32), half(48, 1),
                 half(48, 96)),
    ),
    "k_grouped_gemm": (
        "tttt", k_grouped_call,
        lambda: (half(48, 64), half(48, 96), torch.tensor([3, 30, 48], dtype=torch.int32), half(3, 64, 96)),
    ),
    "dequant_gemm": (
        "ttttt",
        dequant_call,
        lambda: (half(16, 256), torch.zeros(64, 128, dtype=torch.uint8), half(64, 2), half(64), half(16, 64)),
    ),
    "scaled_gemm": (
        "tttttt",
        scaled_call,
        lambda: (half(16, 256).to(FLOAT8), half(64, 256).to(FLOAT8), torch.ones(16, 2), torch.ones(2, 1), half(64),
                 half(16, 64)),
    ),
    "grouped_dequant_gemm": (
        "tttttt", grouped_dequant_call,
        lambda: (half(48, 256), torch.zeros(3, 64, 128, dtype=torch.uint8), half(3, 64, 2),
                 torch.tensor([3, 30, 48], dtype=torch.int32), half(3, 64), half(48, 64)),
    ),
    "grouped_scaled_gemm": (
        "ttttttt", grouped_scaled_call,
        lambda: (half(48, 256).to(FLOAT8), half(3, 64, 256).to(FLOAT8), torch.ones(48, 2), torch.ones(3, 2, 1),
                 torch.tensor([3, 30, 48], dtype=torch.int32), half(3, 64), half(48, 64)),
    ),
    "k_grouped_scaled_gemm": (
        "tttttt", k_grouped_scaled_call,
        lambda: (half(48, 256).to(FLOAT8), half(64, 256).to(FLOAT8), torch.ones(3, 48, 1), torch.ones(3, 64, 1),
                 torch.tensor([3, 30, 256], dtype=torch.int32), half(3, 48, 64)),
    ),
    "masked_scaled_gemm": (
        "tttttt", masked_scaled_call,
        lambda: (half(3, 16, 256).to(FLOAT8), half(3, 64, 256).to(FLOAT8), torch.ones(3, 16, 2), torch.ones(3, 2, 1),
                 torch.tensor([3, 0, 16], dtype=torch.int32), half(3, 16, 64)),
    ),
    "quantize_int8": (
        "ttt", lambda x, values, scales: launchers.quantize_int8(x, 0, out=(values, scales)),
        lambda: (half(16, 256), torch.zeros(16, 256, dtype=torch.int8), torch.ones(16, 1)),
    ),
    "quantize_fp8": (
        "ttt", lambda x, values, scales: launchers.quantize_fp8(x, 0, FLOAT8, out=(values, scales)),
        lambda: (half(16, 256), half(16, 256).to(FLOAT8), torch.ones(16, 1)),
    ),
    "silu_mul_quantize": (
        "tttt", lambda x, up, values, scales: launchers.silu_mul_quantize(x, up, 0, FLOAT8, out=(values, scales)),
        lambda: (half(16, 256), half(16, 256), half(16, 256).to(FLOAT8), torch.ones(16, 1)),
    ),
    "attention": ("tt", attention_call, lambda: (half(2, 40, 384), half(2, 4, 40, 32))),
    "attention_backward": (
        "tttttttt",
        lambda g, q, k, lse, *out: launchers.attention_backward(g, q, k, k, g, lse, None, True, out=out),
        lambda: (half(2, 4, 40, 32), half(2, 4, 40, 32), half(2, 2, 40, 32), torch.empty(2, 4, 40),
                 half(2, 4, 40, 32), half(2, 2, 40, 32), half(2, 2, 40, 32), half(0)),
    ),
    "decode": ("ttttq", decode_call, lambda: (half(1, 8, 1, 64), half(1, 2, 900, 64), half(1, 2, 900, 64),
                                              half(1, 8, 1, 64), 899)),
    "mla": ("ttttttt", mla_call, lambda: (half(2, 1, 16, 512), half(2, 1, 16, 64), half(40, 64, 512), half(40, 64, 64),
                                          torch.zeros(2, 20, dtype=torch.int32), torch.ones(2, dtype=torch.int32),
                                          half(2, 1, 16, 512))),
    "mla, whole cache": ("ttttt", whole_mla_call, lambda: (half(2, 1, 16, 512), half(2, 1, 16, 64), half(2, 640, 512),
                                                           half(2, 640, 64), half(2, 1, 16, 512))),
    "mla, scheduled": (
        "ttttttt", scheduled_mla_call,
        lambda: (half(20, 1, 16, 512), half(20, 1, 16, 64), half(20, 640, 512), half(20, 640, 64),
                 torch.full((20,), 640, dtype=torch.int32), torch.zeros(27, 4, dtype=torch.int32),
                 half(20, 1, 16, 512)),
    ),
    "mla_decode_lse": (
        "tttttt", whole_mla_lse_call,
        lambda: (half(2, 1, 16, 512), half(2, 1, 16, 64), half(2, 640, 512),
                 half(2, 640, 64), half(2, 1, 16, 512), torch.empty(2, 1, 16)),
    ),
    "mla_decode_fp8": (
        "ttttttt",
        lambda q, q_pe, cache, table, lengths, out, lse: launchers.mla_decode_fp8(
            q, q_pe, cache, table, lengths, out=(out, lse)
        ),
        lambda: (half(2, 1, 16, 512), half(2, 1, 16, 64), torch.zeros(40, 64, 656, dtype=torch.uint8),
                 torch.zeros(2, 10, dtype=torch.int32), torch.full((2,), 600, dtype=torch.int32),
                 half(2, 1, 16, 512), torch.empty(2, 1, 16)),
    ),
    "mla_sparse": (
        "ttttttt",
        lambda q, q_pe, kv, k_pe, listed, out, lse: launchers.mla_sparse(q, q_pe, kv, k_pe, listed, out=(out, lse)),
        lambda: (half(2, 1, 16, 512), half(2, 1, 16, 64), half(2, 640, 512), half(2, 640, 64),
                 torch.zeros(2, 1, 128, dtype=torch.int32), half(2, 1, 16, 512), torch.empty(2, 1, 16)),
    ),
    "lightning_index": (
        "tttt", lambda q, k, weights, out: launchers.lightning_index(q, k, weights, 64, out=out),
        lambda: (half(2, 3, 64, 128), half(2, 640, 128), torch.randn(2, 3, 64),
                 torch.empty(2, 3, 64, dtype=torch.int32)),
    ),
    "index_scores": (
        "tttt", lambda q, k, weights, out: launchers.index_scores(q, k, weights, out=out),
        lambda: (half(2, 3, 64, 128), half(2, 640, 128), torch.randn(2, 3, 64), torch.empty(2, 3, 640)),
    ),
    "nsa_select": (
        "tttt", lambda q, k, lse, out: launchers.nsa_select(q, k, lse, 640, 5, out=out),
        lambda: (half(2, 32, 3, 128), half(2, 2, 10, 128), torch.zeros(2, 32, 3),
                 torch.empty(2, 2, 3, 5, dtype=torch.int32)),
    ),
    "mla_schedule": ("tt", lambda lengths, out: launchers.mla_schedule(lengths, 16, 5, out=out),
                     lambda: (torch.full((9,), 70, dtype=torch.int32), torch.empty(14, 4, dtype=torch.int32))),
    "attention_lse": ("ttttt", attention_lse_call, lambda: (*(half(2, 4, 40, 64) for _ in range(4)),
                                                            torch.empty(2, 4, 40))),
    "attention_varlen": (
        "tttttt", varlen_call,
        lambda: (half(60, 4, 64), half(70, 2, 64), half(70, 2, 64), starts(0, 20, 60), starts(0, 30, 70),
                 half(60, 4, 64)),
    ),
    "attention_varlen_lse": (
        "ttttttt", varlen_call,
        lambda: (half(60, 4, 64), half(70, 2, 64), half(70, 2, 64), starts(0, 20, 60), starts(0, 30, 70),
                 half(60, 4, 64), torch.empty(4, 60)),
    ),
    "attention_varlen_backward": (
        "ttttttttttt", varlen_backward_call,
        lambda: (half(60, 4, 64), half(60, 4, 64), half(70, 2, 64), half(70, 2, 64), half(60, 4, 64),
                 torch.empty(4, 60), starts(0, 20, 60), starts(0, 30, 70), half(60, 4, 64), half(70, 2, 64),
                 half(70, 2, 64)),
    ),
    "attention_block_sparse": (
        "tttttt", sparse_call,
        lambda: (half(2, 4, 200, 64), half(2, 2, 250, 64), half(2, 2, 250, 64), *block_lists(), half(2, 4, 200, 64)),
    ),
    "attention_block_sparse_lse": (
        "ttttttt", sparse_call,
        lambda: (half(2, 4, 200, 64), half(2, 2, 250, 64), half(2, 2, 250, 64), *block_lists(), half(2, 4, 200, 64),
                 torch.empty(2, 4, 200)),
    ),
    "attention_block_sparse_backward": (
        "ttttttttttt", sparse_backward_call,
        lambda: (half(2, 4, 200, 64), half(2, 4, 200, 64), half(2, 2, 250, 64), half(2, 2, 250, 64),
                 half(2, 4, 200, 64), torch.empty(2, 4, 200), *block_lists(), half(2, 4, 200, 64),
                 half(2, 2, 250, 64), half(2, 2, 250, 64)),
    ),
    "attention_fp8": (
        "tttttttt", float8_call,
        lambda: (*(half(2, h, n, 64).to(torch.float8_e4m3fn) for h, n in ((4, 200), (2, 250), (2, 250))),
                 torch.rand(2, 4), torch.rand(2, 2), torch.rand(2, 2), half(2, 4, 200, 64), torch.empty(2, 4, 200)),
    ),
    "attention_paged": (
        "tttttt", paged_call,
        lambda: (half(3, 1, 8, 64), half(9, 16, 2, 64), half(9, 16, 2, 64), torch.zeros(3, 4, dtype=torch.int32),
                 starts(1, 0, 60), half(3, 1, 8, 64)),
    ),
    "attention_paged_lse": (
        "ttttttt", paged_call,
        lambda: (half(3, 1, 8, 64), half(9, 64, 2, 64), half(9, 64, 2, 64), torch.zeros(3, 4, dtype=torch.int32),
                 starts(1, 0, 60), half(3, 1, 8, 64), torch.empty(3, 8, 1)),
    ),
    "linear": ("ttttt", linear_call, lambda: (half(2, 24, 64), half(96, 64), half(96), half(2, 24, 96),
                                              half(2, 24, 96))),
    "swiglu": ("tttt", swiglu_call, lambda: (half(2, 24, 64), half(96, 64), half(96, 64), half(2, 24, 96))),
    "rms_norm": ("ttt", lambda x, w, out: launchers.rms_norm(x, w, out=out), lambda: (half(3, 5, 64), half(64),
                                                                                  half(3, 5, 64))),
    "add_rms_norm": ("ttttt", add_norm_call, lambda: (half(4, 72)[:, 8:], *(half(4, 64), half(64), half(4, 64)),
                                                      half(4, 64))),
    "layer_norm": ("ttt", lambda x, w, out: launchers.layer_norm(x, w, out=out), lambda: (half(6, 40), half(40),
                                                                                      half(6, 40))),
    "fused_norm_quantize": (
        "tttttt", fused_norm_quantize_call,
        lambda: (half(2, 3, 64), half(2, 1, 64), half(2, 3, 64), half(2, 3, 64).to(FLOAT8), torch.ones(2, 3, 2),
                 half(2, 3, 64)),
    ),
    "fused_norm": ("ttttt", fused_norm_call, lambda: (half(2, 3, 64), half(2, 1, 64), half(2, 3, 64), half(2, 3, 64),
                                                      half(2, 3, 64))),
    "softmax": ("tt", lambda x, out: launchers.softmax(x, 1, torch.float32, out=out), lambda: (half(3, 20, 8),
                                                                                           torch.empty(3, 20, 8))),
    "cross_entropy": (
        "ttttt", lambda x, y, w, *out: launchers.cross_entropy(x, y, w, -1, 0.1, 1e-4, out=out),
        lambda: (half(3, 5, 64), torch.ones(3, 5).long(), half(64), torch.empty(3, 5), torch.empty(3, 5)),
    ),
    "cross_entropy_backward": (
        "ttttt", lambda g, x, y, lse, out: launchers.cross_entropy_backward(g, x, y, lse, None, out=out),
        lambda: (torch.ones(3, 5), half(3, 5, 64), torch.ones(3, 5).int(), torch.ones(3, 5), half(3, 5, 64)),
    ),
    "route": (
        "tttt", lambda x, b, *out: launchers.route(x, b, 3, "sigmoid", 4, 2, out=out),
        lambda: (half(3, 5, 64), half(64), torch.empty(3, 5, 3), torch.empty(3, 5, 3).long()),
    ),
    "group_tokens": (
        "tttt", lambda x, *out: launchers.group_tokens(x, 6, out=out),
        lambda: (torch.ones(7, 3).long(), *(torch.empty(s, dtype=torch.int32) for s in ((21,), (7, 3), (6,)))),
    ),
    "linear_cross_entropy": (
        "tttttt", lambda x, w, y, b, *out: launchers.linear_cross_entropy(x, w, y, b, None, -1, 0.1, 0.1, 9.0, out=out),
        lambda: (half(3, 5, 64), half(24, 64), torch.ones(3, 5).long(), half(24), torch.empty(3, 5), torch.empty(3, 5)),
    ),
    "linear_cross_entropy_gradients": (
        "tttttttt", lambda *x: launchers.linear_cross_entropy_gradients(*x[:4], out=x[4:]),
        lambda: (torch.ones(3, 5), half(3, 5, 64), half(24, 64), torch.ones(3, 5).long(), torch.empty(()),
                 half(3, 5, 64), half(24, 64), half(0)),
    ),
    "conv": (
        "tttt", lambda x, w, b, out: launchers.conv(x, w, b, None, (), (1, 1), (), "silu", out=out),
        lambda: (half(2, 24, 20, 64), half(32, 3, 3, 64), half(32), half(2, 24, 20, 32)),
    ),
    "causal_conv1d": (
        "tttt", lambda x, w, b, out: launchers.causal_conv1d(x, w, b, None, "silu", out=out),
        lambda: (half(2, 24, 64), half(64, 4), half(64), half(2, 24, 64)),
    ),
    "causal_conv1d_backward": (
        "tttttttt",
        lambda g, x, w, b, *out: launchers.causal_conv1d_backward(g, x, w, b, None, "silu", out=out),
        lambda: (half(2, 24, 64), half(2, 24, 64), half(64, 4), half(64), half(2, 24, 64), half(64, 4), half(64),
                 half(0)),
    ),
    "causal_conv1d_update": (
        "ttttt", lambda x, s, w, *out: launchers.causal_conv1d_update(x, s, w, None, "silu", out=out),
        lambda: (half(5, 64), half(5, 64, 4), half(64, 4), half(5, 64), half(5, 64, 4)),
    ),
    "ssd_chunk_scan": (
        "tttttt", lambda x, dt, A, B, *out: launchers.ssd_chunk_scan(x, dt, A, B, B, dt_softplus=True, out=out),
        lambda: (half(2, 40, 4, 32), half(2, 40, 4), half(4), half(2, 40, 1, 16), half(2, 40, 4, 32),
                 torch.empty(2, 4, 32, 16)),
    ),
    "ssd_chunk_scan_backward": (
        "ttttttttttttt",
        lambda g, x, dt, A, B, *out: launchers.ssd_chunk_scan_backward(g, None, x, dt, A, B, B, out=out),
        lambda: (half(2, 40, 4, 32), half(2, 40, 4, 32), half(2, 40, 4), half(4), half(2, 40, 1, 16),
                 half(2, 40, 4, 32), half(2, 40, 4), half(4), half(2, 40, 1, 16), half(2, 40, 1, 16), half(0), half(0),
                 half(0)),
    ),
    "gated_delta_rule": (
        "ttttttt", lambda q, k, v, g, b, *out: launchers.gated_delta_rule(q, k, v, g, b, use_qk_l2norm=True, out=out),
        lambda: (half(2, 70, 2, 16), half(2, 70, 2, 16), half(2, 70, 4, 32), half(2, 70, 4), half(2, 70, 4),
                 half(2, 70, 4, 32), torch.empty(2, 4, 16, 32)),
    ),
    "gated_delta_rule_backward": (
        "tttttttttttt",
        lambda d, q, k, v, g, b, *out: launchers.gated_delta_rule_backward(d, None, q, k, v, g, b, out=out),
        lambda: (half(2, 70, 4, 32), half(2, 70, 2, 16), half(2, 70, 2, 16), half(2, 70, 4, 32), half(2, 70, 4),
                 half(2, 70, 4), half(2, 70, 2, 16), half(2, 70, 2, 16), half(2, 70, 4, 32), half(2, 70, 4),
                 half(2, 70, 4), half(0)),
    ),
    "gated_delta_rule_step": (
        "tttttttt", lambda s, q, k, v, g, b, *out: launchers.gated_delta_rule_step(s, q, k, v, g, b, out=out),
        lambda: (half(5, 4, 16, 32), half(5, 1, 2, 16), half(5, 1, 2, 16), half(5, 1, 4, 32), half(5, 1, 4),
                 half(5, 1, 4), half(5, 1, 4, 32), half(5, 4, 16, 32)),
    ),
    "gated_linear_attention": (
        "tttttt", lambda q, k, v, g, *out: launchers.gated_linear_attention(q, k, v, g, out=out),
        lambda: (half(2, 70, 4, 16), half(2, 70, 4, 16), half(2, 70, 4, 32), half(2, 70, 4, 16), half(2, 70, 4, 32),
                 torch.empty(2, 4, 16, 32)),
    ),
    "gated_linear_attention_backward": (
        "tttttttttt",
        lambda d, q, k, v, g, *out: launchers.gated_linear_attention_backward(d, None, q, k, v, g, out=out),
        lambda: (half(2, 70, 4, 32), half(2, 70, 4, 16), half(2, 70, 4, 16), half(2, 70, 4, 32), half(2, 70, 4, 16),
                 half(2, 70, 4, 16), half(2, 70, 4, 16), half(2, 70, 4, 32), half(2, 70, 4, 16), half(0)),
    ),
    "gated_linear_attention_step": (
        "ttttttt", lambda s, q, k, v, g, *out: launchers.gated_linear_attention_step(s, q, k, v, g, out=out),
        lambda: (half(5, 4, 16, 32), half(5, 1, 2, 16), half(5, 1, 2, 16), half(5, 1, 4, 32), half(5, 1, 4),
                 half(5, 1, 4, 32), half(5, 4, 16, 32)),
    ),
    "rwkv7": (
        "tttttt", lambda q, k, v, g, *out: launchers.rwkv7(q, k, v, g, k, k, out=out),
        lambda: (half(2, 70, 4, 16), half(2, 70, 4, 16), half(2, 70, 4, 32), half(2, 70, 4, 16), half(2, 70, 4, 32),
                 torch.empty(2, 4, 16, 32)),
    ),
    "rwkv7_backward": (
        "tttttttttttt",
        lambda d, q, k, v, g, *out: launchers.rwkv7_backward(d, None, q, k, v, g, k, k, out=out),
        lambda: (half(2, 70, 4, 32), half(2, 70, 4, 16), half(2, 70, 4, 16), half(2, 70, 4, 32), half(2, 70, 4, 16),
                 half(2, 70, 4, 16), half(2, 70, 4, 16), half(2, 70, 4, 32), half(2, 70, 4, 16), half(2, 70, 4, 16),
                 half(2, 70, 4, 16), half(0)),
    ),
    "rwkv7_step": (
        "ttttttt", lambda s, q, k, v, g, *out: launchers.rwkv7_step(s, q, k, v, g, k, k, out=out),
        lambda: (half(5, 4, 16, 32), half(5, 1, 4, 16), half(5, 1, 4, 16), half(5, 1, 4, 32), half(5, 1, 4, 16),
                 half(5, 1, 4, 32), half(5, 4, 16, 32)),
    ),
    "selective_state_update": (
        "ttttttt", lambda s, x, dt, A, B, *out: launchers.selective_state_update(s, x, dt, A, B, B, out=out),
        lambda: (half(5, 4, 32, 16), half(5, 4, 32), half(5, 4, 32), half(4, 32, 16), half(5, 1, 16), half(5, 4, 32),
                 half(5, 4, 32, 16)),
    ),
}  # fmt: skip


def heap_of_process():
    """The addresses of the heap. It holds small tensors, and it may lie low, among the numbers of a call."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    return range(*(int(bound, 16) for bound in lines[0].split()[0].split("-"))) if lines else range(0)


def asked(fake, call, args):
    """What the driver is asked for, with places instead of addresses; what is in no tensor is in the workspace."""

    def place(slot):
        memories = [a.untyped_storage() for a in args]
        found = [
            (n, slot - args[n].data_ptr())
            for n, memory in enumerate(memories)
            if memory.data_ptr() <= slot < memory.data_ptr() + memory.nbytes()
        ]
        return found[0] if found else "workspace" if slot >= heap.start else slot

    fake.launches()
    call(*args)
    heap = heap_of_process()  # the call may have moved its end: a workspace is freed behind it
    count = fake.number("slots").value
    return [
        (r.function, list(r.grid), r.block[0], r.shared, list(map(place, r.slots[:count]))) for r in fake.launches()
    ]


# Calls of torch beside the launches, which no site repeats: the choice of the largest scores, lists by keys, and steps
# of a time beside each other.
WITH_TORCH = (
    "lightning_index", "nsa_select", "attention_block_sparse_backward", "rwkv7", "rwkv7_backward", "rwkv7_step",
)  # fmt: skip
LAUNCHES_ALONE = {name: call for name, call in CALLS.items() if name not in WITH_TORCH}


@pytest.mark.parametrize(("kinds", "function", "make"), LAUNCHES_ALONE.values(), ids=LAUNCHES_ALONE)
def test_sites_replay(kinds, function, make, gpu):
    calls = []

    def call(*args):
        calls.append(1)
        function(*args)

    site = launchers.site(kinds, call)
    args = list(make())
    if isinstance(args[-1], int):
        number, args = args[-1:], args[:-1]
        site = (lambda inner: lambda *tensors: inner(*tensors, *number))(site)
        plain = lambda *tensors: function(*tensors, *number)  # noqa: E731
    else:
        plain = function
    plan = planned(plain, args)
    gpu.number("slots").value = min(16, *(len(entry.args) for entry in entries_of(plan)))
    wanted = asked(gpu, plain, args)
    for turn in range(4):
        assert asked(gpu, site, [*map(moved, args)] if turn == 3 else args) == wanted, turn
    assert len(calls) == 2


@pytest.mark.parametrize(("kinds", "function", "make"), LAUNCHES_ALONE.values(), ids=LAUNCHES_ALONE)
def test_what_is_launched_is_known_without_tensors(kinds, function, make, gpu):
    args = list(make())
    number = args[-1:] if isinstance(args[-1], int) else []
    plan = planned(lambda *tensors: function(*tensors, *number), [x for x in args if isinstance(x, torch.Tensor)])
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    forms = [TensorMeta(x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]
    recorded = record(lambda given: function(*given, *number), forms, Symbols(None))
    assert entries_of(recorded.plan) == entries_of(plan) and "tile::run(plan" in embedded(recorded).body


def planned(function, tensors):
    """The plan of a call on tensors with memory."""
    plan = LaunchPlan(x.detach() for x in tensors)
    with planning(plan):
        function(*plan.roots)
    assert not plan.torch_calls
    return plan


def entries_of(plan):
    """The entries of the cubins that a plan launches."""
    return [entry for launch in plan.launches for entry in launch.kernel.launcher.source.entries]


SIZES = {
    "attention_block_sparse": 250, "attention_varlen": 60, "attention_varlen_backward": 70, "attention_paged": 3,
    "attention_fp8": 250,
    "gemm": 48, "grouped_gemm": 48, "k_grouped_gemm": 48, "dequant_gemm": 16, "scaled_gemm": 16, "quantize_fp8": 16,
    "quantize_int8": 16, "silu_mul_quantize": 16,
    "grouped_dequant_gemm": 48, "grouped_scaled_gemm": 48, "k_grouped_scaled_gemm": 48, "masked_scaled_gemm": 16,
    "decode": 900, "mla": 2, "mla_decode_fp8": 2, "mla_sparse": 640,
    "mla, whole cache": 640, "mla_decode_lse": 2, "attention_lse": 40, "linear": 24, "swiglu": 24, "rms_norm": 5,
    "add_rms_norm": 4, "layer_norm": 6, "fused_norm": 3, "fused_norm_quantize": 3, "softmax": 3, "cross_entropy": 5,
    "cross_entropy_backward": 5, "conv": 24, "causal_conv1d": 24, "causal_conv1d_update": 5, "ssd_chunk_scan": 40,
    "selective_state_update": 5, "gated_delta_rule": 70, "gated_delta_rule_step": 5, "gated_linear_attention": 70,
    "gated_linear_attention_step": 5,
}  # fmt: skip
"""Of a dimension of each call that may be known at run time only."""


@pytest.mark.parametrize("name", SIZES)
def test_what_is_launched_is_known_for_all_sizes(name, gpu):
    _, function, make = CALLS[name]
    args, env = list(make()), ShapeEnv()
    number = args[-1:] if isinstance(args[-1], int) else []
    size = env.create_symbol(SIZES[name], ConstantSource("n"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    forms = []
    for x in (each for each in args if isinstance(each, torch.Tensor)):
        shape = [size if n == SIZES[name] else n for n in x.shape]
        dense = [sympy.prod(shape[d + 1 :]) for d in range(len(shape))]
        forms.append(TensorMeta(x.dtype, x.device, shape, dense if x.is_contiguous() else x.stride()))
    body = embedded(record(lambda given: function(*given, *number), forms, Symbols(env))).body
    checks = [line for line in body.splitlines() if "require" in line and "multiples of" not in line]
    # only that 32 bits hold a size, and a tensor map a stride
    limits = "<= 2147418112ll", "<= 4294967296ll", "< 1099511627776ll"
    assert "numbers[0]" in body and all(any(limit in line for limit in limits) for line in checks)


@pytest.mark.parametrize("place", ["size - 1", "place"])
def test_places_of_queries_may_be_known_at_run_time_only(place, gpu):
    """As in a step of decoding over a cache whose length is a symbol: the query is at its end, or anywhere."""
    q, k, *_ = CALLS["decode"][2]()
    env = ShapeEnv()
    symbol = lambda name, hint: env.create_symbol(  # noqa: E731
        hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    size = symbol("size", 900)
    known, symbols = {"size": size, "place": symbol("place", 77)}, Symbols(env)
    offset = symbols.number(env.create_symintnode(eval(place, known), hint=77))
    cache = TensorMeta(k.dtype, k.device, [1, 2, size, 64], [128 * size, 64 * size, 64, 1])
    queries = TensorMeta(q.dtype, q.device, q.shape, q.stride())
    calls = lambda given: decode_call(*given, offset)  # noqa: E731
    body = embedded(record(calls, [queries, cache, cache, queries], symbols)).body
    assert ("(-1ll + numbers[0])" if place == "size - 1" else "numbers[1]") in body


def moved(x):
    """The same values elsewhere, in the same strides and from a multiple of as many bytes on."""
    whole = torch.empty(x.untyped_storage().nbytes() // x.element_size() + 64, dtype=x.dtype)
    shift = next(n for n in range(64) if (whole.data_ptr() + n * x.element_size() - x.data_ptr()) % 16 == 0)
    return whole.as_strided(x.shape, x.stride(), shift).copy_(x)


def test_every_op_has_a_call():
    tested = {name.split(",")[0] for name in CALLS} - {"decode", "mla"} | {"mla_decode"}
    assert tested == set(OPERATORS)


def test_a_compiled_model(gpu, monkeypatch):
    """Each different call of its graph goes the long way twice, however many layers make it."""

    def model(x, *weights):
        for w in weights:
            x = x + torch.nn.functional.rms_norm(x, (64,)) @ w.t()
        return x

    long_ways = []
    original = LongWay.__call__
    monkeypatch.setattr(LongWay, "__call__", lambda self, *args: long_ways.append(1) or original(self, *args))
    torch._dynamo.reset()
    run = torch.compile(model, backend=functools.partial(tile, options={"select": "tile"}))
    args = half(32, 64), *(half(64, 64) for _ in range(5))
    launches = []
    with torch.no_grad(), no_graph_caches():
        for _ in range(3):
            run(*args)
            launches.append([(r.function, list(r.grid)) for r in gpu.launches()])
    assert len(long_ways) == 4 and len(launches[0]) == 10
    assert launches[1] == launches[0] == launches[2]


def test_views_begin_where_their_tensor_does():
    whole = torch.arange(40.0)
    x = whole[4:].view(6, 6)
    assert launchers.view(x, (2, 3), (6, 2), 1).tolist() == [[5, 7, 9], [11, 13, 15]]


def test_on_the_cpu_a_site_is_the_call():
    def call(x, out):
        launchers.softmax(x, out=out)

    site = launchers.site("tt", call)
    x, out = torch.randn(3, 8), torch.empty(3, 8)
    for _ in range(3):
        site(x, out)
        torch.testing.assert_close(out, torch.softmax(x, -1))
