# SPDX-License-Identifier: Apache-2.0
import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import torch_tile
import torch_tile.language as T
from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.epilogue import program as epilogue_language
from torch_tile.kernels.epilogue.functions import FUNCTIONS
from torch_tile.kernels.epilogue.program import ADDED
from torch_tile.kernels.gemm.gemm import (
    cluster_matmul,
    gemm,
    matmul,
    persistent_matmul,
    reference,
    tile_of,
)
from torch_tile.kernels.gemm.spec import Aux, Spec
from torch_tile.kernels.gemm.tiling import Config


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("m, k, n", [(5, 7, 9), (1, 33, 2), (16, 1, 16), (0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_product(m, k, n):
    a, b = rand(m, k), rand(n, k)
    got = reference(a, [b.mT], [], "", "", torch.float64)
    torch.testing.assert_close(got, a @ b.mT)
    assert got.is_contiguous()


@pytest.mark.parametrize("batch", [1, 3])
def test_batches_and_every_kind(batch):
    a, b, c = rand(3, 5, 7), rand(batch, 7, 9), rand(3, 7, 9)
    full, row, column, scalar = rand(3, 5, 9), rand(9), rand(3, 5, 1), rand()
    text = "g=silu(acc0);u=mul(g,acc1);v=add(u,x0);w=mul(v,x1);y=sub(w,x2);z=div(y,x3);ret z"
    got = reference(a, [b, c], [full, row, column, scalar], "trcs", text, torch.float64)
    torch.testing.assert_close(got, ((F.silu(a @ b) * (a @ c) + full) * row - column) / scalar)


def test_rounds_once():
    a, b, r = (torch.randn(n).bfloat16() for n in ((8, 64), (64, 8), (8, 8)))
    got = reference(a, [b], [r], "t", "v=add(acc0,x0);ret v", torch.bfloat16)
    torch.testing.assert_close(got, (a.float() @ b.float() + r.float()).bfloat16(), rtol=0, atol=0)
    assert reference(a, [b], [], "", "", torch.float32).dtype == torch.float32


def test_result_does_not_alias():
    a, b, t = rand(2, 3), rand(3, 4), rand(2, 4)
    got = reference(a, [b], [t], "t", "ret x0", torch.float64)
    assert torch.equal(got, t) and got.data_ptr() != t.data_ptr()


FORMS = {  # dtype, result, epilogue, kinds, number of bs
    "plain": (torch.float32, torch.float32, "", "", 1),
    "bias_gelu": (torch.float32, torch.float32, "v=add(acc0,x0);w=gelu(v);ret w", "r", 1),
    "swiglu": (torch.float32, torch.float32, "g=silu(acc0);y=mul(g,acc1);ret y", "", 2),
    "every_kind": (torch.float32, torch.float16, "a=mul(acc0,x0);b=add(a,x1);c=sub(b,x2);d=div(c,x3);ret d", "trcs", 1),
    "bfloat16": (torch.bfloat16, torch.bfloat16, "v=add(acc0,x0);w=gelu_tanh(v);ret w", "r", 1),
    "float16": (torch.float16, torch.float32, "v=relu(acc0);w=add(v,x0);ret w", "t", 1),
    "float64": (torch.float64, torch.float64, "v=tanh(acc0);w=max(v,x0);ret w", "c", 1),
}


def small(dtype):
    """The dtype whose tolerance counts: the operands', where it is coarser than the result's may be."""
    return dtype if dtype.itemsize < 4 else None


SMALL = Config(block_m=16, block_n=32, block_k=16)
ADD_BIAS = "v=add(acc0,x0);ret v"
TURNS = replace(SMALL, panel=2, blocks=3)
UNEVEN = replace(TURNS, block_m=128, block_n=48)  # columns that a panel of them does not divide
TURNED = replace(SMALL, transposed=True, staged=True)
CUTS = (
    SMALL,
    TURNS,
    UNEVEN,
    replace(SMALL, splits=3),
    TURNED,
    replace(TURNS, transposed=True),
    replace(TURNED, staged=False, splits=3),
)


def random_operands(problems, spec, batch, shared, m, n, k, layout):
    dtype, _, _, kinds, count = FORMS[spec]
    lead = () if batch is None else (batch,)
    a = problems.tensor(*lead, m, k, dtype=dtype, layout=layout)
    bs = [
        problems.tensor(*(() if batch is None else (1 if shared else batch,)), k, n, dtype=dtype, layout=layout)
        for _ in range(count)
    ]
    shapes = {"t": (*lead, m, n), "r": (n,), "c": (*lead, m, 1), "s": (1,)}
    aux = [
        problems.tensor(*shapes[kind], dtype=torch.float32 if kind == "r" else dtype, layout="dense") for kind in kinds
    ]
    return a, bs, [x.abs() + 1 if kind == "s" else x for x, kind in zip(aux, kinds, strict=True)]


@pytest.mark.parametrize("spec", FORMS)
def test_random_problems(spec, rounds, problems, check):
    dtype, out_dtype, epilogue, kinds, _ = FORMS[spec]
    for number in rounds(9):
        config = problems.pick(*CUTS) if number % 8 else None
        m, n, k = problems.size(50), problems.size(70), problems.size(90)
        batch = problems.pick(None, None, 1, 3)
        layout = (
            problems.pick("dense", "turned", "slice", "gaps") if number % 8 == 0 else problems.pick("dense", "turned")
        )
        a, bs, aux = random_operands(problems, spec, batch, problems.pick(True, False), m, n, k, layout)
        got = gemm(a, bs, aux, kinds, epilogue, out_dtype, config=config)
        wide = [[x.double() for x in xs] for xs in (bs, aux)]
        want = partial(reference, a.double(), *wide, kinds, epilogue, torch.float64)
        assert got.dtype == out_dtype
        check(got, want, f"{spec} {batch}x{m}x{n}x{k} {layout} {config}", small(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [*CUTS, None])
def test_reads_its_result_before_it_writes_it(config, dtype, problems, check):
    m, n, k, batch = problems.size(50), problems.size(70), problems.size(90), problems.pick(None, 1, 3)
    lead = () if batch is None else (batch,)
    a, b = problems.tensor(*lead, m, k, dtype=dtype), problems.tensor(*lead, k, n, dtype=dtype)
    bias, out = problems.tensor(n), problems.tensor(*lead, m, n, dtype=dtype, layout="dense")
    text = "v=add(acc0,x0);w=mul(x1,0.5);y=add(v,w);ret y"
    want = partial(reference, a.double(), [b.double()], [bias.double(), out.double()], "ro", text, torch.float64)
    got = gemm(a, [b], [bias, out], "ro", text, dtype, config=config, out=out)
    assert got is out
    check(got, want, f"{batch}x{m}x{n}x{k}", small(dtype))


@pytest.mark.parametrize("engine", ["interpreter", "threads"], indirect=True)
@pytest.mark.parametrize("spec", ["float16", "bfloat16", "swiglu"])
def test_sums_of_clusters(spec, engine, problems, check):
    """Blocks that share a sum over K add up the parts themselves."""
    dtype, out_dtype, epilogue, kinds, _ = FORMS[spec]
    for count in (2, 3, 8):
        config = Config(16, 64, 32, 128, 2, splits=count, cluster=True, transposed=problems.pick(False, True))
        m, n, k, batch = problems.size(40), problems.size(150), problems.size(500), problems.pick(None, 2)
        a, bs, aux = random_operands(problems, spec, batch, True, m, n, k, problems.pick("dense", "turned"))
        got = gemm(a, bs, aux, kinds, epilogue, out_dtype, config=config)
        wide = [[x.double() for x in xs] for xs in (bs, aux)]
        want = partial(reference, a.double(), *wide, kinds, epilogue, torch.float64)
        check(got, want, f"{spec} {batch}x{m}x{n}x{k} {count}", small(dtype))
        out, text = torch.randn_like(got), "v=add(acc0,x0);ret v"
        want = partial(reference, a.double(), wide[0][:1], [out.double()], "o", text, torch.float64)
        gemm(a, bs[:1], [out], "o", text, out_dtype, config=config, out=out)
        check(out, want, f"{spec} {batch}x{m}x{n}x{k} {count}, added", small(dtype))


@pytest.mark.parametrize("name", sorted(epilogue_language.ARITY))
def test_every_epilogue_function(name, engine, problems):
    arguments = ["acc0", "x0", "x1"][: epilogue_language.ARITY[name]]
    text = f"v={name}({','.join(arguments)});ret v"
    a, b, full, row = (problems.tensor(*s) for s in ((9, 5), (5, 33), (9, 33), (33,)))
    if name == "div" or FUNCTIONS[name].singular:
        a, b, full = a.abs() + 0.1, b.abs() + 0.1, full.abs() + 0.1
    if name in ("eq", "ne", "where"):
        a = (a > 0).float() * 0 if name == "where" else a * 0
        full = full.round()
    aux, kinds = ([full, row], "tr") if len(arguments) > 1 else ([], "")
    got = gemm(a, [b], aux, kinds, text, torch.float32, config=SMALL)
    want = reference(a, [b], aux, kinds, text, torch.float32)
    torch.testing.assert_close(got, want, rtol=2e-4 if name == "pow" else 2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["min", "max", "relu", "abs", "square", "where"])
def test_nan_passes_as_in_torch(name, engine):
    a = torch.tensor([[float("nan"), 1.0], [2.0, float("inf")]])
    other = torch.tensor([[1.0, float("nan")], [float("nan"), 3.0]])
    count = epilogue_language.ARITY[name]
    text = f"v={name}({','.join(['acc0', 'x0', 'x1'][:count])});ret v"
    aux, kinds = [other, other][: count - 1], "tt"[: count - 1]
    product = torch.where(a.isnan() | a.isinf(), a, a)
    got = gemm(product, [torch.eye(2)[:, :1]], [x[:, :1] for x in aux], kinds, text, torch.float32, config=SMALL)
    want = reference(product, [torch.eye(2)[:, :1]], [x[:, :1] for x in aux], kinds, text, torch.float32)
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1)])
@pytest.mark.parametrize("splits", [1, 2])
def test_empty_and_tiny(shape, splits, engine):
    m, k, n = shape
    a, b, row = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    got = gemm(a, [b], [row], "r", "v=add(acc0,x0);ret v", torch.float32, config=replace(SMALL, splits=splits))
    torch.testing.assert_close(got, a @ b + row)


@pytest.mark.parametrize("spec", ["plain", "swiglu", "every_kind", "bfloat16"])
def test_one_row(spec, rounds, problems, check):
    dtype, out_dtype, epilogue, kinds, _ = FORMS[spec]
    for _ in rounds(5):
        n, k, batch = problems.size(70), problems.size(300), problems.pick(None, 3)
        a, bs, aux = random_operands(problems, spec, batch, False, 1, n, k, "turned")
        a = a.contiguous()
        got = gemm(a, bs, aux, kinds, epilogue, out_dtype)
        wide = [[x.double() for x in xs] for xs in (bs, aux)]
        want = partial(reference, a.double(), *wide, kinds, epilogue, torch.float64)
        check(got, want, f"{spec} {batch}x1x{n}x{k}", small(dtype))


@pytest.mark.parametrize("rows, columns, panel", [(1, 1, 8), (5, 3, 2), (16, 4, 8), (3, 7, 4), (5, 3, 0)])
def test_every_tile_has_its_turn(rows, columns, panel):
    @T.prim_func
    def order(seen: T.Tensor((2, rows, columns), T.int32)):
        with T.Kernel(1):
            for number in T.serial(2 * rows * columns):
                bz, by, bx = tile_of(number, rows, columns, panel)
                seen[bz, by, bx] = seen[bz, by, bx] + number + 1

    seen = torch.zeros(2, rows, columns, dtype=torch.int32)
    torch_tile.compile(order, target="cpu")(seen)
    assert seen.flatten().sort().values.tolist() == list(range(1, 2 * rows * columns + 1))
    assert seen[0, :panel, 0].tolist() == list(range(1, min(rows, panel) + 1))  # down a band first


def test_tile_after_tile_on_hopper():
    """Copies run ahead into the next tile while results leave; every thread finds what it waits for."""
    config = Config(64, 128, 64, 128, 2, panel=2, staged=True, blocks=2)
    spec = Spec(torch.float16, torch.float16, False, (True,), (Aux("r", torch.float16, True, True),), ADD_BIAS, 8)
    kernel = persistent_matmul.on(Target("cuda", 90))(config, spec)
    assert not any(note.why_not for note in kernel.build.remarks), kernel.schedule
    assert kernel.source.count("bulk_wait<1, true>") == 2  # a store is waited for when its buffer is written again
    a, b, bias = (torch.randn(s).half() for s in ((2, 72, 136), (2, 136, 136), (136,)))
    out = torch.full((2, 72, 136), float("nan")).half()
    findings = kernel.interpret(a, b, bias, out)
    assert not findings, findings.report()
    torch.testing.assert_close(out.float(), a.float() @ b.float().mT + bias.float(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("turned", [False, True])
def test_stores_add_on_hopper(turned, problems, check):
    """To what the result holds, also past the last whole tile; the epilogue reads nothing."""
    config = Config(64, 128, 64, 128, 2, panel=2, staged=True, blocks=2)
    m, n, k = 8 * problems.size(20), 8 * problems.size(30), 8 * problems.size(20)
    spec = Spec(torch.bfloat16, torch.bfloat16, turned, (False,), (Aux("o", torch.bfloat16, True, True),), ADDED, 8)
    kernel = persistent_matmul.on(Target("cuda", 90))(config, spec)
    assert "wgmma" in kernel.source and not any(note.why_not for note in kernel.build.remarks), kernel.schedule
    assert "tma_store_add" in kernel.source and kernel.source.count("bulk_wait<1, true>") == 2
    a, b, out = (problems.tensor(2, *shape, dtype=torch.bfloat16, layout="dense") for shape in ((m, k), (k, n), (m, n)))
    want = out.double() + a.double() @ b.double()
    findings = kernel.interpret(a.mT.contiguous() if turned else a, b, out)
    assert not findings, findings.report()
    check(out, want, f"{m}x{n}x{k}", torch.bfloat16)


@pytest.mark.parametrize("stored", ["nxk", "kxn"])
@pytest.mark.parametrize(
    "config, function",
    [
        (Config(24, 64, 64, 128, 2, panel=2, staged=True, transposed=True), matmul),
        (Config(80, 128, 64, 256, 2, panel=2, staged=True, blocks=2, transposed=True), persistent_matmul),
        (Config(8, 64, 64, 128, 2, splits=4, cluster=True, transposed=True), cluster_matmul),
    ],
    ids=["a tile each", "tile after tile", "cluster"],
)
def test_turned_on_hopper(config, function, stored, problems, check):
    """Rows that wgmma has no 64 of are its columns; what of the last tile is past the end stays away."""
    bias = Aux("r", torch.bfloat16, True, True)
    spec = Spec(
        torch.bfloat16, torch.bfloat16, False, (stored == "nxk",) * 2, (bias,), "v=mul(acc0,acc1);w=add(v,x0);ret w", 8
    )
    kernel = function.on(Target("cuda", 90))(config, spec)
    assert "wgmma" in kernel.source and not any(note.why_not for note in kernel.build.remarks), kernel.schedule
    m, n, k = problems.size(100), 8 * problems.size(30), 8 * problems.size(40)
    shapes = (2, m, k), (n,), *[(2, n, k) if stored == "nxk" else (2, k, n)] * 2
    a, x, *bs = (problems.tensor(*shape, dtype=torch.bfloat16, layout="dense") for shape in shapes)
    out = torch.full((2, m, n), float("nan"), dtype=torch.bfloat16)
    findings = kernel.interpret(a, *bs, x, out)
    assert not findings, findings.report()
    wide = [(b.mT if stored == "nxk" else b).double() for b in bs]
    want = (a.double() @ wide[0]) * (a.double() @ wide[1]) + x.double()
    check(out, want, f"{m}x{n}x{k} {config}", torch.bfloat16)


def test_more_products_than_tiles_hold_are_plain_torch(monkeypatch):
    h200 = Machine(Target("cuda", 90), 132)
    monkeypatch.setattr(importlib.import_module("torch_tile.kernels.gemm.gemm"), "machine_of", lambda x: h200)
    a, bs = torch.randn(2, 40, 8), [torch.randn(1, 8, 16) for _ in range(40)]
    text = "".join(f"v{n}=add({f'v{n - 1}' if n else 'acc0'},acc{n});" for n in range(40)) + "ret v39"
    got = gemm(a, bs, [], "", text, torch.float32)
    torch.testing.assert_close(got, a @ (bs[0] + sum(bs)), rtol=1e-4, atol=1e-4)
