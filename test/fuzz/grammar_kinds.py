# SPDX-License-Identifier: Apache-2.0
"""Statements of random programs that the grammar's own productions meet too rarely: each stands for a mended kind.

They draw from a source of their own, and leave nothing in scope, so that the rest of a program does not depend on them.
"""

import random

from grammar_values import INTS, Value, number

SHARE = 0.3  # of kernels that have one of these statements


class Kinds:
    """What a grammar may append to a kernel's body. Each production gives its statements, or None if none fits."""

    def rare(self, program, line):
        """One of the productions, or nothing."""
        own, self.random = self.random, random.Random(f"rare {self.seed} {self.count}")
        try:
            if not self.chance(SHARE):
                return []
            kinds = [self.counting, self.wrapping_index, self.told_across, self.arms_of_floats, self.of_known_numbers]
            with self.scope():
                found = self.pick(*kinds)(program, line) or []
            if self.chance(0.05):
                found += self.refused_update(program, line)
            if self.chance(0.7):
                found += self.of_scalar(program, line)
            return found
        finally:
            self.random = own

    def owned(self, *dtypes):
        """A tensor of rank 2 in which each block writes its row."""
        found = [b for b in self.buffers if b.owned and len(b.shape) == 2 and (not dtypes or b.dtype in dtypes)]
        return self.pick(*found) if found else None

    def counting(self, program, line):
        """The body changes the bound of its loop; how often it ran is stored."""
        w = self.owned("int32", "int64", "uint8", "int8", "uint64")
        if w is None:
            return None
        bound, turns, k = self.fresh("v"), self.fresh("v"), self.fresh("k")
        start = number(self.random.randint(0, 7), "int32")
        with self.scope(Value(k, k, "int32", 0, 7), Value(bound, bound, "int32", *(-(2**31), 2**31 - 1))):
            changed = self.value("int32", 1)
        text = f'{bound} = T.alloc_var("int32", {start.text})\n{turns} = T.alloc_var("int32", 0)\n'
        text += f"for {k} in range({bound} & 7):\n    {turns} += 1\n    {bound} = {changed.text}\n"
        reference = f"{bound}, {turns} = {start.reference}, 0\n"
        reference += f"for {k} in range({bound} & 7):\n    {turns} += 1\n    {bound} = int32({changed.reference})\n"
        place = f"{w.name}[{self.block_name}, {self.random.randrange(w.shape[1])}] = {turns}"
        return [line(text + place, reference + place)]

    def wrapping_index(self, program, line):
        """A nest goes round a fragment several times."""
        w = self.owned()
        if w is None or w.shape[1] < 3:
            return None
        n, dtype, t, i = self.pick(2, 3, 4), self.pick("int32", w.dtype), self.fresh("t"), self.fresh("i")
        n = min(n, w.shape[1] - 1)
        if (dtype == "float32") != (w.dtype == "float32"):
            dtype = w.dtype
        name = f"{w.name}[{self.block_name}, {i}]"
        text = f"{t} = T.alloc_fragment(({n},), {dtype!r})\nfor {i} in T.Parallel({n}):\n    {t}[{i}] = {i} * 3\n"
        reference = f"{t} = tile(({n},), {dtype!r})\nfor {i} in range({n}):\n    {t}[{i}] = {i} * 3\n"
        value = f"{t}[{i} % {n}]"
        text += f"for {i} in T.Parallel({w.shape[1]}):\n    {name} = {value}"
        reference += f"for {i} in range({w.shape[1]}):\n    {name} = {value}"
        return [line(text, reference)]

    def told_across(self, program, line):
        """All threads read an element of global memory before and after one of them writes it."""
        w = self.owned("int32", "int64", "uint32", "uint64")
        if w is None:
            return None
        f, i, n = self.fresh("t"), self.fresh("i"), self.pick(3, 8, 32)
        row, at, to = f"{w.name}[{self.block_name}, ", *(self.random.randrange(w.shape[1]) for _ in "ab")
        place = f"{row}{at}]"
        text = f"{f} = T.alloc_fragment(({n},), {w.dtype!r})\nfor {i} in T.Parallel({n}):\n    {f}[{i}] = {place}\n"
        text += f"T.sync_threads()\n{place} = {place} ^ 5\nT.sync_threads()\n"
        text += f"for {i} in T.Parallel({n}):\n    {f}[{i}] = {f}[{i}] ^ ({place} & ({i} + 3))\n"
        text += f"T.sync_threads()\nT.copy({f}[0:1], {row}{to} : {to + 1}])"
        reference = f"{f} = {place}\n{place} = {place} ^ 5\n{row}{to}] = {f} ^ ({place} & 3)"
        return [line(text, reference)]

    def arms_of_floats(self, program, line):
        """Branches on the index store products and differences to the same elements."""
        w = self.owned("float32", "int32")
        if w is None:
            return None
        f, g, i, n = self.fresh("t"), self.fresh("t"), self.fresh("i"), w.shape[1]
        size = self.pick(16, 48, 64)
        cut, scale, shift = self.random.randint(1, size - 1), self.pick("2.5", "-0.75"), self.pick(1.0, -3.25)
        test = self.pick(f"{i} < {cut}", f"{i} >= {cut}")
        for x in (f, g):  # tiles on a stack are no case for the compilers that go wrong
            shape = f"({self.blocks}, {size}), 'float32'"
            program.body.append(line(f"{x} = T.alloc_global({shape})", f"{x} = tile({shape})"))
        row, f, g = (f"{x}[{self.block_name}, " for x in (w.name, f, g))
        text, reference = self.bits_of(w, f"{f}{i} % {size}]")
        begin = f"{row}{i} % {n}]" if w.dtype == "float32" else f"({row}{i} % {n}] & 1023)"
        lines = [
            [f"for {i} in T.Parallel({size}):", f"for {i} in range({size}):"],
            *([f"    {x}{i}] = {begin}"] * 2 for x in (f, g)),
            [f"for {i} in T.Parallel({size}):", f"for {i} in range({size}):"],
            [f"    if {test}:"] * 2,
            [f"        {f}{i}] = {f}{i}] * {scale}", f"        {f}{i}] = float32_({f}{i}] * {scale})"],
            ["    else:"] * 2,
            [f"        {f}{i}] = {g}{i}] - {shift}", f"        {f}{i}] = float32_({g}{i}] - {shift})"],
            [f"for {i} in T.Parallel({n}):", f"for {i} in range({n}):"],
            [f"    {row}{i}] = {text}", f"    {row}{i}] = {reference}"],
        ]
        return [line(*("\n".join(part) for part in zip(*lines, strict=True)))]

    @staticmethod
    def bits_of(w, value):
        """A float as the text and the reference store it: as it is, or its bits."""
        if w.dtype == "float32":
            return value, value
        return f"T.reinterpret({value}, 'int32')", f"bits({value})"

    def of_known_numbers(self, program, line):
        """An element made from numbers that are known where the kernel is traced or compiled."""
        w = self.owned("float32", "int32")
        if w is None:
            return None
        place = f"{w.name}[{self.block_name}, {self.random.randrange(w.shape[1])}]"
        made = "T.float32(given)", "float32_(given)"
        if self.chance(0.5):  # folded
            (x, y), op = (self.pick("0.0", "-0.0", "1.5") for _ in "ab"), self.pick("max", "min")
            made = f"T.{op}(T.float32({x}), T.float32({y}))", f"{'greater' if op == 'max' else 'lesser'}({x}, {y})"
        text, reference = (self.bits_of(w, of)[n] for n, of in enumerate(made))
        if w.dtype == "float32" and self.chance(0.5):
            text, reference = f"T.max({text}, {place})", f"greater({reference}, {place})"
        return [line(f"{place} = {text}", f"{place} = {reference}")]

    def of_scalar(self, program, line):
        """An element made from a number that is an argument."""
        w, (dtype, _) = self.owned(), program.scale
        if w is None or (dtype not in INTS and w.dtype not in ("float32", "int32")):
            return []
        place = f"{w.name}[{self.block_name}, {self.random.randrange(w.shape[1])}]"
        if dtype not in INTS:
            text, reference = self.bits_of(w, "T.cast(scale, 'float32')")[0], self.bits_of(w, "scale")[1]
        elif w.dtype == "float32":
            text, reference = "T.cast(scale & 255, 'float32')", "float32_(scale & 255)"
        else:
            text, reference = f"T.cast(scale, {w.dtype!r})", f"{w.dtype}(scale)"
        return [line(f"{place} = {text}", f"{place} = {reference}")]

    def refused_update(self, program, line):
        """Addition of bools, which no target takes."""
        found = [c for c in self.counters if c.dtype == "bool"]
        if not found:
            return []
        program.refusal = "bad_argument"
        return [line(f"T.atomic_add({found[0].name}[0], True)", "pass")]
