# SPDX-License-Identifier: Apache-2.0
"""Decide whether roles get the registers that they ask for.

On a chip that moves no registers, roles keep equal shares. Elsewhere roles that ask for more than their block has are
an error: setmaxnreg would wait for ever. A block starts with an equal share for each thread. Roles move registers
between warpgroups, and get no others. Roles between two barriers of the block run at the same time. So one may take
what another one gives back. A warpgroup keeps its registers behind a barrier. May assume that every barrier stands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError, error
from torch_tile.hardware import REGISTERS_OF_ROLES, UNIT, WARP, registers_at_start
from torch_tile.intrinsics import lookup
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir.expr import Call
from torch_tile.ir.node import Rewriter, find
from torch_tile.ir.stmt import Kernel, Program, Role, Stmt


def resolve_role_registers(program: Program, build: Build) -> Program:
    """Drop registers that no role can get. Raise an author error where roles would wait for registers for ever."""
    if not build.target.has_register_moves:
        shared: Program = _EqualShares(build)(program)
        return shared
    for kernel in program.kernels:
        threads = math.prod(kernel.threads)
        share, held = registers_at_start(threads, kernel.min_blocks), dict[int, int]()
        for roles in phases(kernel):
            asking = [one for one in roles if one.registers]
            for one in asking:
                _refuse_mixed(one, sorted({held.get(warp, share) for warp in warps_of(one)}))
            held |= {warp: one.registers for one in asking for warp in warps_of(one)}
            block = _Block(threads, share, held)
            if block.need > block.most:
                raise _too_many(block, asking)
    return program


class _EqualShares(Rewriter):
    """Drop the registers of roles, and report that."""

    def __init__(self, build: Build):
        self.build = build

    def visit_Role(self, one: Role) -> Role:
        """Drop the registers of a role."""
        if not one.registers:
            return one
        why = f"{self.build.target.arch} cannot move registers between warpgroups"
        self.build.remark(one.span, "T.set_max_nreg", "an equal share of the block's registers", why)
        return replace(one, registers=0)


def phases(kernel: Kernel) -> Iterator[list[Role]]:
    """Yield the roles that run at the same time. A warp's second role begins with them when its first one ends."""
    found: list[Role] = []
    for one in kernel.body.stmts:
        again = isinstance(one, Role) and any(warp in warps_of(other) for other in found for warp in warps_of(one))
        if again or (not isinstance(one, Role) and _is_met(one)):
            yield found
            found = []
        if isinstance(one, Role):
            found.append(one)
    yield found


def warps_of(role: Role) -> range:
    """Return the warps of a role."""
    return range(role.first // WARP, (role.first + role.count) // WARP)


def _is_met(one: Stmt) -> bool:
    """Return whether threads of all roles wait for each other in a statement."""
    return any(lookup(call.name).sync is Sync.BARRIER for call in find(one, Call))


@dataclass(frozen=True)
class _Block:
    """The registers that warps of a block hold, if not its `share`."""

    threads: int
    share: int
    held: dict[int, int]

    @property
    def most(self) -> int:
        """Return the registers that the block started with."""
        return self.share * self.threads

    @property
    def need(self) -> int:
        """Return the registers that all its threads hold."""
        return self.most + sum(WARP * (count - self.share) for count in self.held.values())

    def described(self) -> str:
        """Return the registers of each run of threads, in words."""
        runs = itertools.groupby(range(self.threads), lambda n: self.held.get(n // WARP, self.share))
        spans = [(count, list(those)) for count, those in runs]
        return ", ".join(f"{count} in threads {those[0]} to {those[-1]}" for count, those in spans)


def _refuse_mixed(one: Role, before: Sequence[int]) -> None:
    """Raise an author error for a role whose threads would not all move their registers the same way."""
    if len(before) > 1 and before[0] <= one.registers <= before[-1]:
        why = f"is {one.registers} for warpgroups of which some have {before[0]} registers, some {before[-1]}"
        fix = "write a T.ws for each of them"
        raise error("bad_argument", one.span, op="T.ws", name="registers", why=why, fix=fix)


def _too_many(block: _Block, asking: Sequence[Role]) -> TileError:
    """Describe roles that together ask for more registers than their block has, and what would fit."""
    most = max(r.registers for r in asking)
    greedy = [r for r in asking if r.registers == most]
    fits = (most - math.ceil((block.need - block.most) / sum(r.count for r in greedy))) // UNIT * UNIT
    fix = "let another role keep fewer by T.dec_max_nreg"
    if fits in REGISTERS_OF_ROLES:
        where = " and ".join(f"{r.first} to {r.first + r.count - 1}" for r in greedy)
        fix = f"ask for at most {fits} registers in threads {where}, or {fix}"
    others = [r for r in asking if r is not greedy[0]]
    return error(
        "registers_of_roles", greedy[0].span,
        [(r.span, f"each of these {r.count} threads asks for {r.registers} registers") for r in others],
        held=block.described(), need=block.need, most=block.most, share=block.share, threads=block.threads, fix=fix,
    )  # fmt: skip
