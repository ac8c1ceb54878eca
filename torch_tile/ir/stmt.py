# SPDX-License-Identifier: Apache-2.0
"""Statements, kernels and programs.

A `Block` runs in order. `Let` names a value for the rest of its block. A `TileOp` is one operation on whole tiles,
performed by all threads of the block as if it were atomic: what an earlier statement wrote is seen by a later one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Call, Expr, Var
from torch_tile.ir.layout import Layout
from torch_tile.ir.node import Node, find, node_class

if TYPE_CHECKING:
    import torch


@node_class
class Stmt(Node):
    """Base of statements."""


@node_class
class Block(Stmt):
    """Statements in order. A block among them is replaced by its statements, so that there is one form of each body."""

    stmts: tuple[Stmt, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(isinstance(s, Block) for s in self.stmts):
            flat = tuple(t for s in self.stmts for t in (s.stmts if isinstance(s, Block) else (s,)))
            object.__setattr__(self, "stmts", flat)


class LoopKind(enum.Enum):
    """How a loop's iterations may run."""

    SERIAL = "serial"
    UNROLLED = "unroll"
    VECTOR = "vectorized"
    PARALLEL = "Parallel"
    PIPELINED = "Pipelined"


@node_class
class For(Stmt):
    """A loop nest over a box; more than one variable only for PARALLEL.

    Iterations run from `start` while below `stop`, by `step`. `stages`, `order` and `stage` belong to PIPELINED.
    `layout` belongs to PARALLEL: which thread runs which points of the box, in which of its own steps (axes "t" and
    "r"). With `ping_pong`, warpgroups take turns in starting products. With `independent`, the author promises that
    iterations of a PARALLEL nest never meet in an element. The text for a GPU has `factor` iterations of a SERIAL
    loop side by side; where that is 0, the compiler chooses. The first `skip` iterations of a PIPELINED loop
    change nothing in the rows that T.own_rows gives, as the author promises.
    """

    binders: ClassVar[tuple[str, ...]] = ("vars",)
    kind: LoopKind
    vars: tuple[Var, ...]
    starts: tuple[Expr, ...]
    stops: tuple[Expr, ...]
    body: Block
    step: int = 1
    stages: int = 0
    order: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()
    layout: Layout | None = None
    ping_pong: bool = False
    independent: bool = False
    factor: int = 0
    skip: Expr | None = None


@node_class
class While(Stmt):
    """Repeat `body` while `condition` holds."""

    condition: Expr
    body: Block


@node_class
class If(Stmt):
    """Run `then` if `condition` holds, else `otherwise`."""

    condition: Expr
    then: Block
    otherwise: Block


@node_class
class Role(Stmt):
    """Threads `first` to `first + count - 1` of the block run `body`, the others skip it; both are multiples of 32.

    Roles that follow each other run at the same time. `registers`, if not 0, is how many registers each thread of these
    whole warpgroups may use. It is a multiple of 8 from 24 to 256. The author orders the waits and releases of a role
    `by_hand`.
    """

    first: int
    count: int
    body: Block
    registers: int = 0
    by_hand: bool = False


@node_class
class Let(Stmt):
    """Name a value for the rest of the block."""

    binders: ClassVar[tuple[str, ...]] = ("var",)
    var: Var
    value: Expr


@node_class
class Alloc(Stmt):
    """Bring a buffer to life for the rest of the block: undefined, or `init` for a T.alloc_var or an address."""

    binders: ClassVar[tuple[str, ...]] = ("buffer",)
    buffer: Buffer
    init: Expr | None = None


@node_class
class Store(Stmt):
    """Write one element. `value` has the buffer's type."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr


@node_class
class Do(Stmt):
    """A call of an intrinsic for its effect."""

    call: Expr


@node_class
class Break(Stmt):
    """Leave the innermost loop."""


@node_class
class Continue(Stmt):
    """Go on with the next iteration of the innermost loop."""


@node_class
class Assert(Stmt):
    """Stop the kernel with `message` unless `condition` holds."""

    condition: Expr
    message: str


@node_class
class Print(Stmt):
    """Print `message` and the value, a scalar or a whole region; None prints the message alone."""

    message: str
    value: Expr | Region | None


class Env(Protocol):
    """The state of one block, as tile ops see it."""

    def read(self, region: Region) -> torch.Tensor:
        """Copy a region, one dimension per buffer dimension; global elements outside the buffer read 0."""

    def write(self, region: Region, tile: torch.Tensor) -> None:
        """Overwrite the region with a tile of its shape; global elements outside the buffer are dropped."""

    def extents(self, region: Region) -> list[int]:
        """Return the region's extents, one per buffer dimension."""

    def value(self, expr: Expr) -> Any:
        """Compute a scalar expression as a Python number."""

    def size(self, expr: Expr) -> int:
        """Compute an integer expression as a Python int."""

    def full(self, shape: Sequence[int], value: Any, dtype: DType) -> torch.Tensor:
        """Return a constant tile."""

    def wide(self, dtype: DType) -> torch.dtype:
        """Return the type in which a reference computes results of `dtype`: float64 or int64."""

    def block(self, block: Block) -> None:
        """Run statements."""


@node_class
class TileOp(Stmt):
    """Base of the operations in `torch_tile.tileop`; see `tileop/base.py` for what a subclass provides."""

    def evaluate(self, env: Env) -> None:
        """Compute the op on whole tiles: its meaning."""
        raise NotImplementedError

    def check(self) -> list[Any]:
        """Return the operands' faults as diagnostics."""
        raise NotImplementedError


@node_class
class Kernel(Node):
    """One launch: `body` runs once for every point of `grid`, with `threads` threads.

    `blocks` are the block indices, x first. `swizzle` is T.use_swizzle's (panel_size, order) or None. On GPUs, from
    stage THREAD on, the body is what one thread does: `thread` is its index in the block, x fastest; `shared_bytes` is
    the block's shared memory. Blocks come in groups of `cluster`. `min_blocks` of them shall have room on a
    multiprocessor at once.
    """

    binders: ClassVar[tuple[str, ...]] = ("blocks", "thread")
    grid: tuple[Expr, ...]
    blocks: tuple[Var, ...]
    threads: tuple[int, ...]
    body: Block
    swizzle: tuple[int, str] | None = None
    thread: Var | None = None
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    min_blocks: int = 1


# The key of pass_configs of each option of the compiler that a program may ask for.
SWITCH_KEYS = {
    "fast_math": "tl.enable_fast_math", "strict": "tl.strict", "tf32": "tl.enable_tf32", "mma_sync": "tl.disable_wgmma",
}  # fmt: skip


@node_class
class Program(Node):
    """The IR of one author's function: parameters, scratch memory, and kernels launched one after another.

    `params` are buffers and scalar variables in the order of the signature. `outputs` are buffers made by T.empty and
    returned. `views` are global buffers at the place of their `base`, another buffer. `switches` names the compiler
    options that the function asks for. Launches check what is `assumed` of sizes and scalar parameters.
    """

    binders: ClassVar[tuple[str, ...]] = ("params", "workspaces", "outputs", "views")
    name: str
    params: tuple[Buffer | Var, ...]
    kernels: tuple[Kernel, ...]
    workspaces: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    views: tuple[Buffer, ...] = ()
    switches: tuple[str, ...] = ()
    assumed: tuple[Expr, ...] = ()


def calls(one: Node, *names: str) -> bool:
    """Return whether a statement is a call, for its effect, of one of these intrinsics."""
    return isinstance(one, Do) and isinstance(one.call, Call) and one.call.name in names


def dimensions(program: Program) -> list[Var]:
    """Return the dimensions known only at run time, in order of appearance in the parameters."""
    found: dict[Var, None] = {}
    for buffer in (*program.params, *program.workspaces, *program.outputs):
        if isinstance(buffer, Buffer):
            for size in (*buffer.shape, *(buffer.strides or ())):
                for var in find(size, Var):
                    if var.role == "dim":
                        found[var] = None
    return list(found)


__all__ = [
    "Alloc", "Assert", "Block", "Break", "Continue", "DType", "Do", "For", "If", "Kernel", "Let", "LoopKind", "Print",
    "Program", "Role", "Stmt", "Store", "TileOp", "While", "calls", "dimensions",
]  # fmt: skip
