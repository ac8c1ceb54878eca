# SPDX-License-Identifier: Apache-2.0
"""The declaration of an intrinsic and the registry.

An intrinsic is one of three things: a pure function of scalars (`math.py`), a helper of CPU kernels (`cpu.py`), or an
action of one thread (`memory.py`, `matrix.py`). Its meaning stands beside its spelling. So the interpreters, the tests
and the generated code cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir import dtype as dt
from torch_tile.ir.dtype import DType, promote
from torch_tile.ir.expr import Call, Expr, cast, to_expr
from torch_tile.ir.printer import TARGET_LEVEL
from torch_tile.ir.stmt import Do

Rule = Callable[[Sequence[Expr]], tuple[DType, DType]]


@dataclass(frozen=True)
class Access:
    """The memory access of a call through operand number `operand`, an `Address`.

    `kind` is "r", "w" or "rw". Each calling thread touches `elements` of the buffer's type, from the address on; -1
    stands for any elements of the buffer. An asynchronous access happens at any time up to the wait that completes it.
    """

    operand: int
    kind: str
    elements: int
    asynchronous: bool = False


def no_effects(call: Call) -> tuple[Access, ...]:
    """Return no accesses, as a pure function of its operands has none."""
    return ()


@dataclass(frozen=True)
class Intrinsic:
    """The declaration of one intrinsic.

    `rule` gives (operand type, result type) from the operands; `cpu` is the C++ function called for it, in namespace
    `tile` unless it names another; `evaluate` computes it on torch tensors (None for helpers that only lowered kernels
    call).

    For GPUs: `cuda` is the C++ function, or gives it from the call; `header` of csrc/ declares it; `arch` is the least
    compute capability that has it, or the only one if `only`; `effects` tells what a call does to memory; `convergent`
    says who must call it together ("block", "role", "warpgroup", "warp" or ""). `meaning` computes it on NumPy arrays,
    one entry per thread, for a warp's whole warps at once (arrays `[warps, 32, ...]`); its last argument is the call's
    options.

    `sync`, `scope` and `engine` are its traits (traits.py). `atomic`: other blocks may touch the memory at the same
    time. `idle`: it has nothing to do where one thread runs a block.
    """

    name: str
    arity: int
    rule: Rule
    cpu: str
    evaluate: Callable[..., Any] | None = None
    doc: str = ""
    cuda: str | Callable[[Call], str] = ""
    header: str = ""
    arch: int = 0
    effects: Callable[[Call], tuple[Access, ...]] = no_effects
    convergent: str = ""
    meaning: Callable[..., Any] | None = None
    only: bool = False
    sync: Sync | None = None
    scope: Scope | None = None
    engine: Engine | None = None
    atomic: bool = False
    idle: bool = False

    @property
    def starts(self) -> bool:
        """Return whether the intrinsic gives an engine work."""
        return self.engine is not None and self.sync is None

    @property
    def is_barrier(self) -> bool:
        """Return whether several warps, or all, wait for each other at it."""
        return self.sync is Sync.BARRIER and self.scope is not Scope.WARP

    @property
    def by_hand(self) -> bool:
        """Return whether the kernel's author orders threads and copies by hand."""
        ordering = self.sync not in (None, Sync.FENCE, Sync.PROXY_FENCE, Sync.TURN)
        return ordering or self.engine is not None

    @property
    def is_grouped(self) -> bool:
        """Return whether it closes or awaits groups that all threads of a block count alike, as no bulk store does."""
        return self.sync in (Sync.COMMIT, Sync.DRAIN) and self.engine is not Engine.BULK

    @property
    def publishes(self) -> bool:
        """Return whether it publishes a thread's earlier work to the threads waiting at the same barrier.

        A barrier of all threads does not count.
        """
        apart = self.scope in (Scope.WARP, Scope.GROUP, Scope.MBARRIER)
        return apart and self.sync in (Sync.ARRIVE, Sync.BARRIER)

    def exists_on(self, capability: int) -> bool:
        """Return whether GPUs of this compute capability have it."""
        return capability == self.arch if self.only else capability >= self.arch

    @property
    def where(self) -> str:
        """Name the targets that have it."""
        return f"sm_{self.arch}a" if self.only else f"sm_{self.arch} or later"

    def spelling(self, call: Call) -> str:
        """Return the C++ function that a CUDA kernel calls for `call`, options as template arguments."""
        if not isinstance(self.cuda, str):
            return self.cuda(call)
        options = ", ".join(str(o).lower() if isinstance(o, bool) else str(o) for o in call.options)
        return f"{self.cuda}<{options}>" if options else self.cuda

    def build(self, args: Sequence[Any]) -> Expr:
        """Build a call with operands converted to the operand type. Plain numbers take the other operands' type."""
        if len(args) != self.arity:
            why = f"takes {self.arity} operands, got {len(args)}"
            raise error("bad_argument", None, op=f"T.{self.name}", name="args", why=why, fix="see its documentation")
        typed = [a for a in args if isinstance(a, Expr)]
        like = _common(typed) if typed else None
        exprs = [to_expr(a, like, f"T.{self.name}") for a in args]
        operand, result = self.rule(exprs)
        return Call(self.name, tuple(cast(e, operand) for e in exprs), result)


_REGISTRY: dict[str, Intrinsic] = {}


def declare(intrinsic: Intrinsic) -> Intrinsic:
    """Add an intrinsic to the registry; a name may be declared once."""
    if intrinsic.name in _REGISTRY:
        raise ValueError(f"intrinsic {intrinsic.name} is declared twice")
    _REGISTRY[intrinsic.name] = intrinsic
    if intrinsic.header and intrinsic.evaluate is None:
        TARGET_LEVEL.add(intrinsic.name)
    return intrinsic


def lookup(name: str) -> Intrinsic:
    """Return the intrinsic called `name`; KeyError if there is none."""
    return _REGISTRY[name]


def intrinsic_of(node: object) -> Intrinsic | None:
    """Return the declaration of the intrinsic that a call or a statement calls; None for other nodes."""
    found = node.call if isinstance(node, Do) else node
    return _REGISTRY.get(found.name) if isinstance(found, Call) else None


def is_pure(node: Call) -> bool:
    """Return whether a call is a function of its operands alone, so that it may be moved or left out."""
    found = intrinsic_of(node)
    if found is None or found.evaluate is None or found.effects is not no_effects:
        return False
    return not found.convergent and found.sync is None and found.engine is None


def starts(node: object, engine: Engine) -> TypeGuard[Call]:
    """Return whether a node is a call that gives `engine` work."""
    found = intrinsic_of(node) if isinstance(node, Call) else None
    return found is not None and found.starts and found.engine is engine


def syncs(node: object, sync: Sync, scope: Scope | None = None) -> bool:
    """Return whether a call, or a statement of one, synchronises as `sync` among the threads of `scope`."""
    found = intrinsic_of(node)
    return found is not None and found.sync is sync and scope in (None, found.scope)


def call(name: str, *args: Any) -> Expr:
    """Build a call of the intrinsic `name` on operands of any kind."""
    return lookup(name).build(args)


def effect(name: str, *args: Expr, options: tuple[object, ...] = ()) -> Do:
    """Build the statement that calls an intrinsic for its effect."""
    return Do(Call(name, args, dt.int32, options))


def names() -> list[str]:
    """Return all declared names."""
    return sorted(_REGISTRY)


def floating(args: Sequence[Expr]) -> tuple[DType, DType]:
    """Give operands and result their common floating type; integers count as float32."""
    common = _common(args)
    common = common if common.is_float else dt.float32
    return common, common


def same(args: Sequence[Expr]) -> tuple[DType, DType]:
    """Give operands and result their common type."""
    common = _common(args)
    return common, common


def predicate(args: Sequence[Expr]) -> tuple[DType, DType]:
    """Give operands their common floating type, and the result bool."""
    return floating(args)[0], dt.bool_


def _common(args: Sequence[Expr]) -> DType:
    """Return the dtype that all operands promote to."""
    common = args[0].dtype
    for a in args[1:]:
        common = promote(common, a.dtype)
    return common
