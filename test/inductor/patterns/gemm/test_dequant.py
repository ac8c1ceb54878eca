# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of few bits, as quantisation libraries write them, become one kernel."""

import pytest
import torch
import torch.nn.functional as F

N, K, GROUP = 24, 128, 32


class Weights(torch.nn.Module):
    """Random words and factors of a layer, and what it makes of them."""

    def __init__(self, generator: torch.Generator, form=None) -> None:
        super().__init__()
        self.form = form
        bytes_ = torch.randint(0, 256, (N, K), generator=generator, dtype=torch.uint8)
        self.int8, self.packed = bytes_.view(torch.int8), bytes_[:, : K // 2].contiguous()
        self.fp8 = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
        self.zeros = torch.randint(-9, 9, (N, K // GROUP), generator=generator, dtype=torch.int8)
        self.row = torch.rand(N, generator=generator) / 64
        self.groups = torch.rand(N, K // GROUP, generator=generator) / 64
        self.bias = torch.randn(N, generator=generator)
        for name, tensor in list(vars(self).items()):  # of sizes that no compilation takes for symbols
            if isinstance(tensor, torch.Tensor):
                delattr(self, name)
                self.register_buffer(name, tensor)

    def forward(self, x):
        return self.form(x, self)


def grouped(q, w):
    return ((q.unflatten(1, (-1, GROUP)).float() - w.zeros[..., None]) * w.groups[..., None]).flatten(1)


def nibbles(x):
    return torch.stack([x & 15, x >> 4], -1).flatten(1)


def interleaved(x):
    out = torch.empty(N, K)
    out[:, ::2] = (x & 15).to(out.dtype)
    out[:, 1::2] = (x >> 4).to(out.dtype)
    return out


FORMS = {
    "scale of each row, on the result": (
        lambda x, w: F.linear(x, w.int8.float()) * w.row,
        "8 bits of torch.int8, v0=mul(acc0,x0);ret v0",
    ),
    "scale of each row, on the weight": (
        lambda x, w: F.linear(x, w.int8.float() * w.row[:, None], w.bias),
        "8 bits of torch.int8, v0=add(acc0,x0);ret v0",
    ),
    "one scale": (lambda x, w: F.linear(x, w.int8.float() * w.row[0]), "8 bits of torch.int8, ret acc0"),
    "a number": (lambda x, w: F.linear(x, (w.int8.float() - 3) / 64), "8 bits of torch.int8, ret acc0"),
    "numbers and tensors": (
        lambda x, w: F.linear(x, (w.int8.float() + 2) * 0.5 * w.row[:, None] * w.row[1]),
        "8 bits of torch.int8, ret acc0",
    ),
    "groups with zeros": (
        lambda x, w: F.silu(F.linear(x, grouped(w.int8, w))),
        "8 bits of torch.int8 in groups of 32, v0=silu(acc0);ret v0",
    ),
    "zeros of rows": (
        lambda x, w: F.linear(x, (w.int8.float() - w.zeros[:, :1].float()) * w.row[:, None]),
        "8 bits of torch.int8, ret acc0",
    ),
    "scales of groups, repeated": (
        lambda x, w: F.linear(x, w.int8.float() * w.groups.repeat_interleave(GROUP, 1)),
        "8 bits of torch.int8 in groups of 32, ret acc0",
    ),
    "float8": (
        lambda x, w: x @ (w.fp8.t().float() * w.row[None]).to(x.dtype),
        "8 bits of torch.float8_e4m3fn, ret acc0",
    ),
    "einsum": (
        lambda x, w: F.silu(torch.einsum("nk,bsk->bsn", w.int8.float() * w.row[:, None], x) + w.bias) + x[..., :N],
        "8 bits of torch.int8, v0=add(acc0,x0);v1=silu(v0);v2=add(x1,v1);ret v2",
    ),
    "stored [K, N]": (
        lambda x, w: x @ (w.int8.reshape(K, N).float() * w.row),
        "8 bits of torch.int8, ret acc0",
    ),
    "4 bits": (
        lambda x, w: F.linear(x, grouped(nibbles(w.packed), w)),
        "4 bits of torch.uint8 in groups of 32, ret acc0",
    ),
    "4 bits, written into every second column": (
        lambda x, w: F.linear(x, grouped(interleaved(w.packed), w)),
        "4 bits of torch.uint8 in groups of 32, ret acc0",
    ),
    "4 bits, cast before they are stacked": (
        lambda x, w: F.linear(
            x, (torch.stack([(w.packed & 15).float(), (w.packed >> 4).float()], -1).view(N, K) - 8) * w.row[:, None]
        ),
        "4 bits of torch.uint8, ret acc0",
    ),
    "4 bits, the high ones first, shifted by 8": (
        lambda x, w: F.linear(
            x, (torch.stack([w.packed >> 4, w.packed & 15], -1).view(N, K).to(torch.int8) - 8).float() * w.row[:, None]
        ),
        "4 bits of torch.uint8, ret acc0",
    ),
    "4 bits, signed": (
        lambda x, w: F.linear(
            x, torch.stack([(b := w.packed.view(torch.int8)) << 4 >> 4, b >> 4], -1).view(N, K).float() * w.row[:, None]
        ),
        "4 bits of torch.int8, ret acc0",
    ),
    "4 bits, not signed, of signed bytes": (
        lambda x, w: F.linear(x, grouped(nibbles(w.packed.view(torch.int8)) & 15, w)),
        None,  # the mask behind the packing is not read
    ),
    "2 bits": (
        lambda x, w: F.linear(
            x, torch.stack([w.packed[:, :32] >> s & 3 for s in (6, 4, 2, 0)], -1).view(N, K).float() * w.row[:, None]
        ),
        "2 bits of torch.uint8, ret acc0",
    ),
    "halves of a row side by side": (
        lambda x, w: F.linear(x, torch.cat([w.packed & 15, w.packed >> 4], 1).float() * w.row[:, None]),
        "8 bits of torch.uint8, ret acc0",  # of bytes that something else unpacks
    ),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dynamic, agrees, generator):
    function, what = FORMS[form]
    _, report = agrees(Weights(generator, function), torch.randn(2, 5, K, generator=generator), dynamic=dynamic)
    if what is not None:
        (row,) = report.replaced("dequant")
        assert row.what == f"tile.dequant_gemm({what})"


def test_swiglu_is_one_kernel(agrees, generator):
    gate, up = Weights(generator), Weights(generator)
    x = torch.randn(7, K, generator=generator)
    _, report = agrees(lambda x: F.silu(F.linear(x, grouped(gate.int8, gate))) * F.linear(x, grouped(up.int8, up)), x)
    (row,) = report.replaced("dequant")
    assert "(2 products, 8 bits of torch.int8 in groups of 32, v0=silu(acc0);v1=mul(acc1,v0);" in row.what


def test_products_of_different_storage_are_two_kernels(agrees, generator):
    w, dense = Weights(generator), torch.randn(N, K, generator=generator)
    x = torch.randn(7, K, generator=generator)
    _, report = agrees(lambda x: F.silu(F.linear(x, w.int8.float() * w.row[:, None])) * F.linear(x, dense), x)
    assert len(report.replaced("dequant")) == len(report.replaced("gemm")) == 1


def test_low_precision_is_closer_to_the_truth(light, generator):
    w = Weights(generator)
    x, scale = torch.randn(33, K, generator=generator).bfloat16(), w.row.bfloat16()

    def f(x, scale):
        return F.linear(x, w.int8.to(x.dtype)) * scale

    got, report = light(f, x, scale)
    assert len(report.replaced("dequant")) == 1
    want = f(x.double(), scale.double())
    assert (got.double() - want).norm() <= (f(x, scale).double() - want).norm()


def words_of_four_bytes(x, w):
    """GPTQ's: eight input features in a word, the group of each by an index."""
    words, shifts = w.packed.view(torch.int32).t(), torch.arange(0, 32, 4, dtype=torch.int32)
    q = (torch.bitwise_right_shift(words[:, None].expand(-1, 8, -1), shifts[None, :, None]) & 15).reshape(K, N)
    return x @ ((q - 8) * w.groups.t()[torch.arange(K) // GROUP])


def half_written(x, w):
    """Every second column is what it was before."""
    out = torch.ones(N, K)
    out[:, ::2] = (w.packed & 15).float()
    return F.linear(x, out)


MISSES = {
    "words of four bytes": (words_of_four_bytes, "words of torch.int32"),
    "half written": (half_written, "not put together"),
    "scales by an index": (
        lambda x, w: F.linear(x, (nibbles(w.packed).float() - 8) * w.groups[:, torch.arange(K) // GROUP]),
        "gathered by an index",
    ),
    "small groups": (
        lambda x, w: F.linear(
            x, (w.int8.unflatten(1, (-1, 8)).float() * w.int8[:, :16, None].float().cos()).flatten(1)
        ),
        "scales of 8 input features",
    ),
    "scales of columns": (lambda x, w: F.linear(x, w.int8.float() * w.row.sum() * x[0].abs()), "scales of 1 input"),
    "rounded": (lambda x, w: F.linear(x, (w.int8.float() * w.row[:, None]).to(torch.int32).float()), None),
    "wraps": (lambda x, w: F.linear(x, (w.int8 - 100).float()), None),
    "shifted after the scale": (lambda x, w: F.linear(x, w.int8.float() * w.row[:, None] - w.bias[:, None]), None),
}


@pytest.mark.parametrize("form", MISSES)
def test_what_no_kernel_widens_stays_an_ordinary_product(form, agrees, generator):
    function, reason = MISSES[form]
    w = Weights(generator)
    _, report = agrees(lambda x: function(x, w), torch.randn(7, K, generator=generator) / 16)
    replaced = [row.what for row in report.replaced("dequant")]
    assert not replaced or (reason is None and "8 bits" in replaced[0]), replaced
    if reason is not None:
        (miss,) = report.missed("dequant")
        assert reason in miss.reason


def test_torchao(light, generator):
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.quantization.granularity import PerGroup

    configs = {
        "8 bits of torch.int8,": quantization.Int8WeightOnlyConfig(version=2),
        "8 bits of torch.int8 in groups of 32": quantization.IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
        "8 bits of torch.float8_e4m3fn,": quantization.Float8WeightOnlyConfig(),
    }
    for what, config in configs.items():
        model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.SiLU()).bfloat16().requires_grad_(False)
        quantization.quantize_(model, config)
        x = torch.randn(5, K, generator=generator).bfloat16()
        got, report = light(model, x)
        (row,) = report.replaced("dequant")
        assert what in row.what and "silu" in row.what
        torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)
