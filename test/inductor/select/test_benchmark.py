# SPDX-License-Identifier: Apache-2.0
"""Parts that are run node by node, not compiled, to be timed."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.compile_ahead import kernels
from torch_tile.inductor.graph.extract import extract
from torch_tile.inductor.graph.nodes import aten, is_call
from torch_tile.inductor.select import benchmark, decide
from torch_tile.inductor.select.benchmark import CONSTANTS, compute_constants, is_called


def graph_of(f, *shapes):
    return make_fx(f, tracing_mode="fake")(*map(torch.randn, shapes))


@pytest.mark.parametrize(
    ("f", "options", "compiled"),
    [
        (torch.mm, {}, 0),
        (lambda a, b: torch.relu(a @ b), {}, 2),
        (torch.mm, {"max_autotune": True}, 2),  # Inductor's search may find a faster product
        (lambda a, b: torch.ops.tile.gemm(a, [b], [], "", "", a.dtype), {"max_autotune": True}, 0),
    ],
)
def test_calls_are_made_and_the_rest_is_compiled(f, options, compiled, monkeypatch):
    made = []
    compile_alone = benchmark.compat.compile_alone
    monkeypatch.setattr(benchmark.compat, "compile_alone", lambda *args: made.append(args) or compile_alone(*args))
    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.01)
    with no_graph_caches():
        ours, theirs = benchmark.times(graph_of(f, (8, 8), (8, 8)), graph_of(f, (8, 8), (8, 8)), options)
    assert len(made) == compiled and ours > 0 and theirs > 0


def test_kernels_are_compiled_while_the_other_side_is_made_ready(monkeypatch):
    """All at a time, and before they are called."""
    together, order = threading.Barrier(3), []

    def prepare(op, *rest):
        together.wait(60)
        order.append(op)

    def ours(q, k, v):
        out, lse = torch.ops.tile.attention_lse(q, k, v)
        return torch.ops.tile.attention_backward(out, q, k, v, out, lse)[:3]

    made = make_fx(ours, tracing_mode="fake")(*(torch.randn(1, 2, 8, 16) for _ in "qkv"))
    run = benchmark._run
    monkeypatch.setattr(kernels, "prepare", prepare)
    monkeypatch.setattr(benchmark, "_run", lambda call, inputs: (order or together.wait(60), run(call, inputs)))
    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.01)
    benchmark.times(made, graph_of(torch.mm, (8, 8), (8, 8)), {})
    assert [op.name() for op in order] in (
        ["tile::attention_lse", "tile::attention_backward"],
        ["tile::attention_backward", "tile::attention_lse"],
    )


def test_the_slower_one_is_seen(monkeypatch):
    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.05)
    small, large = graph_of(torch.mm, (8, 8), (8, 8)), graph_of(torch.mm, (512, 512), (512, 512))
    ours, theirs = benchmark.times(large, small, {})
    assert ours > 3 * theirs


def traced(f, *args):
    made = make_fx(f, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)
    made.graph.eliminate_dead_code()
    return made


def attend(q, k, v, mask=None):
    """With gradients, as training.py compares it."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*given, mask)
        return out.detach(), *torch.autograd.grad(out, given, q)


MASKS = {
    "none": None,
    "bool": torch.rand(2, 1, 8, 8) > 0.3,
    "row": torch.arange(8)[None] < 5,
    "bias": torch.randn(2, 1, 8, 8),
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_of_torch_is_called_in_both_directions(mask):
    x = torch.randn(2, 4, 8, 16)
    given = (x, x, x) if MASKS[mask] is None else (x, x, x, MASKS[mask])
    part = traced(lambda *args: attend(*args), *given)
    assert any("backward" in str(n.target) for n in part.graph.nodes)
    assert is_called(part)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.relu(x @ x),
        lambda x: (x @ x) @ torch.where(x > 0, x, 0.0),  # which Inductor may fuse
        lambda x: F.scaled_dot_product_attention(x, x, x * 2),
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.where(x > 0, 0.0, -1.0)),
        lambda x: torch.zeros_like(x) + x,
    ],
    ids=["behind", "where", "operand", "made mask", "constant"],
)
def test_what_a_compiler_can_fuse_is_not(f):
    assert not is_called(traced(f, torch.randn(2, 4, 16, 16)))


def test_a_mask_that_others_read_is_not():
    def f(x, mask):
        bias = torch.where(mask, 0.0, float("-inf"))
        return F.scaled_dot_product_attention(x, x, x, bias), bias.exp()

    assert not is_called(traced(f, torch.randn(2, 4, 8, 16), torch.rand(8, 8) > 0.3))


def test_constants_are_computed_once():
    x, mask = torch.randn(2, 4, 8, 16), torch.rand(2, 1, 8, 8) > 0.3
    part = traced(attend, x, x, x, mask)
    assert any(is_call(n, *CONSTANTS) for n in part.graph.nodes)
    want = part(x, x, x, mask)
    compute_constants(part)
    part.recompile()
    assert not any(is_call(n, *CONSTANTS) for n in part.graph.nodes)
    assert any(is_call(n, aten.where.self) for n in part.graph.nodes)
    torch.testing.assert_close(part(x, x, x, mask), want, rtol=0, atol=0)


def _linear_graph():
    """x @ weight.T as Inductor has it, with a bias, and a mask that no product reads."""
    graph = torch.fx.Graph()
    x, w, b, m = (graph.placeholder(name) for name in "xwbm")
    for node, shape in ((x, (8, 256)), (w, (64, 256)), (b, (64,)), (m, (8, 64))):
        node.meta["val"] = torch.empty(shape, device="meta")
    turned = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
    turned.meta["val"] = torch.empty(256, 64, device="meta")
    made = graph.call_function(torch.ops.aten.addmm.default, (b, x, turned))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (made, m)),))
    return torch.fx.GraphModule({}, graph)


def test_weights_of_a_contest_are_as_large_as_trained_ones():
    x, w, b, m = _linear_graph().graph.find_nodes(op="placeholder")
    assert [benchmark.assumed_deviation(n) for n in (x, w, b, m)] == [1.0, 256**-0.5, 1.0, 1.0]
    for node in (x, w):
        node.meta["val"] = torch.empty(node.meta["val"].shape)
        torch.testing.assert_close(
            benchmark.example(node, deviation=0.25).std(), torch.tensor(0.25), rtol=0.15, atol=0.0
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int32])
@pytest.mark.parametrize("form", [lambda x: x[:1].expand(5, 7), lambda x: x.unfold(1, 3, 1), lambda x: x[:, ::2]])
def test_examples_of_tensors_that_overlap_themselves(form, dtype):
    """In-place operations refuse them, and Inductor's code wants their strides."""
    x = torch.fx.Graph().placeholder("x")
    x.meta["val"] = form(torch.zeros(5, 7, dtype=dtype))
    made = benchmark.example(x, 2.0, 0.125)
    assert (made.shape, made.stride(), made.dtype) == (x.meta["val"].shape, x.meta["val"].stride(), dtype)
    if dtype.is_floating_point:
        assert made.float().sub(2 if dtype.itemsize > 1 else 1).abs().max() < 1


def test_contests_take_expanded_inputs():
    x, w = torch.randn(1, 64).expand(8, 64), torch.randn(64, 64)

    def f(x, w):
        return torch.relu(x @ w)

    traced = make_fx(f, tracing_mode="fake")(x, w)
    assert all(each > 0 for each in benchmark.times(traced, traced, {}))


def test_a_frozen_tensor_is_its_own_example():
    frozen = torch.randn(64, 256)
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("frozen")
    x.meta["val"], w.meta["val"] = torch.empty(8, 256), torch.empty(64, 256)
    made = graph.call_function(torch.ops.aten.mm.default, (x, w))
    graph.output(made)
    module = torch.fx.GraphModule({"frozen": frozen}, graph)
    (made,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    part = extract([made], list(made.all_input_nodes))
    names = [benchmark.example(n) for n in part.graph.find_nodes(op="placeholder")]
    assert any(each is module.frozen for each in names)
    text = decide._describe(part)
    module.frozen.data.mul_(64)
    assert decide._describe(part) != text  # outcomes for other numbers are others
