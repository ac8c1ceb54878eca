# SPDX-License-Identifier: Apache-2.0
import logging

import pytest
import torch
import torch.nn.functional as F

from torch_tile.nn import Attention, functional
from torch_tile.nn.functional import attend, rotate


def inputs(sq: int = 6, skv: int = 9, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, heads, sq, 16), torch.randn(2, kv_heads, skv, 16), torch.randn(2, kv_heads, skv, 8)


def visible(sq: int, skv: int, causal: bool, window: int) -> torch.Tensor:
    i, j = torch.arange(sq)[:, None] + skv - sq, torch.arange(skv)
    return ((j <= i) if causal else torch.ones(sq, skv, dtype=torch.bool)) & ((j > i - window) if window else True)


def exact(q, k, v, mask, sinks=None, softcap=None, scale=None):
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(2, -1, q.shape[2], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("option", ["none", "softcap", "sinks", "sinks with gradient"])
def test_attend(causal: bool, window: int, option: str, seed: int) -> None:
    q, k, v = inputs()
    sinks = torch.randn(4) if "sinks" in option else None
    softcap = 1.5 if option == "softcap" else None
    q.requires_grad_(option == "sinks with gradient")
    out = attend(q, k, v, causal=causal, window=window, sinks=sinks, softcap=softcap, scale=0.4)
    wanted = exact(q, k, v, visible(6, 9, causal, window), sinks, softcap, 0.4)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    assert out.requires_grad == q.requires_grad


@pytest.mark.parametrize("plain", [True, False])
def test_mask_is_used_with_causal_and_rows_may_be_empty(plain: bool, seed: int) -> None:
    q, k, v = inputs()
    mask = torch.rand(2, 1, 6, 9) > 0.5
    mask[0, 0, 2] = False
    both = mask & visible(6, 9, True, 0)
    out = (
        functional._plain(q, k, v, mask, True, None, 0, 0.0, None, None)
        if plain
        else attend(q, k, v, mask, causal=True)
    )
    wanted = exact(q, k, v, both).nan_to_num(0.0)  # a softmax over nothing
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    assert out[0, :, 2].eq(0).all()
    bias = torch.randn(1, 4, 6, 9)
    added = attend(q, k, v, bias)
    wanted = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), bias.double(), enable_gqa=True)
    torch.testing.assert_close(added.double(), wanted, rtol=1e-4, atol=1e-5)


def test_dropout_drops_and_says_that_no_kernel_is_used(seed: int, caplog, monkeypatch) -> None:
    monkeypatch.setattr(functional, "_told", set())
    q, k, _ = inputs()
    v = torch.ones(2, 2, 9, 8)
    with caplog.at_level(logging.WARNING, "torch_tile"):
        out = torch.stack([attend(q, k, v, dropout=0.5) for _ in range(200)])
    assert out.std() > 0.1
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), rtol=0.05, atol=0.0)
    assert [r.message for r in caplog.records] == [
        "attention with dropout is computed by plain torch, not by a tile kernel"
    ]


@pytest.mark.parametrize("way", ["kernel", "dropout", "sinks in training"])
@pytest.mark.parametrize(
    "mask", [torch.ones(6, 9).long(), torch.ones(6, 9).byte(), torch.ones(3, 1, 6, 9), torch.ones(6, 8)]
)
def test_every_way_refuses_a_mask_of_another_dtype_or_shape(mask, way: str, seed: int) -> None:
    """Plain torch would add integers to scores, and give more results than there are queries."""
    sinks = torch.zeros(4, requires_grad=True) if way == "sinks in training" else None
    with pytest.raises((TypeError, RuntimeError), match=r"attend: mask has"):
        attend(*inputs(), mask, dropout=0.5 * (way == "dropout"), sinks=sinks)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_turns_pairs(interleaved: bool, seed: int) -> None:
    x, angle = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.rand(2, 5, 4, dtype=torch.float64) * 6
    twice = torch.cat([angle, angle], -1)
    turned = rotate(x, twice.cos(), twice.sin(), interleaved)
    pairs = torch.complex(x[..., 0::2], x[..., 1::2]) if interleaved else torch.complex(x[..., :4], x[..., 4:])
    wanted = pairs * torch.exp(1j * angle)[:, None]
    torch.testing.assert_close(turned, torch.cat([wanted.real, wanted.imag], -1))


ALIKE = {  # what `attend` takes or refuses, whether plain torch computes it or a kernel
    "nothing more": {},
    "no window: None": {"window": None},
    "no window: False": {"window": False},
    "one sink": {"sinks": torch.zeros(1)},
    "a sink without dimensions": {"sinks": torch.tensor(0.5)},
    "sinks of another number": {"sinks": torch.zeros(3)},
    "sinks in columns": {"sinks": torch.zeros(4, 1)},
    "a scale in a tensor": {"scale": torch.tensor(0.25)},
    "no cap: 0": {"softcap": 0.0},
    "a negative cap": {"softcap": -1.0},
    "a window that is True": {"window": True},
    "a negative window": {"window": -1},
    "keys of another dtype": {"k": torch.ones(2, 2, 9, 16, dtype=torch.float64)},
    "one batch of keys": {"k": torch.ones(1, 2, 9, 16), "v": torch.ones(1, 2, 9, 8)},
    "no key": {"k": torch.ones(2, 2, 0, 16), "v": torch.ones(2, 2, 0, 8)},
    "three dimensions": {"q": torch.ones(4, 6, 16)},
    "two dimensions": {"q": torch.ones(6, 16)},
}


@pytest.mark.parametrize("case", ALIKE)
def test_attend_takes_the_same_with_and_without_dropout(case: str, seed: int) -> None:
    given = dict(zip("qkv", inputs(), strict=True)) | ALIKE[case]
    found = []
    for dropout in (0.0, 1e-30):
        try:
            found.append(attend(**given, dropout=dropout))
        except (TypeError, RuntimeError, ValueError) as problem:
            found.append(str(problem))
    kernel, plain = found
    assert isinstance(kernel, str) == isinstance(plain, str), found
    if isinstance(kernel, str):
        assert kernel == plain and kernel.startswith("attend: "), found
    else:
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sinks", [torch.tensor([0.7]), torch.tensor(0.7)])
@pytest.mark.parametrize("in_training", [True, False])
def test_one_sink_serves_all_heads(sinks: torch.Tensor, in_training: bool, seed: int) -> None:
    q, k, v = inputs()
    out = attend(q, k, v, sinks=sinks.clone().requires_grad_(in_training), scale=0.4)
    wanted = exact(q, k, v, visible(6, 9, False, 0), sinks.expand(4), None, 0.4)
    torch.testing.assert_close(out.detach().double(), wanted, rtol=1e-4, atol=1e-5)


def test_angles_without_a_batch_are_those_of_every_sequence(seed: int) -> None:
    x, angle = torch.randn(2, 5, 5, 8), torch.rand(5, 8)
    torch.testing.assert_close(rotate(x, angle.cos(), angle.sin()), rotate(x, angle.cos()[None], angle.sin()[None]))
    with pytest.raises(RuntimeError, match=r"rotate: cos has 7 positions.*expected 5.*cos\[\.\.\., start"):
        rotate(x, torch.ones(7, 8), torch.ones(7, 8))
    layer, states = Attention(24, 3), torch.randn(2, 5, 24)
    torch.testing.assert_close(
        layer(states, (angle.cos(), angle.sin())), layer(states, (angle.cos()[None], angle.sin()[None]))
    )


@pytest.mark.parametrize("window", [None, False, 0])
def test_layers_without_a_window(window) -> None:
    assert Attention(32, 2, window=window).window == 0
    with pytest.raises(TypeError, match="Attention: window is True; expected an integer of at least 0"):
        Attention(32, 2, window=True)


def test_lengths_may_be_tensors_of_one_number(seed: int) -> None:
    """As `lengths.max()` gives them."""
    q, starts = torch.randn(9, 4, 16), torch.tensor([0, 3, 9], dtype=torch.int32)
    most = starts.diff().max()
    out = functional.attend_varlen(q, q, q, starts, starts, most, most, causal=True)
    torch.testing.assert_close(out, functional.attend_varlen(q, q, q, starts, starts, 6, 6, causal=True))
    with pytest.raises(TypeError, match="attend_varlen: most_queries is of type Tensor; expected an integer"):
        functional.attend_varlen(q, q, q, starts, starts, starts.diff(), most)
