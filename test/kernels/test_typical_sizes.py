# SPDX-License-Identifier: Apache-2.0
"""Cuts are chosen by typical sizes where sizes are known at run time only: they must be right for all others."""

import functools
from dataclasses import replace

import pytest
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_tile.hardware import Target
from torch_tile.jit import JITFunction
from torch_tile.kernels.attention import backward, forward as attention
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import dequant as dequant_gemm, gemm, grouped
from torch_tile.kernels.mla import decode as mla_decode, spec as mla_spec
from torch_tile.simulator.tile.interpreter import evaluate

HALF = torch.float16


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Kernels as they are for an H200, computed tile by tile."""
    machine = Machine(Target("cuda", 90), 132)
    for module in (attention, backward, dequant_gemm, gemm, grouped, mla_decode):
        monkeypatch.setattr(module, "machine_of", lambda x: machine)
    monkeypatch.setattr(JITFunction, "compile", lambda self, *args: functools.partial(evaluate, self.function(*args)))


@pytest.fixture
def typically(monkeypatch):
    """`typically(module, names, **sizes)`: a module chooses as if its problems had these sizes, one call's of many."""

    def choose(module, names, **sizes):
        env = ShapeEnv()
        sizes = {
            k: env.create_symintnode(sympy.Symbol(k, positive=True, integer=True), hint=v) for k, v in sizes.items()
        }
        for name in names:
            original = getattr(module, name)
            at = next(n for n, word in enumerate(original.__code__.co_varnames) if word == "problem")

            def instead(*args, at=at, original=original, **options):
                typical = {k: v for k, v in sizes.items() if hasattr(args[at], k)}
                return original(*args[:at], replace(args[at], **typical), *args[at + 1 :], **options)

            monkeypatch.setattr(module, name, instead)

    return choose


TYPICAL = {"long": (16, 512, 512), "many": (256, 2048, 2048), "decoding": (8, 1, 8192), "few": (3, 40, 300)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("typical", TYPICAL)
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 77, 77), (1, 5, 130), (2, 1, 600)])
def test_attention(typical, size, causal, typically, check):
    heads, rows, keys = TYPICAL[typical]
    batch, queries, length = size
    q = torch.randn(batch, 4, queries, 64).to(HALF)
    k, v = (torch.randn(batch, 2, length, 64).to(HALF) for _ in "kv")
    typically(attention, ("tiling_for", "config_for", "splits_for"), heads=heads, rows=2 * rows, keys=keys)
    options = None, causal, None, 0, length - queries if causal else 0
    got = attention.attention(q, k, v, *options)
    want = attention.reference(*(x.double() for x in (q, k, v)), *options)
    for a, b in zip(got, want, strict=True):
        check(a, b, f"{typical} {size}", HALF)


@pytest.mark.parametrize("typical", ["long", "few"])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 77, 50)])
def test_attention_backward(typical, size, typically, check):
    heads, rows, keys = TYPICAL[typical]
    batch, queries, length = size
    q, grad = (torch.randn(batch, 4, queries, 64).to(HALF) for _ in "qg")
    k, v = (torch.randn(batch, 2, length, 64).to(HALF) for _ in "kv")
    options = None, True, None, 0, 0
    out, lse = attention.reference(q, k, v, *options)
    typically(backward, ("tilings_for",), heads=heads, rows=2 * rows, keys=keys)
    got = backward.attention_backward(grad, q, k, v, out, lse, *options)
    want = backward.reference(*(x.double() for x in (grad, q, k, v)), None, None, *options)
    for a, b in zip(got, want, strict=True):
        check(a, b, f"{typical} {size}", HALF, least=1.0)


@pytest.mark.parametrize("typical", [(2048, 768), (8192, 8192), (1, 4096), (16, 4096)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 77, 300])
def test_gemm(typical, rows, typically, check):
    a, b = torch.randn(rows, 96).to(HALF), torch.randn(200, 96).to(HALF)
    typically(gemm, ("config_for",), m=typical[0], n=typical[1], k=4096)
    got = gemm.gemm(a, [b.mT], [], "", "", HALF)
    check(got, a.double() @ b.double().mT, f"{typical} {rows}")


@pytest.mark.parametrize("typical", [1024, 1, 16])
@pytest.mark.parametrize("rows", [1, 5, 77])
def test_dequant_gemm(typical, rows, typically, check):
    a, words = torch.randn(rows, 128).to(HALF), torch.randint(0, 256, (72, 64), dtype=torch.uint8)
    scheme = [words], [torch.rand(72, 4).to(HALF)], [], 4, False, 8, [], "", ""
    typically(dequant_gemm, ("config_for",), m=typical, n=4096, k=4096)
    got = dequant_gemm.dequant_gemm(a, *scheme, HALF)
    wide = words, scheme[1][0].double()
    want = functools.partial(dequant_gemm.reference, a.double(), [wide[0]], [wide[1]], *scheme[2:], torch.float64)
    check(got, want, f"{typical} {rows}")


@pytest.mark.parametrize("typical", [4, 90, 5000])
@pytest.mark.parametrize("rows", [1, 5, 77])
def test_grouped_gemm(typical, rows, typically, check):
    a, b = torch.randn(rows, 96).to(HALF), torch.randn(3, 200, 96).to(HALF).mT
    offsets = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32)
    typically(grouped, ("config_for",), m=typical, n=4096, k=4096)
    got = grouped.grouped_gemm(a, [b], offsets, [], "", "", HALF)
    want = functools.partial(grouped.reference, a.double(), [b.double()], offsets, [], "", "", torch.float64)
    check(got, want, f"{typical} {rows}")


@pytest.mark.parametrize("typical", [(64, 128, 4096), (1, 128, 65536), (4, 16, 300)], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1, 5), (3, 2, 16, 300)])
def test_mla_decode(typical, size, typically, check, monkeypatch):
    # The interpreter of tiles does not run kernels by hand: those by turns have tests of their own.
    monkeypatch.setattr(mla_spec, "HOPPER", mla_spec.HOPPER[1:])
    batch, queries, heads, length = size
    q, q_pe = (torch.randn(batch, queries, heads, n).to(HALF) for n in (128, 64))
    kv, k_pe = (torch.randn(batch, length, n).to(HALF) for n in (128, 64))
    lens = torch.randint(0, length + 1, (batch,), dtype=torch.int32)
    typically(mla_decode, ("config_for", "splits_for"), batch=typical[0], rows=typical[1], positions=typical[2])
    got = mla_decode.mla_decode(q, q_pe, kv, k_pe, None, lens)
    want = mla_decode.reference(*(x.double() for x in (q, q_pe, kv, k_pe)), None, lens)
    for a, b in zip(got, want, strict=True):
        check(a, b, f"{typical} {size}", HALF)
