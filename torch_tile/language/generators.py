# SPDX-License-Identifier: Apache-2.0
"""Three random generators as statements of a kernel, with the numbers that curand draws from the same seed.

Philox 4x32-10 computes a number from its place (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
XORWOW (Marsaglia, "Xorshift RNGs", 2003) and MRG32k3a (L'Ecuyer, 1999) are linear recurrences. A power of their step
leads to a place. L'Ecuyer's paper is "Good parameters and implementations for combined multiple recursive generators".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar

from torch_tile import intrinsics
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Expr, Load, binary, cast, const, select
from torch_tile.ir.stmt import Store
from torch_tile.language.loops import serial
from torch_tile.language.trace import Tracer, let, make_variable, repeat_while, when

OF_WORD = 2.0**-32
OF_TWO = 2.0**-53


class Generator:
    """The state of a thread's generator in variables, and the second of two normal numbers."""

    name: ClassVar[str]
    at: Tracer
    spare: Load
    has_spare: Load

    def __init__(self, at: Tracer):
        self.at = at
        self.spare = make_variable("spare", dt.float64, const(0.0, dt.float64))
        self.has_spare = make_variable("has_spare", dt.bool_, const(False, dt.bool_))

    def word(self) -> Expr:
        """Draw the next number, a uint32."""
        raise NotImplementedError

    def uniform(self, bit: int, most: float) -> Expr:
        """Draw the next float in (0, most], of 32 bits from a word or of 64 bits from two."""
        if bit == 32:
            step = const(OF_WORD * most, dt.float32)
            return cast(self.word(), dt.float32) * step + step * 0.5
        low, high = cast(self.word(), dt.uint64), cast(self.word(), dt.uint64)
        return cast(low ^ (high << 21), dt.float64) * (OF_TWO * most) + OF_TWO * most * 0.5

    def unit(self, bit: int) -> Expr:
        """Draw the next float that curand calls uniform."""
        return self.uniform(bit, 1.0)

    def put(self, variable: Load, value: Expr) -> None:
        """Set a variable of the state."""
        self.at.emit(Store(variable.buffer, (), value))

    def apply_power(self, exponent: Expr, apply: Callable[[], None], square: Callable[[], None]) -> None:
        """Apply a power of a step by repeated squaring: `apply` where the exponent's lowest bit is 1, then `square`."""
        left = make_variable("left", dt.uint64, exponent)
        with repeat_while(binary("!=", left, _uint64(0))):
            with when(binary("!=", left & _uint64(1), _uint64(0))):
                apply()
            square()
            self.put(left, left >> _uint64(1))


class Philox(Generator):
    """Philox 4x32-10: key, sequence, number of words drawn, and the next four words."""

    name = "curandStatePhilox4_32_10_t"

    def __init__(self, at: Tracer, seed: Expr, seq: Expr, off: Expr):
        key, sequence = _halves(seed), _halves(seq)
        super().__init__(at)
        self.place = *sequence, *key
        self.drawn = make_variable("drawn", dt.uint64, off)
        self.words = tuple(make_variable(f"word{n}", dt.uint32, _word(0)) for n in range(4))
        self._refill()

    def word(self) -> Expr:
        """Draw the next word; after the fourth, generate four more."""
        place = let("place", cast(self.drawn & _uint64(3), dt.int32))
        word: Expr = self.words[3]
        for n in (2, 1, 0):
            word = select(binary("==", place, n), self.words[n], word)
        found = let("random", word)
        self.put(self.drawn, self.drawn + _uint64(1))
        with when(binary("==", place, 3)):
            self._refill()
        return found

    def unit(self, bit: int) -> Expr:
        """Draw the next float; curand makes one of 64 bits from a single word here, and from two for normal floats."""
        return cast(self.word(), dt.float64) * OF_WORD + OF_WORD if bit == 64 else super().unit(bit)

    def _refill(self) -> None:
        """Compute the four words that contain number `drawn`."""
        low, high = _halves(self.drawn >> _uint64(2))
        for place, word in enumerate(self.words):
            self.put(word, intrinsics.call(intrinsics.random.NAME, _word(place), low, high, *self.place))


class Xorwow(Generator):
    """XORWOW: five words that shifts and XORs turn, and a sum of one constant.

    The words are a vector of 160 bits, and its step is linear. Where P is the step's characteristic polynomial, the
    n-th step is the polynomial x^n modulo P, applied to the step.
    """

    name = "curandStateXORWOW_t"
    BITS, STEP, APART = 160, 362437, 67  # sequences lie 2^67 numbers apart

    def __init__(self, at: Tracer, seed: Expr, seq: Expr, off: Expr):
        low, high = _halves(seed)
        first = let("first", (low ^ _word(0xAAD26B49)) * _word(1099087573))
        second = let("second", (high ^ _word(0xF7DCEFDD)) * _word(2591861531))
        super().__init__(at)
        start = (
            _word(123456789) + first, _word(362436069) ^ first, _word(521288629) + second,
            _word(88675123) ^ second, _word(5783321) + first,
        )  # fmt: skip
        self.state = self._words("state", start)
        step = cast(off, dt.uint32) * _word(self.STEP)
        self.sum = make_variable("sum", dt.uint32, _word(6615241) + second + first + step)
        for number, power in (seq, 1 << self.APART), (off, 1):
            jump = self._words("jump", [_word(w) for w in _words_of(_power_of_x(power))])
            self.apply_power(number, lambda jump=jump: self._jump(jump), lambda jump=jump: self._square(jump))  # type: ignore[misc]

    def word(self) -> Expr:
        """Take one step and return the last word plus the sum."""
        self._step()
        self.put(self.sum, self.sum + _word(self.STEP))
        return let("random", self.state[4] + self.sum)

    def _words(self, name: str, values: Sequence[Expr]) -> list[Load]:
        """Return five variables."""
        return [make_variable(f"{name}{n}", dt.uint32, value) for n, value in enumerate(values)]

    def _set(self, words: Sequence[Load], values: Sequence[Expr]) -> None:
        """Set five variables to values that may read them."""
        for word, value in zip(words, [let("next", value) for value in values], strict=True):
            self.put(word, value)

    def _step(self) -> None:
        """Take one step."""
        v = self.state
        mixed = v[0] ^ (v[0] >> _word(2))
        self._set(v, [*v[1:], v[4] ^ (v[4] << _word(4)) ^ mixed ^ (mixed << _word(1))])

    def _jump(self, jump: Sequence[Load]) -> None:
        """Replace the state by the sum of its steps that the polynomial `jump` names."""
        total, left = self._words("total", [_word(0)] * 5), self._words("left", jump)

        for _ in serial(self.BITS):  # add the state where the lowest digit is set, and take a step
            chosen = let("chosen", _word(0) - (left[0] & _word(1)))
            self._set(total, [t ^ (v & chosen) for t, v in zip(total, self.state, strict=True)])
            higher = [*left[1:], _word(0)]
            self._set(left, [a >> _word(1) | b << _word(31) for a, b in zip(left, higher, strict=True)])
            self._step()
        self._set(self.state, total)

    def _square(self, jump: Sequence[Load]) -> None:
        """Square a polynomial modulo P, from its highest digit on."""
        total, left, high = self._words("total", [_word(0)] * 5), self._words("left", jump), _words_of(_polynomial())
        for _ in serial(self.BITS):  # multiply by x, and add the factor where the highest digit left is set
            over = let("over", _word(0) - (total[4] >> _word(31)))
            chosen = let("chosen", _word(0) - (left[4] >> _word(31)))
            more = [_doubled(total, n) ^ (over & _word(high[n])) ^ (chosen & jump[n]) for n in range(5)]
            self._set(total, more)
            self._set(left, [_doubled(left, n) for n in range(5)])
        self._set(jump, total)


class Mrg32k3a(Generator):
    """MRG32k3a: the difference of two recurrences of three numbers each, modulo two primes near 2^32."""

    name = "curandStateMRG32k3a_t"
    APART = 76  # sequences lie 2^76 numbers apart
    START = 12345
    PRIMES = 4294967087, 4294944443
    # The next of three numbers, as factors of those before, oldest first.
    FACTORS = (-810728, 1403580, 0), (-1370589, 0, 527612)
    TO_WORD, TO_UNIT = 1.000000048662, 2.3283065498378288e-10  # 2^32 / prime; 1 / prime, as curand rounds them

    def __init__(self, at: Tracer, seed: Expr, seq: Expr, off: Expr):
        super().__init__(at)
        halves = [w ^ _word(mask) for w, mask in zip(_halves(seed), (0x55555555, 0xAAAAAAAA), strict=True)]
        low, high = (let("half", cast(half, dt.uint64)) for half in halves)
        self.states = []
        for prime, chosen in zip(self.PRIMES, ((low, high, low), (high, low, high)), strict=True):
            starts = [select(binary("==", seed, _uint64(0)), _uint64(1), half) * _uint64(self.START) for half in chosen]
            self.states.append([make_variable("state", dt.uint64, start % _uint64(prime)) for start in starts])
        for number, power in (seq, 1 << self.APART), (off, 1):
            for state, prime, factors in zip(self.states, self.PRIMES, self.FACTORS, strict=True):
                self._advance(number, power, state, prime, factors)

    def word(self) -> Expr:
        """Draw the next number, scaled to all words."""
        return let("random", cast(cast(self._next(), dt.float64) * self.TO_WORD, dt.uint32))

    def uniform(self, bit: int, most: float) -> Expr:
        """Draw the next float in (0, most]: one number of the recurrences for either width."""
        unit = cast(self._next(), dt.float64) * self.TO_UNIT
        return unit * most if bit == 64 else cast(unit, dt.float32) * const(most, dt.float32)

    def _next(self) -> Expr:
        """Take one step of both recurrences and return their difference, from 1 to the first prime."""
        found = []
        for state, prime, factors in zip(self.states, self.PRIMES, self.FACTORS, strict=True):
            terms = [(v * _uint64(f % prime)) % _uint64(prime) for v, f in zip(state, factors, strict=True) if f]
            newest = let("newest", (terms[0] + terms[1]) % _uint64(prime))
            for older, value in zip(state, [*state[1:], newest], strict=True):
                self.put(older, value)
            found.append(newest)
        first, second = found
        return let("difference", first - second + select(first > second, _uint64(0), _uint64(self.PRIMES[0])))

    def _advance(self, number: Expr, power: int, state: Sequence[Load], prime: int, factors: Sequence[int]) -> None:
        """Take `number * power` steps of one recurrence, by squares of the matrix of its step."""
        step = ((0, 1, 0), (0, 0, 1), tuple(f % prime for f in factors))
        rows = [[make_variable("m", dt.uint64, _uint64(v)) for v in row] for row in _matrix_power(step, power, prime)]

        def products(right: Sequence[Expr]) -> list[Expr]:
            """Return the matrix times a column."""
            found = []
            for row in rows:
                terms = [(a * b) % _uint64(prime) for a, b in zip(row, right, strict=True)]
                found.append(let("product", (terms[0] + terms[1] + terms[2]) % _uint64(prime)))
            return found

        def apply() -> None:
            """Multiply the state."""
            for variable, value in zip(state, products(state), strict=True):
                self.put(variable, value)

        def square() -> None:
            """Square the matrix."""
            columns = [products([row[n] for row in rows]) for n in range(3)]
            for i, row in enumerate(rows):
                for j, variable in enumerate(row):
                    self.put(variable, columns[j][i])

        self.apply_power(number, apply, square)


GENERATORS: dict[str, type[Philox | Xorwow | Mrg32k3a]] = {g.name: g for g in (Philox, Xorwow, Mrg32k3a)}


def _word(value: int) -> Expr:
    """Return a constant of 32 bits."""
    return const(value, dt.uint32)


def _uint64(value: int) -> Expr:
    """Return a constant of 64 bits."""
    return const(value, dt.uint64)


def _halves(value: Expr) -> tuple[Expr, Expr]:
    """Split 64 bits into the lower and upper word."""
    whole = let("whole", value)
    return tuple(let("half", cast(whole >> shift, dt.uint32)) for shift in (0, 32))  # type: ignore[return-value]


def _doubled(words: Sequence[Expr], n: int) -> Expr:
    """Return word `n` of a number of several words, lowest first, times 2."""
    return words[n] << _word(1) | words[n - 1] >> _word(31) if n else words[0] << _word(1)


# Polynomials over bits, as Python's integers whose bit n is the coefficient of x^n.


def _words_of(polynomial: int) -> list[int]:
    """Return the coefficients below x^160 in five words."""
    return [polynomial >> 32 * n & 0xFFFFFFFF for n in range(5)]


@cache
def _polynomial() -> int:
    """Return the characteristic polynomial of XORWOW's step, by Berlekamp and Massey from a bit of its states."""
    mask, state, bits = 0xFFFFFFFF, [1, 0, 0, 0, 0], 0
    connection, before, length, since = 1, 1, 0, 1
    for n in range(2 * Xorwow.BITS):
        bits = bits << 1 | state[0] & 1
        if (connection & bits).bit_count() & 1:
            kept = connection
            connection ^= before << since
            if 2 * length <= n:
                length, before, since = n + 1 - length, kept, 0
        since += 1
        mixed = state[0] ^ state[0] >> 2
        state = [*state[1:], (state[4] ^ state[4] << 4 ^ mixed ^ mixed << 1) & mask]
    return sum((connection >> n & 1) << length - n for n in range(length + 1))


def _power_of_x(power: int) -> int:
    """Return x^power modulo the characteristic polynomial."""
    found, square = 1, 2
    while power:
        if power & 1:
            found = _times(found, square)
        square, power = _times(square, square), power >> 1
    return found


def _times(a: int, b: int) -> int:
    """Return a product modulo the characteristic polynomial."""
    found = 0
    for n in reversed(range(Xorwow.BITS)):
        found <<= 1
        if found >> Xorwow.BITS:
            found ^= _polynomial()
        if b >> n & 1:
            found ^= a
    return found


Matrix = Sequence[Sequence[int]]


def _matrix_power(matrix: Matrix, power: int, prime: int) -> Matrix:
    """Return a power of a matrix modulo a prime."""
    found: Matrix = [[int(i == j) for j in range(3)] for i in range(3)]
    while power:
        if power & 1:
            found = _matrix_product(found, matrix, prime)
        matrix, power = _matrix_product(matrix, matrix, prime), power >> 1
    return found


def _matrix_product(a: Matrix, b: Matrix, prime: int) -> Matrix:
    """Return a product of matrices modulo a prime."""
    return [[sum(x * y[j] for x, y in zip(row, b, strict=True)) % prime for j in range(3)] for row in a]
