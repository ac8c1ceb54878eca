# SPDX-License-Identifier: Apache-2.0
"""The context that families work in, how they register themselves, and what they ask of the selection.

A family is a function of a `Context`. Its decorator names the stage that runs it and its place in there; the driver
loads the modules of a stage and asks `families` for its list. Whether a kernel beats Inductor's code is the business
of the `Select` that the driver hands in: no family and no context imports the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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


class Select:
    """How a context chooses between our kernel and Inductor's code. This one takes every replacement, untimed."""

    times = False
    """Whether replacements are timed."""

    def refused(self, nodes: Iterable[Node]) -> str:
        """Why tile ops among `nodes` cannot be called from where they will be; empty if they can."""
        return ""

    def of_rewrite(self, rewrite: Rewrite, pairs: Sequence[tuple[Node, Node]]) -> Outcome | None:
        """Times of the new nodes of `pairs` (old, new) and of the old ones; None where nothing is timed."""
        return None

    def of_captured(self, node: Node, reference: Callable[..., torch.Tensor]) -> Outcome | None:
        """Times of a captured op and of the ATen that it stands for; None where nothing is timed."""
        return None

    def of_graphs(self, new: GraphModule, old: GraphModule) -> Outcome | None:
        """Times of two graphs of the same inputs, tile ops in `old` written out; None where nothing is timed."""
        return None

    def of_training(self, tensors: tuple[Any, Any, Any, Any], causal: bool, scale: float | None) -> Outcome | None:
        """Times of attention with its gradients, `tensors` being q, k, v and a mask; None where nothing is timed."""
        return None

    def of_loss(
        self, tensors: Sequence[Any], widened: bool, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Outcome | None:
        """Times of a cross-entropy, with its gradient if one is wanted; None where nothing is timed.

        tensors: logits, target and, if there are any, weights of the classes. widened: the model widens the logits to
        float32 first.
        """
        return None


class Context:
    """One graph being worked on by the families."""

    def __init__(self, graph: Graph, settings: Settings, stage: str, select: Select) -> None:
        self.graph = graph
        self.settings = settings
        self.stage = stage
        self.select = select
        self.handled: set[Node] = set()
        """Anchors already replaced, or already reported with a reason."""
        self.left: set[Node] = set()
        """Captured ops that were noted to be Inductor's, of which ATen is made in the end."""
        self.rows: dict[Node, report.Row] = {}
        """The row of each node that was inserted."""

    def replace(
        self, rewrite: Rewrite, family: str, pairs: list[tuple[Node, Node]], what: str, anchor: Node, sure: str = ""
    ) -> bool:
        """Let each new node stand for an old one, unless Inductor's code for the same subgraph is faster.

        `pairs` are (old, new), the new ones made by `rewrite`. `sure` says why ours is faster, where that needs no
        contest but for a thorough search. Returns whether the graph was changed.
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
        """Note a one-to-one capture; the post-grad stage reports what became of it."""
        self.handled.add(node)
        report.log.debug("captured %s at %s", what, place(node))

    def miss(self, family: str, anchor: Node, why: Miss) -> None:
        """Record why a subgraph of a family was not replaced (the first reason counts)."""
        if anchor not in self.handled:
            self.note(family, report.MISSED, name_of(anchor), anchor, why.reason, [anchor], None, why)

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
        """Record what became of a subgraph: `nodes` stand for it now, or would have."""
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
    """One family function with its place: `name` is the option that leaves it out, None if nothing does."""

    name: str | None
    stage: Stage
    order: int
    run: Family


_registered: dict[tuple[Stage, int], Registered] = {}


def family(name: str | None, stage: Stage, order: int) -> Callable[[Family], Family]:
    """Register a function as a step of `stage`, run in ascending `order`; raises ValueError if the place is taken."""

    def register(run: Family) -> Family:
        there = _registered.get((stage, order))
        if there is not None and (there.run.__module__, there.run.__name__) != (run.__module__, run.__name__):
            raise ValueError(f"{stage} step {order} is {there.run.__module__}.{there.run.__name__} already")
        _registered[stage, order] = Registered(name, stage, order, run)
        return run

    return register


def families(stage: Stage, settings: Settings) -> list[Family]:
    """The registered steps of a stage that the user wants, in their order."""
    steps = sorted((r for r in _registered.values() if r.stage == stage), key=lambda r: r.order)
    return [r.run for r in steps if r.name is None or r.name in settings.families]
