# SPDX-License-Identifier: Apache-2.0
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

import torch_tile
from benchmarks import mla
from benchmarks.mla import PAGE, Shape
from benchmarks.problem import error_of, tolerance_of

SMALL = Shape(2, 2 * PAGE, 4, torch.float32, latent=32, rotary=16, splits=2)


def fake_decode(q, cache, table, lengths, latent, plan, splits, causal):
    """FlashMLA's form: pages of 64 positions with latent and rotary part side by side, one key head."""
    assert cache.shape[1:] == (PAGE, 1, q.shape[-1]) and (plan, splits, causal) == ("plan", "splits", False)
    keys = cache[table.long()].flatten(1, 3).view(q.shape[0], -1, q.shape[-1])
    assert lengths.tolist() == [keys.shape[1]] * q.shape[0]
    scores = (q[:, 0].double() @ keys.double().mT) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ keys[..., :latent].double())[:, None], None


def operands(s: Shape) -> list[torch.Tensor]:
    shapes = (s.batch, 1, s.heads), (s.batch, s.length)
    return [torch.randn(*shape, n).to(s.dtype) for shape in shapes for n in (s.latent, s.rotary)]


def test_rivals_compute_the_same(monkeypatch):
    fake = SimpleNamespace(
        get_mla_metadata=lambda lengths, heads, kv_heads: ("plan", "splits"), flash_mla_with_kvcache=fake_decode
    )
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    monkeypatch.setitem(sys.modules, "tilelang", torch_tile)
    tensors = operands(SMALL)
    want = mla.reference(*(x.double() for x in tensors))[0]
    assert error_of(mla.flash_mla(SMALL, *tensors)()[0], want) < 1e-5
    assert error_of(mla.plain(*tensors), want) < 1e-5
    narrow = [x.half() for x in tensors]
    call = mla.tilelang(replace(SMALL, dtype=torch.float16), *narrow)
    assert error_of(call(), mla.reference(*(x.double() for x in narrow))[0]) < tolerance_of(torch.float16)


def test_expected_is_a_sample_of_the_definition():
    case = mla.case(replace(SMALL, batch=9, dtype=torch.float64), "cpu")
    assert case.expected().shape == (4, 1, 4, 32)
    assert error_of(case.sample(case.rivals["torch"]()()), case.expected()) < 1e-5  # its softmax is in float32
    assert error_of(case.sample(case.ours()[0]), case.expected()) < 1e-9


def test_rows_of_the_targets():
    found = {p.name: p for p in mla.problems("cuda")}
    row = found["mla b64 s4096 h128 fp16"]
    assert row.flops == 2.0 * 64 * 128 * 4096 * 1088
    assert list(row.asked.items()) == [("FlashMLA", 1.0), ("tilelang", 1.28), ("Inductor", 2.2)]
    assert found["mla b64 s8192 h16 fp16"].asked == {"FlashMLA": 1.0, "ceiling": 0.9}
    assert sum("bf16" in name for name in found) == 9
    ragged = found["mla b64 s1 to 8192 h128 bf16"]
    assert ragged.asked == {"FlashMLA": 1.0, "unscheduled": 1.2}
    assert 0.4 < ragged.flops / (2.0 * 64 * 128 * 8192 * 1088) < 0.6


def test_sequences_of_different_lengths():
    case = mla.ragged_case(replace(SMALL, batch=5, length=300, dtype=torch.float64, unscheduled=1.0), "cpu")
    assert case.expected().shape == (4, 1, 4, 32)
    assert sorted(Shape(64, 8192, unscheduled=1.2).lengths)[0] == 1
    for call in (case.ours, case.rivals["unscheduled"]()):
        assert error_of(case.sample(call()), case.expected()) < 1e-9
