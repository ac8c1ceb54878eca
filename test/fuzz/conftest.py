# SPDX-License-Identifier: Apache-2.0
"""Random programs in the tile language, as a tree of lines from which single statements can be dropped."""

import contextlib
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_expressions import INTS, Expressions, Tile
from fuzz_lines import Line, Source
from fuzz_threads import ThreadGenerator


class Generator(Expressions):
    """Makes one program from a seed. Branches depend only on values that every engine has exactly."""

    def __init__(self, seed, name):
        self.random = random.Random(seed)
        self.aside = random.Random(f"aside {seed}")
        self.name, self.count = name, 0
        self.family = self.pick("float32", "float32", "float32", "float16", "bfloat16", "float8")
        self.sizes = [self.pick(1, 3, 4, 7, 8, 16, 17, 32) for _ in range(3)]
        self.tiles, self.vars, self.indices, self.lets = [], [], {}, []
        self.budget = self.random.randint(6, 16)

    def generate(self):
        """The whole program."""
        globals_ = []
        dims, dynamic = {}, []
        for n in range(self.random.randint(3, 6)):
            is_input = n < 2 or (n > 2 and self.chance(0.4))
            dtype = self.float_type() if self.chance(0.75) else self.pick(*INTS, "bool" if is_input else "int32")
            shape = []
            for _ in range(self.pick(1, 2, 2, 2, 3)):
                size = self.pick(1, 2, 5, 8, 16, 19, 33)
                if self.chance(0.4):
                    name = f"n{len(dims)}"
                    dims[name] = size
                    dynamic.append(name)
                    shape.append(name)
                else:
                    shape.append(size)
            name = f"{'ABCDEF'[n]}" if is_input else f"O{n}"
            globals_.append((Tile(name, tuple(shape), dtype, is_input), [dims.get(s, s) for s in shape]))
        self.inputs = [g for g, _ in globals_ if g.is_input]
        self.outputs = [g for g, _ in globals_ if not g.is_input]
        grid = [self.pick(1, 2, 3) for _ in range(self.pick(1, 1, 2))]
        blocks = ["bx", "by"][: len(grid)]
        self.indices = dict(zip(blocks, grid, strict=True))
        header = [f'{d} = T.dynamic("{d}")' for d in dynamic] + ["@T.prim_func"]
        params = ", ".join(f"{g.name}: T.Tensor({self.tuple(g.shape)}, {g.dtype!r})" for g, _ in globals_)
        names = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
        header += [f"def {self.name}({params}, limit: T.int32):"]
        header += [f"    with T.Kernel({', '.join(map(str, grid))}, threads=32) as {names}:"]
        body = self.block(top=True)
        body += [self.write_out() for _ in self.outputs for _ in range(2)]
        tensors = [(g.name, shape, g.dtype, g.is_input) for g, shape in globals_]
        return Source(self.name, self.family, header, body, tensors)

    def tuple(self, items):
        return "(" + ", ".join(map(str, items)) + ("," if len(items) == 1 else "") + ")"

    # -- statements ----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def scope(self, **indices):
        """Names made inside are gone afterwards."""
        before = self.tiles[:], self.vars[:], dict(self.indices), self.lets[:]
        self.indices |= indices
        yield
        self.tiles, self.vars, self.indices, self.lets = before

    def block(self, top=False):
        lines = []
        for _ in range(self.random.randint(4, 9) if top else self.random.randint(1, 4)):
            if self.budget <= 0:
                break
            self.budget -= 1
            kinds = [self.copy_in, self.copy_in, self.parallel, self.parallel, self.gemm, self.reduce, self.scan,
                     self.copy_tile, self.loop, self.branch, self.variable, self.atomic, self.write_out, self.let,
                     self.scalar_store, self.variable_update, self.while_loop]  # fmt: skip
            made = self.pick(*kinds)()
            lines += made if isinstance(made, list) else [made]
        return lines

    def alloc(self, shape, dtype, lines):
        """A new tile with a value; one statement, so that neither is dropped alone."""
        name = self.fresh("t")
        where = self.pick("shared", "fragment", "fragment", "local")
        made = f"{name} = T.alloc_{where}({self.tuple(shape)}, {dtype!r})"
        lines.append(Line(f"{made}\nT.fill({name}, {self.pick(0, 1, 2)})"))
        tile = Tile(name, tuple(shape), dtype)
        self.tiles.append(tile)
        return tile

    def some_shape(self):
        return tuple(self.pick(*self.sizes) for _ in range(self.pick(1, 2, 2, 2)))

    def any_type(self):
        return self.float_type() if self.chance(0.75) else self.pick(*INTS)

    def choose(self, lines, test):
        """A tile that passes the test, or None."""
        found = [t for t in self.tiles if test(t)]
        return self.pick(*found) if found else None

    def copy_in(self):
        lines = []
        source = self.pick(*self.inputs)
        rank = self.pick(*range(1, min(2, len(source.shape)) + 1))
        shape = tuple(self.pick(*self.sizes) for _ in range(rank))
        dtype = self.pick(source.dtype, self.float_type()) if source.is_float or self.chance(0.5) else "int32"
        dtype = "int32" if dtype == "bool" else dtype
        tile = self.alloc(shape, dtype, lines)
        lead = [self.index(outside=True) for _ in range(len(source.shape) - rank)]
        starts = [self.index(outside=True) for _ in range(rank)]
        if self.chance(0.5):
            place = ", ".join(lead + starts)
        else:
            place = ", ".join(lead + [f"{s} : {s} + {n}" for s, n in zip(starts, shape, strict=True)])
        lines.append(Line(f"T.copy({source.name}[{place}], {tile.name})"))
        return lines

    def write_out(self):
        out = self.pick(*self.outputs)
        tile = self.choose([], lambda t: len(t.shape) <= len(out.shape) and t.is_float == out.is_float)
        if tile is None:
            return Line(f"T.fill({out.name}[{', '.join([':'] * len(out.shape))}], {self.pick(0, 1, 3)})")
        lead = [self.index(outside=True) for _ in range(len(out.shape) - len(tile.shape))]
        starts = [self.index(outside=True) for _ in tile.shape]
        return Line(f"T.copy({tile.name}, {out.name}[{', '.join(lead + starts)}])")

    def copy_tile(self):
        lines = []
        source = self.choose(lines, lambda t: True)
        if source is None:
            return self.copy_in()
        dtype = self.float_type() if source.is_float else self.pick(self.float_type(), "int32", "int64", source.dtype)
        target = self.choose(lines, lambda t: t.shape == source.shape and (t.is_float or not source.is_float))
        target = target or self.alloc(source.shape, dtype, lines)
        if self.chance(0.5) or target is source:
            lines.append(Line(f"T.copy({source.name}, {target.name})"))
        else:
            extents = [self.random.randint(1, n) for n in source.shape]
            a, b = ([self.random.randint(0, n - e) for n, e in zip(source.shape, extents, strict=True)] for _ in "ab")
            texts = [", ".join(f"{s}:{s + e}" for s, e in zip(x, extents, strict=True)) for x in (a, b)]
            lines.append(Line(f"T.copy({source.name}[{texts[0]}], {target.name}[{texts[1]}])"))
        return lines

    def gemm(self):
        lines = []
        m, n, k = (self.pick(*self.sizes) for _ in range(3))
        whole = self.chance(0.15)
        operand = "int8" if whole else self.float_type()
        result = "int32" if whole else ("float64" if operand == "float64" else "float32")
        ta, tb = self.chance(0.3), self.chance(0.3)
        a = self.alloc((k, m) if ta else (m, k), operand, lines)
        b = self.alloc((n, k) if tb else (k, n), operand, lines)
        source = self.pick(*[g for g in self.inputs if g.is_float and len(g.shape) > 1] or [None])
        for t in (a, b):
            if source is None or whole:
                value = "(i * 3 + j) % 5 - 2" if whole else "T.cast(i - j, 'float32') * 0.03125"
                body = [Line(f"{t.name}[i, j] = {value}")]
                lines.append(Line(f"for i, j in T.Parallel({t.shape[0]}, {t.shape[1]}):", body))
            else:
                lead = [self.index(outside=True) for _ in source.shape[2:]]
                starts = [self.index(outside=True) for _ in range(2)]
                lines.append(Line(f"T.copy({source.name}[{', '.join(lead + starts)}], {t.name})"))
        c = self.choose(lines, lambda t: (t.shape, t.dtype) == ((m, n), result) and t not in (a, b)) or self.alloc(
            (m, n), result, lines
        )
        clear = self.chance(0.5)
        options = f", transpose_A={ta}, transpose_B={tb}, clear_accum={clear}"
        lines.append(Line(f"T.gemm({a.name}, {b.name}, {c.name}{options})"))
        if not whole:
            self.shrink_values(c, lines, f"/ {4.0 * k}")
        return lines

    def shrink_values(self, tile, lines, how):
        """Keep magnitudes small after an operation that adds many values."""
        names = "ij"[: len(tile.shape)]
        place = ", ".join(names)
        body = [Line(f"{tile.name}[{place}] = {tile.name}[{place}] {how}")]
        lines.append(Line(f"for {', '.join(names)} in T.Parallel({', '.join(map(str, tile.shape))}):", body))

    def region(self):
        """A part of an input, perhaps beyond its edges, as a tile that can be read."""
        found = [g for g in self.inputs if g.dtype != "bool"]
        if not found:
            return None
        g = self.pick(*found)
        rank = self.pick(*range(1, min(2, len(g.shape)) + 1))
        extents = [self.pick(*self.sizes) for _ in range(rank)]
        place = [self.index(outside=True) for _ in range(len(g.shape) - rank)]
        for start, n in zip([self.index(outside=True) for _ in extents], extents, strict=True):
            place.append(f"{start} : {start} + {n}")
        return Tile(f"{g.name}[{', '.join(place)}]", tuple(extents), g.dtype)

    def reduce(self):
        lines = []
        source = self.region() if self.chance(0.25) else self.choose(lines, lambda t: True)
        if source is None:
            return self.copy_in()
        dim = self.pick(*range(len(source.shape)))
        shape = list(source.shape)
        shape[dim] = 1
        shape = tuple(shape) if len(shape) == 1 or self.chance(0.3) else tuple(shape[:dim] + shape[dim + 1 :])
        dtype = self.pick("float32", source.dtype) if source.is_float else self.pick("int64", source.dtype)
        kinds = ["sum", "max", "min", "absmax", "abssum"] + ([] if source.is_float else ["bitand", "bitor", "bitxor"])
        kind = self.pick(*kinds)
        if source.dtype == "int16" and kind.startswith("abs"):
            kind = "max"
        target = self.alloc(shape, dtype, lines)
        axis = self.pick(dim, dim - len(source.shape))
        clear = "" if self.chance(0.6) else ", clear=False"
        lines.append(Line(f"T.reduce_{kind}({source.name}, {target.name}, dim={axis}{clear})"))
        if kind in ("sum", "abssum") and source.is_float:
            self.shrink_values(target, lines, f"* {1.0 / source.shape[dim]}")
        return lines

    def scan(self):
        lines = []
        source = self.choose(lines, lambda t: True)
        if source is None:
            return self.copy_in()
        dim, kind = self.pick(*range(len(source.shape))), self.pick("cumsum", "cumsum", "cummax")
        reverse = self.pick("", ", reverse=True")
        if self.chance(0.4):
            lines.append(Line(f"T.{kind}({source.name}, dim={dim}{reverse})"))
            target = source
        else:
            dtype = self.pick("float32", source.dtype) if source.is_float else self.pick("int64", source.dtype)
            target = self.alloc(source.shape, dtype, lines)
            lines.append(Line(f"T.{kind}({source.name}, {target.name}, dim={dim}{reverse})"))
        if kind == "cumsum" and target.is_float:
            self.shrink_values(target, lines, f"* {1.0 / source.shape[dim]}")
        return lines

    def parallel(self):
        lines = []
        shape = self.some_shape()
        target = self.choose(lines, lambda t: t.shape == shape) or self.alloc(shape, self.any_type(), lines)
        names = [self.fresh("i") for _ in target.shape]
        place = ", ".join(names)
        with self.scope(**dict(zip(names, target.shape, strict=True))):
            body = []
            if self.chance(0.25):
                body += [self.let()]
            store = Line(f"{target.name}[{place}] = {self.value_for(target)}")
            if target.is_float and self.chance(0.35):
                store = self.carried(target, names, lines)
            if self.chance(0.4):
                other = [Line(f"{target.name}[{place}] = {self.value_for(target)}")] if self.chance(0.4) else None
                store = Line(f"if {self.condition()}:", [store], other)
            body.append(store)
        kind = f"T.Parallel({', '.join(map(str, target.shape))})"
        if len(names) == 1 and self.chance(0.3):
            kind = f"T.{self.pick('vectorized', 'serial', 'unroll')}({target.shape[0]})"
        lines.append(Line(f"for {', '.join(names)} in {kind}:", body))
        return lines

    def carried(self, target, names, lines):
        """Iterations that meet: the result is that of running them in order."""
        t, first, n = target.name, names[0], target.shape[0]
        rest = "".join(f", {x}" for x in names[1:])
        value = f"{self.bounded()} * 0.5"
        kinds = [
            f"{t}[{first}{rest}] = {t}[T.max({first} - 1, 0){rest}] * 0.5 + {value}",
            f"{t}[{first}{rest}] = {t}[{n - 1} - {first}{rest}] * 0.5 + {value}",
            f"{t}[{first} // 2{rest}] = {value}",
            f"{t}[{first} * 3 % {n}{rest}] = {value}",
        ]
        shape = tuple(1 if self.chance(0.5) else x for x in target.shape)
        total = self.alloc(shape, "float32", lines).name
        place = ", ".join("0" if x == 1 else y for x, y in zip(shape, names, strict=True))
        kinds += [f"{total}[{place}] = {total}[{place}] * 0.75 + {t}[{first}{rest}]", f"{total}[{place}] = {value}"]
        return Line(self.pick(*kinds))

    def loop(self):
        name = self.fresh("k")
        n = self.pick(1, 2, 3, 4)
        bound = self.pick(str(n), f"T.min(limit, {n})", f"T.ceildiv({n * 4}, 4)")
        kind = self.pick("T.serial({})", "T.serial({})", "T.Pipelined({}, num_stages=2)", "T.unroll({})", "range({})",
                         "T.serial(1, {})")  # fmt: skip
        with self.scope(**{name: n}):
            first, body = self.leave(), self.block()
            body = [*first, *body] if self.chance(0.5) else [*body, *self.leave(), *self.block()]
        return Line(f"for {name} in {kind.format(bound)}:", body)

    def leave(self):
        """Perhaps a break or continue."""
        if self.chance(0.6):
            return []
        return [Line(f"if {self.condition(exact=True)}:", [Line(self.pick("break", "continue"))])]

    def while_loop(self):
        name = self.fresh("w")
        first = Line(f'{name} = T.alloc_var("int32", 0)')
        with self.scope(**{name: 3}):
            body = [Line(f"{name} += 1"), *self.block(), *self.leave()]
        with_guard = f" and {self.condition(exact=True)}" if self.chance(0.3) else ""
        return [first, Line(f"while {name} < 2{with_guard}:", body)]

    def branch(self):
        condition = self.condition(exact=True)
        with self.scope():
            then = self.block()
        otherwise = None
        if self.chance(0.5):
            with self.scope():
                otherwise = self.block()
        return Line(f"if {condition}:", then, otherwise)

    def variable(self):
        dtype = self.pick("int32", "int32", "float32", self.float_type())
        value = "1" if dtype == "int32" else self.bounded()
        name = self.fresh("v")
        line = Line(f"{name} = T.alloc_var({dtype!r}, {value})")
        self.vars.append(Tile(name, (), dtype))
        return line

    def variable_update(self):
        if not self.vars:
            return self.variable()
        var = self.pick(*self.vars)
        if var.is_float:
            return Line(f"{var.name} = {var.name} * 0.5 + {self.bounded()}")
        return Line(f"{var.name} = ({var.name} * 3 + {self.integer()}) % 17")

    def let(self):
        name = self.fresh("x")
        if self.chance(0.5):
            line = Line(f"{name} = {self.bounded()}")
            self.lets.append((name, True))
        else:
            line = Line(f"{name} = {self.integer()}")
            self.lets.append((name, False))
        return line

    def atomic(self):
        out = self.pick(*self.outputs)
        if out.dtype in ("uint8", "int16"):
            return self.scalar_store()
        kind = self.pick("add", "max", "min")
        place = ", ".join(self.index(outside=True) for _ in out.shape)
        value = self.bounded() if out.is_float else self.integer()
        name = self.fresh("i")
        if self.chance(0.5):
            return Line(f"T.atomic_{kind}({out.name}[{place}], {value})")
        with self.scope(**{name: 5}):
            place = ", ".join(self.index(outside=True) for _ in out.shape)
            body = [Line(f"T.atomic_{kind}({out.name}[{place}], {self.bounded() if out.is_float else self.integer()})")]
        return Line(f"for {name} in T.Parallel(5):", body)

    def scalar_store(self):
        out = self.pick(*self.outputs)
        place = ", ".join(self.index(outside=True) for _ in out.shape)
        return Line(f"{out.name}[{place}] = {self.value_for(out)}")


@pytest.fixture
def generate():
    """`generate(seed, name)`: a random program."""
    return lambda seed, name: Generator(seed, name).generate()


@pytest.fixture
def generate_threads():
    """`generate_threads(seed, name)`: a random program for GPUs."""
    return lambda seed, name: ThreadGenerator(seed, name).generate()
