# SPDX-License-Identifier: Apache-2.0
"""Random kernels of threads: each thread by its number, with memory of its own, shared memory, warps and barriers.

Each program comes with a model in NumPy, which runs statement by statement for all threads. Values are whole numbers
below `MOST`. In one statement no thread reads a shared tile that the statement writes.
"""

import random

import numpy as np
from fuzz_lines import Choices

MOST = 1009
ALL, WARPS, SOME = "all threads", "whole warps", "some threads"  # who comes to a statement


def indented(lines):
    return ["    " + line for line in lines]


class ByHand(Choices):
    """Make one program from a seed. An expression is its text, and a function of the names' values.

    A statement is its lines, and a function of these values and of which threads run.
    """

    def __init__(self, seed):
        self.random, self.count = random.Random(seed), 0
        self.threads, self.blocks = self.pick(32, 64, 64, 96, 128, 256), self.pick(1, 2, 3)
        self.size = 256 if self.threads > 128 else self.pick(128, 256)  # of shared tiles
        self.vars, self.tiles, self.loops, self.arrays = [], [], [], []
        self.budget = self.random.randint(6, 18)

    # -- expressions ---------------------------------------------------------------------------------------------------
    def atom(self, avoid, simple):
        """A number, an index, a variable or an element."""
        kinds = ["tx", "number", "bx"] + ["var"] * (3 if self.vars else 0) + ["loop"] * bool(self.loops)
        tiles = [t for t in self.tiles if t != avoid]
        if not simple:
            kinds += ["global"] + ["tile"] * (3 if tiles else 0) + ["array"] * bool(self.arrays)
        kind = self.pick(*kinds)
        if kind == "number":
            n = self.random.randint(0, 40)
            return str(n), lambda e: np.full_like(e["tx"], n)
        if kind in ("tx", "var"):
            name = "tx" if kind == "tx" else self.pick(*self.vars)
            return name, lambda e: e[name]
        if kind in ("bx", "loop"):
            name = "bx" if kind == "bx" else self.pick(*self.loops)
            return name, lambda e: np.full_like(e["tx"], e[name])
        if kind == "array":
            name, size = self.pick(*self.arrays)
            n = self.random.randrange(size)
            return f"{name}[{n}]", lambda e: e[name][:, n]
        text, at = self.value(1, False, None, simple=True)
        if kind == "global":
            return f"A[bx, ({text}) % 64]", lambda e: e["A"][e["bx"], at(e) % 64]
        tile, n, by = self.pick(*tiles), self.size, self.random.randrange(32)
        place, where = self.pick(
            (f"({text}) % {n}", lambda e: at(e) % n), (f"(tx + {by}) % {n}", lambda e: (e["tx"] + by) % n),
            (f"tx ^ {by}", lambda e: e["tx"] ^ by),
        )  # fmt: skip
        return f"{tile}[{place}]", lambda e: e[tile][where(e)]

    def of_warp(self, depth, avoid):
        """What lanes of a warp tell each other."""
        text, of = self.value(depth - 1, True, avoid)
        by, least = self.random.randint(1, 31), self.random.randint(0, 200)

        def moved(e, sign):
            lane = e["tx"] % 32 + sign * by
            return of(e)[np.where((lane >= 0) & (lane < 32), e["tx"] + sign * by, e["tx"])]

        def folded(e, fold):
            return np.repeat(fold(of(e).reshape(-1, 32), axis=1), 32)

        def holds(e, fold):
            return np.repeat(fold((of(e) > least).reshape(-1, 32), axis=1), 32)

        return self.pick(
            (f"T.shfl_xor({text}, {by})", lambda e: of(e)[e["tx"] ^ by]),
            (f"T.shfl_down({text}, {by})", lambda e: moved(e, 1)),
            (f"T.shfl_up({text}, {by})", lambda e: moved(e, -1)),
            (f"T.shfl_sync({text}, {by})", lambda e: of(e)[e["tx"] // 32 * 32 + by]),
            (f"(T.warp_reduce_sum({text}) % {MOST})", lambda e: folded(e, np.sum) % MOST),
            (f"T.warp_reduce_max({text})", lambda e: folded(e, np.max)),
            (f"T.warp_reduce_min({text})", lambda e: folded(e, np.min)),
            (f"T.cast(T.popcount(T.ballot({text} > {least})), 'int32')", lambda e: holds(e, np.sum)),
            (f"T.if_then_else(T.any_sync({text} > {least}) != 0, 3, 5)", lambda e: np.where(holds(e, np.any), 3, 5)),
            (f"T.if_then_else(T.all_sync({text} > {least}) != 0, 3, 5)", lambda e: np.where(holds(e, np.all), 3, 5)),
        )

    def value(self, depth, in_warps, avoid, simple=False):
        """An expression that reads no tile `avoid`, and no memory if `simple`; with `in_warps`, whole warps make it."""
        if depth == 0 or self.chance(0.2):
            return self.atom(avoid, simple)
        if in_warps and not simple and self.chance(0.25):
            return self.of_warp(depth, avoid)
        (a, x), (b, y) = (self.value(depth - 1, in_warps, avoid, simple) for _ in "ab")
        n = self.random.randint(0, 100)
        return self.pick(
            (f"(({a} + {b}) % {MOST})", lambda e: (x(e) + y(e)) % MOST),
            (f"(({a} * {b}) % {MOST})", lambda e: (x(e) * y(e)) % MOST),
            (f"(({a} ^ {b}) % {MOST})", lambda e: (x(e) ^ y(e)) % MOST),
            (f"({a} & {b})", lambda e: x(e) & y(e)),
            (f"({a} % ({b} % 7 + 2))", lambda e: x(e) % (y(e) % 7 + 2)),
            (f"({a} // ({b} % 5 + 1))", lambda e: x(e) // (y(e) % 5 + 1)),
            (f"T.max({a}, {b})", lambda e: np.maximum(x(e), y(e))),
            (f"T.min({a}, {b})", lambda e: np.minimum(x(e), y(e))),
            (f"T.cast(T.cast({a}, 'float32') * 0.5, 'int32')", lambda e: x(e) // 2),
            (f"T.if_then_else({a} > {n}, {b}, {a})", lambda e: np.where(x(e) > n, y(e), x(e))),
        )

    # -- statements ----------------------------------------------------------------------------------------------------
    def block(self, depth, here):
        """The lines of a block, and the function that runs it. Names made inside are gone afterwards."""
        before, made = (self.vars[:], self.arrays[:]), []
        for _ in range(self.random.randint(1, 4) if depth else self.budget):
            if self.budget > 0:
                self.budget -= 1
                made.append(self.statement(depth, here))
        if depth:
            self.vars, self.arrays = before

        def run(e, mask):
            for _, each in made:
                each(e, mask)

        return [line for lines, _ in made for line in lines] or ["pass"], run

    def statement(self, depth, here):
        kinds = [self.assigned, self.assigned, self.variable, self.variable, self.array]
        if self.tiles:
            kinds += [self.stored, self.stored, self.stored, self.updated]
        if here == ALL:
            kinds += [self.met, self.counted]
            kinds += [self.tile] * (2 if depth == 0 else 0) + [self.filled, self.nest] * bool(self.tiles)
        if depth < 3:
            kinds += [self.branch, self.branch, self.uniform_branch, self.loop, self.loop]
        return self.pick(*kinds)(depth, here)

    def variable(self, depth, here):
        text, of = self.value(2, here != SOME, None)
        name = self.fresh("v")
        self.vars.append(name)

        def run(e, mask):
            e[name] = of(e).copy()

        return [f"{name} = T.alloc_var('int32')", f"{name} = {text}"], run

    def assigned(self, depth, here):
        if not self.vars:
            return self.variable(depth, here)
        name, (text, of) = self.pick(*self.vars), self.value(3, here != SOME, None)

        def run(e, mask):
            e[name] = np.where(mask, of(e), e[name])

        return [f"{name} = {text}"], run

    def array(self, depth, here):
        values = [self.value(2, here != SOME, None) for _ in range(self.pick(2, 4))]
        name = self.fresh("l")
        self.arrays.append((name, len(values)))

        def run(e, mask):
            e[name] = np.stack([of(e) for _, of in values], 1)

        lines = [f"{name}[{n}] = {text}" for n, (text, _) in enumerate(values)]
        return [f"{name} = T.alloc_local(({len(values)},), 'int32')", *lines], run

    def tile(self, depth, here):
        name, n = self.fresh("s"), self.random.randint(0, 9)
        self.tiles.append(name)

        def run(e, mask):
            e[name] = np.full(self.size, n, np.int64)

        return [f"{name} = T.alloc_shared(({self.size},), 'int32')", f"T.fill({name}, {n})"], run

    def stored(self, depth, here):
        """Each thread to a place of its own."""
        name, n, by, odd = self.pick(*self.tiles), self.size, self.random.randrange(32), self.pick(1, 3, 5, 7, 9)
        text, of = self.value(2, here != SOME, name)
        place, at = self.pick(
            ("tx", lambda x: x), (f"(tx * {odd} + {by}) % {n}", lambda x: (x * odd + by) % n),
            (f"{n - 1} - tx", lambda x: n - 1 - x), (f"tx ^ {by}", lambda x: x ^ by),
        )  # fmt: skip

        def run(e, mask):
            e[name][at(e["tx"])[mask]] = of(e)[mask]

        return [f"{name}[{place}] = {text}"], run

    def updated(self, depth, here):
        """Atomic updates, in any order."""
        name, n = self.pick(*self.tiles), self.size
        (text, of), (place, at) = self.value(1, here != SOME, name), self.value(1, False, None, simple=True)
        kinds = {"max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}
        kind = self.pick(*kinds)

        def run(e, mask):
            kinds[kind].at(e[name], (at(e) % n)[mask], of(e)[mask])

        return [f"T.atomic_{kind}({name}[({place}) % {n}], {text})"], run

    def met(self, depth, here):
        return ["T.sync_threads()"], lambda e, mask: None

    def filled(self, depth, here):
        name, n = self.pick(*self.tiles), self.random.randint(0, 50)

        def run(e, mask):
            e[name][:] = n

        return [f"T.fill({name}, {n})"], run

    def nest(self, depth, here):
        """By all threads, of one tile in place or of two."""
        name, other, i = self.pick(*self.tiles), self.pick(*self.tiles), self.fresh("i")
        n, by = self.size, self.random.randint(0, 50) * (name != other)

        def run(e, mask):
            at = np.arange(n)
            e[name][:] = (e[other][(at + by) % n] * 3 + at) % MOST

        text = f"{name}[{i}] = ({other}[({i} + {by}) % {n}] * 3 + {i}) % {MOST}"
        return [f"for {i} in T.Parallel({n}):", f"    {text}"], run

    def counted(self, depth, here):
        (text, of), n, name = self.value(1, True, None), self.random.randint(0, 100), self.fresh("v")
        kind, fold = self.pick(("count", np.sum), ("and", np.all), ("or", np.any))
        self.vars.append(name)

        def run(e, mask):
            e[name] = np.full_like(e["tx"], fold(of(e) > n))

        return [f"{name} = T.alloc_var('int32')", f"{name} = T.syncthreads_{kind}({text} > {n})"], run

    def branch(self, depth, here):
        """Of some threads or warps. It has no `else`, whose threads would run beside the others."""
        (text, of), n = self.value(1, here != SOME, None), self.random.randint(0, 60)
        warp = self.random.randrange(self.threads // 32)
        condition, holds, inside = self.pick(
            (f"{text} > {n}", lambda e: of(e) > n, SOME), (f"tx < {n}", lambda e: e["tx"] < n, SOME),
            (f"tx % 3 == {n % 3}", lambda e: e["tx"] % 3 == n % 3, SOME),
            (f"tx // 32 == {warp}", lambda e: e["tx"] // 32 == warp, WARPS),
        )  # fmt: skip
        lines, body = self.block(depth + 1, SOME if here == SOME else inside)

        def run(e, mask):
            body(e, mask & holds(e))

        return [f"if {condition}:", *indented(lines)], run

    def uniform_branch(self, depth, here):
        name, n = self.pick("bx", *self.loops), self.random.randint(0, 2)
        (lines, then), (others, otherwise) = (self.block(depth + 1, here) for _ in "ab")

        def run(e, mask):
            (then if e[name] > n else otherwise)(e, mask)

        return [f"if {name} > {n}:", *indented(lines), "else:", *indented(others)], run

    def loop(self, depth, here):
        name, n = self.fresh("k"), self.pick(1, 2, 3, 4)
        self.loops.append(name)
        lines, body = self.block(depth + 1, here)
        self.loops.pop()

        def run(e, mask):
            for e[name] in range(n):
                body(e, mask)

        return [f"for {name} in {self.pick('T.serial', 'T.serial', 'T.unroll')}({n}):", *indented(lines)], run

    def generate(self, name):
        """The text of a T.prim_func of A, O and S, the shapes of O and S, and their values as a function of A."""
        lines, body = self.block(0, ALL)
        shapes = (self.blocks, len(self.vars) + 1, self.threads), (self.blocks, len(self.tiles) + 1, self.size)
        params = [("A", (self.blocks, 64)), ("O", shapes[0]), ("S", shapes[1])]
        lines += [f"O[bx, {n}, tx] = {var}" for n, var in enumerate(self.vars)]
        lines += [f"T.copy({tile}, S[bx, {n}, 0])" for n, tile in enumerate(self.tiles)]
        given = ", ".join(f"{param}: T.Tensor({shape}, 'int32')" for param, shape in params)
        head = [f"with T.Kernel({self.blocks}, threads={self.threads}) as bx:", "    tx = T.get_thread_binding()"]
        text = "\n".join(["@T.prim_func", f"def {name}({given}):", *indented([*head, *indented(lines)])]) + "\n"

        def model(a):
            results = [np.zeros(shape, np.int64) for shape in shapes]
            for block in range(self.blocks):
                e = {"tx": np.arange(self.threads), "bx": block, "A": a}
                body(e, np.ones(self.threads, bool))
                for result, names in zip(results, (self.vars, self.tiles), strict=True):
                    for n, each in enumerate(names):
                        result[block, n] = e[each]
            return results

        return text, shapes, model
