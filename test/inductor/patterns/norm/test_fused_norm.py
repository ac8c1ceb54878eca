# SPDX-License-Identifier: Apache-2.0
"""What stands around norms, as diffusion and other transformers write it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.context import Context
from torch_tile.inductor.driver import TilePass
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.finalize import settle
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import decide
from torch_tile.inductor.select.policy import policy_of
from torch_tile.inductor.settings import Settings

N = 24


def rms(x, w=None, b=None):
    y = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return y if w is None else w * y


def layer(x, w=None, b=None):
    return F.layer_norm(x, (N,), w, b, 1e-5)


def by_hand(x, w=None, b=None):
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
    return y if w is None else y * w + b


NORMS = {"rms": rms, "layer": layer, "layer by hand": by_hand}


def modulate(norm, x, y, c, m, w, b):
    """DiT: scale and shift of each sequence from one linear layer."""
    shift, scale = (F.silu(c) @ m).chunk(6, -1)[:2]
    return norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def gated(norm, x, y, c, m, w, b):
    shift, scale, gate = (F.silu(c) @ m).chunk(6, -1)[:3]
    x = x + gate.unsqueeze(1) * y
    return norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1), x


def gated_product(norm, x, y, c, m, w, b):
    """Gemm's epilogue has no operand of one row for each sequence, so the gate is the norm's."""
    gate = (c @ m[:, :N])[:, None]
    x = x + gate * (y @ torch.ones(N, N))
    return norm(x, w, b), x.relu()


def table(norm, x, y, c, m, w, b):
    """PixArt: a table of six rows and an embedding of the time, added."""
    shift, scale, *_ = (m[:6, :N][None] + (c @ m).view(-1, 6, N)).chunk(6, 1)
    return norm(x) * (1 + scale) + shift


def affine(norm, x, y, c, m, w, b):
    return norm(x, w, b) * (1 + c[:, None, :N]) + c[:, None, -N:]


def tokens(norm, x, y, c, m, w, b):
    """A scale for each token."""
    return norm(x, w, b) * y[..., :1] + b


def behind_and_sum(norm, x, y, c, m, w, b):
    return x + torch.tanh(c[:, None, :N]) * norm(y, w, b)


MODELS = [modulate, gated, gated_product, table, affine, tokens, behind_and_sum]


def inputs(generator, batch=2, seq=5):
    shapes = ((batch, seq, N), (batch, seq, N), (batch, 2 * N), (2 * N, 6 * N), N, N)
    return [torch.randn(s, generator=generator) for s in shapes]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("model", MODELS)
def test_is_one_kernel(model, norm, dynamic, agrees, generator):
    _, report = agrees(functools.partial(model, NORMS[norm]), *inputs(generator), dynamic=dynamic)
    (row,) = report.replaced("norm")
    assert " with " in row.what, report
    in_front, behind = model in (gated, gated_product), model is not gated_product
    assert ("makes its input" in row.what, "what follows" in row.what) == (in_front, behind)


def test_small_operands_are_computed_inside(light, generator, final_graph):
    """No kernel of Inductor's is left for `1 + scale`."""
    args = inputs(generator)
    light(functools.partial(modulate, layer), *args)
    (call,) = final_graph[-1].find_nodes(op="call_function", target=torch.ops.tile.fused_norm.default)
    assert call.args[2] == "gg" and "add(x0,1.0)" in call.args[4], call.args
    assert not final_graph[-1].find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)


@pytest.mark.parametrize("norm", NORMS)
def test_operands_that_are_cast(norm, agrees, generator):
    """RecurrentGemma scales its embeddings by a number kept in bfloat16."""
    x, y, c, _, w, b = inputs(generator)

    def block(x, y, c, n, w, b):
        return NORMS[norm](x * n.to(x.dtype) + y, w, b) * (1 + c[:, None, :N].float())

    _, report = agrees(block, x, y, c.bfloat16(), torch.tensor(7.0, dtype=torch.bfloat16), w, b)
    assert "with what makes its input and what follows" in report.replaced("norm")[-1].what


@pytest.mark.parametrize("kind", ["layer", "layer by hand"])
def test_a_residual_in_front_of_a_layer_norm(kind, agrees, generator):
    def block(x, y, w, b):
        x = x + y
        return NORMS[kind](x, w, b), x * 2

    x, y, _, _, w, b = inputs(generator)
    _, report = agrees(block, x, y, w, b)
    assert "makes its input" in report.replaced("norm")[-1].what


@pytest.fixture
def final_graph(monkeypatch):
    """The graph that the passes leave."""
    graphs = []
    original = TilePass.run
    monkeypatch.setattr(TilePass, "run", lambda self, graph: (original(self, graph), graphs.append(graph))[0])
    return graphs


ENDS = {
    "pointwise": (lambda x, z, m: x + z.tanh() * z, False),
    "pointwise, cast and turned": (lambda x, z, m: (x + z).mT.to(torch.float64) * 2, False),
    "a result": (lambda x, z, m: x, True),
    "a product reads it": (lambda x, z, m: (x * 2) @ m, True),
    "a product may take it": (lambda x, z, m: x + z @ m, True),
    "summed up": (lambda x, z, m: (x * 2).sum(-1), True),
}


@pytest.mark.parametrize(("end", "kept"), ENDS.values(), ids=ENDS)
def test_sums_that_end_in_registers_are_not_stored(end, kept, agrees, final_graph, generator):
    """The gated residual of a diffusion block, read again where the block ends."""

    def block(x, y, c, m, w, b):
        x = x + c[:, None, :N] * y
        return layer(x) * (1 + c[:, None, -N:]), end(x, y, m[:N, :N])

    _, report = agrees(block, *inputs(generator))
    assert "makes its input" in report.replaced("norm")[-1].what
    (call,) = final_graph[-1].find_nodes(op="call_function", target=torch.ops.tile.fused_norm.default)
    assert call.args[7] is kept, call.args


def test_a_product_takes_its_residual_itself(agrees, generator):
    def block(x, y, c, m, w, b):
        x = x + y @ m[:N, :N]
        return layer(x, w, b), x

    _, report = agrees(block, *inputs(generator))
    assert "makes its input" not in report.replaced("norm")[-1].what
    assert "add" in report.replaced("gemm")[-1].what


def test_an_input_that_is_needed_earlier_is_left(agrees, generator):
    """The gate's result is read by what the modulation is computed from."""

    def block(x, y, c, m, w, b):
        x = x + c[:, None, :N] * y
        scale = torch.cos(x.cumsum(1))
        return layer(x) * scale, x

    _, report = agrees(block, *inputs(generator))
    assert "makes its input" not in report.replaced("norm")[-1].what


def test_an_input_that_its_operands_read_is_left(agrees, generator):
    _, report = agrees(lambda x, y, c, m, w, b: (x := x + c[:, None, :N] * y) + layer(x, w, b), *inputs(generator))
    assert "makes its input" not in report.replaced("norm")[-1].what


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_what_follows_a_norm_that_is_read_besides_leaves_its_kernel(norm, agrees, generator):
    """As in training, where the backward reads it: scale and shift are made after the norm, and its kernel has none."""

    def block(x, y, c, m, w, b):
        x = x + c[:, None, :N] * y
        normed = norm(x, w, b)
        return normed, normed * (1 + (c @ m)[:, None, :N]) + (c @ m)[:, None, -N:], x

    _, report = agrees(block, *inputs(generator))
    assert report.replaced("norm")[-1].what.endswith("with what makes its input")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, c: x * c[:, :, None][..., :1, :],  # one number for each sequence
        lambda x, c: torch.cumsum(x, 1) * c[:, None, :N],
    ],
)
def test_what_has_no_form_stays(wrong, agrees, generator):
    x, _, c, *_ = inputs(generator)
    agrees(lambda x, c: layer(wrong(layer(x), c)), x, c)


@pytest.mark.parametrize("wins", [False, True])
def test_competes_as_a_whole_and_leaves_no_trace(wins, monkeypatch, generator):
    measured = []

    def measure(new, old, *rest):
        measured.append([n.target for n in new.graph.nodes])
        return decide.Outcome(1, 2) if wins else decide.Outcome(2, 1)

    monkeypatch.setattr(decide, "_measure", measure)
    monkeypatch.setattr(decide, "_outcomes", {})
    args = inputs(generator)
    for norm in NORMS.values():
        measured.clear()
        torch._dynamo.reset()
        f = functools.partial(gated, norm)
        with torch.no_grad(), no_graph_caches(), collect() as report:
            got = torch.compile(f, backend=dry_run)(*args)
        torch.testing.assert_close(got, f(*args), rtol=1e-4, atol=1e-4)
        assert next(row.status for row in report.select("norm")) == ("replaced" if wins else "kept"), report
        assert len(report.replaced("norm")) == wins
        assert torch.ops.tile.fused_norm.default in measured[0] and torch.ops.aten.add.Tensor not in measured[0]
        assert len(measured) == 1  # what lost with what stands around it would lose alone, too


@pytest.mark.parametrize("stored", [False, True])
def test_sums_that_only_an_rms_norm_reads_are_its_own_at_once(stored, monkeypatch, generator):
    """Alone it would lose to one kernel that does not store the sum; a sum that is stored is add_rms_norm's."""
    measured = []

    def measure(new, old, *rest):
        measured.append({n.target for n in new.graph.nodes})
        return decide.Outcome(1, 2)

    monkeypatch.setattr(decide, "_measure", measure)
    monkeypatch.setattr(decide, "_outcomes", {})
    x, y = (torch.randn(64, N, generator=generator) for _ in range(2))

    def f(x, y):
        total = x + y
        return (rms(total), total.cumsum(0)) if stored else rms(total)

    with torch.no_grad(), no_graph_caches(), collect() as report:
        torch.testing.assert_close(torch.compile(f, backend=dry_run)(x, y), f(x, y), rtol=1e-4, atol=1e-4)
    last = torch.ops.tile.add_rms_norm.default if stored else torch.ops.tile.fused_norm.default
    assert last in measured[-1] and len(measured) == 1 + stored and len(report.replaced("norm")) == 1 + stored


@pytest.mark.parametrize(("rows", "device", "kept"), [(8, "cuda", True), (4096, "cuda", False), (8, "cpu", False)])
@pytest.mark.parametrize("family", ["norm", "softmax"])
def test_what_is_too_small_to_matter_is_not_timed(family, rows, device, kept, monkeypatch):
    def timed(*args):
        raise LookupError

    monkeypatch.setattr(decide, "decide", timed)
    with FakeTensorMode() as mode, V.set_fake_mode(mode), collect() as report:
        x, w = torch.empty(rows, 64, device=device), torch.empty(64, device=device)
        ops = {"softmax": lambda x, w: torch.ops.tile.softmax(x), "norm": lambda x, w: torch.ops.tile.rms_norm(x, w)}
        graph = make_fx(ops[family])(x, w).graph
        context = Context(graph, Settings(), "inference", policy_of(Settings()))
        if not kept:
            with pytest.raises(LookupError):
                settle(context)
            return
        settle(context)
    (row,) = report.rows
    assert row.status == "kept" and "so small" in row.reason
    assert not [n for n in graph.nodes if getattr(n.target, "namespace", "") == "tile"]


def test_sums_of_many_norms(agrees, generator):
    """What one match leaves behind is no epilogue of the next norm."""
    x, ws = torch.randn(10, 16, generator=generator), torch.rand(4, 16, generator=generator)
    gates = torch.rand(4, 10, 1, generator=generator)

    def mixture(x, ws, gates):
        out = torch.zeros_like(x)
        for i in range(4):
            out = out + gates[i] * F.rms_norm(x + i, (16,), ws[i])
        return out

    _, report = agrees(mixture, x, ws, gates)
    assert len(report.replaced("norm")) == 4, report
