# SPDX-License-Identifier: Apache-2.0
"""Attention written out in training becomes the two kernels, where its gradients are attention's, and only there."""

import functools
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch_tile.inductor import context, driver
from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.patterns.attention import joint
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import decide

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-2}


def later(q, k):
    """Where keys come after their queries."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)


def weighed(scores, v):
    return torch.softmax(scores, -1) @ v


def plain(q, k, v):
    return weighed(q @ k.transpose(-2, -1) * 0.2, v)


def divided(q, k, v):
    return weighed(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), v)


def causal(q, k, v):
    return weighed((q @ k.mT * 0.3).masked_fill(later(q, k), -math.inf), v)


def added(q, k, v):
    return weighed(q @ k.mT * 0.2 + torch.zeros(later(q, k).shape, dtype=q.dtype).masked_fill(later(q, k), -1e9), v)


def in_float(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 4
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores.double(), -1).to(q.dtype), v)


def heads_last(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k), -1), v).transpose(1, 2)


def turned(q, k, v):
    return (v.mT @ torch.softmax(k @ q.mT * 0.2, -2)).mT


def copied(q, k, v):
    k, v = k[:, :2], v[:, :2]
    return causal(
        q, k.repeat_interleave(2, 1), v[:, :, None].expand(-1, -1, 2, -1, -1).reshape(v.shape[0], 4, *v.shape[2:])
    )


def shared(q, k, v):  # copied by nobody
    scores = torch.einsum("bqghd,bkgd->bghqk", q.unflatten(1, (2, 2)).permute(0, 3, 1, 2, 4), k[:, :2].transpose(1, 2))
    weights = torch.softmax(scores.masked_fill(later(q, k), -2e38), -1)
    return torch.einsum("bghqk,bkgd->bqghd", weights, v[:, :2].transpose(1, 2)).flatten(2, 3).transpose(1, 2)


def capped(q, k, v):
    return weighed(torch.tanh(q @ k.mT / 3) * 3, v)


def shifted(q, k, v):
    scores = (q @ k.mT * 0.2).masked_fill(later(q, k), -math.inf)
    return weighed(scores - scores.amax(-1, keepdim=True).detach(), v)


def padded(q, k, v):
    hidden = torch.arange(k.shape[2]) >= k.shape[2] - 2
    return weighed((q @ k.mT * 0.2).masked_fill(hidden[None, None, None, :], torch.finfo(q.dtype).min), v)


def scaled_before(q, k, v):
    return weighed((q * 0.5) @ (k / 3).mT, v.sin())


def crossed(q, k, v):
    return causal(q[:, :, :-2], k[:, :, 1:], v[:, :, 1:])


def one_head(q, k, v):
    return causal(q[:1, :1], k[:1, :1], v[:1, :1])


def of_one_tensor(q, k, v):
    return causal(q, q, q)


def with_shared_keys(q, k, v):
    return plain(q, k, v) + plain(q.sin(), k, v.cos())


def biased_by_distance(q, k, v):  # as in T5 and Swin: a table of the distances; q makes it, for all batches
    place = torch.arange(q.shape[2])
    return weighed(q @ k.mT * 0.2 + q.mean((0, 3))[:, (place[:, None] - place).abs()], v)


def biased_and_hidden(q, k, v):
    bias = (k[:1, :, :, 0].unsqueeze(-1) - k[:1, :, :, 1].unsqueeze(-2)).sin()
    return weighed((q @ k.mT * 0.2 + bias).masked_fill(later(q, k), -math.inf), v)


def biased_and_padded(q, k, v):
    hidden = torch.where(torch.arange(k.shape[2]) >= k.shape[2] - 2, -1e9, 0.0).to(q.dtype)
    return weighed(q @ k.mT * 0.2 + (v.mean((0, 3))[:, :, None] * q.mean((0, 3))[:, None]) + hidden, v)


def biased_by_key(q, k, v):
    return weighed(q @ k.mT * 0.2 + q.mean() * torch.arange(k.shape[2]), v)


class Halved(torch.autograd.Function):
    """What a model may do: its gradient is another than its form says."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def with_a_halved_bias(q, k, v):  # behind the gradient of the scores
    scores = q @ k.mT * 0.2
    return weighed(scores + Halved.apply(q[..., :1].expand(scores.shape)), v)


def of_fixed_queries(q, k, v):
    return causal(q.detach(), k, v)


def of_fixed_values(q, k, v):
    return causal(q, k, v.detach())


def of_values_alone(q, k, v):
    return causal(q.detach(), k.detach(), v)


def out_of_three_dimensions(q, k, v):
    return plain(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, q.shape[:2])


FORMS = [
    plain, divided, causal, added, in_float, heads_last, turned, copied, shared,
    capped, shifted, padded, scaled_before, of_fixed_queries, of_fixed_values, out_of_three_dimensions, crossed,
    one_head, of_one_tensor, with_shared_keys, biased_by_distance, biased_and_hidden, biased_and_padded,
    biased_by_key, with_a_halved_bias,
]  # fmt: skip


def with_scores_halved(q, k, v):
    return weighed(Halved.apply(q @ k.mT * 0.2), v)


def with_weights_halved(q, k, v):
    return Halved.apply(torch.softmax(q @ k.mT * 0.2, -1)) @ v


def with_one_side_detached(q, k, v):
    scores = q @ k.mT * 0.2
    return weighed(torch.where(later(q, k), scores.detach(), scores), v)


def with_weights(q, k, v):
    weights = torch.softmax(q @ k.mT * 0.2, -1)
    return weights @ v + weights.mean()


def with_scores(q, k, v):
    scores = q @ k.mT * 0.2
    return weighed(scores, v) + scores.mean()


def with_scores_and_bias_halved(q, k, v):
    return weighed(Halved.apply(q @ k.mT * 0.2 + q[..., :1].expand(-1, -1, -1, k.shape[2])), v)


def with_a_learned_temperature(q, k, v):
    return weighed(q @ k.mT * k.mean(), v)


def with_dropped_weights(q, k, v):
    torch.manual_seed(0)
    return F.dropout(torch.softmax(q @ k.mT * 0.2, -1), 0.5) @ v


OTHERS = {
    with_scores_halved: "gradient of the scores is not",
    with_weights_halved: "gradient of the scores is not",
    with_one_side_detached: "",
    with_weights: "used more than once",
    with_scores: "gradient of the scores is not",
    with_scores_and_bias_halved: "gradient of the scores is not",
    with_a_learned_temperature: "",
}


def operands(seed, dtype=torch.float32, batch=2, length=None):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    length = length or choose.randint(5, 40)
    size, width = choose.choice((16, 24, 32)), choose.choice((16, 32, 40))
    make = lambda d: torch.randn(batch, 4, length, d, generator=generator).to(dtype).requires_grad_()  # noqa: E731
    return make(size), make(size), make(width)


def gradients(f, args):
    """The result and its gradients; the gradient that comes in is of no simple form."""
    out = f(*args)
    found = torch.autograd.grad(out.sin().sum() + out.square().mean(), args, allow_unused=True)
    return [out.detach(), *found]


def run(f, *problems, dynamic=None, backend=dry_run, select="tile"):
    """The report of a function that is compiled once for all problems, whose gradients are eager's."""
    torch._dynamo.reset()
    options = {"select": select, "families": ["attention", "softmax"]}
    compiled = torch.compile(f, backend=functools.partial(backend, options=options), dynamic=dynamic)
    with no_graph_caches(), collect() as report:
        for args in problems:
            wide = [x.detach().double().requires_grad_() for x in args]
            for found, want in zip(gradients(compiled, args), gradients(f, wide), strict=True):
                assert (found is None) == (want is None)
                if found is not None:
                    error = (found - want).abs().max() / want.abs().max().clamp(min=1e-2)
                    assert error < TOLERANCE[args[0].dtype], f"{f.__name__} {args[0].dtype}: {error}"
    return report


def directions(report):
    return [r.graph for r in report.replaced("attention")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_both_directions_are_kernels(form, dtype, seed):
    report = run(form, operands(seed, dtype))
    assert directions(report) in (["forward", "backward"], ["forward"] * 2 + ["backward"] * 2)
    assert not [r for r in report.rows if r.status == "missed"]


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.__name__)
def test_other_gradients_stay_the_models(form, seed):
    report = run(form, operands(seed))
    assert directions(report) == []
    missed = [r for r in report.rows if r.family == "attention" and r.status == "missed"]
    assert len(missed) == 1 and OTHERS[form] in missed[0].reason and missed[0].fix, report.rows


def test_a_router_is_no_near_miss(seed):
    """Its softmax is read by products in the backward alone."""

    def f(x, gate, experts):
        weights, chosen = torch.softmax(x @ gate, -1).topk(2, -1)
        return (experts[chosen] * weights[..., None]).sum(-2)

    generator = torch.Generator().manual_seed(seed)
    args = [torch.randn(n, generator=generator).requires_grad_() for n in ((9, 16), (16, 4), (4, 8))]
    assert not [r for r in run(f, args).rows if r.family == "attention"]


def test_dropout_stays_the_models(seed):
    torch._dynamo.reset()
    args = operands(seed)
    with no_graph_caches(), collect() as report:
        gradients(
            torch.compile(with_dropped_weights, backend=functools.partial(dry_run, options={"select": "tile"})), args
        )
    assert directions(report) == []


def test_values_alone(seed):
    """Without gradients of scores there is nothing of attention's to be found in the backward."""
    assert "backward" not in directions(run(of_values_alone, operands(seed)))


def test_the_gradient_of_the_result_may_be_changed(seed):
    assert directions(run(lambda q, k, v: Halved.apply(causal(q, k, v)), operands(seed))) == ["forward", "backward"]


def test_copied_heads_are_shared(seed):
    (forward, backward) = run(copied, operands(seed)).replaced("attention")
    assert "k [2, 2, " in forward.what and "k [2, 2, " in backward.what


def test_masks_are_rules(seed):
    for form in (causal, added, shifted):
        assert all(", causal)" in r.what for r in run(form, operands(seed)).replaced("attention"))


def test_dynamic_sizes(seed):
    report = run(causal, *(operands(seed, length=n) for n in (9, 12, 31)), dynamic=True)
    assert directions(report) == ["forward", "backward"]


def test_layers_one_after_another(seed):
    def f(q, k, v):
        for form in (causal, capped, plain):
            v = form(q.sin(), k, v)
        return v

    assert directions(run(f, operands(seed))) == ["forward"] * 3 + ["backward"] * 3


def test_under_checkpoints(seed):
    def f(q, k, v):
        return checkpoint(lambda *x: causal(*x).cos(), q.sin(), k, v, use_reentrant=False)

    report = run(f, operands(seed))
    assert directions(report).count("backward") >= 1 and directions(report)[0] == "forward"


def test_under_autocast(seed):
    args = operands(seed)

    def f(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return causal(q, k, v).float()

    torch._dynamo.reset()
    with no_graph_caches(), collect() as report:
        found = gradients(torch.compile(f, backend=functools.partial(dry_run, options={"select": "tile"})), args)
    want = gradients(causal, args)
    assert directions(report) == ["forward", "backward"]
    for a, b in zip(found, want, strict=True):
        assert (a - b).abs().max() / b.abs().max() < 5e-2


def test_no_copies_around(seed, monkeypatch):
    """Kernels read views of projections, and what they give is read as views."""
    graphs, run_pass = [], driver.TilePass.run

    def watched(self, graph):
        context = run_pass(self, graph)
        if self.stage == "post_grad":
            graphs.append(graph)
        return context

    monkeypatch.setattr(driver.TilePass, "run", watched)
    generator = torch.Generator().manual_seed(seed)
    x, *weights = (torch.randn(*n, 64, generator=generator).div(8).requires_grad_() for n in ((2, 24), *4 * [(64,)]))

    def f(x, *weights):
        q, k, v = ((x @ w).view(2, 24, 4, 16).transpose(1, 2) for w in weights[:3])
        return causal(q, k, v).transpose(1, 2).contiguous().view(2, 24, 64) @ weights[3]

    run(f, (x, *weights))
    assert len(graphs) == 2
    for graph in graphs:
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default), graph


@pytest.mark.parametrize("form", [causal, copied, turned], ids=lambda form: form.__name__)
def test_generated_code(form, seed):
    assert directions(run(form, operands(seed), backend=tile)) == ["forward", "backward"]


@pytest.mark.parametrize("wins", [True, False])
@pytest.mark.parametrize("form", [causal, capped, copied, in_float, turned], ids=lambda form: form.__name__)
def test_the_faster_stays(form, wins, seed, monkeypatch):
    """Both sides of a contest compute the same; its loser leaves no trace."""
    sides = []

    def decided(new, old, settings):
        sides.append((new, old))
        return decide.Outcome(1.0, 2.0) if wins else decide.Outcome(2.0, 1.0)

    monkeypatch.setattr(decide, "decide", decided)
    report = run(form, operands(seed), select="fastest")
    assert directions(report) == (["forward", "backward"] if wins else [])
    assert [r.status for r in report.rows if r.family == "attention" and r.times] == ["replaced"] * 2 * wins or ["kept"]
    new, old = sides[0]
    generator = torch.Generator().manual_seed(seed)
    given = [
        torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype)
        if v.is_floating_point() else torch.ones(v.shape, dtype=v.dtype)
        for v in (n.meta["val"] for n in new.graph.find_nodes(op="placeholder"))
    ]  # fmt: skip
    for module in (new, old):
        module.recompile()
    for a, b in zip(new(*given), old(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.shape == b.shape and a.dtype == b.dtype


LOW = torch.finfo(torch.float32).min


def positions(q):
    return torch.arange(q.shape[2], device=q.device)


def causal_joint_masks(q, given):
    i = positions(q)
    return i[:, None] >= i[None, :]


def causal_and_padded(q, given):
    return causal_joint_masks(q, given) & given.bool()[:, None, None, :]


def window_and_padded(q, given):
    i = positions(q)
    return causal_and_padded(q, given) & (i[None, :] > i[:, None] - 4)


def added_joint_masks(q, given):
    return torch.zeros(q.shape[2], q.shape[2]).masked_fill(~causal_joint_masks(q, given), LOW)


def padded_joint_masks(q, given):
    return ((given - 1) * 1e9)[:, None, None, :].to(q.dtype)


def documents(q, given):
    return causal_joint_masks(q, given) & (given[:, None, :, None] == given[:, None, None, :])


MASKS = {  # what is said of it, in both directions
    causal_joint_masks: "causal)",
    causal_and_padded: "causal, score v0=where(x0,acc0,-inf);ret v0)",
    window_and_padded: "causal, window 4, score v0=where(x0,acc0,-inf);ret v0)",
    added_joint_masks: "causal)",
    padded_joint_masks: "mask)",
    documents: "causal, mask)",
}


def attend(q, k, v, given, mask):
    m = mask(q, given)
    return F.scaled_dot_product_attention(q.sin(), k, v, m.expand(q.shape[0], 1, *q.shape[2:3] * 2)).cos()


def operands_joint_masks(length=9):
    q, k, v = (torch.randn(2, 3, length, 16).requires_grad_() for _ in range(3))
    given = torch.ones(2, length, dtype=torch.int64)
    given[1, -2:] = 0
    return q, k, v, given


def run_joint_masks(f, *problems, dynamic=None, backend=dry_run, graphs=("forward", "backward")):
    """The rows of a function that is compiled once for all problems, whose gradients are eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(
        f, backend=functools.partial(backend, options={"select": "tile", "families": ["attention"]}), dynamic=dynamic
    )
    with no_graph_caches(), collect() as report:
        for args in problems:
            wanted = [x for x in args if x.requires_grad]
            found, want = (torch.autograd.grad(call(*args).square().sum(), wanted) for call in (compiled, f))
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    rows = report.replaced("attention")
    assert [r.graph for r in rows] == list(graphs)
    return [r.what for r in rows]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_what_is_said(mask, dynamic):
    lengths = (9, 12) if dynamic else (9,)
    rows = run_joint_masks(functools.partial(attend, mask=mask), *map(operands_joint_masks, lengths), dynamic=dynamic)
    assert all(row.endswith(MASKS[mask]) for row in rows), rows


def test_what_is_learned_stays():
    q, k, v, _ = operands_joint_masks()
    bias = torch.randn(3, 9, 9, requires_grad=True)

    def f(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~causal_joint_masks(q, None), -torch.inf))

    assert all(row.endswith("mask)") for row in run_joint_masks(f, (q, k, v, bias)))


def test_under_checkpoints_joint_masks():
    def f(*args):
        return checkpoint(attend, *args, causal_and_padded, use_reentrant=False)

    rows = run_joint_masks(f, operands_joint_masks(), graphs=("forward", "backward", "backward"))
    assert all(row.endswith(MASKS[causal_and_padded]) for row in rows)


def test_generated_code_joint_masks():
    rows = run_joint_masks(functools.partial(attend, mask=causal_and_padded), operands_joint_masks(), backend=tile)
    assert all(row.endswith(MASKS[causal_and_padded]) for row in rows)


@pytest.fixture
def heads(monkeypatch):
    """Whether keys have fewer heads than queries in the graphs that are compiled, in both directions."""
    found, read_masks = [], joint.read_masks

    def noted(of):
        for target, place in ((joint.LSE, 0), (joint.BACKWARD, 1)):
            for node in of.graph.find_nodes(op="call_function", target=target):
                q, k = (x.meta["val"] for x in node.args[place : place + 2])
                found.append(bool(k.shape[1] < q.shape[1]))
        read_masks(of)

    (place,) = (key for key, step in context._registered.items() if step.run is read_masks)
    monkeypatch.setitem(context._registered, place, replace(context._registered[place], run=noted))
    return found


def expanded(x, groups):
    return x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])


def interleaved(x, groups):
    return x.repeat_interleave(groups, 1)


def behind_positions(x, groups):
    return x.transpose(1, 2).repeat_interleave(groups, 2).transpose(1, 2)


def of_one_head(x, groups):
    return x[:, :1].expand(-1, 6, -1, -1)


def stacked(x, groups):
    return torch.stack([x] * groups, 2).flatten(1, 2)  # gradients of copies are added one by one


def tiled(x, groups):
    return x.repeat(1, groups, 1, 1)  # a head of queries has every second one of keys


BOTH = [True, True]
COPIES = {
    expanded: BOTH, interleaved: BOTH, behind_positions: BOTH, of_one_head: BOTH,
    stacked: [True, False], tiled: [False, False],
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("copied", COPIES, ids=lambda f: f.__name__)
def test_heads_are_shared(copied, masked, dynamic, heads):
    def f(q, k, v, given):
        rule = {"attn_mask": causal_and_padded(q, given)} if masked else {"is_causal": True}
        return F.scaled_dot_product_attention(q, copied(k.sin(), 3), copied(v, 3), **rule)

    def problem(length):
        _, _, _, given = operands_joint_masks(length)
        q, k, v = (torch.randn(2, n, length, 16).requires_grad_() for n in (6, 2, 2))
        return q, k, v, given

    run_joint_masks(f, *map(problem, (9, 12) if dynamic else (9,)), dynamic=dynamic)
    assert heads == COPIES[copied]


def test_copies_whose_gradients_are_read_stay(heads):
    """Of keys a sum over copies, of values the gradient of each copy."""

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.arange(6.0)[:, None, None]

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, expanded(k, 3), Spy.apply(expanded(v, 3)), is_causal=True)

    run_joint_masks(f, [torch.randn(2, n, 9, 16).requires_grad_() for n in (6, 2, 2)])
    assert heads == [True, False]
