# SPDX-License-Identifier: Apache-2.0
"""Traits of intrinsics, and that passes and simulators go by them: a new barrier is one for all of them."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from mutation import ordering

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics import base, lookup, names
from torch_tile.intrinsics.base import starts, syncs
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir.expr import Call
from torch_tile.ir.node import Rewriter, walk
from torch_tile.ir.stmt import Do
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.hopper.plan_tma_loads import _is_barrier
from torch_tile.lowering.sync.insert_barriers import insert_barriers, is_barrier
from torch_tile.simulator.simt.prescan import is_concurrent

ROOT = Path(base.__file__).parents[1]


def having(**traits):
    return {n for n in names() if all(getattr(lookup(n), key) is value for key, value in traits.items())}


def test_what_orders_has_a_scope_or_an_engine():
    for name in names():
        found = lookup(name)
        assert found.sync is None or found.scope is not None or found.engine is not None, name
        assert found.scope is None or found.sync is not None, name


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        ({"sync": Sync.BARRIER}, {"barrier", "warp_barrier", "lanes_barrier", "named_barrier"}),
        ({"is_barrier": True}, {"barrier", "named_barrier"}),
        ({"sync": Sync.COMMIT}, {"cp_async_commit", "wgmma_commit", "bulk_commit"}),
        ({"sync": Sync.DRAIN}, {"cp_async_wait", "wgmma_wait", "bulk_wait"}),
        ({"sync": Sync.WAIT}, {"mbarrier_wait", "cluster_wait", "grid_wait"}),
        ({"is_grouped": True}, {"cp_async_commit", "cp_async_wait", "wgmma_commit", "wgmma_wait"}),
        ({"starts": True}, {"cp_async", "tma_load", "tma_store", "wgmma"}),
        ({"atomic": True}, {"atomic", "atomic_add_vector", "atomic_load", "arrive_last"}),
        (
            {"publishes": True},
            {
                "mbarrier_arrive",
                "warp_arrive",
                "warp_barrier",
                "lanes_barrier",
                "named_barrier",
                "named_barrier_arrive",
            },
        ),
    ],
    ids=lambda found: " ".join(sorted(map(str, found))),
)
def test_who_has_which(traits, expected):
    assert having(**traits) == expected


def test_asynchronous_accesses_are_an_engines():
    for name in ("cp_async", "tma_load", "tma_store", "wgmma"):
        assert lookup(name).engine is not None and lookup(name).starts
    assert not [n for n in names() if lookup(n).by_hand and not lookup(n).header]


class Renamed(Rewriter):
    """Calls of another name."""

    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit_Do(self, node):
        if isinstance(node.call, Call) and node.call.name == self.old:
            return replace(node, call=replace(node.call, name=self.new))
        return node


@pytest.fixture
def another(monkeypatch):
    """Barriers of new names, with the traits of known ones."""
    for name in ("barrier", "named_barrier"):
        monkeypatch.setitem(base._REGISTRY, f"another_{name}", replace(lookup(name), name=f"another_{name}"))


def exchanged():
    """Threads read what others wrote, which takes a barrier."""

    @T.prim_func
    def kernel(x: T.Tensor((128,), T.float32), y: T.Tensor((128,), T.float32)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((128,), T.float32)
            for i in T.Parallel(128):
                tile[i] = x[i]
            for i in T.Parallel(128):
                y[i] = tile[127 - i]

    build = Build(Target("cuda", 80))
    return lower(kernel.program, cuda_passes(build))


def test_a_new_barrier_orders(another):
    program = exchanged()
    assert len(ordering(program)) == 1 and insert_barriers(program) is program
    other = Renamed("barrier", "another_barrier")(program)
    assert insert_barriers(other) is other  # no second one
    gone = Renamed("barrier", "memory_fence")(program)
    assert insert_barriers(gone) is not gone
    (call,) = (n for n in walk(other) if isinstance(n, Do) and syncs(n, Sync.BARRIER))
    assert is_barrier(call) and _is_barrier(call.call)


def test_a_new_barrier_by_number_is_concurrent(another):
    program = exchanged()
    named = Call("another_named_barrier", (), program.params[0].dtype, (1, 64))
    other = replace(next(n for n in walk(program) if isinstance(n, Do) and syncs(n, Sync.BARRIER)), call=named)
    (kernel,) = program.kernels
    assert not is_concurrent(kernel)
    assert is_concurrent(replace(kernel, body=replace(kernel.body, stmts=(*kernel.body.stmts, other))))


def test_nothing_but_a_call_starts_anything():
    assert not starts(None, Engine.BULK) and not syncs(None, Sync.BARRIER, Scope.BLOCK)


ORDERING = {n for n in names() if lookup(n).sync is not None or lookup(n).engine is not None}


def test_no_pass_and_no_simulator_lists_what_orders():
    """Names stand alone where one intrinsic is made or meant; several together are a trait that is missing."""
    tables = {"simulator/simt/calls.py"}  # what each of them does to threads
    for folder in ("lowering", "simulator", "codegen", "tileop"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Tuple | ast.Set | ast.List) and str(path.relative_to(ROOT)) not in tables:
                    words = {n.value for n in node.elts if isinstance(n, ast.Constant)} & ORDERING
                    assert len(words) < 2, f"{path.relative_to(ROOT)}:{node.lineno} lists {sorted(words)}"
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("name.startswith"):
                    prefix = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                    assert not any(n.startswith(prefix) for n in ORDERING) or not prefix, f"{path}:{node.lineno}"
