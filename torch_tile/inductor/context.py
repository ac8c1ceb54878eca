# SPDX-License-Identifier: Apache-2.0
"""Define the context that families work in, how families register, and the interface of the selection.

A family is a function of a `Context`. Its decorator names the stage that runs the function, and its order there. The
driver loads the modules of a stage and gets the list from `families`. The driver passes in a `Select`, which decides
whether a kernel beats Inductor's code. So no family and no context imports the benchmark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from torch_tile.inductor.graph.nodes import (
    Miss,
    Rewrite,
    dtype,
    frames_of,
    is_tensor,
    module_of,
    name_of,
    ordered,
    place,
    same_shape,
    shape,
    val,
)
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.report.rows import Outcome
from torch_tile.inductor.select.roofline import cost_of
from torch_tile.inductor.settings import Settings

Stage = Literal["pre_grad", "written_out", "joint", "post_grad", "settle"]
"""When families run.

- pre_grad: on Dynamo's graph, before autograd: calls are captured as tile ops.
- written_out: forward and backward in one graph, before Inductor's own passes on it.
- joint: the same graph, after those.
- post_grad: on functional ATen, where structure is matched.
- settle: behind post_grad, in one go with it: captured ops are judged, what nothing took is reported.
"""


class AttentionOperands(NamedTuple):
    """The operands of attention in training, as fake tensors."""

    q: Any
    k: Any
    v: Any
    mask: Any | None


class LossOperands(NamedTuple):
    """The operands of a cross-entropy, as fake tensors; `weight` is that of each class."""

    logits: Any
    target: Any
    weight: Any | None


class LinearLossOperands(NamedTuple):
    """The operands of a linear layer with its cross-entropy, as fake tensors."""

    hidden: Any
    weight: Any
    target: Any
    bias: Any | None
    class_weight: Any | None


class LossOptions(NamedTuple):
    """The options of a cross-entropy, as `F.cross_entropy` takes them."""

    ignore_index: int
    reduction: str
    label_smoothing: float


class Select:
    """Choose between our kernel and Inductor's code. This base class takes every replacement, untimed."""

    times = False
    """Whether replacements are timed."""

    def refused(self, nodes: Iterable[Node]) -> str:
        """Return the reason why tile ops among `nodes` cannot be called from the generated code; empty if they can."""
        return ""

    def of_rewrite(self, rewrite: Rewrite, pairs: Sequence[tuple[Node, Node]]) -> Outcome | None:
        """Time the new nodes of `pairs` (old, new) against the old ones; None where nothing is timed."""
        return None

    def of_captured(self, node: Node, reference: Callable[..., torch.Tensor]) -> Outcome | None:
        """Time a captured op against its ATen; None where nothing is timed."""
        return None

    def of_graphs(self, new: GraphModule, old: GraphModule) -> Outcome | None:
        """Time two graphs of the same inputs, with no tile ops in `old`; None where nothing is timed."""
        return None

    def of_training(self, operands: AttentionOperands, causal: bool, scale: float | None) -> Outcome | None:
        """Time attention with its gradients; None where nothing is timed."""
        return None

    def of_loss(self, operands: LossOperands, options: LossOptions, widened: bool) -> Outcome | None:
        """Time a cross-entropy, with its gradient if one is wanted; None where nothing is timed.

        widened: the model widens the logits to float32 first.
        """
        return None

    def of_linear_loss(
        self, operands: LinearLossOperands, options: LossOptions, softcap: float | None
    ) -> Outcome | None:
        """Time a linear layer with its cross-entropy, and their wanted gradients; None without kernels."""
        return None


class Context:
    """State of the families on one graph: settings, selection, and nodes already handled."""

    def __init__(self, graph: Graph, settings: Settings, stage: str, select: Select) -> None:
        self.graph = graph
        self.settings = settings
        self.stage = stage
        self.select = select
        self.handled: set[Node] = set()
        """Anchors already replaced, or already reported with a reason."""
        self.left: set[Node] = set()
        """Captured ops left to Inductor; `settle` replaces them by ATen."""
        self.rows: dict[Node, report.Row] = {}
        """The row of each node that was inserted."""

    def replace(
        self, rewrite: Rewrite, family: str, pairs: list[tuple[Node, Node]], what: str, anchor: Node, sure: str = ""
    ) -> bool:
        """Replace each old node by its new node, unless Inductor's code for the same subgraph is faster.

        `pairs` are (old, new); `rewrite` made the new nodes. `sure` gives a reason why our kernel is faster without a
        contest; a thorough search times it anyway. Returns whether the graph was changed.
        """
        for old, new in pairs:
            if not is_tensor(new) or not same_shape(shape(old), shape(new)) or dtype(old) != dtype(new):
                rewrite.discard()
                why = Miss(
                    f"the replacement of {name_of(old)} would have another shape or dtype",
                    "nothing in the model is wrong: please report the graph",
                    at=old,
                )
                self.miss(family, anchor, why)
                return False
        if refusal := self.select.refused(rewrite.nodes):
            self.note(family, report.KEPT, what, anchor, refusal, rewrite.nodes)
            rewrite.discard()
            return False
        outcome = None if sure and not self.settings.thorough else self.select.of_rewrite(rewrite, pairs)
        reason = sure if self.settings.select == "fastest" and outcome is None else str(outcome or "")
        if outcome is not None and not outcome.tile_wins:
            self.note(family, report.KEPT, what, anchor, reason, rewrite.nodes, outcome)
            rewrite.discard()
            return False
        self.handled.update(rewrite.nodes)
        position = ordered(self.graph)
        for old, new in pairs:
            # Users that precede the new node are part of the replaced subgraph and become dead.
            start = position[new]
            later = lambda user: position[user] > start and user not in rewrite.nodes  # noqa: B023, E731
            old.replace_all_uses_with(new, delete_user_cb=later)
        self.note(family, report.REPLACED, what, anchor, reason, rewrite.nodes, outcome)
        return True

    def captured(self, family: str, what: str, node: Node) -> None:
        """Note a one-to-one capture; the post-grad stage reports its outcome."""
        self.handled.add(node)
        report.log.debug("captured %s at %s", what, place(node))

    def miss(self, family: str, anchor: Node, why: Miss) -> None:
        """Record why a subgraph of a family was not replaced; only the first reason counts."""
        if anchor not in self.handled:
            self.note(family, report.MISSED, name_of(anchor), anchor, why.reason, [anchor], None, why)

    @contextlib.contextmanager
    def recording_miss(self, family: str, anchor: Node) -> Iterator[None]:
        """Record the Miss that ends the `with`, if one does."""
        try:
            yield
        except Miss as why:
            self.miss(family, anchor, why)

    def note(
        self,
        family: str,
        status: str,
        what: str,
        anchor: Node,
        reason: str = "",
        nodes: Sequence[Node] = (),
        times: Outcome | None = None,
        why: Miss | None = None,
    ) -> None:
        """Record the outcome of a subgraph; `nodes` are its replacement, or the proposed one."""
        self.handled.add(anchor)
        blamed = frames_of(why.at) if why and why.at else ()
        row = report.Row(
            family, status, what, place(anchor), reason, self.stage,
            fix=why.fix if why else "",
            module=module_of(anchor),
            frames=frames_of(anchor),
            cause=blamed[-1] if blamed else None,
            times=times,
            cost=cost_of(nodes),
            device=val(anchor).device if is_tensor(anchor) else None,
        )  # fmt: skip
        self.rows.update(dict.fromkeys(nodes, row))
        report.record(row)


Family = Callable[[Context], None]


@dataclass(frozen=True)
class Registered:
    """One family function with its stage and order. The option `name` turns it off; None if none does."""

    name: str | None
    stage: Stage
    order: int
    run: Family


_registered: dict[tuple[Stage, int], Registered] = {}


def family(name: str | None, stage: Stage, order: int) -> Callable[[Family], Family]:
    """Register a function as a step of `stage`, run in ascending `order`. Raises ValueError if the order is taken."""

    def register(run: Family) -> Family:
        there = _registered.get((stage, order))
        if there is not None and (there.run.__module__, there.run.__name__) != (run.__module__, run.__name__):
            raise ValueError(f"{stage} step {order} is {there.run.__module__}.{there.run.__name__} already")
        _registered[stage, order] = Registered(name, stage, order, run)
        return run

    return register


def families(stage: Stage, settings: Settings) -> list[Family]:
    """Return the registered steps of a stage that the user wants, in their order."""
    steps = sorted((r for r in _registered.values() if r.stage == stage), key=lambda r: r.order)
    return [r.run for r in steps if r.name is None or r.name in settings.families]
