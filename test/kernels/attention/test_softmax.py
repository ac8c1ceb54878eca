# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels.attention import backward as module
from torch_tile.kernels.attention.backward import Tilings, attention_backward, reference
from torch_tile.kernels.attention.forward import reference as forward
from torch_tile.kernels.attention.softmax import begin_rows, exponentiate
from torch_tile.kernels.attention.spec import Config
from torch_tile.kernels.common import Machine
from torch_tile.kernels.epilogue.program import soft_cap
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret


def of_blocks(slack, subtracts=False):
    @T.prim_func
    def blockwise(
        X: T.Tensor((6, 24), "float32"),
        Y: T.Tensor((6, 24), "float32"),
        Z: T.Tensor((6,), "float32"),
        P: T.Tensor((3, 2, 6), "float32"),
    ):
        """Y: exponentials; Z: the denominators of a softmax in powers of two, from blocks; P: `row_max` and
        `rescale`.
        """
        with T.Kernel(1) as _:
            scores = T.alloc_fragment((6, 8), "float32")
            row_max = T.alloc_fragment((6,), "float32")
            row_sum = T.alloc_fragment((6,), "float32")
            base, rescale = T.alloc_fragment((6,), "float32"), T.alloc_fragment((6,), "float32")
            begin_rows(row_max, base)
            T.clear(row_sum)
            for step in T.serial(3):
                T.copy(X[0, step * 8], scores)
                exponentiate(scores, row_max, base, row_sum, rescale, 0.5, slack=slack, subtracts=subtracts)
                T.copy(scores, Y[0, step * 8])
                T.copy(row_max, P[step, 0, :])
                T.copy(rescale, P[step, 1, :])
            for i in T.Parallel(6):
                Z[i] = row_max[i] * 0.5 + T.log2(row_sum[i])

    return blockwise


def run(engine, slack, x, subtracts=False):
    from torch_tile.jit import compile
    from torch_tile.simulator.tile.interpreter import evaluate

    y, z, p = torch.empty(6, 24), torch.empty(6), torch.empty(3, 2, 6)
    launch = evaluate if engine == "interpreter" else lambda f, *args: compile(f, target="cpu")(*args)
    launch(of_blocks(slack, subtracts), x, y, z, p)
    want = torch.logsumexp(x.double() * 0.5 * math.log(2), 1) / math.log(2)
    torch.testing.assert_close(z.double(), want, rtol=1e-5, atol=1e-5)
    return y, p[:, 0].T, p[:, 1].T


def some_scores():
    x = torch.randn(6, 24) * 20
    x[0], x[1, :8], x[2, 8:] = -torch.inf, -torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("subtracts", [False, True])
def test_blocks_make_the_whole(subtracts, engine):
    x = some_scores()
    if subtracts:
        x[3, :8], x[4, 8:], x[5] = (torch.finfo(torch.float32).min,) * 3
    y, row_max, _ = run(engine, 0.0, x, subtracts)
    seen = x.view(6, 3, 8).amax(2).cummax(1).values
    assert torch.equal(row_max, seen)
    want = ((x.double().view(6, 3, 8) - seen.masked_fill(seen.isneginf(), 0)[..., None]) * 0.5).exp2().view(6, 24)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slack", [3.0, 8.0])
def test_maxima_that_grow_little_are_not_followed(engine, slack):
    x = some_scores()
    x[3, :8], x[3, 8:16], x[3, 16:] = 0.0, 2 * slack - 0.5, 2 * slack + 0.5  # in powers of two half of that
    y, row_max, rescale = run(engine, slack, x)
    assert row_max[3].tolist() == [0, 0, 2 * slack + 0.5]
    assert (y <= 2**slack).all() and y[3, 8] > 2 ** (slack - 1)
    before = torch.cat([torch.full((6, 1), -torch.inf), row_max[:, :2]], 1)
    assert (rescale[row_max == before] == 1).all()
    torch.testing.assert_close(rescale, ((before - row_max) * 0.5).exp2().nan_to_num(nan=1.0), rtol=1e-5, atol=1e-7)


MAGNITUDES = [10.0**n * sign for n in range(31) for sign in (1, -1)] + [2.0**31, 5e6, -3e38, 0.0]


def of_magnitudes(slack, subtracts, rows):
    """The softmax in powers of two, of scores in three blocks."""

    @T.prim_func
    def softmax(X: T.Tensor((rows, 24), "float32"), P: T.Tensor((rows, 24), "float32")):
        with T.Kernel(1, threads=64) as _:
            scores, all_scores = T.alloc_fragment((rows, 8), "float32"), T.alloc_shared((rows, 24), "float32")
            row_max, base, row_sum, rescale = (T.alloc_fragment((rows,), "float32") for _ in range(4))
            begin_rows(row_max, base)
            T.clear(row_sum)
            T.clear(all_scores)
            for step in T.serial(3):
                T.copy(X[0, step * 8], scores)
                exponentiate(scores, row_max, base, row_sum, rescale, 0.7, slack=slack, subtracts=subtracts)
                T.copy(scores, all_scores[:, step * 8 : step * 8 + 8])
                for i, j in T.Parallel(rows, step * 8):
                    all_scores[i, j] *= rescale[i]
            for i, j in T.Parallel(rows, 24):
                P[i, j] = all_scores[i, j] / row_sum[i]

    return softmax


@pytest.mark.parametrize("slack, subtracts", [(0.0, False), (0.0, True), (8.0, False)])
def test_weights_of_any_magnitude(slack, subtracts, way):
    """Rows of numbers that are neighbours, equal, or far apart."""
    x = torch.tensor(MAGNITUDES)[:, None].repeat(1, 24)
    for _ in range(3):
        up = torch.rand(x.shape) < 0.3
        x = torch.where(up, torch.nextafter(x, torch.full((), -torch.inf)), x)
    x += torch.randn(x.shape)
    x[::5, 8:] *= 0.5
    x = torch.cat([x, torch.full((4, 24), -torch.inf)])[: len(MAGNITUDES) + 2].contiguous()
    x[-2, 13] = 1e12
    p = torch.empty_like(x)
    way(of_magnitudes(slack, subtracts, len(x)), x, p)
    want = torch.softmax(x.double() * 0.7 * math.log(2), 1)
    assert p[-1].isnan().all()
    torch.testing.assert_close(p[:-1].double(), want[:-1], rtol=0, atol=3e-5)


TEXTS = {  # a text, the shapes and dtypes of its operands for a problem, and which of these may want a gradient
    "cap": (soft_cap(1.5), lambda b, h, q, k: [], ""),
    "cap and documents": (
        "v0=div(acc0,1.5);v1=tanh(v0);v2=mul(v1,1.5);v3=eq(x0,x1);v4=where(v3,v2,-inf);ret v4",
        lambda b, h, q, k: [((b, 1, q, 1), torch.bool), ((b, 1, 1, k), torch.bool)],
        "",
    ),
    "bias": ("v=add(acc0,x0);ret v", lambda b, h, q, k: [(h, q, k)], "x0"),
    "slopes": ("v0=sub(i3,i2);v1=mul(x0,v0);v2=add(acc0,v1);ret v2", lambda b, h, q, k: [(h, 1, 1)], "x0"),
    "bias before a cap": (
        f"w=add(acc0,x0);{soft_cap(2.0).replace('acc0', 'w')}", lambda b, h, q, k: [(h, q, k)], "x0"
    ),
    "temperature and keys": (
        "v=mul(acc0,x0);w=add(v,x1);ret w", lambda b, h, q, k: [(b, h, q, 1), (k,)], "x0,x1"
    ),
    "a low bias under a cap": (
        f"v=where(x0,acc0,-10000.0);{soft_cap(3.0).replace('acc0', 'v')}",
        lambda b, h, q, k: [((b, 1, 1, k), torch.bool)],
        "",
    ),
    "infinite slope": (  # where nothing goes through; elsewhere at most 4, so that rounding stays small
        "c=gt(acc0,0.25);v=where(c,acc0,0.0);w=log(v);ret w", lambda b, h, q, k: [], ""
    ),
    "no product": ("ret x0", lambda b, h, q, k: [(h, q, k)], "x0"),
}  # fmt: skip


def operands_of(problems, name, sizes, dtype):
    made = []
    for shape in TEXTS[name][1](*sizes):
        shape, kind = shape if isinstance(shape[-1], torch.dtype) else (shape, dtype)
        made.append(problems.tensor(*shape).gt(-0.5) if kind == torch.bool else problems.tensor(*shape, dtype=dtype))
    return made


@pytest.mark.parametrize("causal, window, q_offset", [(False, 0, 0), (True, 0, -2), (True, 3, 2)])
@pytest.mark.parametrize("name", sorted(TEXTS.keys() - {"infinite slope"}))  # torch finds 0 times infinity
def test_reference_is_what_autograd_finds(name, causal, window, q_offset, problems):
    text, _, keep = TEXTS[name]
    q, k, v = (
        problems.tensor(*shape, dtype=torch.float64).clone().requires_grad_()
        for shape in ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6))
    )
    aux = [x.clone().requires_grad_(x.is_floating_point()) for x in operands_of(problems, name, (2, 4, 5, 7), q.dtype)]
    mask = torch.randn(2, 4, 5, 7, dtype=torch.float64, requires_grad=True)
    options = (mask, causal, 0.4, window, q_offset)
    out, lse = forward(q, k, v, *options, aux, text)
    grad = torch.randn_like(out)
    keep = f"mask,{keep}" if keep else "mask"
    *found, kept = reference(grad, q, k, v, out, lse, *options, keep, aux, text)
    learned = [mask, *(x for x in aux if x.requires_grad)]
    want = torch.autograd.grad(out, (q, k, v, *learned), grad, allow_unused=True)
    found += [x.sum_to_size(y.shape) for x, y in zip(kept, learned, strict=True)]
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y)


CUTS = (
    None,
    Tilings(Config(32, 16, packed=False), Config(16, 32, packed=False)),
    Tilings(Config(32, 16, packed=False), Config(16, 32, packed=False), Config(32, 16, packed=False)),
    Tilings(Config(32, 16, packed=False, shared_probs=True), Config(16, 16, packed=False, shared_probs=True)),
)


@pytest.mark.parametrize("name", TEXTS)
def test_random_problems(name, rounds, problems, check):
    text, _, learned = TEXTS[name]
    for _ in rounds(2):
        dtype = problems.pick(torch.float32, torch.float32, torch.bfloat16, torch.float64)
        batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 2, 3)
        sizes = batch, kv_heads * groups, problems.size(40), problems.size(50)
        q, grad = (problems.reordered(*sizes[:3], 32, dtype=dtype) for _ in range(2))
        k, v = (problems.tensor(batch, kv_heads, sizes[3], 32, dtype=dtype, layout="dense") for _ in range(2))
        aux = operands_of(problems, name, sizes, problems.pick(torch.float32, dtype))
        mask = problems.pick(None, None, torch.bool, torch.float32)
        mask = problems.mask(mask, batch, sizes[1], *sizes[2:]) if mask else None
        causal, window = problems.pick(True, False), problems.pick(0, 0, 9)
        options = (mask, causal, problems.pick(None, 0.3, -0.1), window, problems.pick(0, sizes[3] - sizes[2], 5))
        keep = ",".join([*(["mask"] if mask is not None else []), *([learned] if learned else [])])
        keep = problems.pick("", keep)
        out, lse = forward(q, k, v, *options, aux, text)
        got = attention_backward(
            grad, q, k, v, out, lse, *options, keep, aux, text, tilings=problems.pick(*CUTS)
        )  # fmt: skip
        want = reference(*(x.double() for x in (grad, q, k, v)), out, lse, *options, keep, aux, text)
        farthest = float(max(sizes[2:])) if name == "slopes" else 1.0  # what rounding of a score's gradient is times
        for what, a, b in zip(("dq", "dk", "dv", "kept"), got, want, strict=True):
            check(
                a.contiguous(),
                b.contiguous(),
                f"{what} of {name} {dtype} {sizes} {options[1:]} {keep}",
                dtype,
                least=1.0 if what != "kept" else farthest,
                own=what == "kept",
            )


HOPPER = Machine(Target("cuda", 90), 132)


@pytest.mark.parametrize(
    "name, causal, stages",
    [
        ("cap", True, 2),
        ("cap and documents", False, 2),
        ("temperature and keys", True, 2),
        ("bias before a cap", False, 3),
    ],
)
def test_values_on_hopper(name, causal, stages, monkeypatch, problems):
    """The kernels as they are lowered, thread by thread."""

    def call(kernel, *args):
        flat = lower(kernel.program, cuda_passes(Build(HOPPER.target, PassOptions(fast_math=True))))
        assert not interpret(flat, kernel.program, args)

    text, _, keep = TEXTS[name]
    sizes = 1, 2, 70, 200
    q, grad = (problems.tensor(*sizes[:3], 64, dtype=torch.float16, layout="dense") for _ in range(2))
    k, v = (problems.tensor(1, 1, sizes[3], 64, dtype=torch.float16, layout="dense") for _ in range(2))
    aux = operands_of(problems, name, sizes, torch.float16)
    options = (None, causal, 0.125, 0, sizes[3] - sizes[2])
    out, lse = forward(q, k, v, *options, aux, text)
    monkeypatch.setattr(module, "machine_of", lambda x: HOPPER)
    monkeypatch.setattr(JITKernel, "__call__", call)
    cut = Config(64, 64, 128, stages, packed=False, staged=True, tiled=True)
    got = attention_backward(grad, q, k, v, out, lse, *options, keep, aux, text, tilings=Tilings(cut, cut))
    want = reference(*(x.double() for x in (grad, q, k, v)), out, lse, *options, keep, aux, text)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-2, rtol=1e-2)
