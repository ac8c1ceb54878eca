# SPDX-License-Identifier: Apache-2.0
"""Random numbers with the results of curand's generators: T.rng_init, T.rng_rand, T.rng_rand_float.

Each thread has a sequence of its own.
"""

from __future__ import annotations

import math

from torch_tile import intrinsics
from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Expr, binary, cast, const, to_expr
from torch_tile.ir.stmt import Block, If, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.generators import GENERATORS, Generator, Philox
from torch_tile.language.threads import get_block_binding, get_thread_binding, get_thread_extent
from torch_tile.language.trace import Tracer, let, make_variable
from torch_tile.tileop.base import Scalar, need_choice


def rng_init(seed: Scalar, seq: Scalar = None, off: Scalar = 0, generator: str = Philox.name) -> None:
    """Initialise the running thread's generator: sequence `seq` of `seed`, from number `off` on.

    Without `seq` the sequence is the number of the thread in the grid, counted along x, which only GPUs have.
    `generator` names the state of one of curand's: Philox's is set up at once, "curandStateXORWOW_t" and
    "curandStateMRG32k3a_t" take longer for each binary digit of `seq` and `off`.
    """
    at = in_kernel("T.rng_init")
    need_choice("rng_init", "generator", generator, tuple(GENERATORS))
    if seq is None:
        seq = get_thread_binding() + get_block_binding() * get_thread_extent()
    at.launch.generator = GENERATORS[generator](at, *map(_as_uint64, (seed, seq, off)))


def rng_rand() -> Expr:
    """Draw the next number of the running thread's generator, a uint32."""
    return _generator("T.rng_rand")[1].word()


def rng_rand_float(bit: int = 32, dist: str = "uniform") -> Expr:
    """Draw a float of `bit` bits, 32 or 64. `dist` is "uniform" in (0, 1], or "normal" (mean 0, deviation 1).

    Floats are made as curand makes them: normal ones in pairs, from two words, or from four for 64 bits. Philox makes
    uniform ones of 64 bits from one word.
    """
    at, own = _generator("T.rng_rand_float")
    need_choice("rng_rand_float", "bit", bit, (32, 64))
    need_choice("rng_rand_float", "dist", dist, ("uniform", "normal"))
    if dist == "uniform":
        return let("uniform", own.unit(bit))
    found = make_variable("normal", dt.BY_NAME[f"float{bit}"], None)
    with at.open("if") as kept:
        at.emit(Store(found.buffer, (), cast(own.spare, found.dtype)))
    with at.open("else") as made:
        radius = let("radius", own.uniform(bit, 1.0))
        angle = let("angle", own.uniform(bit, 2 * math.pi))
        length = let("length", intrinsics.call("sqrt", -2.0 * intrinsics.call("log", radius)))
        at.emit(Store(found.buffer, (), length * intrinsics.call("sin", angle)))
        at.emit(Store(own.spare.buffer, (), cast(length * intrinsics.call("cos", angle), dt.float64)))
    at.emit(If(own.has_spare, Block(tuple(kept.stmts)), Block(tuple(made.stmts))))
    at.emit(Store(own.has_spare.buffer, (), binary("==", own.has_spare, const(False, dt.bool_))))
    return found


def _as_uint64(value: Scalar) -> Expr:
    """Return a number as uint64, a negative one modulo 2^64."""
    return const(value % 2**64, dt.uint64) if isinstance(value, int) else cast(to_expr(value), dt.uint64)


def _generator(what: str) -> tuple[Tracer, Generator]:
    """Return the random generator of the kernel. Raises an error if none was set up."""
    at = in_kernel(what)
    own = getattr(at.launch, "generator", None)
    if own is None:
        fix = "set the generator up before: T.rng_init(seed)"
        raise error("bad_argument", None, op=what, name="generator", why="is not set up", fix=fix)
    if at.doubtful:
        why, fix = f"is wanted only if {at.doubtful} asks for a number", "draw it in a line before"
        raise error("bad_argument", None, op=what, name="generator", why=why, fix=fix)
    return at, own
