# SPDX-License-Identifier: Apache-2.0
"""Random numbers by Philox 4x32-10, with the results of curand's generator of that name: T.rng_init, T.rng_rand.

Each thread has a sequence of its own. It draws four words at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_tile import intrinsics
from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Expr, Load, binary, cast, const, select, to_expr
from torch_tile.ir.stmt import Block, If, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.threads import get_block_binding, get_thread_binding, get_thread_extent
from torch_tile.language.trace import Tracer, let, make_variable
from torch_tile.tileop.base import Scalar, need_choice

PHILOX = "curandStatePhilox4_32_10_t"
OTHERS = ("curandStateMRG32k3a_t", "curandStateXORWOW_t")
OF_WORD = 2.0**-32
OF_TWO = 2.0**-53


@dataclass
class Generator:
    """The state of a thread's random generator: key, sequence, number of words drawn, and the next four words."""

    key: tuple[Expr, Expr]
    sequence: tuple[Expr, Expr]
    drawn: Load  # uint64
    words: tuple[Load, ...]
    spare: Load  # the second of two normal numbers
    has_spare: Load


def rng_init(seed: Scalar, seq: Scalar = None, off: Scalar = 0, generator: str = PHILOX) -> None:
    """Initialise the running thread's generator: sequence `seq` of `seed`, from number `off` on.

    Without `seq` the sequence is the number of the thread in the grid, counted along x, which only GPUs have. Raises
    TileError for curand's other generators.
    """
    at, what = in_kernel("T.rng_init"), "rng_init"
    need_choice(what, "generator", generator, (PHILOX, *OTHERS))
    if generator != PHILOX:
        why, fix = f"is {generator!r}", f"give {PHILOX!r}, whose numbers follow from their place alone"
        raise error("bad_argument", None, op="T.rng_init", name="generator", why=why, fix=fix)
    if seq is None:
        seq = get_thread_binding() + get_block_binding() * get_thread_extent()
    key, sequence = _halves(seed), _halves(seq)
    drawn = make_variable("drawn", dt.uint64, cast(to_expr(off), dt.uint64))
    zero, none = const(0, dt.uint32), const(False, dt.bool_)
    words = tuple(make_variable(f"word{n}", dt.uint32, zero) for n in range(4))
    spare = make_variable("spare", dt.float64, const(0.0, dt.float64))
    at.launch.generator = Generator(key, sequence, drawn, words, spare, make_variable("has_spare", dt.bool_, none))
    _refill(at, at.launch.generator)


def rng_rand() -> Expr:
    """Draw the next number of the running thread's generator, a uint32."""
    return _draw(*_generator("T.rng_rand"))


def rng_rand_float(bit: int = 32, dist: str = "uniform") -> Expr:
    """Draw a float of `bit` bits, 32 or 64: "uniform" in (0, 1], or "normal" (mean 0, deviation 1).

    Normal numbers are made in pairs, as curand makes them, from two words, or from four for 64 bits.
    """
    at, own = _generator("T.rng_rand_float")
    need_choice("rng_rand_float", "bit", bit, (32, 64))
    need_choice("rng_rand_float", "dist", dist, ("uniform", "normal"))
    if dist == "uniform":
        return let("uniform", _uniform(at, own, bit, 1.0))
    found = make_variable("normal", dt.BY_NAME[f"float{bit}"], None)
    with at.open("if") as kept:
        at.emit(Store(found.buffer, (), cast(own.spare, found.dtype)))
    with at.open("else") as made:
        radius = let("radius", _uniform(at, own, bit, 1.0))
        angle = let("angle", _uniform(at, own, bit, 2 * math.pi))
        length = let("length", intrinsics.call("sqrt", -2.0 * intrinsics.call("log", radius)))
        at.emit(Store(found.buffer, (), length * intrinsics.call("sin", angle)))
        at.emit(Store(own.spare.buffer, (), cast(length * intrinsics.call("cos", angle), dt.float64)))
    at.emit(If(own.has_spare, Block(tuple(kept.stmts)), Block(tuple(made.stmts))))
    at.emit(Store(own.has_spare.buffer, (), binary("==", own.has_spare, const(False, dt.bool_))))
    return found


def _uniform(at: Tracer, own: Generator, bit: int, most: float) -> Expr:
    """Draw the next number in (0, most]."""
    if bit == 32:
        step = const(OF_WORD * most, dt.float32)
        return cast(_draw(at, own), dt.float32) * step + step * 0.5
    low, high = cast(_draw(at, own), dt.uint64), cast(_draw(at, own), dt.uint64)
    return cast(low ^ (high << 21), dt.float64) * (OF_TWO * most) + OF_TWO * most * 0.5


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


def _halves(value: Any) -> tuple[Expr, Expr]:
    """Split 64 bits into the lower and upper word."""
    whole = let("whole", cast(to_expr(value), dt.uint64))
    return tuple(let("half", cast(whole >> shift, dt.uint32)) for shift in (0, 32))  # type: ignore[return-value]


def _draw(at: Tracer, own: Generator) -> Expr:
    """Draw the next word; after the fourth, generate four more."""
    place = let("place", cast(own.drawn & const(3, dt.uint64), dt.int32))
    word: Expr = own.words[3]
    for n in (2, 1, 0):
        word = select(binary("==", place, n), own.words[n], word)
    found = let("random", word)
    at.emit(Store(own.drawn.buffer, (), own.drawn + const(1, dt.uint64)))
    with at.open("if") as scope:
        _refill(at, own)
    at.emit(If(binary("==", place, 3), Block(tuple(scope.stmts)), Block(())))
    return found


def _refill(at: Tracer, own: Generator) -> None:
    """Compute the four words that contain number `drawn`."""
    block = let("block", own.drawn >> const(2, dt.uint64))
    low, high = (let("counter", cast(block >> const(shift, dt.uint64), dt.uint32)) for shift in (0, 32))
    for place, word in enumerate(own.words):
        given = (const(place, dt.uint32), low, high, *own.sequence, *own.key)
        at.emit(Store(word.buffer, (), intrinsics.call(intrinsics.random.NAME, *given)))
