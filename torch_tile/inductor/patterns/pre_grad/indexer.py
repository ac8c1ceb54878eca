# SPDX-License-Identifier: Apache-2.0
"""Pre-grad: replace the scores by which an indexer lists each query's positions (DeepSeek-V3.2) by `tile.index_scores`.

    scores = (weights[..., None, :] @ relu(q @ k^T)).squeeze(-2);  positions = (scores under a mask).topk(n).indices

The operator keeps the products of all heads out of memory. The mask and the choice stay as they are written. A trial on
random numbers decides whether both compute the same scores, and finds their factor.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, known, ordered, val
from torch_tile.inductor.patterns.pre_grad.router import CASTS, argument, called, real_tensors, run_nodes
from torch_tile.inductor.report import rows as report
from torch_tile.ops.reference import reference

FORMS = "write the indexer as DeepSeek-V3.2 of transformers does, or call tile.lightning_index"
PRODUCTS = "matmul", "bmm", "einsum", "__matmul__"
FACTORS = "mul", "imul", "truediv"
SUMMED = {"relu", "squeeze", "sum", *FACTORS, *CASTS, *PRODUCTS}
"""What models do to queries, keys and weights, besides views, to make scores."""
BETWEEN = {"masked_fill", "where", "add", "iadd", "getitem", *SUMMED} - {"relu"}
"""What models do to the products of all heads before they choose positions."""
VIEWS = {"unsqueeze", "transpose", "permute", "swapaxes", "getattr", "mT", "getitem", *CASTS}  # torch 2.15: aten.mT
"""What models do to queries, keys and weights before they multiply them."""
SIZES = {"b": 2, "q": 3, "h": 4, "k": 5, "d": 8}  # sizes of a trial


class Scores(NamedTuple):
    """Scores `[B, Sq, S]`: `factor` times those of `tile.index_scores` of q, k and weights; and the nodes between."""

    last: Node
    operands: tuple[Node, ...]
    nodes: list[Node]
    factor: float


@family("mla", "pre_grad", 28)
def capture_indexers(context: Context) -> None:
    """Replace the scores of every indexer under `select="tile"`: no contest times them."""
    for node in list(context.graph.nodes):
        if called(node) != "topk" or (relu := _rectified_products(argument(node, 0, "input"))) is None:
            continue
        with context.recording_miss("mla", node):
            _replace(context, node, _scores(relu))


def _rectified_products(chosen: Node) -> Node | None:
    """Return the rectified products `[B, Sq, H, S]` or `[B, H, Sq, S]` behind what a choice `[B, Sq, S]` is made of."""
    if not _has_dimensions(chosen, 3):
        return None
    seen: set[Node] = set()
    waiting = [chosen]
    while waiting:
        one = waiting.pop()
        if called(one) == "relu":
            inner = argument(one, 0, "input")
            while called(inner) in FACTORS:
                inner = argument(inner, 0, "input")
            if called(inner) in PRODUCTS and _has_dimensions(one, 4) and val(one).shape[-1] == val(chosen).shape[-1]:
                return one
        elif called(one) in BETWEEN and one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return None


def _has_dimensions(node: Node, count: int) -> bool:
    """Return whether a node is a tensor of so many dimensions."""
    return isinstance(node, Node) and isinstance(val(node), torch.Tensor) and val(node).dim() == count


def _scores(relu: Node) -> Scores:
    """Return the scores around rectified products; raises Miss."""
    product = argument(relu, 0, "input")
    while called(product) in FACTORS:
        product = argument(product, 0, "input")
    last, others = relu, []
    while not _has_dimensions(last, 3):
        if len(last.users) != 1:
            raise Miss("products of heads are used elsewhere", FORMS)
        user = next(iter(last.users))
        others += [x for x in user.all_input_nodes if x is not last]
        last = user
    if len(product.all_input_nodes) == 2 and len(others) == 1:
        operands = *product.all_input_nodes, others[0]
        for chosen in itertools.product(*map(_viewed_tensors, operands, (4, 3, 3))):
            nodes = _nodes_between(last, chosen)
            if nodes is not None and _shapes_fit(last, *chosen):
                factor = _multiple_of_scores(last, chosen, nodes)
                if factor > 0.0:
                    return Scores(last, chosen, nodes, factor)
    raise Miss("scores are not sums of rectified products by one weight for each head", FORMS)


def _viewed_tensors(node: Node, dims: int) -> list[Node]:
    """Return the tensors of so many dimensions of which views and widening casts make `node`, the first one first."""
    found: list[Node] = []
    while isinstance(val(node), torch.Tensor) and val(node).is_floating_point():
        if val(node).dim() == dims:
            found.insert(0, node)
        if not _is_view(node) or len(node.all_input_nodes) != 1:
            break
        inner = node.all_input_nodes[0]
        if not isinstance(val(inner), torch.Tensor) or val(inner).dtype.itemsize > val(node).dtype.itemsize:
            break
        node = inner
    return found


def _is_view(node: Node) -> bool:
    """Return whether a node is a view of a whole tensor, or a cast. A trial of other sizes shows no slices."""
    if called(node) != "getitem":
        return called(node) in VIEWS
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(one is None or one is Ellipsis or one == slice(None) for one in index)


def _shapes_fit(last: Node, q: Node, k: Node, weights: Node) -> bool:
    """Return whether `tile.index_scores` takes these operands, and scores have the shape of its result."""
    batch, queries, heads, d = val(q).shape
    keys = val(k).shape[1]
    wanted = (k, (batch, keys, d)), (weights, (batch, queries, heads)), (last, (batch, queries, keys))
    pairs = [(have, size) for node, shape in wanted for have, size in zip(val(node).shape, shape, strict=True)]
    return val(q).dtype == val(k).dtype and all(known(have == size) for have, size in pairs)


def _nodes_between(last: Node, operands: Sequence[Node]) -> list[Node] | None:
    """Return the nodes that compute `last` from operands, in order, or None if they read or do something else."""
    inside: set[Node] = set()
    waiting = [last]
    while waiting:
        one = waiting.pop()
        if one in operands or one in inside:
            continue
        if called(one) not in SUMMED and not _is_view(one):
            return None
        inside.add(one)
        waiting += one.all_input_nodes
    position = ordered(last.graph)
    return sorted(inside, key=position.__getitem__)


def _multiple_of_scores(last: Node, operands: Sequence[Node], nodes: Sequence[Node]) -> float:
    """Return what multiple of the operator's scores the nodes compute for random numbers, or 0 for no multiple."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), real_tensors():
        torch.manual_seed(0)
        tried = [torch.randn([SIZES[n] for n in dims]) for dims in ("bqhd", "bkd", "bqh")]
        try:
            (got,) = run_nodes(nodes, dict(zip(operands, tried, strict=True)), [last])
        except Exception:  # a trial of nodes that we do not know may fail in any way
            return 0.0
        want = reference("index_scores", *tried)
        factor = float((got.double() * want).sum() / want.double().square().sum()) if got.shape == want.shape else 0.0
        return factor if torch.allclose(got.float(), want * factor, rtol=1e-4, atol=1e-4 * factor) else 0.0


def _replace(context: Context, choice: Node, found: Scores) -> None:
    """Replace scores, if the user asked for tile kernels and no gradient goes through them; raises Miss."""
    q, k, _ = found.operands
    if val(found.last).requires_grad and any(argument(user, 1, "") == 0 for user in choice.users):
        raise Miss("the chosen scores want a gradient", "choose positions alone, under torch.no_grad()")
    what = f"tile.index_scores({[str(n) for n in val(q).shape]}, {[str(n) for n in val(k).shape]})".replace("'", "")
    if context.select.times:
        context.note("mla", report.KEPT, what, choice, 'not timed: options={"select": "tile"} takes the tile kernel')
        return
    graph = choice.graph
    with graph.inserting_before(found.last):
        new = graph.call_function(torch.ops.tile.index_scores.default, found.operands)
        scaled = graph.call_function(operator.mul, (new, found.factor))
        made = graph.call_method("to", (scaled, val(found.last).dtype))
    for node in (new, scaled, made):
        node.meta.update(found.last.meta)
    new.meta["example_value"] = torch.ops.tile.index_scores.default(*map(val, found.operands))
    scaled.meta["example_value"] = val(new) * found.factor
    found.last.replace_all_uses_with(made)
    for node in reversed(found.nodes):
        if not node.users:
            graph.erase_node(node)
