# SPDX-License-Identifier: Apache-2.0
"""Choose between our kernel and Inductor's code by the user's `select`: wherever it fits, or wherever it is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import GraphModule, Node

from torch_tile.inductor import compat
from torch_tile.inductor.context import AttentionOperands, LinearLossOperands, LossOperands, LossOptions, Select
from torch_tile.inductor.graph.nodes import Rewrite
from torch_tile.inductor.report.rows import Outcome
from torch_tile.inductor.settings import Settings


class Always(Select):
    """Take every replacement that can be called: `select="tile"`."""

    def refused(self, nodes: Iterable[Node]) -> str:
        """Return the reason why tile ops among `nodes` cannot be called from the C++ of Inductor; empty if they can."""
        if not compat.in_cpp():
            return ""
        from torch_tile.inductor.codegen.cpp_wrapper import why_not

        calls = [n for n in nodes if n.op == "call_function" and getattr(n.target, "namespace", "") == "tile"]
        reasons = filter(None, map(why_not, calls))
        return next((f"not to be called from C++: {why}" for why in reasons), "")


class Fastest(Always):
    """Time each replacement against Inductor's code for the same subgraph: `select="fastest"`."""

    times = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def of_rewrite(self, rewrite: Rewrite, pairs: Sequence[tuple[Node, Node]]) -> Outcome:
        """Time the new nodes against the old nodes."""
        from torch_tile.inductor.select.decide import compete

        return compete(rewrite, pairs, self.settings)

    def of_captured(self, node: Node, reference: Callable[..., torch.Tensor]) -> Outcome:
        """Time a captured op against its ATen."""
        from torch_tile.inductor.select.decide import compete_captured

        return compete_captured(node, reference, self.settings)

    def of_graphs(self, new: GraphModule, old: GraphModule) -> Outcome:
        """Time two graphs against each other."""
        from torch_tile.inductor.select import decide

        return decide.decide(new, decide.write_out(old), self.settings)

    def of_training(self, operands: AttentionOperands, causal: bool, scale: float | None) -> Outcome:
        """Time attention and its backward by our kernels against torch's kernels."""
        from torch_tile.inductor.select.training import compete_attention

        return compete_attention(operands, causal, scale, self.settings)

    def of_loss(self, operands: LossOperands, options: LossOptions, widened: bool) -> Outcome:
        """Time the loss by our kernels against Inductor's code."""
        from torch_tile.inductor.select.training import compete_loss

        return compete_loss(operands, options, widened, self.settings)

    def of_linear_loss(self, operands: LinearLossOperands, options: LossOptions, softcap: float | None) -> Outcome:
        """Time the linear layer and its loss by our kernels against Inductor's code."""
        from torch_tile.inductor.select.training import compete_linear_loss

        return compete_linear_loss(operands, options, softcap, self.settings)


def policy_of(settings: Settings) -> Select:
    """Return the selection that the user chose."""
    return Fastest(settings) if settings.select == "fastest" else Always()
