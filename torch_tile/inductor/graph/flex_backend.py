# SPDX-License-Identifier: Apache-2.0
"""Choose and name Inductor's backend for calls of `flex_attention`: FLASH (FlashAttention-4), else Triton.

Inductor takes FLASH only where a call asks for it by its kernel options. So a contest asks for it first, where the
machine has it and the user leaves the choice open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_tile.inductor import compat
from torch_tile.inductor.graph.nodes import val

OP = torch.ops.higher_order.flex_attention
OPTIONS = 6  # the position of the kernel options among the arguments of a call
OPEN, FLASH = "AUTO", "FLASH"


def flex_calls(graph: Graph) -> Sequence[Node]:
    """List the calls of `flex_attention` in a graph."""
    return list(graph.find_nodes(op="call_function", target=OP))


def may_use_flash(calls: Sequence[Node]) -> bool:
    """Return whether the machine has FLASH, and no call names a backend."""
    is_open = bool(calls) and all(_backend(call) == OPEN for call in calls)
    return is_open and all(compat.has_flex_flash(_device(call)) for call in calls)


def set_backend(calls: Sequence[Node], name: str) -> None:
    """Write a backend into the kernel options of calls."""
    for call in calls:
        options: Any = call.args[OPTIONS]
        call.update_arg(OPTIONS, {**options, "BACKEND": name})


def rival_name(calls: Sequence[Node]) -> str:
    """Name the code that a contest is against: Inductor's, and of `flex_attention` on a GPU which backend."""
    if not calls or _device(calls[0]).type == "cpu":
        return "Inductor"
    return f"Inductor's {FLASH if _backend(calls[0]) == FLASH else 'Triton'}"


def _backend(call: Node) -> str:
    """Return the backend that a call asks for."""
    options: Any = call.args[OPTIONS]
    return str(options.get("BACKEND", OPEN))


def _device(call: Node) -> torch.device:
    """Return the device of a call's queries."""
    device: torch.device = val(call.args[0]).device
    return device
