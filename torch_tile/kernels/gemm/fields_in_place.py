# SPDX-License-Identifier: Apache-2.0
"""Multiply 4-bit weights by tensor cores without unpacking their words, and bring the other operand into float16.

A masked half of a word is a float16 below the least normal one. Codes of a format are looked up in a table. A power of
two brings the other numbers into the range of float16 without loss. Kernels for few rows share these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.formats import pairs_of
from torch_tile.kernels.gemm.packed import SIGNS, Problem, Spec
from torch_tile.kernels.measured_rules import verdict

FIELDS = 8  # of a word
COLUMNS = 4 * FIELDS  # of a word of each lane that shares a row
LEAST_GROUP, MOST_GROUP = 64, 256  # columns that share a scale: a product of tensor cores for each, words in registers
# Sums of two exponents as float32 stores them: of a group's largest number and its factor, of the factor and what takes
# it back. Then the largest factor's exponent.
LIFTED, BACK, MOST = 268, 254, 253
IN_PLACE = 24  # the exponent of a field as it lies in its word, negated


@dataclass(frozen=True)
class Order:
    """The order in which lanes take the `width` columns of a slice that share a scale.

    Sums have no order. Four lanes share a row of an operand of mma.sync. Each takes a quarter of the columns, so that
    it takes whole words. Lane l holds slots 2 l, 2 l + 1, 2 l + 8 and 2 l + 9 of 16. Both of a pair are the same field
    of the halves of a word. A product takes the lower fields of a word's bytes, the next product the upper ones.
    A pair of codes is a byte, which a table of pairs is asked for.
    """

    width: int
    high_first: bool
    coded: bool = False

    @property
    def words(self) -> int:
        """Number of a lane's words."""
        return self.width // COLUMNS

    def field(self, slot: Any) -> tuple[Any, Any, Any]:
        """Return the word of a slot, its field there, and the half that has it. Of a code: its byte, and which half."""
        step, upper = slot // 16 % 2, slot // 8 % 2
        place = step * 2 + upper if self.coded else upper * 2 + step
        return slot % 8 // 2 * self.words + slot // COLUMNS, place, slot % 2

    def held(self, slot: Any) -> tuple[Any, Any]:
        """Return where `hold` puts the number of a slot: the word of its lane, and the place there."""
        return slot // COLUMNS, slot % 8 // 2 * FIELDS + slot // 16 % 2 * 4 + slot // 8 % 2 * 2 + slot % 2

    def place(self, group: Any, s: Any, place: Any) -> tuple[Any, Any]:
        """Return where the rows have a place of a group of column `s` of the product."""
        word = place // FIELDS
        line = group * self.words + word % self.words
        return line, s * COLUMNS + word // self.words * FIELDS + place % FIELDS

    def less(self, place: Any) -> Any:
        """Return the factor of a number that meets a field as it lies in its word: upper ones count 16 times."""
        return 1.0 if self.coded else T.if_then_else(place % FIELDS < 4, 1.0, 1 / 16)

    def column(self, place: Any) -> Any:
        """Return the column whose number `hold` puts at a place of a word."""
        if self.coded:
            return place
        upper = place % FIELDS // 4
        return place // FIELDS * FIELDS + place % 2 * 4 + place // 2 % 2 * 2 + (1 - upper if self.high_first else upper)


def order_of(spec: Spec) -> Order:
    """Return the order of a product's columns."""
    return Order(spec.storage.group, spec.storage.high_first, spec.storage.coded)


def float_of_exponent_bits(exponent: Any) -> Any:
    """Return the power of two whose float32 has these exponent bits, in a kernel."""
    return T.float_from_bits(exponent << 23, 0x7FFFFFFF, 0)


def lifting_exponent(most: Any) -> Any:
    """Return the exponent of the factor that lifts numbers of at most `most` in size, as float32 stores it."""
    return T.max(T.min(LIFTED - (T.reinterpret(most, "int32") >> 23), MOST), IN_PLACE)


def lowering_power(order: Order, exponent: Any) -> Any:
    """Return the factor that undoes the scaling of lifted numbers and of fields multiplied in place."""
    return float_of_exponent_bits(BACK + (0 if order.coded else IN_PLACE) - exponent)


def excess(spec: Spec) -> float:
    """Return the offset to subtract from each unsigned field, besides its zero."""
    storage = spec.storage
    return 0.0 if storage.coded else float(storage.offset + (8 if storage.signed else 0))


def unsigned(spec: Spec, word: Any) -> Any:
    """Return a word whose fields are natural numbers: signed ones have their signs turned over."""
    return word ^ SIGNS if spec.storage.signed else word


def table_of(spec: Spec) -> Any:
    """Return the table of pairs of a format's numbers in shared memory, in a kernel. None if weights are no codes."""
    storage = spec.storage
    return pairs_of(storage.format, storage.high_first, torch.float16) if storage.coded else None


def dequantize_field(spec: Spec, word: Any, place: Any, half: Any, table: Any, lane: Any) -> Any:
    """Return the float16 value of a field of a word. `Order.field` says which field; a `lane` reads its own table."""
    if table is not None:
        return table[T.table_place(word, place, lane, half)]
    return T.cast(T.nibble_in_place(unsigned(spec, word), place, half), "float16")


def subtracts_offset(spec: Spec) -> bool:
    """Return whether unsigned fields have an offset or a zero to subtract."""
    return bool(spec.storage.zero) or excess(spec) != 0.0


def has_whole_groups(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether lanes can take whole words of groups with a scale each, and whether the sizes are known."""
    storage = spec.storage
    return (
        not isinstance(problem.m, torch.SymInt)  # another call may have more rows
        and not isinstance(problem.k, torch.SymInt)
        and machine.is_gpu
        and problem.aligned
        and storage.words == torch.int32
        and LEAST_GROUP <= storage.group <= MOST_GROUP
        and storage.group % COLUMNS == 0
        and bool(storage.scale)
        and problem.k % storage.group == 0
        and verdict("dequant.slices", machine.target, False)
    )
