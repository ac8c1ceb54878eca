# SPDX-License-Identifier: Apache-2.0
"""Random programs for Hopper's roles: pipelined loops of products, alone or in chains, with all that may stand between,
also in clusters.

Inputs are small whole numbers and functions of them exact, so that every engine has the same sums.
"""

import random

from fuzz_lines import WHOLE, Choices, Line, Source

STEPS = {"float16": 16, "bfloat16": 16, "float8_e4m3fn": 32, "float8_e5m2": 32, "int8": 32, "float32": 8}  # of wgmma
BYTES = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "float32": 4}


class RoleGenerator(Choices):
    """Makes one program from a seed. `thorough` ones make each wait matter: no empty loop, many iterations."""

    def __init__(self, seed, name, thorough=False):
        self.random, self.name, self.count, self.thorough = random.Random(seed), name, 0, thorough
        self.dtype = self.pick("float16", "float16", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8",
                               "float32")  # fmt: skip
        self.groups = self.pick(1, 1, 1, 2, 2, 3)
        self.total = "int32" if self.dtype == "int8" else "float32"
        self.short = "float16" if self.dtype == "float32" else self.dtype  # of probabilities
        self.grid = [self.pick(1, 2, 2), self.pick(1, 1, 2)]
        self.cluster = [self.pick(1, n) for n in self.grid]  # of which blocks load for each other
        self.tensors, self.params, self.dims = [], [], {}
        self.rows = 64 * self.pick(self.groups, self.groups, self.groups, 1, 2)
        self.tile = "bx"  # which rows

    def generate(self):
        """The whole program."""
        body = self.persistent() if self.chance(0.3) else self.work()
        header = [f'{d} = T.dynamic("{d}", multiple_of={m})' for d, m in self.dims.items()] + ["@T.prim_func"]
        header += [f"def {self.name}({', '.join(self.params)}, limit: T.int32):"]
        cluster = f", cluster_dims={(*self.cluster, 1)}" if self.cluster != [1, 1] else ""
        sizes = f"{self.grid[0]}, {self.grid[1]}, threads={128 * self.groups}{cluster}"
        header += [f"    with T.Kernel({sizes}) as (bx, by):"]
        return Source(self.name, WHOLE, header, body, self.tensors)

    def persistent(self):
        """Blocks that take tile after tile."""
        name, self.tile = self.fresh("t"), "t"
        self.tiles = 3 if self.thorough else self.pick(1, 2, 3, 4)
        heads = [f"T.serial({self.tiles})", f"T.serial(bx, {self.tiles}, {self.grid[0]})"]
        heads += [] if self.thorough else [f"T.serial(T.min(limit, {self.tiles}))"]
        self.tile = name
        return [Line(f"for {name} in {self.pick(*heads)}:", self.work())]

    def work(self):
        """All that is done for one tile of rows: loops of products, then what they leave is written."""
        lines = []
        for _ in range(self.pick(1, 1, 1, 2)):
            if self.chance(0.4):
                lines += self.chain()
                continue
            shape = self.rows, self.width()
            c = self.alloc(shape, self.total, "fragment", lines)
            lines += [Line(f"T.clear({c})")]
            for _ in range(self.pick(1, 1, 1, 1, 2)):
                lines += self.products(c, shape)
            lines += self.written(c, shape)
        return lines

    def around(self, loop):
        """The loop as it is, run again, or not in all blocks."""
        kind = self.pick(*["plain"] * 7, "again", "if", "if")
        if kind == "plain":
            return [loop]
        if kind == "again":
            turns = self.pick("2", "3") if self.thorough else self.pick("2", "T.min(limit, 2)", f"{self.tile} + 1")
            kind = self.pick("T.serial", "T.serial", "T.unroll") if turns.isdigit() else "T.serial"
            return [Line(f"for {self.fresh('again')} in {kind}({turns}):", [loop])]
        return [loop] if self.thorough else [Line(f"if {self.pick('bx == 0', 'limit > 3', 'by < limit')}:", [loop])]

    # -- memory --------------------------------------------------------------------------------------------------------
    def tensor(self, shape, dtype, is_input):
        """A new parameter, whose rows bulk copies can reach; some of its sizes are known only at run time."""
        name, written = f"{'A' if is_input else 'O'}{len(self.tensors)}", []
        for n, size in enumerate(shape):
            unit = 16 // BYTES.get(dtype, 4) if n == len(shape) - 1 else 1
            if self.chance(0.25) and size % unit == 0:
                written.append(self.fresh("n"))
                self.dims[written[-1]] = unit
            else:
                written.append(str(size))
        self.params.append(f"{name}: T.Tensor(({', '.join(written)},), {dtype!r})")
        self.tensors.append((name, list(shape), dtype, is_input))
        return name

    def alloc(self, shape, dtype, scope, lines):
        name = self.fresh({"shared": "s", "fragment": "f"}[scope])
        lines.append(Line(f"{name} = T.alloc_{scope}({tuple(shape)}, {dtype!r})"))
        return name

    def ragged(self, size, unit):
        """The tensor may end inside the last tile, or well before it."""
        return max(unit, size - unit * self.pick(0, 0, 0, 1, 3, size // unit // 2))

    def load(self, tile, shape, dtype, place, sizes):
        """A copy of a tile of a new tensor of `sizes` from `place`."""
        unit = 16 // BYTES[dtype]
        sizes = [self.ragged(sizes[0], 1), self.ragged(sizes[1], unit)]
        lead, at = ([2], [self.pick("0", "1", "by")]) if self.chance(0.2) else ([], [])
        wider = BYTES[dtype] == 2 and self.chance(0.02)  # which no bulk copy converts
        name = self.tensor([*lead, *sizes], "float32" if wider else dtype, True)
        whole = self.chance(0.15)
        hint = ", disable_tma=True" if self.chance(0.02) else ""
        ends = [f"{p}:{p} + {n}" if whole else p for p, n in zip(place, shape, strict=True)]
        return Line(f"T.copy({name}[{', '.join([*at, *ends])}], {tile}{hint})")

    # -- loops ---------------------------------------------------------------------------------------------------------
    def loop(self, lines):
        """`(name, its most turns, text of the head)` of a loop, which may need names before it."""
        name, n = self.fresh("k"), self.pick(7, 9) if self.thorough else self.pick(1, 2, 3, 4, 5, 7)
        stages = self.pick(1, 2, 2, 3, 3) if self.thorough else self.pick(1, 2, 2, 3, 3, 4)
        heads = [f"{n}"] * 3
        if not self.thorough:
            heads += [f"T.min(limit, {n})", f"T.min(limit % 3, {n})", f"T.min({self.tile} + by, {n})"]
            heads += [f"limit % 4, {n}", f"T.min({self.tile}, 1), {n}", f"T.min({self.tile} - 1, {n})"]
            heads += [f"2, T.min(limit, {n})", "0"]
        if self.chance(0.15) and not self.thorough:
            table, at = self.tensor([4], "int32", True), self.fresh("x")
            lines.append(Line(f"{at} = {table}[{self.pick('bx', 'by', f'{self.tile} % 4')}]"))
            heads = [f"T.max({at}, 0) % {n + 1}"]
        turns = ", ping_pong=True" if self.chance(0.3) else ""
        kind = "T.serial({})" if self.chance(0.08) else f"T.Pipelined({{}}, num_stages={stages}{turns})"
        bound = self.pick(*heads)
        self.from_zero = bound.isdigit()
        return name, n, f"for {name} in {kind.format(bound)}:"

    def turn(self, name, n, lines, before):
        """Which part along K (or of a sequence) a turn reads: its own, or one that a table names."""
        if self.chance(0.12):
            table, page = self.tensor([4, n], "int32", True), self.fresh("page")
            lines.append(Line(f"{page} = T.max({table}[by, {name}], 0) % {n}"))
            return page
        if self.chance(0.04):
            var = self.fresh("v")
            before.append(Line(f'{var} = T.alloc_var("int32", 0)'))
            lines.append(Line(f"{var} = ({var} * 3 + {name} + 1) % {n}"))
            return var
        return self.pick(name, name, name, name, f"({n - 1} - {name})", f"({name} // 2)")

    def condition(self, name):
        """Of a turn: from some turn on, up to one, every other one, of the block."""
        number = self.random.randint(0, 4)
        return self.pick(
            f"{name} >= {number}", f"{name} >= {number}", f"{number} <= {name} + by", f"{name} > {number}",
            f"{name} * 32 + 31 >= {self.tile} * 40", f"{name} > limit % 3", f"{name} < {number}",
            f"{name} % 2 == {number % 2}", f"{name} != {number}", f"{self.tile} < {number}", f"{name} >= 1 or by == 1",
            f"{name} * 2 + by > {number} or {name} > 3",
        )  # fmt: skip

    # -- products ------------------------------------------------------------------------------------------------------
    def depth(self):
        step = STEPS[self.dtype]
        return step * self.pick(1, 2, 2, 4)

    def width(self):
        return self.pick(32, 64, 64, 128) if BYTES[self.dtype] == 1 else self.pick(16, 32, 64, 64, 96, 128)

    def policy(self):
        return self.pick("", "", "", ", policy=T.GemmWarpPolicy.FullRow", ", policy=T.GemmWarpPolicy.FullCol")

    def maybe(self, name, body, share=0.15):
        """Perhaps under a condition."""
        return [Line(f"if {self.condition(name)}:", body)] if self.chance(share) else body

    def operand(self, left, sizes, k, turn, n, lines, turns=True):
        """`(tile, its copy, the option of T.gemm)` of an operand of (rows, k)."""
        turned = self.chance(0.4) if BYTES[self.dtype] == 2 else False
        rows, at = sizes, (f"{self.tile} * {sizes}" if left else f"by * {sizes}")
        along = f"{turn} * {k}" if turns else "0"
        shape, place = ((k, rows), (along, at)) if turned else ((rows, k), (at, along))
        total = [k * n, rows * 2] if turned else [rows * 2, k * n]
        tile = self.alloc(shape, self.dtype, "shared", lines)
        option = f"transpose_A={turned}" if left else f"transpose_B={not turned}"
        return tile, self.load(tile, shape, self.dtype, place, total), option, shape

    def products(self, c, shape):
        """C += A B along K; A from shared memory, of this iteration or the same in all, or from registers."""
        lines, k, columns = [], self.depth(), shape[1]
        name, n, head = self.loop(lines)
        body, copies = [], []
        turn = self.turn(name, n, body, lines)
        kind = self.pick("turn", "turn", "turn", "once", "registers")
        a, load, side, a_shape = self.operand(True, self.rows, k, turn, n, lines, turns=kind != "once")
        if kind == "once":
            lines.append(load)
        else:
            copies.append(load)
        b, load, other, b_shape = self.operand(False, columns, k, turn, n, lines)
        copies.append(load)
        self.random.shuffle(copies)
        if self.chance(0.1):  # a tile that is kept for two iterations, or comes from elsewhere
            kept = self.from_zero and self.chance(0.5)
            copies[-1] = Line(f"if {name} % 2 == 0:", [copies[-1]], None if kept else [copies[-1]])
        extra = self.beside(c, shape, a, a_shape, name, lines) if self.chance(0.45) else []
        if kind == "registers" and "False" in side and self.dtype != "float32":
            f = self.alloc(a_shape, self.dtype, "fragment", lines)
            body += [*copies, Line(f"T.copy({a}, {f})")]
            left = f
        else:
            body += copies
            left = a
            if self.chance(0.12):  # by the threads, in place
                text = f"{a}[{{i}}, {{j}}] = T.max({a}[{{i}}, {{j}}], T.cast(0, {self.dtype!r}))"
                body += self.maybe(name, [self.parallel(a_shape, text)], 0.3 if kind == "turn" else 0)
        clear = bool(extra) and self.chance(0.3)
        tail = ", clear_accum=True" if clear else ""
        gemm = Line(f"T.gemm({left}, {b}, {c}, {side}, {other}{self.policy()}{tail})")
        if left == a and not clear and self.chance(0.12):
            gemm = self.slices(gemm, (a, a_shape, "True" in side), (b, b_shape, "False" in other), k, c)
        body += self.maybe(name, [gemm], 0 if clear else 0.12)
        if self.chance(0.15):  # a second product with the same operands, or others
            d, more, option, _ = self.operand(False, columns, k, turn, n, lines)
            body += [more, Line(f"T.gemm({left}, {d}, {c}, {side}, {option})")]
        body += extra
        return [*lines, *self.around(Line(head, body))]

    def slices(self, gemm, left, right, k, c):
        """The product in two steps along K."""
        if k == STEPS[self.dtype]:
            return gemm
        name, half, operands = self.fresh("r"), k // 2, []
        for tile, shape, first in (left, right):
            part = f"{name} * {half}:{name} * {half} + {half}"
            operands.append(f"{tile}[{part}, 0:{shape[1]}]" if first else f"{tile}[0:{shape[0]}, {part}]")
        options = f"transpose_A={left[2]}, transpose_B={not right[2]}"
        body = Line(f"T.gemm({', '.join(operands)}, {c}, {options})")
        return Line(f"for {name} in T.{self.pick('serial', 'unroll')}(2):", [body])

    def parallel(self, shape, text):
        i, j = self.fresh("i"), self.fresh("j")
        body = [Line(part.format(i=i, j=j)) for part in text.split("\n")]
        return Line(f"for {i}, {j} in T.Parallel({shape[0]}, {shape[1]}):", body)

    def beside(self, c, shape, a, a_shape, name, lines):
        """Arithmetic on the results of an iteration, or on its tiles."""
        made = []
        for _ in range(self.pick(1, 1, 2)):
            kind = self.pick("add", "tile", "max", "reduce", "shared")
            if kind == "add":
                made += self.maybe(name, [self.parallel(shape, f"{c}[{{i}}, {{j}}] = {c}[{{i}}, {{j}}] + 1")], 0.5)
            elif kind == "tile":
                place = f"{{i}} % {a_shape[0]}, {{j}} % {a_shape[1]}"
                text = f"{c}[{{i}}, {{j}}] = {c}[{{i}}, {{j}}] + T.cast({a}[{place}], {self.total!r})"
                made += self.maybe(name, [self.parallel(shape, text)])
            elif kind == "max":
                d = self.alloc(shape, self.total, "fragment", lines)
                lines.append(Line(f"T.clear({d})"))
                text = f"{d}[{{i}}, {{j}}] = T.max({d}[{{i}}, {{j}}], {c}[{{i}}, {{j}}])"
                made += self.maybe(name, [self.parallel(shape, text)])
                made += [] if self.chance(0.5) else [self.parallel(shape, f"{c}[{{i}}, {{j}}] = {d}[{{i}}, {{j}}]")]
            elif kind == "reduce":
                d = self.alloc(shape[:1], self.total, "fragment", lines)
                made += self.maybe(name, [Line(f"T.reduce_max({c}, {d}, dim=1)")], 0)
                text = f"{c}[{{i}}, {{j}}] = T.min({c}[{{i}}, {{j}}], {d}[{{i}}] - 1)"
                made += self.maybe(name, [self.parallel(shape, text)])
            else:
                d = self.alloc(shape, self.total, "shared", lines)
                made += [Line(f"T.copy({c}, {d})")]
                place = f"({{i}} + 1) % {shape[0]}, {{j}}"
                made += [self.parallel(shape, f"{c}[{{i}}, {{j}}] = {c}[{{i}}, {{j}}] + {d}[{place}] % 5")]
        return made

    # -- chains --------------------------------------------------------------------------------------------------------
    def chain(self):
        """S = Q K^T, probabilities, O += P V."""
        lines, keys, inner = [], self.pick(32, 64, 64), STEPS[self.dtype] * self.pick(1, 2, 4)
        keys = max(keys, STEPS[self.short])
        same = BYTES[self.dtype] == 2 and self.chance(0.25)  # one tile is K and V, as in latent attention
        columns = inner if same else self.width()
        q, k = self.alloc((self.rows, inner), self.dtype, "shared", lines), None
        s = self.alloc((self.rows, keys), self.total, "fragment", lines)
        o = self.alloc((self.rows, columns), self.total, "fragment", lines)
        k = self.alloc((keys, inner), self.dtype, "shared", lines)
        name, n, head = self.loop(lines)
        lines.append(self.load(q, (self.rows, inner), self.dtype, (f"{self.tile} * {self.rows}", "0"),
                               [self.rows * 2, inner]))  # fmt: skip
        body = []
        turn = self.turn(name, n, body, lines)
        body.append(self.load(k, (keys, inner), self.dtype, (f"{turn} * {keys}", "0"), [keys * n, inner]))
        value = self.value(turn, keys, columns, n, lines) if not same else (k, [], False)
        v, load, turned = value
        if load and self.chance(0.1):
            text = f"{v}[{{i}}, {{j}}] = T.min({v}[{{i}}, {{j}}], T.cast(1, {self.short!r}))"
            load = [*load, *self.maybe(name, [self.parallel((columns, keys) if turned else (keys, columns), text)])]
        late = self.chance(0.6)
        body += [] if late else load
        body.append(Line(f"T.gemm({q}, {k}, {s}, transpose_B=True, clear_accum=True)"))
        if self.chance(0.25):  # of two parts, as with rope
            body += self.second_part(s, keys, turn, n, lines)
        body += self.between(s, (self.rows, keys), o, (self.rows, columns), name, lines)
        p, copy = self.probabilities(s, (self.rows, keys), lines)
        body += [*copy, *(load if late else [])]
        gemm = Line(f"T.gemm({p}, {v}, {o}, transpose_B={turned})")
        body += self.maybe(name, [gemm], 0.06)
        lines += [Line(f"T.clear({o})"), *self.around(Line(head, body))]
        return [*lines, *self.written(o, (self.rows, columns))]

    def value(self, turn, keys, columns, n, lines):
        """V, k x n where the instruction can read it so, n x k elsewhere."""
        turned = BYTES[self.short] != 2 or self.chance(0.2)
        shape = (columns, keys) if turned else (keys, columns)
        place = ("0", f"{turn} * {keys}") if turned else (f"{turn} * {keys}", "0")
        v = self.alloc(shape, self.short, "shared", lines)
        total = [columns, keys * n] if turned else [keys * n, columns]
        return v, [self.load(v, shape, self.short, place, total)], turned

    def second_part(self, s, keys, turn, n, lines):
        inner = STEPS[self.dtype]
        q, k = (self.alloc((x, inner), self.dtype, "shared", lines) for x in (self.rows, keys))
        lines.append(self.load(q, (self.rows, inner), self.dtype, (f"{self.tile} * {self.rows}", "0"),
                               [self.rows * 2, inner]))  # fmt: skip
        load = self.load(k, (keys, inner), self.dtype, (f"{turn} * {keys}", "0"), [keys * n, inner])
        return [load, Line(f"T.gemm({q}, {k}, {s}, transpose_B=True)")]

    def between(self, s, shape, o, o_shape, name, lines):
        """Masks, statistics of rows, and what they do to the sums so far."""
        body = []
        if self.chance(0.6):
            low = "-20" if self.total == "int32" else "-20.0"
            causal = f"{name} * {shape[1]} + {{j}} <= {self.tile} * 64 + {{i}}"
            visible = self.pick("{j} <= {i}", causal, "{j} % 3 != 0")
            text = f"{s}[{{i}}, {{j}}] = T.if_then_else({visible}, {s}[{{i}}, {{j}}], {low})"
            body += self.maybe(name, [self.parallel(shape, text)], 0.7)
        if self.chance(0.6):
            m, old = (self.alloc(shape[:1], self.total, "fragment", lines) for _ in range(2))
            lines.append(Line(f"T.fill({m}, -40)"))
            i = self.fresh("i")
            body += [Line(f"T.copy({m}, {old})"), Line(f"T.reduce_max({s}, {m}, dim=1, clear=False)")]
            if self.chance(0.5):
                limit = f"{m}[{i}] = T.min({m}[{i}], 30)"
                body.append(Line(f"for {i} in T.Parallel({shape[0]}):", [Line(limit)]))
            body.append(self.parallel(shape, f"{s}[{{i}}, {{j}}] = {s}[{{i}}, {{j}}] - {m}[{{i}}] + 2"))
            if self.total == "float32" and self.chance(0.7):
                scale = self.pick("0.5", f"T.exp2(T.max({old}[{{i}}] - {m}[{{i}}], -9.0))")
                body.append(self.parallel(o_shape, f"{o}[{{i}}, {{j}}] = {o}[{{i}}, {{j}}] * {scale}"))
        if self.chance(0.3):
            total = self.alloc(shape[:1], self.total, "fragment", lines)
            lines.append(Line(f"T.clear({total})"))
            body.append(Line(f"T.reduce_sum({s}, {total}, dim=1, clear=False)"))
            text = f"{o}[{{i}}, {{j}}] = {o}[{{i}}, {{j}}] + T.max(T.min({total}[{{i}}], 3), -3)"
            body += [self.parallel(o_shape, text)]
        return body

    def probabilities(self, s, shape, lines):
        """Small numbers of the operands' type, in registers or through shared memory."""
        value = f"T.max(T.min({s}[{{i}}, {{j}}], 3), -3)"
        if self.total == "float32":
            value = self.pick(value, f"T.max({value}, 0.0) * 0.5", f"T.exp2(T.max(T.min({s}[{{i}}, {{j}}], 3), -6))")
        f = self.alloc(shape, self.short, "fragment", lines)
        made = [self.parallel(shape, f"{f}[{{i}}, {{j}}] = T.cast({value}, {self.short!r})")]
        if self.chance(0.7):
            return f, made
        p = self.alloc(shape, self.short, "shared", lines)
        return p, [*made, Line(f"T.copy({f}, {p})")]

    # -- results -------------------------------------------------------------------------------------------------------
    def written(self, c, shape):
        """From registers, or through shared memory; perhaps after more arithmetic."""
        lines, dtype = [], self.total if self.total == "int32" or self.chance(0.5) else "float32"
        if self.chance(0.3):
            lines.append(self.parallel(shape, f"{c}[{{i}}, {{j}}] = {c}[{{i}}, {{j}}] * 2"))
        sizes = [self.ragged(shape[0] * 2, 1), self.ragged(shape[1] * 2, 4)]
        place = [f"{self.tile} * {shape[0]}", f"by * {shape[1]}"]
        dtype = self.pick(dtype, "float32" if dtype == "float32" else dtype, "float16" if dtype == "float32" else dtype)
        if self.tile != "bx":  # blocks write rows of their own
            sizes, place = [2, *sizes], ["bx", *place]
        out = f"{self.tensor(sizes, dtype, False)}[{', '.join(place)}]"
        if self.chance(0.45):
            return [*lines, Line(f"T.copy({c}, {out})")]
        s = self.alloc(shape, dtype, "shared", lines)
        return [*lines, Line(f"T.copy({c}, {s})"), Line(f"T.copy({s}, {out})")]
