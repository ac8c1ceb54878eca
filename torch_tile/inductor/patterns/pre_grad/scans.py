# SPDX-License-Identifier: Apache-2.0
"""Report the scans of models that were replaced before the graph was traced (integrations/scans.py)."""

from __future__ import annotations

import torch

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import val
from torch_tile.inductor.report import rows as report
from torch_tile.ops.registry import operator_of

SCANS = (
    "causal_conv1d", "causal_conv1d_update", "gated_delta_rule", "gated_delta_rule_step",
    "gated_linear_attention", "gated_linear_attention_step", "selective_state_update", "ssd_chunk_scan",
)  # fmt: skip


@family("scan", "pre_grad", 90)
def report_scans(context: Context) -> None:
    """Note every call of a scan's operator."""
    for node in context.graph.nodes:
        if node.op != "call_function":
            continue
        target = getattr(node.target, "default", node.target)
        operator = operator_of(target)
        if operator is None or operator.name not in SCANS:
            continue
        shapes = ", ".join(str(list(val(x).shape)) for x in node.all_input_nodes if isinstance(val(x), torch.Tensor))
        context.note("scan", report.REPLACED, f"tile.{operator.name}({shapes})", node)
