# SPDX-License-Identifier: Apache-2.0
"""Pre-grad: replace the choice of experts that models write out, by topk of softmax or sigmoid, by `tile.route`.

The nodes between the scores and the weights propose the options of the operator. A trial on random numbers then
decides whether both compute the same: all forms that mean the same match, however they are written.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, ordered, val
from torch_tile.inductor.report import rows as report
from torch_tile.ops.families.route import MOST_EXPERTS
from torch_tile.ops.reference import reference

FORMS = "write the router as Mixtral, Qwen3-MoE or DeepSeek-V3 of transformers do"
CASTS = "float", "to", "type"
SCORES = "softmax", "sigmoid"
BETWEEN = {
    "add", "iadd", "view", "reshape", "unflatten", "flatten", "topk", "getitem", "sum", "max", "amax", "zeros_like",
    "scatter", "scatter_", "unsqueeze", "expand", "repeat_interleave", "bool", "invert", "logical_not", "masked_fill",
    "getattr", *CASTS,
}  # fmt: skip
"""What models do to scores before they choose."""
TOKENS = 7  # of a trial, where their number is a symbol
MOST_TRIED = 2**22  # scores


class Router(NamedTuple):
    """A choice of experts: the nodes from the scores on, in order, and the options of `tile.route`."""

    nodes: list[Node]
    scores: Node
    bias: Node | None
    indices: Node
    weights: Node
    options: tuple[Any, ...]


@family("route", "pre_grad", 27)
def capture_routers(context: Context) -> None:
    """Replace every choice of experts that `tile.route` makes, too, under `select="tile"`: no contest times it."""
    for node in list(context.graph.nodes):
        if called(node) != "topk" or node not in context.graph.nodes or not _chooses_experts(node):
            continue
        with context.recording_miss("route", node):
            _replace(context, node, _router(node))


def called(node: Any) -> str:
    """Return the name of the method or function that a node calls, and nothing for other nodes."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, by its place or by its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _nodes_of_choice(node: Node) -> tuple[set[Node], set[Node], set[Node]]:
    """Return the nodes between scores and a choice, the nodes that compute scores, and what else is read."""
    inside: set[Node] = set()
    scores: set[Node] = set()
    inputs: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if called(one) in SCORES:
            scores.add(one)
        elif called(one) in BETWEEN and not (called(one) in CASTS and _is_input(one)):
            if one not in inside:
                inside.add(one)
                waiting += one.all_input_nodes
                waiting += [user for user in one.users if called(user) == "scatter_" and user.args[0] is one]
        else:
            inputs.add(one)
    return inside, scores, inputs


def _is_input(node: Node) -> bool:
    """Return whether a node is a vector, as a bias is."""
    return isinstance(val(node), torch.Tensor) and val(node).dim() == 1


def _chooses_experts(node: Node) -> bool:
    """Return whether a topk is the last one behind the scores of a router; not those that choose groups."""
    _, scores, _ = _nodes_of_choice(node)
    if len(scores) != 1 or not isinstance(val(next(iter(scores))), torch.Tensor):
        return False
    given = val(argument(node, 0, "input"))
    count = val(next(iter(scores))).shape[-1]
    whole = isinstance(given, torch.Tensor) and isinstance(count, int) and given.shape[-1] == count
    return whole and given.dim() == val(next(iter(scores))).dim()


def _router(choice: Node) -> Router:
    """Return the router around its last topk; raises Miss."""
    inside, found, inputs = _nodes_of_choice(choice)
    scores = next(iter(found))
    x = val(scores)
    if x.dtype != torch.float32:
        raise Miss(f"scores in {x.dtype}", "compute the scores in float32, as x.float() before softmax or sigmoid")
    if x.shape[-1] > MOST_EXPERTS:
        raise Miss(f"{x.shape[-1]} experts", f"nothing in the model is wrong: the kernel takes at most {MOST_EXPERTS}")
    if len(inputs) > 1 or not all(_is_input(one) and val(one).shape[0] == x.shape[-1] for one in inputs):
        raise Miss("the choice reads more than scores and a bias", FORMS)
    bias = next(iter(inputs), None)
    if bias is not None and val(bias).requires_grad and torch.is_grad_enabled():
        raise Miss("the bias of the choice wants a gradient", "make it a buffer: it has none behind a topk")
    k = argument(choice, 1, "k")
    results = {user.args[1]: user for user in choice.users if called(user) == "getitem"}
    if not isinstance(k, int) or len(results) != len(choice.users) or 1 not in results:
        raise Miss("topk's result is used as a whole, or its indices are not used", FORMS)
    more, weights, normalise, scale = _weights(scores, results)
    groups = _groups(inside)
    if any(set(node.users) - inside - {choice} for node in inside):
        raise Miss("what is between scores and choice is used elsewhere", FORMS)
    position = ordered(choice.graph)
    nodes = sorted({*inside, choice, *results.values(), *more}, key=position.__getitem__)
    return Router(nodes, scores, bias, results[1], weights, (k, called(scores), *groups, normalise, scale))


def _groups(inside: set[Node]) -> tuple[int, int, int]:
    """Return how many groups of experts there are and are chosen, and how many scores make a group's."""
    inner = sorted(
        (node for node in inside if called(node) == "topk"), key=lambda n: val(argument(n, 0, "input")).dim()
    )
    if not inner:
        return 1, 1, 2
    groups, k = val(argument(inner[0], 0, "input")).shape[-1], argument(inner[0], 1, "k")
    return groups, k, argument(inner[1], 1, "k") if len(inner) > 1 else 1


def _weights(scores: Node, results: dict[Any, Node]) -> tuple[list[Node], Node, bool, float]:
    """Return the nodes behind the choice, the weights that they compute, and the options of these weights."""
    gathers = [user for user in results[1].users if called(user) == "gather" and user.args[0] is scores]
    if bool(gathers) == (0 in results) or len(gathers) > 1:
        raise Miss("no weights of the chosen experts, or two", FORMS)
    last = gathers[0] if gathers else results[0]
    nodes, normalise, scale = [last], False, 1.0
    total = next((user for user in last.users if called(user) == "sum"), None)
    if total is not None:
        nodes.append(total)
        user = next(iter(total.users), total)
        if called(user) in ("add", "iadd", "add_", "clamp"):
            nodes.append(user)
        share = next((user for user in nodes[-1].users if called(user) in ("truediv", "itruediv", "div", "div_")), None)
        if share is None or share.args[0] is not last:
            raise Miss("weights are summed up, but not divided by their sum", FORMS)
        nodes.append(share)
        inner = set(nodes)
        if any(set(node.users) - inner for node in nodes[:-1]):
            raise Miss("weights are used before they are divided by their sum", FORMS)
        last, normalise = share, True
    user = next(iter(last.users), last)
    if called(user) in ("mul", "imul", "mul_") and len(last.users) == 1 and user.args[0] is last:
        factor = user.args[1]
        if isinstance(factor, int | float):
            nodes.append(user)
            last, scale = user, float(factor)
    return nodes, last, normalise, scale


def _replace(context: Context, choice: Node, found: Router) -> None:
    """Replace a router if both compute the same and the user asked for tile kernels; raises Miss."""
    source = argument(found.scores, 0, "input")
    logits = source.args[0] if called(source) in CASTS and isinstance(source.args[0], Node) else source
    if not isinstance(val(logits), torch.Tensor) or not val(logits).is_floating_point():
        logits = source
    if (
        argument(found.scores, 1, "dim", -1) not in (-1, val(found.scores).dim() - 1)
        and called(found.scores) != "sigmoid"
    ):
        raise Miss("softmax over another dimension than the experts'", FORMS)
    _try(found, source)
    what = f"tile.route({[str(n) for n in val(logits).shape]}, k={found.options[0]})".replace("'", "")
    if context.select.times:
        context.note("route", report.KEPT, what, choice, 'not timed: options={"select": "tile"} takes the tile kernel')
        return
    with context.graph.inserting_before(choice):
        args = logits, found.bias, *found.options
        new = context.graph.call_function(torch.ops.tile.route.default, args)
        weights, indices = (context.graph.call_function(operator.getitem, (new, n)) for n in (0, 1))
    new.meta["example_value"] = val(found.weights), val(found.indices)
    for made, old in ((weights, found.weights), (indices, found.indices)):
        made.meta.update(old.meta)
    inside = set(found.nodes)
    for made, old in ((weights, found.weights), (indices, found.indices)):
        old.replace_all_uses_with(made, delete_user_cb=lambda user: user not in inside)
    for node in reversed(found.nodes):
        context.graph.erase_node(node)
    context.handled.add(new)
    context.note("route", report.REPLACED, what, new, "", [new])


def _try(found: Router, source: Node) -> None:
    """Run the router's nodes and the operator on random numbers; raises Miss unless they agree."""
    shape = [n if isinstance(n, int) else TOKENS for n in val(found.scores).shape]
    if torch.Size(shape).numel() > MOST_TRIED:
        shape = [*([1] * (len(shape) - 2)), TOKENS, shape[-1]]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), real_tensors():
        torch.manual_seed(0)
        logits = torch.randn(shape)
        bias = None if found.bias is None else torch.rand(shape[-1])
        try:
            got = run_nodes(
                [found.scores, *found.nodes], {source: logits, found.bias: bias}, (found.weights, found.indices)
            )
            want = reference("route", logits, bias, *found.options)
        except Exception as problem:  # a trial of nodes that we do not know may fail in any way
            raise Miss(f"the trial of the router failed: {type(problem).__name__}", FORMS) from problem
    order, wanted = got[1].argsort(-1), want[1].argsort(-1)
    same = got[1].shape == want[1].shape and torch.equal(got[1].gather(-1, order), want[1].gather(-1, wanted))
    if not same or not torch.allclose(got[0].gather(-1, order), want[0].gather(-1, wanted), rtol=1e-4, atol=1e-6):
        raise Miss("it chooses or weighs experts in a way that tile.route does not", FORMS)


def real_tensors() -> Any:
    """Leave the fake tensors of a trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def run_nodes(nodes: Sequence[Node], env: dict[Any, Any], outputs: Sequence[Node]) -> list[Any]:
    """Run nodes of Dynamo's graph on tensors. Results are taken at once, as later nodes may write into them."""
    for node in nodes:
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        target: Any = node.target
        env[node] = (
            getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
        )
    return [env[node] for node in outputs]
