# SPDX-License-Identifier: Apache-2.0
"""Whether `tile.attention` takes the shapes of a call of torch's attention. Patterns ask before and after autograd."""

from __future__ import annotations

from torch.fx import Node

from torch_tile.inductor.graph.nodes import val
from torch_tile.inductor.patterns.attention.scores import NoMatch
from torch_tile.ops.attention_common import check_shapes


def check_attention_shapes(q: Node, k: Node, v: Node) -> None:
    """Raise NoMatch for shapes that torch broadcasts, or does not check, where `tile.attention` refuses them."""
    try:
        check_shapes("attention", val(q), val(k), val(v))
    except RuntimeError as misfit:
        fix = "make q [B, H, Sq, D], k [B, Hkv, Skv, D] and v [B, Hkv, Skv, Dv], H a multiple of Hkv"
        raise NoMatch(str(misfit), fix) from None
