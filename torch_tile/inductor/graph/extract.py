# SPDX-License-Identifier: Apache-2.0
"""Cut out parts of a graph for a contest: the replaced subgraph, and the nodes that Inductor would fuse with it.

A replacement is a kernel that Inductor cannot fuse into. Pointwise operations and row reductions may stand around the
subgraph. Inductor would fuse them with the old subgraph at no extra cost, so the contest includes them. On our side
they are kernels of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_tile.inductor.compat import graph_module, size_hint
from torch_tile.inductor.graph.nodes import (
    CAST,
    COPIES,
    EXAMPLE,
    FROZEN,
    LAYOUT,
    NUMBERS,
    PARTS,
    VIEWS,
    aten,
    is_call,
    ordered,
    val,
)
from torch_tile.inductor.patterns.gemm.epilogue import PRODUCTS
from torch_tile.inductor.patterns.gemm.grouped_ops import is_grouped

MOST_AROUND = 24  # most surrounding operations added on either side
KEPT = ("val", EXAMPLE, FROZEN)
REDUCTIONS = (
    aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var_mean.correction,
    aten.var.correction,
)  # fmt: skip
EXTERN = (
    *PRODUCTS,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)


def is_extern(node: Node) -> bool:
    """Return whether Inductor calls a ready-made kernel for the node, and so fuses nothing into it."""
    return is_call(node, *EXTERN) or is_grouped(node)


def is_fused(node: Node) -> bool:
    """Return whether Inductor computes the node inside the kernel that makes or reads its operand."""
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or is_call(node, CAST, *COPIES, *LAYOUT, *PARTS, *REDUCTIONS)


def is_read_in_registers(node: Node) -> bool:
    """Return whether Inductor would fuse all readers of the node, so that it is neither rounded nor stored."""
    readers = list(node.users)
    for reader in readers:  # grows meanwhile
        if is_call(reader, *LAYOUT, *PARTS):
            readers.extend(reader.users)
    readers = [r for r in readers if not is_call(r, *LAYOUT, *PARTS)]
    return bool(readers) and all(
        is_call(r, CAST) or torch.Tag.pointwise in getattr(r.target, "tags", ()) for r in readers
    )


def rivals(
    pairs: Sequence[tuple[Node, Node]], inputs: Sequence[Node], made: Iterable[Node]
) -> tuple[GraphModule, GraphModule]:
    """Return the two parts that a contest times: one with the new nodes of `pairs`, one with the old nodes.

    Both parts include the surrounding nodes that Inductor would fuse. The new nodes are computed from `inputs`; `made`
    contains all of them.
    """
    olds = [old for old, _ in pairs]
    position = ordered(olds[0].graph)
    inside = {*_nodes_needed(olds, set(inputs), Ancestors(inputs, position), position), *olds}
    around = behind(olds, set(made), position)
    inputs = list(inputs)
    # Attention of any origin: `tile.attention` stands for flex_attention or for an extern attention.
    attention = torch.ops.higher_order.flex_attention, torch.ops.tile.attention.default
    if not any(is_extern(n) or is_call(n, *attention) for n in inside):
        inputs = in_front(inputs, {*inside, *around, *made})
    known = {*olds, *around}
    others = (x for n in around for x in n.all_input_nodes if x not in known)
    inputs = list(dict.fromkeys([*inputs, *others]))
    outputs = [n for n in known if any(u not in known and u not in made for u in n.users)] or olds
    outputs.sort(key=position.__getitem__)
    return extract(outputs, inputs, dict(pairs)), extract(outputs, inputs)


def behind(olds: Sequence[Node], made: set[Node], position: Mapping[Node, int]) -> list[Node]:
    """Find the users of `olds` that Inductor would fuse behind them. Their further operands do not depend on `olds`.

    The search ends where the least memory is written, as Inductor's kernels do. Among equal ends it takes the latest.
    """
    dependent = Descendants(olds, position)
    found: list[Node] = []
    known = set(olds)
    least, best = _written(known, made), 0
    while len(found) < MOST_AROUND:
        users = {u for n in known for u in n.users if u not in known and u not in made and is_fused(u)}
        ready = [
            u for u in users if all(x in known or (_is_value(x) and x not in dependent) for x in u.all_input_nodes)
        ]
        if not ready:
            break
        found.append(min(ready, key=position.__getitem__))
        known.add(found[-1])
        if (written := _written(known, made)) <= least:
            least, best = written, len(found)
    return found[:best]


def _is_value(node: Node) -> bool:
    """Return whether a node can be an input of a part: one tensor or one number."""
    return not isinstance(val(node), list | tuple)


def _written(known: set[Node], made: set[Node]) -> int:
    """Return the total size in bytes of the values in `known` that have users outside `known`."""
    outputs = [n for n in known if any(u not in known and u not in made for u in n.users)]
    return sum(_bytes(val(n)) for n in outputs)


def _bytes(value: Any) -> int:
    """Return the size of a value in bytes."""
    if isinstance(value, torch.Tensor):
        return math.prod(map(size_hint, value.shape)) * value.dtype.itemsize
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def in_front(inputs: Sequence[Node], readers: set[Node]) -> list[Node]:
    """Replace each input that is pointwise and read only by `readers` by its own inputs."""
    found, taken = list(inputs), set(readers)
    for _ in range(MOST_AROUND):
        node = next((n for n in found if _fused_in_front(n, taken)), None)
        if node is None:
            break
        taken.add(node)
        at = found.index(node)
        found[at : at + 1] = [x for x in node.all_input_nodes if x not in found]
    return found


def _fused_in_front(node: Node, readers: set[Node]) -> bool:
    """Return whether Inductor fuses the node into `readers`, which must be its only users."""
    sources = node.all_input_nodes
    return is_fused(node) and all(u in readers for u in node.users) and all(map(_is_value, sources))


def extract(outputs: Sequence[Node], inputs: Sequence[Node], instead: Mapping[Node, Node] | None = None) -> GraphModule:
    """Copy the part of a graph that computes `outputs` from `inputs`; `instead` maps nodes to replacements.

    The ancestors of `inputs` exist before this part runs. An ancestor that the part also reads becomes a further input
    and is not computed again. An example is the tensor under an input that is a view.
    """
    graph = Graph()
    instead = instead or {}
    position = ordered(outputs[0].graph)
    given = Ancestors(inputs, position)
    env: dict[Node, Node] = {}
    parts: dict[str, GraphModule] = {}  # bodies of higher-order operators

    def add_input(node: Node, target: str) -> None:
        env[node] = graph.placeholder(target)
        env[node].meta = {key: node.meta[key] for key in KEPT if key in node.meta}
        if (tensor := _held(node)) is not None:
            env[node].meta[FROZEN] = tensor
        if (numbers := _numbers(node)) is not None:
            env[node].meta[NUMBERS] = numbers

    for index, node in enumerate(inputs):
        add_input(node, f"in{index}")
    for node in _nodes_needed(outputs, set(inputs), given, position, instead):
        if (body := body_of(node)) is not None:
            parts[str(node.target)] = body
            env[node] = graph.create_node("get_attr", str(node.target))
        elif node.op == "call_function" and node not in given:
            env[node] = graph.node_copy(node, lambda n: env[instead.get(n, n)])
        else:
            with graph.inserting_before(next(iter(graph.nodes), None)):
                add_input(node, node.name)
    graph.output(tuple(env[instead.get(o, o)] for o in outputs))
    return graph_module(graph, parts)


def _held(node: Node) -> torch.Tensor | None:
    """Return the tensor that a `get_attr` node reads from its graph's module, if it is a real one."""
    found = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return found if type(found) in (torch.Tensor, torch.nn.Parameter) else None


def _numbers(node: Node) -> tuple[float, float] | None:
    """Return the mean and deviation of the tensor that a node holds, converts or views, if they are known."""
    while NUMBERS not in node.meta and is_call(node, CAST, *COPIES, *LAYOUT, *PARTS) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    found: tuple[float, float] | None = node.meta.get(NUMBERS)
    return found


def copied(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """Copy `nodes` into a graph of their own. They must be in order and read only `inputs` and each other."""
    graph = Graph()
    env: dict[Node, Node] = {}
    for index, node in enumerate(inputs):
        env[node] = graph.placeholder(f"in{index}")
        env[node].meta = {key: node.meta[key] for key in KEPT if key in node.meta}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[o] for o in outputs))
    graph.eliminate_dead_code()
    return graph_module(graph)


def body_of(node: Node) -> GraphModule | None:
    """Return the graph that a `get_attr` node passes to a higher-order operator, else None."""
    body = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return body if isinstance(body, GraphModule) else None


class Ancestors:
    """Test whether one of `nodes` depends on a given node: `node in Ancestors(nodes, position)`.

    This class and `Descendants` walk no further than the answer needs, because graphs are long and their parts short.
    """

    nodes: set[Node]
    position: Mapping[Node, int]

    def __init__(self, nodes: Sequence[Node], position: Mapping[Node, int]) -> None:
        self.nodes, self.position = set(nodes), position
        self.end: int = max((position[n] for n in nodes), default=-1)
        self.known: dict[Node, bool] = {}

    def __contains__(self, node: Node) -> bool:
        if node not in self.known:
            self.known[node] = self._leads_to_one(node)
        return self.known[node]

    def _leads_to_one(self, node: Node) -> bool:
        """Search the users of `node`, and their users, for one of `nodes`."""
        seen, waiting = {node}, [node]
        while waiting:
            users = [u for u in waiting.pop().users if u not in seen and self.position.get(u, self.end + 1) <= self.end]
            if any(u in self.nodes or self.known.get(u, False) for u in users):
                return True
            seen.update(users)
            waiting.extend(sorted(users, key=self.position.__getitem__))  # the nearest to the end comes next
        return False


class Descendants:
    """Test whether a given node is one of `nodes` or depends on one: `node in Descendants(nodes, position)`."""

    def __init__(self, nodes: Sequence[Node], position: Mapping[Node, int]) -> None:
        self.position = position
        self.start: int = min(position[n] for n in nodes)
        self.known: dict[Node, bool] = dict.fromkeys(nodes, True)

    def __contains__(self, node: Node) -> bool:
        """Return whether `node` is one of the nodes or depends on one."""
        if node not in self.known:
            self.known[node] = self._comes_from_one(node)
        return self.known[node]

    def _comes_from_one(self, node: Node) -> bool:
        """Search the operands of `node`, and their operands, for one of `nodes`."""
        seen, waiting = {node}, [node]
        while waiting:
            sources = [x for x in waiting.pop().all_input_nodes if x not in seen and self.position[x] >= self.start]
            if any(self.known.get(x, False) for x in sources):
                return True
            seen.update(sources)
            waiting.extend(sorted(sources, key=self.position.__getitem__, reverse=True))
        return False


def _nodes_needed(
    outputs: Sequence[Node],
    inputs: set[Node],
    given: Ancestors,
    position: Mapping[Node, int],
    instead: Mapping[Node, Node] | None = None,
) -> list[Node]:
    """List the nodes that `outputs` depend on, in an order of computation. Stop at `inputs` and at nodes in `given`."""
    instead = instead or {}
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        node = instead.get(node, node)
        if node in found or node in inputs:
            return
        if node not in given:
            for x in sorted(node.all_input_nodes, key=position.__getitem__):
                visit(x)
        found[node] = None

    for node in outputs:
        visit(node)
    return list(found)


# Remove the views at the edges of both parts: parts that differ only in these views are one contest. A model may use
# one norm in front of a product and in front of another reader. The product reads the norm's rows as a matrix. A view
# may also stand in front of the norm. Views of dense tensors take no time on either side.


def without_views(new: GraphModule, old: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Remove in place the views that both graphs begin or end with; return both graphs."""
    parts = new, old
    mine, theirs = ({n.target: n for n in part.graph.find_nodes(op="placeholder")} for part in parts)
    for name in mine.keys() & theirs.keys():
        _start_at_view((mine[name], theirs[name]))
    ends = [next(iter(part.graph.find_nodes(op="output"))) for part in parts]
    outputs = [_under_views(pair) for pair in zip(*(end.args[0] for end in ends), strict=True)]
    for end, made in zip(ends, zip(*outputs, strict=True), strict=True):
        end.args = (tuple(made),)
    for part in parts:
        part.graph.eliminate_dead_code()
        part.recompile()
    return parts


def _start_at_view(inputs: tuple[Node, ...]) -> None:
    """Let both graphs start at the view that is an input's only user, if it is alike in both."""
    users = [list(node.users) for node in inputs]
    views = [each[0] for each in users if len(each) == 1 and _is_plain(each[0])]
    if len(views) < len(inputs) or {EXAMPLE, FROZEN} & inputs[0].meta.keys() or not _alike(views):
        return
    for node, view in zip(inputs, views, strict=True):
        node.meta["val"] = val(view)
        view.replace_all_uses_with(node)


def _under_views(outputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the tensors under the views at an output, if they are alike in both graphs."""
    while all(map(_is_plain, outputs)):
        sources: Any = tuple(node.args[0] for node in outputs)
        if not _alike(sources):
            break
        outputs = sources
    return outputs


def _is_plain(node: Any) -> bool:
    """Return whether a node is a view of a dense tensor of constant sizes."""
    if not isinstance(node, Node) or not is_call(node, *VIEWS):
        return False
    return all(map(_is_dense, (node, node.args[0])))


def _is_dense(node: Any) -> bool:
    """Return whether a node holds a contiguous tensor of constant sizes and strides."""
    value = val(node)
    known = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return known and value.is_contiguous()


def _alike(nodes: Any) -> bool:
    """Return whether the nodes of both graphs hold dense tensors of equal shape and dtype."""
    a, b = (val(node) for node in nodes)
    return all(map(_is_dense, nodes)) and (a.shape, a.dtype) == (b.shape, b.dtype)
