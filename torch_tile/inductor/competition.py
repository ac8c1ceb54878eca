# SPDX-License-Identifier: Apache-2.0
"""`select="fastest"`: a replacement against what Inductor makes of the same subgraph, timed, the winner kept.

Both sides are cut out of the graph with the same inputs and compiled by the whole of Inductor (without our passes), so
both pay the same wrapper. Sizes that are symbols take the value that was traced with. Outcomes are remembered in the
process and on disk, keyed by both graphs, the machine and our sources.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from torch_tile.inductor import compat
from torch_tile.inductor.passes.expand import REFERENCES, expand
from torch_tile.inductor.passes.graph import Rewrite, ordered, val
from torch_tile.inductor.passes.manager import fingerprint
from torch_tile.inductor.report import log
from torch_tile.runtime.cache import cache_dir

BUDGET = 0.2
"""Seconds of timing for each pair, after one warm-up of each."""


@dataclass(frozen=True)
class Outcome:
    """Best times of both, in microseconds."""

    tile: float
    inductor: float

    @property
    def tile_wins(self) -> bool:
        """Ties go to Inductor: its code can still fuse with what surrounds it."""
        return self.tile < self.inductor

    def __str__(self) -> str:
        return f"tile {self.tile:.1f} us, Inductor {self.inductor:.1f} us"


def compete(rewrite: Rewrite, pairs: Sequence[tuple[Node, Node]]) -> Outcome:
    """Time the new nodes of `pairs` against the old ones."""
    inputs = rewrite.inputs()
    old = extract([o for o, _ in pairs], inputs)
    new = extract([n for _, n in pairs], inputs)
    for node in list(old.graph.nodes):
        if node.target in REFERENCES:
            expand(node, REFERENCES[node.target][1])
    return decide(new, old)


def compete_captured(node: Node, reference: Callable[..., torch.Tensor]) -> Outcome:
    """Time a captured op against the ATen that it stands for."""
    inputs = list(node.all_input_nodes)
    new, old = extract([node], inputs), extract([node], inputs)
    for inner in list(old.graph.nodes):
        if inner.target is node.target:
            expand(inner, reference)
    return decide(new, old)


def extract(outputs: Sequence[Node], inputs: Sequence[Node]) -> GraphModule:
    """The part of a graph that computes `outputs` from `inputs`.

    What `inputs` are themselves made from is there already when this part runs: where the part reads it as well (the
    tensor under an input that is a view, say), it is an input too, not computed again.
    """
    graph = Graph()
    given = _ancestors(inputs)
    env: dict[Node, Node] = {}

    def take(node: Node, target: str) -> None:
        env[node] = graph.placeholder(target)
        env[node].meta["val"] = val(node)

    for index, node in enumerate(inputs):
        take(node, f"in{index}")
    for node in _needed(outputs, set(inputs), given):
        if node.op == "call_function" and node not in given:
            env[node] = graph.node_copy(node, env.__getitem__)
        else:
            with graph.inserting_before(next(iter(graph.nodes), None)):
                take(node, node.name)
    graph.output(tuple(env[o] for o in outputs))
    return GraphModule(torch.nn.Module(), graph)


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    """Everything that `nodes` depend on, without themselves."""
    found: set[Node] = set()
    stack = [x for n in nodes for x in n.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _needed(outputs: Sequence[Node], inputs: set[Node], given: set[Node]) -> list[Node]:
    """What `outputs` depend on, up to `inputs` and no further than `given`, in graph order."""
    found: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in found and node not in inputs:
            found.add(node)
            stack.extend(() if node in given else node.all_input_nodes)
    position = ordered(outputs[0].graph)
    return sorted(found, key=position.__getitem__)


def decide(new: GraphModule, old: GraphModule) -> Outcome:
    """The remembered outcome for this pair of graphs, or a new measurement."""
    key = _key(new, old)
    if key not in _outcomes:
        _outcomes[key] = _load(key) or _measure(new, old, key)
    return _outcomes[key]


_outcomes: dict[str, Outcome] = {}


def _describe(module: GraphModule) -> str:
    """Text that is equal for graphs that compute the same way on tensors of the same sizes, strides and dtypes."""
    names = {node: f"n{index}" for index, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        args = torch.fx.node.map_arg((node.args, node.kwargs), cast(Any, lambda n: _Name(names[n])))
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{names[node]}={node.op} {target} {args} {_facts(val(node)) if node.op == 'placeholder' else ''}")
    return "\n".join(lines)


class _Name:
    """A node's position, as it is printed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _facts(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes, strides = map(_hints, (value.shape, value.stride()))
        return f"{value.dtype} {value.device} {sizes} {strides}"
    return str(compat.size_hint(value))


def _hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(compat.size_hint(s) for s in sizes)


def _key(new: GraphModule, old: GraphModule) -> str:
    threads = torch.get_num_threads()
    text = "\0".join((_describe(new), _describe(old), _machine(), str(threads), fingerprint()))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _machine() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line for line in lines if line.startswith("model name")), platform.processor())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return f"{cpu} {gpu}"


def _file(key: str) -> pathlib.Path:
    return cache_dir() / "select" / f"{key}.json"


def _load(key: str) -> Outcome | None:
    try:
        data = json.loads(_file(key).read_text())
        return Outcome(float(data["tile"]), float(data["inductor"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not ours: measure again


def _save(key: str, outcome: Outcome) -> None:
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(outcome)))
        os.replace(temporary, path)
    except OSError as error:
        log.warning("outcome not saved: %s", error)


def _measure(new: GraphModule, old: GraphModule, key: str) -> Outcome:
    inputs = [_example(val(n)) for n in new.graph.find_nodes(op="placeholder")]
    others = [_example(val(n)) for n in old.graph.find_nodes(op="placeholder")]
    with compat.isolated_compile():
        rivals = [(compat.compile_alone(new, inputs), inputs), (compat.compile_alone(old, others), others)]
        outcome = Outcome(*_times(rivals))
    _save(key, outcome)
    return outcome


def _example(value: Any) -> Any:
    """A real input like a fake one; integers are zero, so that they are valid indices."""
    if not isinstance(value, torch.Tensor):
        return compat.size_hint(value)
    sizes, strides = _hints(value.shape), _hints(value.stride())
    with torch.utils._python_dispatch._disable_current_modes():
        out = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        if value.dtype.is_floating_point:
            return out.normal_()
        return out.fill_(1 if value.dtype == torch.bool else 0)


def _times(rivals: Sequence[tuple[Callable[..., Any], list[Any]]]) -> list[float]:
    """Best time of each in microseconds, taken in turns so that a busy machine is unfair to none."""
    best = [float("inf")] * len(rivals)
    for run, inputs in rivals:
        run(*inputs)
    end = time.perf_counter() + BUDGET
    rounds = 0
    while rounds < 3 or (time.perf_counter() < end and rounds < 200):
        for i, (run, inputs) in enumerate(rivals):
            _wait(inputs)
            start = time.perf_counter()
            run(*inputs)
            _wait(inputs)
            best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
        rounds += 1
    return best


def _wait(inputs: Sequence[Any]) -> None:
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs):
        torch.cuda.synchronize()
