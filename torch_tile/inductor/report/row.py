# SPDX-License-Identifier: Apache-2.0
"""Describe one subgraph of a report: what became of it, why, and the times of both sides of its contest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from torch_tile.inductor.graph.nodes import Frame
    from torch_tile.inductor.select.roofline import Cost
    from torch_tile.kernel import JITKernel

WORTH = 0.99
"""Share of Inductor's time that our time must be below. Near ties are noise, and Inductor's code exists already."""
LARGE = 256 << 20
LEAN_WORTH = 1.05
"""The same share for a kernel that leaves out a tensor of at least LARGE bytes."""


@dataclass(frozen=True)
class Outcome:
    """Best times of both sides of a contest, in microseconds.

    `others` are times at other sizes: (text of the sizes, tile, inductor). `worth` is the most that ours may take of
    Inductor's time at the traced sizes. `rival` names the code of Inductor that was timed.
    """

    tile: float
    inductor: float
    others: tuple[tuple[str, float, float], ...] = ()
    worth: float = WORTH
    rival: str = "Inductor"

    @property
    def tile_wins(self) -> bool:
        """Return whether our kernel is fast enough at the traced sizes and slower at no other size.

        Ties go to Inductor, except for kernels that need less memory.
        """
        return self.tile < self.worth * self.inductor and all(
            tile <= max(self.worth, 1 / WORTH) * inductor for _, tile, inductor in self.others
        )

    def __str__(self) -> str:
        rest = (f"; {sizes}: {tile:.1f} and {inductor:.1f} us" for sizes, tile, inductor in self.others)
        return f"tile {self.tile:.1f} us, {self.rival} {self.inductor:.1f} us{''.join(rest)}"


@dataclass(frozen=True)
class Row:
    """One subgraph.

    Attributes:
        family: attention, mla, norm, dequant, scaled, grouped, gemm, softmax, loss, scan or route.
        status: replaced; kept (Inductor's code was faster); missed (it did not match).
        what: the tile operator with its arguments, or the operation that was looked at.
        where: module and line, as text.
        reason: why it did not match, or the times that decided.
        graph: pre_grad, inference, forward or backward.
        fix: what to write instead, so that it matches.
        module: the path of the module that it belongs to.
        frames: the calls in the model that led to it, outermost first.
        cause: the line of the operation that `reason` is about.
        times: microseconds of both sides, if they were measured.
        cost: operations and bytes, if they are known.
        device: where it runs.
        kernels: what ran in its place; known once the model has run under `explain`.
    """

    family: str
    status: str
    what: str
    where: str
    reason: str = ""
    graph: str = "inference"
    fix: str = ""
    module: str = ""
    frames: tuple[Frame, ...] = ()
    cause: Frame | None = None
    times: Outcome | None = None
    cost: Cost | None = None
    device: torch.device | None = None
    kernels: list[JITKernel] = field(default_factory=list, compare=False, repr=False)

    @property
    def source(self) -> Frame | None:
        """Return the innermost line of the model that the subgraph comes from."""
        return self.frames[-1] if self.frames else None
