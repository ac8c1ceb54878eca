# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead: which ones, and that nothing runs."""

import functools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import library
from torch_tile.hardware import Target
from torch_tile.inductor import compat, driver
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.compile_ahead import kernels, rehearse as prefetch, workers
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect
from torch_tile.ir.stmt import Program
from torch_tile.kernel import JITKernel
from torch_tile.kernels.common import machine_of
from torch_tile.ops import launchers
from torch_tile.runtime.launch_plan import LaunchPlan, has_memory, planning

OURS = functools.partial(dry_run, options={"select": "tile"})


def layer(x, norm, gate, up, down):
    h = F.rms_norm(x, (16,), norm)
    return x + (F.silu(h @ gate) * (h @ up)) @ down


@pytest.fixture
def rehearsed(monkeypatch):
    """What rehearsals found, as they would go to the threads."""
    found = []

    def note(graph, settings, stage):
        before = str(graph)
        if stage not in ("joint", "pre_grad"):
            found.extend(prefetch.rehearse(graph, settings, stage))
        assert str(graph) == before
        return []

    monkeypatch.setattr(driver, "is_on_gpu", lambda graph: True)
    monkeypatch.setattr(prefetch, "prefetch", note)
    return found


def test_every_different_call_once(rehearsed):
    args = [torch.randn(s) for s in ((2, 5, 16), 16, (16, 24), (16, 24), (24, 16))]
    with torch.no_grad(), no_graph_caches(), collect() as report:
        torch.compile(lambda *a: layer(layer(*a), *a[1:]), backend=OURS)(*args)
    assert sorted(n.target.__name__ for n in rehearsed) == ["gemm.default", "gemm.default", "rms_norm.default"]
    assert len(report.replaced()) == 6  # the rehearsal reports nothing


def test_graphs_of_the_cpu_do_not_wait_for_its_import():
    code = """
import functools, sys, torch
from torch_tile.inductor.dry_run import dry_run
ours = functools.partial(dry_run, options={"select": "tile"})
torch.compile(lambda a, b: torch.relu(a @ b), backend=ours)(torch.ones(3, 4), torch.ones(4, 5))
assert "torch_tile.inductor.patterns.gemm.gemm" in sys.modules
assert "torch_tile.inductor.compile_ahead.rehearse" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plain_products_are_not_compiled_ahead(rehearsed):
    with torch.no_grad(), no_graph_caches():
        torch.compile(torch.mm, backend=dry_run)(torch.randn(3, 4), torch.randn(4, 5))
    assert not rehearsed


def test_both_directions_of_attention_are_compiled_before_either_graph(monkeypatch):
    prepared, stages = [], []
    prefetch_, rehearse = prefetch.prefetch, prefetch.rehearse
    monkeypatch.setattr(driver, "is_on_gpu", lambda graph: True)
    monkeypatch.setattr(workers, "ready", lambda: None)
    monkeypatch.setattr(kernels, "prepare", lambda op, *rest: prepared.append(op.name()))

    def noted(graph, settings, stage):
        for future in (started := prefetch_(graph, settings, stage)):
            future.result(60)
        stages.append((stage, sorted(prepared)))
        prepared.clear()
        return started

    monkeypatch.setattr(prefetch, "prefetch", noted)
    monkeypatch.setattr(prefetch, "rehearse", lambda *args: rehearse(*args)[:0])
    args = [torch.randn(1, 2, 9, 16, requires_grad=True) for _ in "qkv"]

    def twice(q, k, v):
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v), k, v)

    with no_graph_caches():
        torch.compile(twice, backend=OURS)(*args).sum().backward()
    assert stages == [
        ("pre_grad", []), ("joint", ["tile::attention_backward", "tile::attention_lse"]),
        ("forward", []), ("backward", []),
    ]  # fmt: skip


def test_kernels_are_compiled_without_tensors(rehearsed, monkeypatch):
    """The kernels of a graph's call are those that the call launches; to compile them, nothing of its sizes is made."""
    args = torch.randn(3, 4), torch.randn(4, 5)
    with torch.no_grad(), no_graph_caches():
        torch.compile(lambda a, b: torch.relu(a @ b), backend=OURS)(*args)
    (node,) = rehearsed
    with planning() as plan:
        launchers.gemm(*args_of(node, args), out=torch.full((3, 5), 7.0))
    made, launched = [], []
    monkeypatch.setattr(LaunchPlan, "compile", lambda self: made.extend(self.launches))
    monkeypatch.setattr(JITKernel, "run", lambda *a: launched.append(a), raising=False)
    kernels.prepare(node.target, node.args, dict(node.kwargs))
    assert [(each.function, each.choice) for each in made] == [(each.function, each.choice) for each in plan.launches]
    assert made and not launched and not any(has_memory(x) for each in made for x in each.args)


def args_of(node, tensors):
    """The arguments of a node's call, with tensors in the place of its inputs, in the order in which they come."""
    inputs = dict(zip(node.all_input_nodes, tensors, strict=True))
    return torch.fx.map_arg((node.args, node.kwargs), inputs.__getitem__)[0]


def test_programs_are_traced_here_and_sent_to_workers(rehearsed, monkeypatch, tmp_path):
    """What a worker was sent is compiled by nobody else meanwhile, and by this process when it is handed back."""
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_TILE_VERIFY", "0")
    args = torch.randn(192, 320), torch.randn(320, 256)
    with torch.no_grad(), no_graph_caches():
        torch.compile(lambda a, b: torch.relu(a @ b), backend=OURS)(*args)
    (node,) = rehearsed
    sent = []

    class Pool:
        def submit(self, job, *args):
            sent.append(args)
            assert not list(tmp_path.rglob("*.cubin"))
            raise RuntimeError("closed")

    machine = library.machine_for(Target("cuda", 90))
    kernels.prepare(node.target, node.args, dict(node.kwargs), Pool(), machine)
    ((program, target, _, cache),) = sent
    assert isinstance(program, Program) and target == Target("cuda", 90) and cache == str(tmp_path)
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


@pytest.mark.parametrize("pool", [None, "workers"])
def test_calls_of_a_graph_for_a_gpu_are_prepared_in_threads(monkeypatch, pool):
    with FakeTensorMode():
        value = torch.empty(2, device="cuda")
    graph, prepared = torch.fx.Graph(), []
    x = graph.placeholder("x")
    x.meta["val"] = value
    calls = [graph.call_function(op, (x,)) for op in (torch.relu, torch.exp, torch.tanh)]
    monkeypatch.setattr(workers, "ready", lambda: pool)
    monkeypatch.setattr(prefetch, "rehearse", lambda *args: calls)
    monkeypatch.setattr(kernels, "prepare", lambda *args: prepared.append(args))
    for future in prefetch.prefetch(graph, None, "post_grad"):
        future.result(60)
    assert len(prepared) == 3 and all((call.target, (x,), {}, pool) in prepared for call in calls)


class TestForesight:
    """Small graphs are traced ahead, before AOTAutograd does: the slow kernels begun then are those called later."""

    @pytest.fixture
    def begun(self, monkeypatch, tmp_path):
        """The stages of prefetching, with the calls that are begun at each."""
        monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(driver, "is_on_gpu", lambda graph: True)
        monkeypatch.setattr(workers, "ready", lambda: None)
        stages, original, now = {}, prefetch.prefetch, []

        def form(op, args, kwargs, pool):
            node = torch.fx.Graph().call_function(op, (), dict(kwargs))
            node._args = args  # of another graph
            now.append(kernels.form(node))

        def noted(graph, settings, stage):
            for future in (started := original(graph, settings, stage)):
                future.result(60)
            stages[stage] = sorted(now)
            now.clear()
            return started

        monkeypatch.setattr(kernels, "prepare", form)
        monkeypatch.setattr(prefetch, "prefetch", noted)
        return stages

    @pytest.fixture
    def operands(self, generator):
        return [torch.randn(s, generator=generator) for s in ((3, 8, 32), (3, 8, 16), (3, 20, 32), (3, 20, 16))]

    @staticmethod
    def decode(q, q_pe, kv, k_pe):
        scores = torch.einsum("bhd,bkd->bhk", q, kv) + torch.einsum("bhd,bkd->bhk", q_pe, k_pe)
        return torch.einsum("bhk,bkd->bhd", (scores * 0.1).softmax(-1), kv)

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_finds_what_the_graph_will_have(self, dynamic, begun, operands):
        with torch.no_grad(), no_graph_caches():
            got = torch.compile(self.decode, backend=OURS, dynamic=dynamic)(*operands)
        torch.testing.assert_close(got, self.decode(*operands), rtol=1e-4, atol=1e-4)
        assert len(begun["pre_grad"]) == 1 and "mla_decode" in begun["pre_grad"][0]
        assert dynamic or begun["pre_grad"] == begun["inference"]

    def test_looks_once_at_a_graph(self, begun, operands):
        for again in (False, True):
            torch._dynamo.reset()
            with torch.no_grad(), no_graph_caches():
                torch.compile(self.decode, backend=OURS)(*operands)
            assert bool(begun["pre_grad"]) != again and begun["inference"]

    @pytest.mark.parametrize("why", ["it trains", "it is large", "its kernels are fast", "nothing: it writes an input"])
    def test_leaves_other_graphs_for_later(self, why, begun, operands):
        if why == "it trains":
            operands[0].requires_grad_()

        def model(q, q_pe, kv, k_pe):
            if why == "it is large":
                for _ in range(prefetch.MOST_NODES):
                    q = q + 1
            if why == "its kernels are fast":
                return F.scaled_dot_product_attention(q, kv, kv), (q_pe @ k_pe.mT).softmax(-1)
            if why == "nothing: it writes an input":
                kv[:, -1] = 0
            return self.decode(q, q_pe, kv, k_pe)

        copies = [x.detach().clone() for x in operands]
        with torch.set_grad_enabled(why == "it trains"), no_graph_caches():
            got = torch.compile(model, backend=OURS)(*operands)
            torch.testing.assert_close(got, model(*copies), rtol=1e-4, atol=1e-4)
        assert len(begun["pre_grad"]) == ("nothing" in why)
        torch.testing.assert_close(operands, copies)


def test_threads_leave_what_the_compiling_thread_counts():
    """The counters, and who saves Inductor's code: threads beside must neither read nor restore them."""
    inside, leave = threading.Event(), threading.Event()

    def beside():
        with compat.outside_trace():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=beside)
    thread.start()
    inside.wait(10)
    counters["torch_tile_test"]["compiles"] += 1
    leave.set()
    thread.join()
    assert counters.pop("torch_tile_test") == {"compiles": 1}


def test_many_threads_plan_while_the_compiling_thread_counts():
    calls = [
        (torch.ops.tile.rms_norm.default, (torch.empty(8, 64), torch.empty(64), 1e-6)),
        (torch.ops.tile.softmax.default, (torch.empty(8, 64),)),
    ]
    graph = torch.fx.Graph()
    with FakeTensorMode() as mode:
        for op, args in calls:
            nodes = [graph.placeholder("x") if isinstance(x, torch.Tensor) else x for x in args]
            for node, x in zip(nodes, args, strict=True):
                if isinstance(node, torch.fx.Node):
                    node.meta["val"] = mode.from_tensor(x)
            graph.call_function(op, tuple(nodes))
    for n in range(20):
        counters[f"torch_tile_test {n}"]["compiles"] = 1
    try:
        with ThreadPoolExecutor(8) as threads:
            plans = [
                threads.submit(kernels.plan_of, n.target, n.args, {}, machine_of(torch.empty(0)))
                for _ in range(20)
                for n in kernels.calls(graph)
            ]
            with compat.nested_compile():
                counters.clear()
            assert all(plan.result().launches for plan in plans)
        assert [counters[f"torch_tile_test {n}"]["compiles"] for n in range(20)] == [1] * 20
    finally:
        for name in [name for name in counters if name.startswith("torch_tile_test")]:
            del counters[name]
