# SPDX-License-Identifier: Apache-2.0
"""Contests that need not be held, as sizes decide."""

import pytest
import torch
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile import hardware
from torch_tile.inductor.context import Context
from torch_tile.inductor.finalize import settle
from torch_tile.inductor.patterns.gemm import gemm
from torch_tile.inductor.patterns.norm import fused_norm
from torch_tile.inductor.patterns.pre_grad import inline_fused_layers
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import cost_rules, decide as competition, roofline
from torch_tile.inductor.select.policy import policy_of
from torch_tile.inductor.settings import Settings


@pytest.fixture
def h200(monkeypatch):
    """Fake tensors of a GPU are an H200's."""
    monkeypatch.setattr(cost_rules, "measured", lambda device: roofline.PEAKS["NVIDIA H200"])
    monkeypatch.setattr(hardware, "_is_here", lambda index: True)
    monkeypatch.setattr(hardware, "_capability_of", lambda index: 90)
    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        yield


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def product(m, n, k, count=1, dtype=torch.bfloat16):
    def call(a, *bs):
        return torch.ops.tile.gemm(a, list(bs), [], "", "v=gelu(acc0);ret v", dtype)

    return list(make_fx(call)(empty(m, k, dtype=dtype), *(empty(k, n, dtype=dtype) for _ in range(count))).graph.nodes)


def attended(batch, heads, queries, keys, width=128):
    def call(q, k, v):
        return torch.ops.tile.attention(q, k, v)

    made = empty(batch, heads, queries, width), *(empty(batch, heads, keys, width) for _ in range(2))
    return list(make_fx(call)(*made).graph.nodes)


@pytest.mark.parametrize(
    ("sizes", "sure"),
    [
        ((4096, 16384, 4096), True),
        ((8192, 4096, 1024), True),
        ((4096, 14336, 4096, 2), True),
        ((4096, 4096, 14336), False),  # long sums: what is saved is little beside them
        ((64, 14336, 4096), False),  # few rows
        ((4096, 16380, 4096), False),  # rows that begin anywhere
        ((1024, 1024, 640), False),  # small: what is stored stays in cache
    ],
)
def test_products_whose_results_are_long_to_store(sizes, sure, h200):
    assert bool(cost_rules.with_epilogue(product(*sizes))) == sure
    assert not cost_rules.with_epilogue(product(*sizes, dtype=torch.float32))


@pytest.mark.parametrize(
    ("first", "stride", "sure"), [(0, 4104, True), (0, 4100, False), (8, 4104, True), (4, 4104, False)]
)
def test_rows_that_begin_anywhere_need_a_contest(first, stride, sure, h200):
    """Bulk copies begin at multiples of 16 bytes."""

    def call(a, b):
        return torch.ops.tile.gemm(a, [b], [], "", "v=gelu(acc0);ret v", torch.bfloat16)

    a = empty(4096, stride).narrow(1, first, 4096)
    assert bool(cost_rules.with_epilogue(list(make_fx(call)(a, empty(4096, 16384)).graph.nodes))) == sure


@pytest.mark.parametrize(
    ("rows", "width", "lost"),
    [
        (8192, 1024, True),
        (131072, 128, True),
        (8192, 2048, True),
        (8192, 1152, False),  # no power of two
        (4096, 4096, False),  # too long to hold
        (65536, 1024, False),  # a large tensor
    ],
)
@pytest.mark.parametrize("thorough", [False, True])
def test_norms_of_rows_that_inductor_holds_in_registers(rows, width, lost, thorough, h200):
    graph = make_fx(lambda x, w: torch.ops.tile.layer_norm(x, w, None, 1e-5))(empty(rows, width), empty(width)).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.tile.layer_norm.default)
    assert bool(cost_rules.in_registers(node)) == lost
    with collect() as report:
        context = Context(graph, Settings(thorough=thorough), "inference", policy_of(Settings(thorough=thorough)))
        left = fused_norm.left_to_inductor(context, "norm", node, node.args[0], node)
    assert left == (lost and not thorough)
    assert not left or "in registers" in report.rows[0].reason


@pytest.mark.parametrize(
    ("sizes", "sure"), [((4, 16, 1024, 1024), True), ((1, 32, 4096, 4096), True), ((4, 16, 128, 128), False)]
)
def test_attention_whose_scores_are_many(sizes, sure, h200):
    assert bool(cost_rules.of_scores(attended(*sizes))) == sure
    assert not cost_rules.of_scores(product(4096, 4096, 1024))


@pytest.mark.parametrize(
    ("sizes", "widths", "sure"),
    [
        ((64, 4096, 128), (512, 64), True),
        ((128, 8192, 16), (512, 64), True),
        ((64, 4096, 128), (96, 64), False),  # widths that tensor cores take in part
        ((64, 4096, 128), (512, 24), False),
        ((64, 4096, 64), (1024, 64), False),  # no room for tiles of so many columns
        ((64, 4096, 16), (1024, 64), False),
        ((64, 4096, 16), (640, 64), False),
        ((64, 4096, 16), (512, 192), True),
        ((1, 8192, 128), (512, 64), False),  # few scores: they stay in cache
        ((1, 1 << 20, 1024), (512, 64), False),  # so many heads that latents are little and products long
    ],
)
def test_latents_that_many_heads_read(sizes, widths, sure, h200):
    batch, length, heads = sizes
    made = [empty(batch, 1, heads, w) for w in widths] + [empty(batch, length, w) for w in widths]
    graph = make_fx(lambda *x: torch.ops.tile.mla_decode(*x))(*made).graph
    assert bool(cost_rules.of_latents(list(graph.nodes))) == sure
    assert not cost_rules.of_latents(product(4096, 4096, 1024))


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "unknown"])
def test_other_machines_hold_contests(name, monkeypatch):
    """The rules were checked on Hopper; of an Ampere card the peak is known, too."""
    capability = 90 if "H200" in name else 80
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(hardware, "_is_here", lambda index: True)
    monkeypatch.setattr(hardware, "_capability_of", lambda index: capability)
    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        assert bool(cost_rules.with_epilogue(product(4096, 16384, 4096))) == ("H200" in name)


def test_machines_without_a_gpu_hold_contests():
    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        assert not cost_rules.with_epilogue(product(4096, 16384, 4096))


@pytest.mark.parametrize(("thorough", "held"), [(False, 0), (True, 1)])
def test_a_sure_winner_needs_no_contest(thorough, held, h200, monkeypatch):
    contests = []

    def decide(new, old, settings):
        contests.append(new)
        return competition.Outcome(1.0, 2.0)

    monkeypatch.setattr(competition, "decide", decide)

    def model(x, w):
        return torch.nn.functional.gelu(x @ w)

    graph = make_fx(model)(empty(4096, 4096), empty(4096, 16384)).graph
    with collect() as report:
        gemm.match(Context(graph, Settings(thorough=thorough), "inference", policy_of(Settings(thorough=thorough))))
    (row,) = report.replaced("gemm")
    assert len(contests) == held and ("never stored" in row.reason) == (not held)


def test_norms_along_memory_columns_are_inductors(monkeypatch):
    """Channels first, normalised over channels: a kernel of rows would load each line of memory many times."""
    monkeypatch.setattr(competition, "decide", lambda *args: pytest.fail("no contest is needed"))
    with FakeTensorMode() as mode, V.set_fake_mode(mode), collect() as report:
        x, w = empty(4, 640, 64, 64).permute(0, 2, 3, 1), empty(640)
        graph = make_fx(lambda x, w: torch.ops.tile.rms_norm(x, w))(x, w).graph
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.tile.rms_norm.default)
        context = Context(graph, Settings(), "inference", policy_of(Settings()))
        assert fused_norm.left_to_inductor(context, "norm", node, node.args[0], node)
        assert not fused_norm.left_to_inductor(context, "softmax", node, node.args[0], node, "softmax")
    assert "no neighbours in memory" in report.rows[0].reason


def test_a_norm_of_sums_that_is_left_to_inductor_is_its_own_again():
    """Not our kernel on a sum that is rounded before: Inductor keeps the sum in registers."""

    def model(x, y, w):
        return torch.ops.tile.layer_norm(x + y, w, None, 1e-5)

    with FakeTensorMode() as mode, V.set_fake_mode(mode), collect() as report:
        x, y = (empty(4, 640, 64, 64).permute(0, 2, 3, 1) for _ in range(2))
        graph = make_fx(model)(x, y, empty(640)).graph
        context = Context(graph, Settings(), "inference", policy_of(Settings()))
        fused_norm.fuse_front(context)
        settle(context)
    (row,) = report.rows
    assert row.status == "kept" and "what makes its input" in row.what
    assert not [n for n in graph.nodes if getattr(n.target, "namespace", "") == "tile"]


@pytest.mark.parametrize(("length", "width", "mask", "stays"), [
    (512, 1024, None, True),
    (512, 256, None, False),  # attention is a quarter
    (4096, 1024, None, False),
    (512, 1024, "padding", False),
])  # fmt: skip
@pytest.mark.parametrize("select", ["fastest", "tile"])
def test_fused_layers_whose_attention_is_little(length, width, mask, stays, select, h200):
    graph = torch.fx.Graph()
    names = ["x", "in_w", "in_b", "out_w", "out_b", "n1_w", "n1_b", "n2_w", "n2_b", "w1", "b1", "w2", "b2", "mask"]
    shapes = {
        "x": (16, length, width), "in_w": (3 * width, width), "in_b": (3 * width,), "out_w": (width, width),
        "w1": (4 * width, width), "b1": (4 * width,), "w2": (width, 4 * width), "mask": (16, length),
    }  # fmt: skip
    n = {name: graph.placeholder(name) for name in names}
    for name, node in n.items():
        node.meta["val"] = empty(*shapes.get(name, (width,)), dtype=torch.bool if name == "mask" else torch.bfloat16)
    args = n["x"], width, 16, n["in_w"], n["in_b"], n["out_w"], n["out_b"], True, True, 1e-5
    args += n["n1_w"], n["n1_b"], n["n2_w"], n["n2_b"], n["w1"], n["b1"], n["w2"], n["b2"]
    args += (n["mask"], 1) if mask else (None, None)
    layer = graph.call_function(torch._transformer_encoder_layer_fwd, args)
    layer.meta["val"] = n["x"].meta["val"]
    graph.output(layer)
    assert bool(cost_rules.in_fused_layer(layer)) == stays
    if mask:  # torch asks a GPU which kernel takes it, to write it out
        return
    with collect() as report:
        inline_fused_layers.write_out(
            Context(graph, Settings(select=select), "pre_grad", policy_of(Settings(select=select)))
        )
    left = list(graph.find_nodes(op="call_function", target=torch._transformer_encoder_layer_fwd))
    assert bool(left) == (stays and select == "fastest")
    assert len(report.select(None, "kept")) == len(left)
