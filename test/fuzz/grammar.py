# SPDX-License-Identifier: Apache-2.0
"""Random programs by a grammar of the language: nests over parts of tiles, loops and branches of every kind, integers
at the ends of their types, memory of every scope, several kernels in one function.

Each program is also a plain Python function that computes what it means, element by element. Programs are well
defined: tiles hold values from the start, divisors are not 0, blocks write to places of their own.
"""

import contextlib
import itertools
import math
import random
from dataclasses import dataclass, field, replace

import torch
from grammar_kinds import Kinds
from grammar_values import FLOATS, FUNCTIONS, INTS, Expressions, Value, limits, number, tight

KINDS = ("sum", "max", "min", "absmax", "abssum", "bitand", "bitor", "bitxor")


@dataclass
class Line:
    """A statement in the language and in the reference's Python, its body, and what follows as `else`."""

    text: str
    reference: str
    body: list["Line"] | None = None
    otherwise: list["Line"] | None = None

    def render(self, depth, reference=False):
        text = self.reference if reference else self.text
        lines = ["    " * depth + part for part in text.split("\n")]
        if self.body is not None:
            lines += rendered(self.body, depth + 1, reference)
        if self.otherwise is not None:
            chained = len(self.otherwise) == 1 and self.otherwise[0].text.startswith("if ") and text.startswith("if ")
            if chained:
                first, *rest = self.otherwise[0].render(depth, reference)
                return [*lines, first.replace("if ", "elif ", 1), *rest]
            lines += ["    " * depth + "else:", *rendered(self.otherwise, depth + 1, reference)]
        return lines


def rendered(body, depth, reference):
    return [x for line in body for x in line.render(depth, reference)] or ["    " * depth + "pass"]


@dataclass
class Buffer:
    """Memory of a program. `owned`: its first index is the block's. `update`: the only operation on it."""

    name: str
    shape: tuple
    dtype: str
    scope: str
    owned: bool = False
    update: str | None = None


@dataclass
class Program:
    """A generated program. `tensors` are its parameters.

    `given` is the number of this name in its text, `refusal` the code of the error that its compilation must raise.
    """

    seed: int
    name: str
    tensors: list
    body: list = field(default_factory=list)
    given: float = 0.0
    refusal: str = ""

    @property
    def scale(self):
        """The type and the number of a scalar argument, most of which their type has to round."""
        source = random.Random(f"scale {self.seed}")
        dtype = source.choice(["float16", "bfloat16", "float32", "float8_e4m3fn", *INTS])
        if dtype in INTS:
            low, high = limits(dtype)
            return dtype, source.choice([low, high, source.randint(low, high)])
        return dtype, source.choice([0.1, -1 / 3, 1e-5, -0.0, source.uniform(-400, 400)])

    def text(self):
        given = [f"{t.name}: T.Tensor({t.shape}, {t.dtype!r})" for t in self.tensors]
        head = ["@T.prim_func", f"def {self.name}({', '.join(given)}, scale: T.{self.scale[0]}, limit: T.int32):"]
        return "\n".join([*head, *rendered(self.body, 1, False), ""])

    def reference(self):
        head = f"def reference({', '.join(t.name for t in self.tensors)}, scale, limit):"
        return "\n".join([head, *rendered(self.body, 1, True), ""])

    def arguments(self):
        """Random tensors, many of whose elements are ends of their type, and the scalars."""
        source, made = random.Random(f"arguments {self.seed}"), []
        for t in self.tensors:
            count = math.prod(t.shape)
            if t.dtype == "float32":
                values = [source.choice([*FLOATS, source.uniform(-9, 9)]) for _ in range(count)]
            else:
                low, high = limits(t.dtype)
                near = max(low, -9), min(high, 9)
                ends = (low, high, low + 1, high - 1) if t.dtype != "bool" else (0, 1)
                values = [
                    source.choice([source.choice(ends), source.randint(*near), source.randint(*near),
                                   source.randint(low, high)]) for _ in range(count)
                ]  # fmt: skip
                values = [v - 2**64 if v >= 2**63 else v for v in values]
            through = torch.int64 if t.dtype == "uint64" else getattr(torch, t.dtype)
            x = torch.tensor(values, dtype=through).reshape(t.shape)
            made.append(x.view(torch.uint64) if t.dtype == "uint64" else x)
        return [*made, self.scale[1], source.randint(0, 6)]

    def expected(self, args):
        """What the reference makes of the tensors: `args` change in place."""
        space = {**FUNCTIONS, **MEMORY, "given": self.given}
        exec(compile(self.reference(), f"<reference {self.seed}>", "exec"), space)
        memory = [Memory.of(t, x) for t, x in zip(self.tensors, args, strict=False)]
        dtype, scale = self.scale
        scale = scale if dtype in INTS else torch.tensor(scale, dtype=torch.float64).to(getattr(torch, dtype)).item()
        space["reference"](*memory, scale, args[-1])
        for m, x in zip(memory, args, strict=False):
            m.into(x)


# -- memory of the reference -------------------------------------------------------------------------------------------


class Memory:
    """A tensor or tile. Outside of a tensor 0 is read, and stores are dropped; tiles are never left."""

    def __init__(self, shape, dtype, values, ragged=False):
        self.shape, self.dtype, self.values, self.ragged = shape, dtype, values, ragged
        self.convert = {"float32": FUNCTIONS["float32_"], "bool": bool}.get(dtype) or FUNCTIONS[dtype]

    @classmethod
    def of(cls, tensor, x):
        values = x.view(torch.int64).flatten().tolist() if tensor.dtype == "uint64" else x.flatten().tolist()
        values = [v % 2**64 for v in values] if tensor.dtype == "uint64" else values
        return cls(tensor.shape, tensor.dtype, values, True)

    def into(self, x):
        values = self.values
        if self.dtype == "uint64":
            values, x = [v - 2**64 if v >= 2**63 else v for v in values], x.view(torch.int64)
        x.copy_(torch.tensor(values, dtype=x.dtype).reshape(self.shape))

    def place(self, index):
        at = 0
        for i, n in zip(index, self.shape, strict=True):
            if not 0 <= i < n:
                assert self.ragged, (index, self.shape)
                return None
            at = at * n + i
        return at

    def __getitem__(self, index):
        at = self.place(index if isinstance(index, tuple) else (index,))
        return self.convert(0) if at is None else self.values[at]

    def __setitem__(self, index, value):
        at = self.place(index if isinstance(index, tuple) else (index,))
        if at is not None:
            self.values[at] = self.convert(value)


def tile(shape, dtype):
    return Memory(shape, dtype, [None] * math.prod(shape))


def grid(*extents):
    return itertools.product(*map(range, extents)) if len(extents) > 1 else range(*extents)


def places(starts, extents):
    """The indices of a region; an extent None drops a dimension of the other side."""
    return [
        tuple(s + o for s, o in zip(starts, at, strict=True)) for at in itertools.product(*(range(n) for n in extents))
    ]


def copy(source, starts, target, to, extents, target_extents=None):
    values = [source[at] for at in places(starts, extents)]
    for at, value in zip(places(to, target_extents or extents), values, strict=True):
        target[at] = value


def fill(target, starts, extents, value):
    for at in places(starts, extents):
        target[at] = value


def transpose(target):
    n = target.shape[0]
    values = {at: target[at] for at in places((0, 0), (n, n))}
    for (i, j), value in values.items():
        target[j, i] = value


_FOLDS = {
    "sum": lambda a, b: a + b, "max": max, "min": min, "absmax": max, "abssum": lambda a, b: a + b,
    "bitand": lambda a, b: a & b, "bitor": lambda a, b: a | b, "bitxor": lambda a, b: a ^ b,
}  # fmt: skip


def reduce(kind, source, target, dim, clear):
    kept = [n for d, n in enumerate(source.shape) if d != dim]
    for at in places([0] * len(kept), kept):
        line = [source[(*at[:dim], k, *at[dim:])] for k in range(source.shape[dim])]
        found = line[0]
        for x in line[1:]:
            found = _FOLDS[kind](found, x)
        place = at or (0,)
        target[place] = found if clear else _FOLDS[kind](target[place], found)


def scan(kind, source, target, dim, reverse):
    kept = [n for d, n in enumerate(source.shape) if d != dim]
    for at in places([0] * len(kept), kept):
        order = range(source.shape[dim])
        order, total = (reversed(order) if reverse else order), None
        line = {k: source[(*at[:dim], k, *at[dim:])] for k in range(source.shape[dim])}
        for k in order:
            total = line[k] if total is None else (total + line[k] if kind == "cumsum" else max(total, line[k]))
            target[(*at[:dim], k, *at[dim:])] = total


def update(kind, target, index, value):
    old = target[index]
    target[index] = {
        "add": lambda: old + value, "max": lambda: max(old, value), "min": lambda: min(old, value),
        "and": lambda: old & value, "or": lambda: old | value, "xor": lambda: old ^ value,
    }[kind]()  # fmt: skip


MEMORY = {"tile": tile, "grid": grid, "copy": copy, "fill": fill, "transpose": transpose, "reduce": reduce,
          "scan": scan, "update": update}  # fmt: skip


# -- the grammar -------------------------------------------------------------------------------------------------------


class Grammar(Kinds, Expressions):
    """Makes one program from a seed."""

    functions = ("maximum",)

    def __init__(self, seed, name):
        self.random, self.seed, self.name, self.count = random.Random(seed), seed, name, 0
        self.aside = random.Random(f"aside {seed}")
        self.blocks = self.pick(1, 2, 2, 3)
        self.size = self.pick(4, 5, 8, 12, 16, 33)
        self.budget = self.random.randint(5, 14)
        self.buffers, self.values = [], []  # what is in scope
        self.lanes, self.targets = [], []  # of the nest around: (name, extent), and what it writes
        self.locked = []  # what loops around read in their heads, and must not change
        self.depth = 0

    def fresh(self, base):
        self.count += 1
        return f"{base}{self.count}"

    def generate(self):
        """The whole program."""
        dtypes = [self.pick(*INTS), self.pick("int32", "float32", *INTS)]
        tensors = []
        for n, dtype in enumerate(dtypes):
            shape = self.pick((self.size,), (self.blocks, self.size), (self.blocks * self.size - 3,))
            tensors.append(Buffer(f"A{n}", shape, dtype, "global"))
        for n in range(self.random.randint(1, 3)):
            rest = self.pick((self.size,), (self.size,), (self.pick(3, 4, 8), self.size))
            dtype = self.pick("int32", dtypes[n % 2], *INTS)
            tensors.append(Buffer(f"W{n}", (self.blocks, *rest), dtype, "global", owned=True))
        for n in range(self.pick(0, 1, 1)):
            dtype = self.pick("int32", "int32", "int64", "uint32", "uint64", "bool")
            update = self.pick("max", "min", "and", "or", "xor", *["add"] * 3 * (dtype != "bool"))
            tensors.append(Buffer(f"C{n}", (4,), dtype, "global", update=update))
        program = Program(self.seed, self.name, tensors)
        kernels = [self.kernel(program, tensors) for _ in range(self.pick(1, 1, 2, 3))]
        program.body += kernels  # behind the memory that these share
        return program

    def kernel(self, program, tensors):
        self.block_name, threads = self.fresh("b"), self.pick(32, 32, 64, 128)
        blocks = self.pick(self.blocks, self.blocks, 1)
        written = [t for t in tensors if t.owned and self.chance(0.75)] or [t for t in tensors if t.owned][:1]
        updated = [t for t in tensors if t.update]
        self.buffers = [t for t in tensors if not t.update and t not in written]
        self.buffers = [replace(t, owned=False) for t in self.buffers] + written
        self.counters = updated
        self.values = [Value("limit", "limit", "int32", 0, 6), self.index_value(self.block_name, blocks)]
        self.budget = self.random.randint(4, 12)
        body = self.block(True) + self.rare(program, Line)
        for t in [b for b in self.buffers if b.scope in ("fragment", "shared")][:3]:
            body += self.write_out(t)
        head = f"with T.Kernel({blocks}, threads={threads}) as {self.block_name}:"
        return Line(head, f"for {self.block_name} in range({blocks}):", body)

    def index_value(self, name, count):
        return Value(name, name, "int32", 0, count - 1)

    # -- scope ---------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def scope(self, *values):
        """Names made inside are gone afterwards."""
        before = self.buffers[:], self.values[:], self.locked[:]
        self.values += values
        self.depth += 1
        yield
        self.depth -= 1
        self.buffers, self.values, self.locked = before

    @property
    def has_floats(self):
        return any(b.dtype == "float32" and self.readable(b) for b in self.buffers)

    def readable(self, b):
        """Whether an element can be loaded here: one of a fragment only by the nest's own indices."""
        return b.scope != "fragment" or (bool(self.lanes) and len(b.shape) <= len(self.lanes))

    def atom(self, is_float):
        found = [b for b in self.buffers if (b.dtype == "float32") is is_float and self.readable(b)]
        scalars = [v for v in self.values if v.is_float is is_float]
        if found and (not scalars or self.chance(0.6)):
            return self.load(self.pick(*found))
        return self.pick(*scalars) if scalars else self.real_literal() if is_float else self.literal()

    def load(self, b):
        text, reference = self.element(b)
        low, high = (0, 1) if b.dtype == "float32" else limits(b.dtype)
        return Value(f"{b.name}[{text}]", f"{b.name}[{reference}]", b.dtype, low, high)

    def element(self, b):
        """The indices of an element to read, as text and reference."""
        own = b in self.targets
        if own or b.scope == "fragment":
            return self.own(b, not own)
        found = []
        for n in b.shape[1:] if b.owned else b.shape:
            found.append(self.index(n, b.scope == "global"))
        found = [self.values[1]] * b.owned + found
        return ", ".join(v.text for v in found), ", ".join(v.reference for v in found)

    def own(self, b, modulo=False):
        """The nest's own element of a buffer that it writes; through a remainder where the nest may be longer."""
        shape = b.shape[1:] if b.owned else b.shape
        texts = [self.block_name] if b.owned else []
        for (name, extent), n in zip(self.lanes, shape, strict=False):
            texts.append(f"{name} % {n}" if extent > n else name)
        return (", ".join(texts),) * 2

    def index(self, n, ragged=False):
        """An index below `n`, or a little beyond."""
        fitting = [v for v in self.values if v.dtype == "int32" and v.low >= 0 and v.high < n]
        if fitting and self.chance(0.6):
            return self.pick(*fitting)
        if self.chance(0.6):
            at = self.random.randint(0, n - 1 + (ragged and self.chance(0.1)))
            return number(at, "int32")
        v = tight(self.integer(1))
        v = v if v.dtype == "int32" else Value(f"T.cast({v.text} & 63, 'int32')", f"({v.reference} & 63)", "int32")
        return Value(f"{v.text} % {n}", f"{v.reference} % {n}", "int32", 0, n - 1)

    # -- statements of all threads -------------------------------------------------------------------------------------
    def block(self, top=False):
        lines = self.new_tile() + self.new_tile() if top else []
        for _ in range(self.random.randint(4, 8) if top else self.random.randint(1, 3)):
            if self.budget <= 0:
                break
            self.budget -= 1
            kinds = [self.nest] * 7 + [self.new_tile] * 2 + [self.copy_tile] * 2 + [self.fill_region] * 2
            kinds += [self.reduction, self.scanning, self.store, self.store, self.variable, self.assign, self.write_out]
            kinds += [self.shifted, self.turned, self.count_up, self.ragged_division]
            if self.depth < 3:
                kinds += [self.branch] * 3 + [self.loop] * 3 + [self.while_loop] * 2
            lines += self.pick(*kinds)()
        return lines

    def tiles(self, *scopes):
        return [b for b in self.buffers if b.scope in (scopes or ("shared", "fragment")) and b not in self.locked]

    def new_tile(self, shape=None, dtype=None, scope=None):
        """A tile with values; one statement, so that neither is dropped alone."""
        name = self.fresh("t")
        shape = shape or self.pick((self.size,), (self.size,), (self.pick(3, 4, 8), self.size), (self.pick(7, 32),))
        dtype = dtype or self.pick("int32", "float32", "float32", *INTS)
        scope = scope or self.pick("shared", "fragment", "fragment", "local")
        made = Buffer(name, shape, dtype, scope)
        text = f"{name} = T.alloc_{scope}({shape}, {dtype!r})\n"
        reference = f"{name} = tile({shape}, {dtype!r})\n"
        source = self.source(shape, dtype)
        if source is not None and scope != "local" and self.chance(0.6):
            text += f"T.copy({source[0]}, {name})"
            reference += f"copy({source[1]}, {name}, {(0,) * len(shape)}, {source[2]}, {shape})"
        else:
            value = self.literal(dtype) if dtype != "float32" else self.real_literal()
            text += f"T.fill({name}, {value.text})"
            reference += f"fill({name}, {(0,) * len(shape)}, {shape}, {value.reference})"
        self.buffers.append(made)
        return [Line(text, reference)]

    def source(self, shape, dtype):
        """A region of a tensor of this type to copy from, perhaps beyond its edges: text, reference, extents."""
        found = [b for b in self.buffers if b.scope == "global" and b.dtype == dtype and len(b.shape) >= len(shape)]
        if not found:
            return None
        b = self.pick(*found)
        lead = len(b.shape) - len(shape)
        block = self.values[1].text
        starts = [block if b.owned else "0"] * lead + [self.pick("0", "0", "1", f"{block} * 3")] * len(shape)
        if b.owned and not lead:
            return None
        extents = (1,) * lead + shape
        text = ", ".join(starts[:lead] + [f"{s} : {s} + {n}" for s, n in zip(starts[lead:], shape, strict=True)])
        return f"{b.name}[{text}]", f"{b.name}, ({', '.join(starts)},)", extents

    def write_out(self, b=None):
        """A tile into a tensor of its type, from which what is left over is dropped."""
        if b is None:
            if not self.tiles():
                return self.new_tile()
            b = self.pick(*self.tiles())
        found = [
            w for w in self.buffers if w.owned and len(w.shape) > len(b.shape) and w not in self.locked
            and (w.dtype == "float32") == (b.dtype == "float32")
        ]  # fmt: skip
        if not found:
            return []
        w = self.pick(*found)
        lead = len(w.shape) - len(b.shape)
        starts = [self.block_name, *(str(self.pick(0, 1)) for _ in range(lead - 1)), *["0"] * len(b.shape)]
        text = ", ".join(starts[:lead] + [f"0:{n}" for n in b.shape])
        zeros = (0,) * len(b.shape)
        reference = f"copy({b.name}, {zeros}, {w.name}, ({', '.join(starts)},), {b.shape}, {(1,) * lead + b.shape})"
        return [Line(f"T.copy({b.name}, {w.name}[{text}])", reference)]

    def region(self, shape):
        """Starts and extents of a part."""
        extents = tuple(self.pick(n, self.random.randint(1, n)) for n in shape)
        starts = [self.pick(0, self.random.randint(0, n - e)) for n, e in zip(shape, extents, strict=True)]
        return tuple(starts), extents

    @staticmethod
    def sliced(name, starts, extents):
        return f"{name}[{', '.join(f'{s}:{s + e}' for s, e in zip(starts, extents, strict=True))}]"

    def fill_region(self):
        if not self.tiles():
            return self.new_tile()
        b = self.pick(*self.tiles())
        starts, extents = self.region(b.shape)
        if b.scope == "fragment" and self.chance(0.7):
            starts = (0,) * len(starts)
        value = self.value(b.dtype, 1)
        text = self.sliced(b.name, starts, extents)
        if self.chance(0.3):
            return [Line(f"T.clear({text})", f"fill({b.name}, {starts}, {extents}, 0)")]
        return [Line(f"T.fill({text}, {value.text})", f"fill({b.name}, {starts}, {extents}, {value.reference})")]

    def copy_tile(self):
        pairs = [
            (a, b) for a in self.tiles() for b in self.tiles() if a is not b and len(a.shape) == len(b.shape)
            and (a.dtype == "float32") == (b.dtype == "float32")
        ]  # fmt: skip
        if not pairs:
            return self.new_tile()
        a, b = self.pick(*pairs)
        extents = tuple(
            self.pick(min(m, n), self.random.randint(1, min(m, n))) for m, n in zip(a.shape, b.shape, strict=True)
        )
        starts = [
            tuple(0 if t.scope == "fragment" and self.chance(0.7) else self.random.randint(0, n - e)
                  for n, e in zip(t.shape, extents, strict=True)) for t in (a, b)
        ]  # fmt: skip
        text = f"T.copy({self.sliced(a.name, starts[0], extents)}, {self.sliced(b.name, starts[1], extents)})"
        return [Line(text, f"copy({a.name}, {starts[0]}, {b.name}, {starts[1]}, {extents})")]

    def shifted(self):
        """A copy within one buffer, whose sides overlap."""
        found = [b for b in self.tiles("shared", "global") if b.scope == "shared" or b.owned]
        if not found:
            return self.new_tile()
        b = self.pick(*found)
        shape = b.shape[1:] if b.owned else b.shape
        extents = tuple(self.random.randint(1, n) for n in shape)
        starts = [[self.random.randint(0, n - e) for n, e in zip(shape, extents, strict=True)] for _ in "ab"]
        lead, own = ([self.block_name], (1,)) if b.owned else ([], ())
        texts = [", ".join([*lead, *(f"{s}:{s + e}" for s, e in zip(one, extents, strict=True))]) for one in starts]
        places = [f"({', '.join(map(str, [*lead, *one]))},)" for one in starts]
        text = f"T.copy({b.name}[{texts[0]}], {b.name}[{texts[1]}])"
        return [Line(text, f"copy({b.name}, {places[0]}, {b.name}, {places[1]}, {own + extents})")]

    def turned(self):
        """A transpose in place."""
        dtype = self.pick("int32", *INTS)
        n = self.pick(3, 4, 8)
        lines = self.new_tile((n, n), dtype, "shared")
        b = self.buffers[-1]
        fill_text, fill_reference = f"{b.name}[i, j] = i * {n} + j", f"{b.name}[i, j] = i * {n} + j"
        body = [Line(f"T.transpose({b.name}, {b.name})", f"transpose({b.name})")]
        nest = Line(f"for i, j in T.Parallel({n}, {n}):", f"for i, j in grid({n}, {n}):",
                    [Line(fill_text, fill_reference)])  # fmt: skip
        return [*lines, nest, *body]

    def reduction(self):
        found = [b for b in self.tiles() if b.dtype != "float32"]
        if not found:
            return self.new_tile()
        b = self.pick(*found)
        dim = self.random.randrange(len(b.shape))
        shape = tuple(n for d, n in enumerate(b.shape) if d != dim) or (1,)
        kinds = [k for k in KINDS if b.dtype.startswith("u") or not k.startswith("abs")]
        kind, clear = self.pick(*kinds), self.chance(0.7)
        lines = self.new_tile(shape, b.dtype, self.pick("fragment", "fragment", "shared"))
        t = self.buffers[-1]
        text = f"T.reduce_{kind}({b.name}, {t.name}, dim={dim}, clear={clear})"
        return [*lines, Line(text, f"reduce({kind!r}, {b.name}, {t.name}, {dim}, {clear})")]

    def scanning(self):
        found = [b for b in self.tiles() if b.dtype != "float32"]
        if not found:
            return self.new_tile()
        b = self.pick(*found)
        dim, kind, reverse = self.random.randrange(len(b.shape)), self.pick("cumsum", "cummax"), self.chance(0.4)
        text = f"T.{kind}({b.name}, dim={dim}, reverse={reverse})"
        return [Line(text, f"scan({kind!r}, {b.name}, {b.name}, {dim}, {reverse})")]

    def store(self):
        """One element, or one of a thread's array."""
        found = [b for b in self.tiles("shared", "global", "local") if b.scope != "global" or b.owned]
        if not found:
            return self.new_tile()
        b = self.pick(*found)
        text, reference = self.element(b)
        value = self.value(b.dtype)
        return [Line(f"{b.name}[{text}] = {value.text}", f"{b.name}[{reference}] = {value.reference}")]

    def variable(self):
        dtype = self.pick("int32", "int32", *INTS)
        name, value = self.fresh("v"), self.value(dtype, 2)
        line = Line(f"{name} = T.alloc_var({dtype!r}, {value.text})", f"{name} = {dtype}({value.reference})")
        self.values.append(Value(name, name, dtype, *limits(dtype)))
        return [line]

    def variables(self):
        return [v for v in self.values if v.text.startswith("v")]

    def assign(self, found=None):
        found = found or self.variables()
        if not found:
            return self.variable()
        v = self.pick(*found)
        value = self.value(v.dtype)
        if self.chance(0.3):
            op = self.pick("+", "-", "*")
            own, other = v, self.value(v.dtype, 2)
            return [Line(f"{v.text} {op}= {other.text}", f"{v.text} = {v.dtype}({own.text} {op} {other.reference})")]
        return [Line(f"{v.text} = {value.text}", f"{v.text} = {v.dtype}({value.reference})")]

    def count_up(self):
        """An atomic update."""
        if not self.counters:
            return self.new_tile()
        c = self.pick(*self.counters)
        at, value = self.index(4), self.value(c.dtype, 2)
        text = f"T.atomic_{c.update}({c.name}[{at.text}], {value.text})"
        return [Line(text, f"update({c.update!r}, {c.name}, {at.reference}, {value.reference})")]

    def ragged_division(self):
        """A quotient of tiles that reach beyond their tensors, where their divisors are 0: dropped afterwards."""
        found = [
            w for w in self.buffers if w.owned and len(w.shape) == 2 and w.dtype != "float32" and w not in self.locked
        ]
        if not found:
            return self.new_tile()
        w = self.pick(*found)
        n, op, a, d = w.shape[1], self.pick("//", "%"), self.fresh("a"), self.fresh("d")
        text = [
            f"{x} = T.alloc_fragment(({n + 5},), {w.dtype!r})\nT.copy({w.name}[{self.block_name}, 0:{n + 5}], {x})"
            for x in (a, d)
        ]
        loops = f"for i in T.Parallel({n}):\n    {d}[i] = {d}[i] | 1\nfor i in T.Parallel({n + 5}):\n"
        text += [f"{loops}    {a}[i] = {a}[i] {op} {d}[i]\nT.copy({a}, {w.name}[{self.block_name}, 0:{n + 5}])"]
        x = f"{w.name}[{self.block_name}, i]"
        reference = f"for i in range({n}):\n    {x} = {x} {op} ({x} | 1)"
        return [Line("\n".join(text), reference)]

    # -- control flow --------------------------------------------------------------------------------------------------
    def branch(self, block=None, condition=None):
        block = block or self.block
        if self.chance(0.03) and not self.lanes:
            return self.many_branches()
        first = Line("", "")
        line = first
        for turn in range(self.pick(1, 1, 2, 3)):
            c = self.condition()
            with self.scope():
                line.text, line.reference, line.body = f"if {c.text}:", f"if {c.reference}:", block()
            if self.chance(0.5):
                break
            if turn < 2 and self.chance(0.4):
                line.otherwise = [Line("", "")]
                line = line.otherwise[0]
                continue
            with self.scope():
                line.otherwise = block()
            break
        while first.otherwise and first.otherwise[0].text == "":
            first.otherwise = None
        return [prune(first)]

    def many_branches(self):
        """A long chain of elif."""
        found = [b for b in self.tiles("shared", "global", "local") if b.scope != "global" or b.owned]
        if not found:
            return self.new_tile()
        b = self.pick(*found)
        x = tight(self.atom(False))
        chain = None
        for n in reversed(range(self.pick(self.random.randint(6, 18), 20))):
            text, reference = self.element(b)
            store = Line(f"{b.name}[{text}] = {n}", f"{b.name}[{reference}] = {n}")
            head = f"({{}} & 31) == {n}:"
            chain = Line("if " + head.format(x.text), "if " + head.format(x.reference), [store], chain and [chain])
        return [chain]

    def bounds(self):
        """(text, reference, least and greatest turn's value) of a loop's range."""
        kind = self.pick("count", "step", "down", "variable", "memory")
        if kind == "step":
            a, step = self.pick(0, 1, 2), self.pick(1, 2, 3)
            return f"{a}, {a + 7}, {step}", f"{a}, {a + 7}, {step}", a, a + 6
        if kind == "down":
            a, step = self.pick(3, 5, 7), self.pick(-1, -2, -3)
            return f"{a}, -1, {step}", f"{a}, -1, {step}", 0, a
        if kind == "variable" and any(v.dtype == "int32" for v in self.variables()):
            v = self.pick(*[v for v in self.variables() if v.dtype == "int32"])
            return f"{v.text} & 3", f"{v.text} & 3", 0, 3
        if kind == "memory":
            v = tight(self.integer(1))
            if v.dtype in ("int32", "int16", "int8"):
                return f"{v.text} % 4", f"{v.reference} % 4", 0, 3
        n = self.pick(1, 2, 3, 4, 5)
        return str(n), str(n), 0, n - 1

    def loop(self, block=None):
        block = block or self.block
        name = self.fresh("k")
        text, reference, low, high = self.bounds()
        kinds = ["range", "range", "T.serial", "T.unroll"]
        if "," not in text and not self.lanes:
            kinds.append("T.Pipelined")
        kind = self.pick(*kinds)
        options = ", num_stages=2" if kind == "T.Pipelined" else ""
        with self.scope(Value(name, name, "int32", low, high)):
            leaves = kind != "T.Pipelined"
            body = self.leave(leaves, block) + block() + self.leave(leaves, block)
        otherwise = None
        if self.chance(0.35) and leaves:
            with self.scope():
                otherwise = block()
        return [Line(f"for {name} in {kind}({text}{options}):", f"for {name} in range({reference}):", body, otherwise)]

    def leave(self, possible, block):
        """Perhaps a break or continue, with something before."""
        if not possible or self.chance(0.5):
            return []
        c, word = self.condition(), self.pick("break", "break", "continue")
        with self.scope():
            before = block() if self.chance(0.4) else []
        return [Line(f"if {c.text}:", f"if {c.reference}:", [*before, Line(word, word)])]

    def while_loop(self, block=None):
        """Turns are counted, so that it ends; its test may read memory that the body changes."""
        block = block or self.block
        name = self.fresh("w")
        first = Line(f'{name} = T.alloc_var("int32", 0)', f"{name} = 0")
        with self.scope(Value(name, name, "int32", 0, 4)):
            c = self.condition() if self.chance(0.7) else None
            body = [*block(), *self.leave(True, block)]
            test = [f"{name} < 3" + (f" and {x}" if x else "") for x in (c and c.text, c and c.reference)]
        otherwise = None
        if self.chance(0.25):
            with self.scope():
                otherwise = block()
        text, reference = (f"while {t}:\n    {name} += 1" for t in test)  # together, so that shrunk loops end
        loop = Line(text, reference, body, otherwise)
        return [Line("if True:", "if True:", [first, loop])]

    # -- nests ---------------------------------------------------------------------------------------------------------
    def nest(self):
        """A T.Parallel loop, or a nest of them, over a part of the tiles that it writes."""
        found = [b for b in self.tiles("shared", "fragment", "global") if b.scope != "global" or b.owned]
        if not found:
            return self.new_tile()
        first = self.pick(*found)
        shape = first.shape[1:] if first.owned else first.shape
        extents = [self.pick(n, n, self.random.randint(1, n)) for n in shape]
        others = [
            b for b in found if b is not first and len(b.shape) - b.owned == len(shape)
            and all(n >= e for n, e in zip(b.shape[b.owned:], extents, strict=True))
        ]  # fmt: skip
        self.targets = [first, *self.random.sample(others, min(len(others), self.pick(0, 0, 1)))]
        names = [self.fresh("i") for _ in extents]
        self.lanes = list(zip(names, extents, strict=True))
        self.outer = self.values[:]
        with self.scope(*(self.index_value(*lane) for lane in self.lanes)):
            body = self.lane_block(True)
            written = {b.name for b in self.targets if any(stores(line, b.name) for line in body)}
            if not written:
                body += self.lane_store()
        self.lanes, self.targets = [], []
        order = list(range(len(names)))
        if len(order) > 1 and self.chance(0.25):
            order.reverse()
        names, extents = [names[d] for d in order], [extents[d] for d in order]
        head, sizes = ", ".join(names), ", ".join(map(str, extents))
        return [Line(f"for {head} in T.Parallel({sizes}):", f"for {head} in grid({sizes}):", body)]

    def lane_block(self, top=False):
        lines = []
        for _ in range(self.pick(1, 1, 2, 3) if top else self.pick(1, 1, 2)):
            kinds = [self.lane_store] * 5 + [self.variable, self.lane_assign]
            if self.counters and not any(b.scope == "fragment" for b in self.buffers):
                kinds += [self.count_up] * 2  # threads that hold copies of a fragment would update several times
            if self.depth < 4:
                kinds += [lambda: self.branch(self.lane_block)] * 3
                kinds += [lambda: self.loop(self.lane_block), lambda: self.while_loop(self.lane_block)]
                kinds += [self.skip]
            lines += self.pick(*kinds)()
        return lines

    def lane_assign(self):
        """To a variable of the iteration."""
        found = [v for v in self.variables() if v not in self.outer]
        return self.assign(found) if found else self.variable()

    def skip(self):
        c = self.condition()
        return [Line(f"if {c.text}:", f"if {c.reference}:", [Line("continue", "continue")])]

    def lane_store(self):
        b = self.pick(*self.targets)
        text, reference = self.own(b)
        value = self.value(b.dtype)
        return [Line(f"{b.name}[{text}] = {value.text}", f"{b.name}[{reference}] = {value.reference}")]


def stores(line, name):
    """Whether a statement stores to a buffer."""
    inside = [*(line.body or []), *(line.otherwise or [])]
    return line.text.startswith(f"{name}[") or any(stores(x, name) for x in inside)


def prune(line):
    """Without an `else` that nobody filled."""
    if line.otherwise and line.otherwise[0].text == "":
        line.otherwise = None
    elif line.otherwise and len(line.otherwise) == 1:
        prune(line.otherwise[0])
    return line


def generated(seed, name=None):
    """The program of a seed."""
    return Grammar(seed, name or f"p{seed}").generate()
