# SPDX-License-Identifier: Apache-2.0
"""Random programs that a GPU can run: pipelines of copies and products, elementwise loops on fragments and shared
memory, reductions, scans. Each block writes places of its own.
"""

import contextlib
import random
from dataclasses import dataclass

from fuzz_lines import Choices, Line, Source

FAMILIES = {
    "float32": ["float32"], "float16": ["float16", "float16", "float32"],
    "bfloat16": ["bfloat16", "bfloat16", "float32"], "float8": ["float8_e4m3fn", "float16", "float32"],
}  # fmt: skip


@dataclass
class Tile:
    name: str
    shape: tuple
    dtype: str
    scope: str

    @property
    def is_float(self):
        return "float" in self.dtype


class ThreadGenerator(Choices):
    """Makes one program from a seed. Branches depend only on values that every engine has exactly."""

    def __init__(self, seed, name):
        self.random, self.name, self.count = random.Random(seed), name, 0
        self.family = self.pick("float32", "float16", "float16", "bfloat16", "float8")
        self.threads = self.pick(32, 64, 128, 128, 256)
        self.sizes = self.pick((16, 32), (16, 32), (16, 64), (8, 24), (5, 16), (3, 9))
        if self.family == "float8":  # some GPUs make its products of scalars
            self.sizes = self.pick((16, 32), (16, 24), (8, 24), (5, 16))
        if self.family == "float32":  # whose products are made of scalars
            self.sizes = self.pick((16, 16), (8, 16), (5, 16), (3, 9))
        self.grid = [self.pick(1, 2) for _ in range(self.pick(1, 2))]
        self.blocks = ["bx", "by"][: len(self.grid)]
        self.tensors, self.params, self.dims = [], [], {}
        self.tiles, self.uniform = [], list(self.blocks)
        self.budget = self.random.randint(3, 8)

    def float_type(self):
        return self.pick(*FAMILIES[self.family])

    def size(self):
        return self.pick(*self.sizes)

    def generate(self):
        """The whole program."""
        body = self.block(top=True)
        live = [t for t in self.tiles if t.scope != "var"]
        for tile in self.random.sample(live, min(2, len(live))):
            body.append(self.write_out(tile))
        header = [f'{d} = T.dynamic("{d}")' for d in self.dims] + ["@T.prim_func"]
        names = self.blocks[0] if len(self.blocks) == 1 else f"({', '.join(self.blocks)})"
        header += [f"def {self.name}({', '.join(self.params)}, limit: T.int32):"]
        header += [f"    with T.Kernel({', '.join(map(str, self.grid))}, threads={self.threads}) as {names}:"]
        return Source(self.name, self.family, header, body, self.tensors)

    # -- memory --------------------------------------------------------------------------------------------------------
    def tensor(self, shape, dtype, is_input):
        """A new parameter; some of its sizes are known only at run time."""
        name = f"{'A' if is_input else 'O'}{len(self.tensors)}"
        written = []
        for size in shape:
            dim = f"n{len(self.dims)}"
            if self.chance(0.3):
                self.dims[dim] = size
                written.append(dim)
            else:
                written.append(str(size))
        self.params.append(f"{name}: T.Tensor(({', '.join(written)},), {dtype!r})")
        self.tensors.append((name, list(shape), dtype, is_input))
        return name

    def alloc(self, shape, dtype, scope, lines):
        name = self.fresh({"shared": "s", "fragment": "f"}[scope])
        lines.append(Line(f"{name} = T.alloc_{scope}({tuple(shape)}, {dtype!r})"))
        tile = Tile(name, tuple(shape), dtype, scope)
        self.tiles.append(tile)
        return tile

    def choose(self, test):
        found = [t for t in self.tiles if test(t)]
        return self.pick(*found) if found else None

    @contextlib.contextmanager
    def scope(self, *uniform):
        """Names made inside are gone afterwards."""
        before = self.tiles[:], self.uniform[:]
        self.uniform += uniform
        yield
        self.tiles, self.uniform = before

    # -- statements ----------------------------------------------------------------------------------------------------
    def block(self, top=False):
        lines = self.copy_in() if top else []
        for _ in range(self.random.randint(2, 5) if top else self.random.randint(1, 2)):
            if self.budget <= 0:
                break
            self.budget -= 1
            kinds = [self.copy_in, self.parallel, self.parallel, self.product, self.product, self.reduce,
                     self.copy_tile, self.loop, self.branch, self.scan, self.chain]  # fmt: skip
            lines += self.pick(*kinds)()
        return lines

    def source(self, shape, dtype):
        """Text of a region's corner in a new input, perhaps ragged: the tile may reach beyond its edges."""
        block = self.pick(*self.blocks)
        count = self.grid[self.blocks.index(block)]
        sizes = [shape[0] * count, *shape[1:]]
        name = self.tensor([max(1, n - self.pick(0, 0, 0, 1, 5, n // 2)) for n in sizes], dtype, True)
        return f"{name}[{', '.join([f'{block} * {shape[0]}', *['0'] * (len(shape) - 1)])}]"

    def copy_in(self):
        lines = []
        shape = tuple(self.pick(self.size(), self.size(), 17) for _ in range(self.pick(1, 2, 2, 2)))
        dtype = self.pick(self.float_type(), self.float_type(), "int32")
        tile = self.alloc(shape, dtype, self.pick("shared", "shared", "fragment"), lines)
        origin = self.float_type() if tile.is_float and self.chance(0.2) else dtype
        return [*lines, Line(f"T.copy({self.source(shape, origin)}, {tile.name})")]

    def write_out(self, tile):
        shape = list(tile.shape)
        shape[0] *= self.grid[0]
        shape = [max(1, n - self.pick(0, 0, 1, 3)) for n in shape]
        place = [f"bx * {tile.shape[0]}", *["0"] * (len(shape) - 1)]
        dtype = "float32" if tile.is_float and self.chance(0.3) else tile.dtype
        if len(self.grid) == 2:
            shape, place = [self.grid[1], *shape], ["by", *place]
        return Line(f"T.copy({tile.name}, {self.tensor(shape, dtype, False)}[{', '.join(place)}])")

    def copy_tile(self):
        lines = []
        source = self.choose(lambda t: True)
        scope = "shared" if source.scope == "fragment" else self.pick("fragment", "fragment", "shared")
        dtype = self.float_type() if source.is_float else source.dtype
        target = self.choose(lambda t: t.shape == source.shape and t.scope == scope and t.is_float == source.is_float)
        if target is None or target is source or self.chance(0.5):
            target = self.alloc(source.shape, dtype, scope, lines)
        return [*lines, Line(f"T.copy({source.name}, {target.name})")]

    def parallel(self):
        """Elementwise, on fragments and shared memory."""
        lines = []
        target = self.choose(lambda t: True)
        if self.chance(0.4):
            dtype = target.dtype if target.is_float or self.chance(0.5) else "float32"
            target = self.alloc(target.shape, dtype, self.pick("fragment", "shared"), lines)
            lines.append(Line(f"T.clear({target.name})"))
        names = [self.fresh("i") for _ in target.shape]
        place = ", ".join(names)
        body = [Line(f"{target.name}[{place}] = {self.value(target, names)}")]
        if self.chance(0.3):
            other = [Line(f"{target.name}[{place}] = {self.value(target, names)}")] if self.chance(0.4) else None
            body = [Line(f"if {self.condition(names)}:", body, other)]
        elif self.chance(0.3):
            body = [*self.rebound("d", target, names), Line(f"{target.name}[{place}] = d")]
        return [*lines, Line(f"for {place} in T.Parallel({', '.join(map(str, target.shape))}):", body)]

    def rebound(self, name, target, names):
        """A name that the iteration binds again, where Python knows the condition and where it does not."""
        lines = [Line(f"{name} = {self.value(target, names)}")]
        for _ in range(self.random.randint(1, 3)):
            new = self.value(target, names)
            new = self.pick(f"T.if_then_else({self.condition(names)}, {name}, {new})", f"T.max({name}, {new})", new)
            again = Line(f"{name} = {new}")
            heads = f"if {self.condition(names)}:", f"for {self.fresh('r')} in T.serial({self.pick(1, 3)}):"
            lines.append(self.pick(again, *(Line(head, [again]) for head in ("if True:", "if False:", *heads))))
        return lines

    def product(self):
        """A pipeline of copies and products, with something elementwise after it."""
        lines = []
        m, n, k = self.size(), self.size(), self.pick(16, self.size(), self.size())
        whole = self.chance(0.12)
        dtype = "int8" if whole else self.float_type()
        ta, tb = self.chance(0.25), self.chance(0.3)
        a = self.alloc((k, m) if ta else (m, k), dtype, "shared", lines)
        b = self.alloc((n, k) if tb else (k, n), dtype, "shared", lines)
        c = self.alloc((m, n), "int32" if whole else "float32", "fragment", lines)
        policy = self.pick("", "", ", policy=T.GemmWarpPolicy.FullRow", ", policy=T.GemmWarpPolicy.FullCol")
        steps, name = self.pick(1, 2, 2, 3, 5), self.fresh("k")
        extra = self.pick(0, 0, 3)  # the last step is ragged
        left = self.tensor([k * steps - extra, m] if ta else [m, k * steps - extra], dtype, True)
        right = self.tensor([n, k * steps - extra] if tb else [k * steps - extra, n], dtype, True)
        at_a = f"{name} * {k}, 0" if ta else f"0, {name} * {k}"
        at_b = f"0, {name} * {k}" if tb else f"{name} * {k}, 0"
        body = [Line(f"T.copy({left}[{at_a}], {a.name})"), Line(f"T.copy({right}[{at_b}], {b.name})")]
        if self.chance(0.2):
            i, j = self.fresh("i"), self.fresh("j")
            change = Line(f"{a.name}[{i}, {j}] = {a.name}[{i}, {j}] + {a.name}[{i}, {j}]")
            body.append(Line(f"for {i}, {j} in T.Parallel({a.shape[0]}, {a.shape[1]}):", [change]))
        body.append(Line(f"T.gemm({a.name}, {b.name}, {c.name}, transpose_A={ta}, transpose_B={tb}{policy})"))
        if self.chance(0.15):
            body = [*body[:2], Line(f"if {name} % 2 == 0:", body[2:])]
        loop = self.pick("T.Pipelined({}, num_stages={})", "T.Pipelined({}, num_stages={})", "T.serial({})")
        lines.append(Line(f"T.clear({c.name})"))
        stages = self.pick(0, 1, 2, 2, 3, 3, 4, 6)  # at times more than there are steps
        lines.append(Line(f"for {name} in {loop.format(steps, stages)}:", body))
        if not whole:
            lines += self.scaled(c, 1 / (4.0 * k))
        return lines

    def scaled(self, tile, factor):
        """Keep magnitudes small."""
        names = [self.fresh("i") for _ in tile.shape]
        place = ", ".join(names)
        store = Line(f"{tile.name}[{place}] = {tile.name}[{place}] * {factor}")
        return [Line(f"for {place} in T.Parallel({', '.join(map(str, tile.shape))}):", [store])]

    def chain(self):
        """A product whose left operand is a fragment that another product made, as in attention."""
        lines = self.product()
        c = self.tiles[-1]
        if not c.is_float:
            return lines
        p = self.alloc(c.shape, self.pick("float16", "bfloat16") if self.family != "float32" else "float32", "fragment",
                       lines)  # fmt: skip
        v = self.alloc((c.shape[1], self.size()), p.dtype, "shared", lines)
        o = self.alloc((c.shape[0], v.shape[1]), "float32", "fragment", lines)
        lines.append(Line(f"T.copy({self.source(v.shape, v.dtype)}, {v.name})"))
        lines.append(Line(f"T.copy({c.name}, {p.name})"))
        lines.append(Line(f"T.clear({o.name})"))
        lines.append(Line(f"T.gemm({p.name}, {v.name}, {o.name})"))
        return lines + self.scaled(o, 1 / (4.0 * v.shape[0]))

    def reduce(self):
        lines = []
        source = self.choose(lambda t: len(t.shape) == 2)
        if source is None:
            return self.copy_in()
        dim = self.pick(0, 1, 1)
        kind = self.pick("sum", "max", "min", "absmax", "abssum")
        dtype = self.pick("float32", source.dtype) if source.is_float else source.dtype
        shape = source.shape[:dim] + source.shape[dim + 1 :]
        target = self.alloc(shape, dtype, self.pick("fragment", "fragment", "shared"), lines)
        clear = "" if self.chance(0.7) else ", clear=False"
        lines += [Line(f"T.fill({target.name}, {self.pick(0, 1)})")] if clear or self.chance(0.3) else []
        lines.append(Line(f"T.reduce_{kind}({source.name}, {target.name}, dim={dim}{clear})"))
        return lines + (self.scaled(target, 1 / source.shape[dim]) if source.is_float and "sum" in kind else [])

    def scan(self):
        source = self.choose(lambda t: len(t.shape) == 2 or t.shape[0] <= 32)
        if source is None or self.chance(0.5):
            return self.copy_in()
        lines, dim = [], self.pick(*range(len(source.shape)))
        target = self.alloc(source.shape, "float32" if source.is_float else source.dtype, source.scope, lines)
        lines.append(Line(f"T.cumsum({source.name}, {target.name}, dim={dim})"))
        return lines + (self.scaled(target, 1 / source.shape[dim]) if target.is_float else [])

    def loop(self):
        name, n = self.fresh("k"), self.pick(1, 2, 3)
        with self.scope(name):
            body = self.block()
        kind = self.pick("T.serial({})", "T.serial(T.min(limit, {}))", "T.unroll({})")
        return [Line(f"for {name} in {kind.format(n)}:", body or [Line("pass")])]

    def branch(self):
        condition = self.condition([])
        with self.scope():
            then = self.block()
        if self.chance(0.6):
            return [Line(f"if {condition}:", then or [Line("pass")])]
        with self.scope():
            return [Line(f"if {condition}:", then or [Line("pass")], self.block() or [Line("pass")])]

    # -- expressions ---------------------------------------------------------------------------------------------------
    def load(self, names, shape, test):
        """An element that a thread can reach: its own of a fragment, any of shared memory."""
        found = []
        for t in self.tiles:
            if not test(t):
                continue
            if t.shape == shape:
                found.append(f"{t.name}[{', '.join(names)}]")
            elif len(t.shape) == 1 and len(shape) == 2 and t.shape[0] in shape:
                found.append(f"{t.name}[{names[shape.index(t.shape[0])]}]")
            elif t.scope == "shared":
                found.append(f"{t.name}[{', '.join(f'{self.pick(*names)} % {n}' for n in t.shape)}]")
        return self.pick(*found) if found else None

    def value(self, target, names):
        if not target.is_float:
            text = self.load(names, target.shape, lambda t: not t.is_float)
            number = f"({text or names[0]} % 50 + {self.integer(names)})"
            return f"T.cast({number}, {target.dtype!r})"
        return self.number(names, target.shape, 2)

    def number(self, names, shape, depth):
        """A float expression of small magnitude."""
        if depth == 0 or self.chance(0.2):
            text = self.load(names, shape, lambda t: t.is_float)
            return text if text and self.chance(0.8) else f"T.cast({self.integer(names)} % 4, 'float32')"
        a, b = self.number(names, shape, depth - 1), self.number(names, shape, depth - 1)
        return self.pick(
            f"({a} + {b}) * 0.5", f"({a} - {b}) * 0.5", f"T.max({a}, {b})", f"T.min({a}, {b})", f"T.tanh({a}) * {b}",
            f"T.if_then_else({self.condition(names)}, {a}, {b})", f"T.exp2(T.min({a}, 1.0)) * 0.5", f"-({a})",
            f"T.cast({a}, {self.float_type()!r})", f"({a}) / (T.abs({b}) + 1.0)",
        )  # fmt: skip

    def integer(self, names):
        a = self.pick(*names, *self.uniform, "limit")
        return self.pick(a, f"({a} * 3 + 1)", f"({a} // 2)", f"({a} % 5)", f"T.max({a}, 2)", f"({a} ^ 3)")

    def condition(self, names):
        return f"{self.integer(names)} {self.pick('<', '>=', '!=')} {self.random.randint(0, 12)}"
