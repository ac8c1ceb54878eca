# SPDX-License-Identifier: Apache-2.0
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import torch_tile
from benchmarks import attention
from benchmarks.attention import Shape
from benchmarks.problem import error_of, tolerance_of

SHAPES = [
    Shape(1, 4, 2, 128, 128, 32, True, dtype=torch.float16),
    Shape(2, 4, 4, 128, 128, 32, False, dtype=torch.float16),
    Shape(2, 8, 2, 3, 70, 32, False, dtype=torch.bfloat16),
]


def fake_flash_attention(q, k, v, causal=False):
    """FlashAttention-3's layout, and the pair that some versions of it return."""
    operands = [x.transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*operands, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2), None


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_rivals_compute_the_same(monkeypatch, shape):
    module = SimpleNamespace(flash_attn_func=fake_flash_attention, flash_attn_with_kvcache=fake_flash_attention)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setitem(sys.modules, "tilelang", torch_tile)
    q = torch.randn(shape.batch, shape.heads, shape.queries, shape.d).to(shape.dtype)
    k, v = (torch.randn(shape.batch, shape.kv_heads, shape.keys, shape.d).to(shape.dtype) for _ in "kv")
    want = F.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
    )
    calls = [attention.flash_attention_3(shape, q, k, v), attention.rivals_of(shape, q, k, v)["torch"]()]
    if not shape.is_decode:
        calls.append(attention.tilelang(shape, q, k, v))
    for call in calls:
        assert error_of(call(), want) < 2 * tolerance_of(shape.dtype)


@pytest.mark.parametrize(
    "shape",
    [*SHAPES, replace(SHAPES[1], v_d=16), *(replace(SHAPES[0], causal=False, mask=m) for m in ("bool", "bias"))],
    ids=lambda s: s.name,
)
def test_expected_is_the_definition(shape):
    """The sampled reference equals rows of the whole one, causal or not, grouped or not."""
    case = attention.case(replace(shape, dtype=torch.float64), "cpu")
    whole = case.rivals["torch"]()()
    assert error_of(case.sample(whole), case.expected()) < 1e-12
    assert error_of(case.sample(case.ours()), case.expected()) < 1e-9


def test_rows_of_the_targets():
    found = {p.name: p for p in attention.problems("cuda")}
    causal = found["attention b1 s4096 h32 d128 causal fp16"]
    assert causal.flops == 4.0 * 32 * 4096**2 * 128 / 2 and causal.asked == {"FA3": 1.0, "cuDNN": 1.23}
    latent = found["attention b1 s4096 h128 d192/128 causal bf16"]
    assert latent.flops == 128 * 4096**2 * (192 + 128.0)
    decode = found["decode b8 s8192 q1 h64/8 d128 full bf16"]
    assert decode.bytes == 2 * 2 * 8 * 128 * (8 * 8192 + 64.0) and decode.asked == {"cuDNN": 1.15}
    assert found["decode b8 s8192 q16 h64/8 d128 full bf16"].asked == {"cuDNN": 3.0}


@pytest.mark.parametrize("causal", [True, False])
def test_float8_rows_are_right_and_beside_bf16(causal):
    """Ours is within what weights in float8 cost, and the rival computes the same numbers in bf16."""
    case = attention.fp8_case(Shape(2, 4, 2, 70, 70, 32, causal, dtype=torch.bfloat16, fp8=True), "cpu")
    want = case.expected()
    assert error_of(case.sample(case.read(case.ours())), want) < case.leeway * tolerance_of(torch.bfloat16)
    assert error_of(case.sample(case.read(case.rivals["bf16"]()())), want) < tolerance_of(torch.bfloat16)
