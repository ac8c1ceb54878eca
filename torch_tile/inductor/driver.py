# SPDX-License-Identifier: Apache-2.0
"""The passes given to Inductor, and the context that families work in.

Capture (pre-grad) swaps composite calls for tile ops one to one; written_out finds attention's forward and backward in
one graph, and joint says in both alike what only both together show; refine (post-grad, on functional ATen) matches
structure, then puts back what is not worth a kernel. None ever raises: a family that fails is logged and its nodes are
left to Inductor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from torch_tile.inductor import compat
from torch_tile.inductor.compat import CustomGraphPass
from torch_tile.inductor.graph.nodes import (
    Miss,
    Rewrite,
    dtype,
    is_on_gpu,
    is_tensor,
    name_of,
    ordered,
    same_shape,
    shape,
    val,
)
from torch_tile.inductor.graph.source import frames_of, module_of, place
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.select.roofline import cost_of
from torch_tile.inductor.settings import Settings

if TYPE_CHECKING:
    from torch_tile.inductor.select.decide import Outcome


class Context:
    """One graph being worked on by the families."""

    def __init__(self, graph: Graph, settings: Settings, stage: str) -> None:
        self.graph = graph
        self.settings = settings
        self.stage = stage
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
        if refusal := self.refused(rewrite.nodes):
            self.note(family, report.KEPT, what, anchor, refusal, rewrite.nodes)
            rewrite.discard()
            return False
        outcome = None if sure and not self.settings.thorough else self.contest(rewrite, pairs)
        reason = sure if self.settings.select == "fastest" and outcome is None else str(outcome or "")
        if outcome is not None and not outcome.tile_wins:
            self.note(family, report.KEPT, what, anchor, reason, rewrite.nodes, outcome)
            rewrite.discard()
            return False
        self.handled.update(rewrite.nodes)
        position = ordered(self.graph)
        for old, new in pairs:
            # What reads an old node before the new one is there is what the rewrite makes superfluous.
            start = position[new]
            later = lambda user: position[user] > start and user not in rewrite.nodes  # noqa: B023, E731
            old.replace_all_uses_with(new, delete_user_cb=later)
        self.note(family, report.REPLACED, what, anchor, reason, rewrite.nodes, outcome)
        return True

    def refused(self, nodes: Iterable[Node]) -> str:
        """Why tile ops among `nodes` cannot be called from where they will be; empty if they can."""
        if not compat.in_cpp():
            return ""
        from torch_tile.inductor.codegen.cpp_wrapper import why_not

        calls = [n for n in nodes if n.op == "call_function" and getattr(n.target, "namespace", "") == "tile"]
        reasons = filter(None, map(why_not, calls))
        return next((f"not to be called from C++: {why}" for why in reasons), "")

    def contest(self, rewrite: Rewrite, pairs: list[tuple[Node, Node]]) -> Outcome | None:
        """Times of both, unless the user wants ours anyway."""
        if self.settings.select != "fastest":
            return None
        from torch_tile.inductor.select.decide import compete

        return compete(rewrite, pairs, self.settings)

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


class TilePass(CustomGraphPass):
    """A pass over one stage; its `uuid` covers our sources and settings, so Inductor's caches stay right."""

    def __init__(self, stage: str, settings: Settings) -> None:
        self.stage = stage
        self.settings = settings

    def __call__(self, graph: Graph) -> None:
        """Run the stage's families over the graph."""
        context = self.run(graph)
        if self.stage == "pre_grad":
            _prefetch(context)

    def run(self, graph: Graph) -> Context:
        """The same; returns what they left behind."""
        from torch_tile.inductor import patterns

        families = {
            "pre_grad": patterns.capture_families,
            "written_out": patterns.written_out_families,
            "joint": patterns.joint_families,
            "post_grad": patterns.refine_families,
        }[self.stage]
        kind = {"written_out": "joint", "post_grad": _graph_kind(graph)}.get(self.stage, self.stage)
        context = Context(graph, self.settings, kind)
        if self.stage == "pre_grad":
            for body in _checkpointed(graph):
                self.run(body.graph)
                body.recompile()
        elif self.stage == "post_grad":
            from torch_tile.inductor.codegen import lowering

            lowering.register()  # not before: a graph from Inductor's cache does without its lowerings, a slow import
            _prefetch(context)
        with self._progress():
            for family in families(self.settings):
                try:
                    family(context)
                except Exception:
                    report.log.exception("%s failed; its subgraphs are left to Inductor", family.__module__)
                if self.stage == "post_grad":
                    graph.eliminate_dead_code()
        if self.stage == "joint":
            _prefetch(context)
        return context

    def _progress(self) -> contextlib.AbstractContextManager[None]:
        """A bar that counts contests, on a terminal, where a thorough search was asked for."""
        if not self.settings.thorough or self.stage != "post_grad" or self.settings.select != "fastest":
            return contextlib.nullcontext()
        from torch_tile.inductor.select.decide import shown

        return shown()

    def uuid(self) -> Any:
        """Identity for Inductor's caches: our sources, the stage and the settings."""
        return ("torch_tile", self.stage, repr(self.settings), fingerprint())


def _prefetch(context: Context) -> None:
    if not is_on_gpu(context.graph):
        return  # without an import that takes longer than a graph from Inductor's cache can wait
    from torch_tile.inductor.compile_ahead import kernels as prefetch

    prefetch.prefetch(context.graph, context.settings, context.stage)


def _checkpointed(graph: Graph) -> Iterator[torch.fx.GraphModule]:
    """The bodies of calls of torch.utils.checkpoint, which are one graph with what surrounds them only later on."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        body = getattr(graph.owning_module, str(getattr(node.args[0], "target", "")), None)
        if isinstance(body, torch.fx.GraphModule):
            yield body


def _graph_kind(graph: Graph) -> str:
    """Inference, forward or backward, from the names that AOTAutograd gives placeholders and outputs."""
    names = [n.name for n in graph.find_nodes(op="placeholder")]
    if any(n.startswith("tangents") for n in names):
        return "backward"
    return "forward" if any(n.startswith("primals") for n in names) else "inference"


@functools.cache
def fingerprint() -> str:
    """A digest of every source of the package: passes, op definitions, kernels, compiler and run-time headers."""
    root = pathlib.Path(__file__).parents[1]
    headers = root / "csrc" if (root / "csrc").is_dir() else root.parent / "csrc"
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted([*root.rglob("*.py"), *headers.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
