# SPDX-License-Identifier: Apache-2.0
"""Composite torch calls are captured with their meaning, gradients included."""

import pytest
import torch
import torch.nn.functional as F

from torch_tile.inductor.report.rows import collect

CALLS = {
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "attention"),
    "sdpa causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), "attention"),
    "sdpa scale": (lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.3), "attention"),
    "sdpa gqa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True),
        "attention",
    ),
    "sdpa bias": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, k[..., :7, :1].detach().mT), "attention"),
    "rms_norm": (lambda q, k, v: F.rms_norm(q, (8,), k[0, 0, 0], 1e-5), "norm"),
    "rms_norm no eps": (lambda q, k, v: F.rms_norm(q, (8,)), "norm"),
    "layer_norm": (lambda q, k, v: F.layer_norm(q, (8,), k[0, 0, 0], v[0, 0, 0]), "norm"),
    "layer_norm bare": (lambda q, k, v: torch.layer_norm(q, (8,)), "norm"),
    "softmax": (lambda q, k, v: F.softmax(q, 1), "softmax"),
    "softmax method": (lambda q, k, v: q.softmax(dim=-1), "softmax"),
    "softmax double": (lambda q, k, v: torch.softmax(q, -2, dtype=torch.float64), "softmax"),
}


def flash_on_cpu(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name, light, generator):
    f, family = CALLS[name]
    args = [torch.randn(2, 4, 7, 8, generator=generator, requires_grad=True) for _ in range(3)]
    got, report = light(f, *args)
    want = f(*args)
    assert [r.status for r in report.select(family)] == ["replaced"], report
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(want.shape, generator=generator, dtype=want.dtype)
    grads = [torch.autograd.grad(y, args, upstream, allow_unused=True) for y in (got, want)]
    for ours, eager in zip(*grads, strict=True):
        assert (ours is None) == (eager is None)
        if ours is not None:
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("f", "family", "reason"),
    [
        (lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).isfinite().all(), "attention", "dropout"),
        (lambda q: F.layer_norm(q, (7, 8)), "norm", "2 dimensions"),
        (lambda q: F.group_norm(q, 1), "norm", "no kernel for GroupNorm"),
        (lambda q: F.rms_norm(q, (7, 8)), "norm", "2 dimensions"),
    ],
)
def test_refusals_say_why(f, family, reason, light, generator):
    q = torch.randn(2, 4, 7, 8, generator=generator)
    with torch.no_grad():
        got, report = light(f, q)
        torch.testing.assert_close(got, f(q), rtol=1e-5, atol=1e-5)
    assert any(reason in r.reason for r in report.missed(family)), report


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("heads", [(1, 4, 4), (4, 1, 4), (4, 4, 1), (1, 4, 1), (1, 1, 4), (4, 2, 4), (4, 4, 2)])
def test_numbers_of_heads_that_broadcast_stay_or_are_expanded(heads, grouped, dynamic, light, generator):
    """Torch takes them, or repeats them under `enable_gqa`; `tile.attention` refuses them."""
    args = [torch.randn(2, n, length, 8, generator=generator) for n, length in zip(heads, (7, 5, 5), strict=True)]
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)  # noqa: E731
    try:
        want = f(*args)
    except RuntimeError:
        pytest.skip("torch refuses it, too")
    with torch.no_grad():
        got, _ = light(f, *args, dynamic=dynamic)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("f", [F.scaled_dot_product_attention, flash_on_cpu], ids=["functional", "aten"])
def test_values_of_another_length_than_keys_stay(f, dynamic, light, generator):
    """Torch's kernel for CPUs does not check them."""
    args = [torch.randn(2, 4, length, 8, generator=generator) for length in (7, 5, 9)]
    with torch.no_grad():
        got, report = light(f, *args, dynamic=dynamic)
    assert got.shape == (2, 4, 7, 8)
    assert not report.replaced("attention"), report
    assert "expected 5, k's length" in report.missed("attention")[0].reason or dynamic, report


def row_loss(x, w):
    x = F.layer_norm(x, (8,), w)[None, None]
    return (F.scaled_dot_product_attention(x, x, x) + F.rms_norm(x, (8,)).softmax(-1)).square().sum()


TRANSFORMS = {
    "grad": lambda x, w: torch.func.grad(row_loss)(x[0], w),
    "vmap": lambda x, w: torch.func.vmap(row_loss, (0, None))(x, w),
    "grad for each sample": lambda x, w: torch.func.vmap(torch.func.grad(row_loss), (0, None))(x, w),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func(transform, light, generator):
    """They are traced through ATen's operators; what stands outside of them is captured."""
    args = torch.randn(3, 7, 8, generator=generator), torch.randn(8, generator=generator)
    f = lambda x, w: F.softmax(F.layer_norm(x, (8,), w).sum() + transform(x, w), -1)  # noqa: E731
    with torch.no_grad():
        got, report = light(f, *args)
        torch.testing.assert_close(got, f(*args), rtol=1e-4, atol=1e-5)
    assert {r.family for r in report.missed() if "torch.func" in r.reason} == {"attention", "norm", "softmax"}
    assert any("layer_norm([3, 7, 8]" in r.what for r in report.replaced("norm")), report


def test_families_that_are_not_wanted_stay(light, generator):
    q = torch.randn(2, 4, 7, 8, generator=generator)
    f = lambda q: F.rms_norm(F.scaled_dot_product_attention(q, q, q), (8,))  # noqa: E731
    with torch.no_grad():
        got, report = light(f, q, families=("norm",))
    assert {r.family for r in report.rows} == {"norm"}
    torch.testing.assert_close(got, f(q), rtol=1e-5, atol=1e-5)


def test_autocast_dtype_is_eagers(light, generator):
    q = torch.randn(2, 4, 7, 8, generator=generator)

    def f(q):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, q, q)

    with torch.no_grad():
        got, report = light(f, q)
    assert len(report.replaced("attention")) == 1
    assert got.dtype == f(q).dtype == torch.bfloat16


@pytest.mark.parametrize("scales", [(0.3, 0.5), (1, 2, 3)])
def test_scales_that_are_arguments(scales, backend, generator):
    q = torch.randn(2, 4, 7, 8, generator=generator)
    f = lambda q, scale: F.scaled_dot_product_attention(q, q, q, scale=scale)  # noqa: E731
    compiled = torch.compile(f, backend=backend)
    for scale in scales:
        with torch.no_grad(), collect() as report:
            torch.testing.assert_close(compiled(q, scale), f(q, scale), rtol=1e-5, atol=1e-5)
        assert {r.status for r in report.rows} <= {"replaced"}, report
