# SPDX-License-Identifier: Apache-2.0
"""Random programs that move parts of tiles: every way of naming a part, of laying a tile out and of copying it.

grammar_run.py runs them with `--tiles`.

Each program is also Python over tensors of torch, which says what it means. All values are small whole numbers, so that
sums are exact in any order, and results are compared bit by bit. Tiles hold values from the start.
"""

import contextlib
import math
import random
from dataclasses import dataclass, field

import torch
from fuzz_lines import Choices
from grammar import Line, rendered
from tiles_reference import PACKED, REFERENCE, packed, torch_dtype, unpacked

EXACT = {
    "float8_e4m3fn": 16, "bfloat16": 256, "float16": 2048, "float32": 2**24, "float64": 2**53, "int8": 127,
    "uint8": 255, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**53, "int4": 7, "uint4": 15, "uint2": 3,
    "float4_e2m1fn": 3,
}  # fmt: skip
FLOATS = ("float16", "float16", "bfloat16", "float32", "float8_e4m3fn", "float64")
INTS = ("int8", "uint8", "int16", "int32", "int64")
LAYOUTS = (
    "T.make_linear_layout({0})", "T.make_swizzled_layout({0})", "T.make_half_bank_swizzled_layout({0})",
    "T.make_quarter_bank_swizzled_layout({0})",
)  # fmt: skip
MOST = 4096  # elements of a tile


@dataclass(eq=False)
class Buffer:
    """A tensor or tile. `bound`: its values are whole numbers from 0 to this. Views share the `memory` of a tile."""

    name: str
    shape: tuple
    dtype: str
    scope: str
    bound: int = 0
    memory: object = None
    is_input: bool = True
    strides: tuple = ()
    sizes: tuple = ()  # as the program names them, where some are known at run time only

    @property
    def is_float(self):
        return "float" in self.dtype


@dataclass
class Part:
    """A region: for each dimension its start as text, its extent, and whether a single index names it."""

    buffer: Buffer
    starts: list
    extents: list
    single: list
    steps: list = None

    @property
    def text(self):
        texts = [
            s if one else f"{s} : {s} + {e}" if k == 1 else f"{s} : {s} + {(e - 1) * k + 1} : {k}"
            for s, e, one, k in zip(self.starts, self.extents, self.single, self.by, strict=True)
        ]
        return f"{self.buffer.name}[{', '.join(texts)}]"

    @property
    def reference(self):
        steps = f", {tuple(self.steps)}" if self.steps else ""
        return f"{self.buffer.name}, ({', '.join(self.starts)},), {tuple(self.extents)}{steps}"

    @property
    def by(self):
        return self.steps or [1] * len(self.starts)

    @property
    def tile_shape(self):
        """The dimensions that the part keeps."""
        return tuple(e for e, one in zip(self.extents, self.single, strict=True) if not one)


@dataclass
class Program:
    """A generated program, in the form that grammar_run.py takes. `tensors` are its parameters."""

    seed: int
    name: str
    head: list
    threads: int
    blocks: int
    tensors: list
    body: list = field(default_factory=list)
    given: float = 0.0
    refusal: str = ""

    def text(self):
        given = ", ".join(
            f"{t.name}: T.StridedTensor({t.shape}, {t.strides}, {t.dtype!r})" if t.strides
            else f"{t.name}: T.Tensor(({', '.join(map(str, t.sizes or t.shape))},), {t.dtype!r})" for t in self.tensors
        )  # fmt: skip
        named = [n for t in self.tensors for n in t.sizes if isinstance(n, str)]
        head = [*(f'{n} = T.dynamic("{n}")' for n in named), "@T.prim_func", f"def {self.name}({given}):"]
        head += [f"    with T.Kernel({self.blocks}, threads={self.threads}) as bx:"]
        return "\n".join([*head, *rendered(self.body, 2, False), ""])

    def reference(self):
        head = [f"def reference({', '.join(t.name for t in self.tensors)}):", f"    for bx in range({self.blocks}):"]
        return "\n".join([*head, *rendered(self.body, 2, True), ""])

    def arguments(self):
        generator = torch.Generator().manual_seed(self.seed)
        made = []
        for t in self.tensors:
            low, high = (0, t.bound + 1) if t.is_input else (1, 2)
            x = torch.randint(low, high, t.shape, generator=generator).to(torch_dtype(t.dtype))
            if t.dtype in PACKED:
                x = packed(x, t.dtype)
            if t.strides:
                room = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))
                x = torch.zeros(room, dtype=x.dtype).as_strided(t.shape, t.strides).copy_(x)
            made.append(x)
        return made

    def expected(self, args):
        """What the reference makes of the tensors: `args` change in place."""
        space = dict(REFERENCE)
        exec(compile(self.reference(), f"<reference {self.seed}>", "exec"), space)
        given = [unpacked(x, t.dtype) if t.dtype in PACKED else x for t, x in zip(self.tensors, args, strict=True)]
        space["reference"](*given)
        for t, x, made in zip(self.tensors, args, given, strict=True):
            if t.dtype in PACKED:
                x.view(torch.uint8).copy_(packed(made, t.dtype).view(torch.uint8))


class Tiles(Choices):
    """Makes one program from a seed."""

    def __init__(self, seed, name):
        self.random, self.seed, self.name, self.count = random.Random(seed), seed, name, 0
        self.threads, self.blocks = self.pick(32, 64, 96, 128, 128, 128, 128, 256, 160, 384, 40), self.pick(1, 2, 2, 3)
        self.most = 4 * MOST if self.chance(0.1) else MOST
        self.tensors, self.tiles, self.turns = [], [], []  # turns: loops around, as (name, count)
        self.budget = self.random.randint(2, 6)
        self.inside = False

    def generate(self):
        body = self.load() + self.block(True)
        shown = [t for t in self.tiles if t.scope in ("shared", "fragment")]
        for t in self.random.sample(shown, min(3, len(shown))):
            body += self.show(t)
        return Program(self.seed, self.name, [], self.threads, self.blocks, self.tensors, body)

    # -- shapes --------------------------------------------------------------------------------------------------------
    def width(self):
        return self.pick(8, 16, 16, 24, 32, 32, 40, 48, 64, 64, 96, 128, 160, 256, 320, 512, 7, 12, 33)

    def height(self):
        return self.pick(1, 2, 3, 4, 5, 8, 8, 16, 16, 17, 24, 32, 64)

    def shape(self, rank=None):
        while True:
            found = [self.height() for _ in range((rank or self.pick(1, 2, 2, 2, 3, 3, 4)) - 1)] + [self.width()]
            if math.prod(found) <= self.most:
                return tuple(found)

    def dtype(self):
        if self.chance(0.08):
            return self.pick(*PACKED)
        return self.pick(*FLOATS) if self.chance(0.7) else self.pick(*INTS)

    # -- memory --------------------------------------------------------------------------------------------------------
    def tensor(self, shape, dtype, is_input=True, plain=False):
        name = f"{'A' if is_input else 'O'}{len(self.tensors)}"
        bound = min(self.pick(1, 3, 7, 200), EXACT[dtype]) if is_input else 1
        if dtype in PACKED:
            shape = [*shape[:-1], -(-shape[-1] // 4) * 4]
        made = Buffer(name, tuple(shape), dtype, "global", bound, is_input=is_input)
        if plain:
            pass
        elif self.chance(0.2):
            rest = shape[:-1] if dtype in PACKED else shape
            made.sizes = [f"n{len(self.tensors)}_{d}" if self.chance(0.5) else n for d, n in enumerate(rest)]
            made.sizes += shape[len(rest) :]
        elif is_input and len(shape) > 1 and dtype not in PACKED and self.chance(0.15):
            strides, room = [], 1
            for n in reversed(shape):
                strides.insert(0, room)
                room = room * n + self.pick(0, 0, 8, 16, 3)
            made.strides = tuple(strides)
        self.tensors.append(made)
        return made

    def alloc(self, shape, dtype, scope, lines, filled=True):
        made = Buffer(self.fresh({"shared": "s", "fragment": "f"}[scope]), tuple(shape), dtype, scope, 1)
        made.memory = made
        text = f"{made.name} = T.alloc_{scope}({made.shape}, {dtype!r})\n"
        if scope == "shared" and self.chance(0.4):
            layout = self.pick(*LAYOUTS, *LAYOUTS, self.own_layout(shape)).format(made.name)
            text += f"T.annotate_layout({{{made.name}: {layout}}})\n"
        text += f"T.fill({made.name}, 1)" * filled
        lines.append(Line(text.rstrip(), f"{made.name} = tile({made.shape}, {dtype!r}, 1)"))
        self.tiles.append(made)
        return made

    def own_layout(self, shape):
        """A layout with room behind each row, or with another order of the dimensions."""
        names = [f"i{n}" for n in range(len(shape))]
        order, place, room = list(range(len(shape))), [], 1
        if self.chance(0.4):
            self.random.shuffle(order)
        for d in reversed(order):
            place.insert(0, f"{names[d]} * {room}")
            room = room * shape[d] + (self.pick(0, 8, 4) if d == order[-1] else 0)
        return f"T.Layout({tuple(shape)}, lambda {', '.join(names)}: {' + '.join(place)})"

    def choose(self, test=lambda t: True):
        found = [t for t in self.tiles if test(t)]
        return self.pick(*found) if found else None

    def written(self, b, bound, whole):
        """Note what a buffer holds after a store of values up to `bound` to a part, or all of it."""
        for t in self.tiles:
            if t.memory is b.memory and b.memory is not None:
                if t.dtype == b.dtype:
                    t.bound = bound if whole else max(t.bound, bound)
                else:  # other bits of an integer type
                    t.bound = EXACT[t.dtype]

    # -- parts ---------------------------------------------------------------------------------------------------------
    def part(self, b, rank=None, aligned=0.5):
        """A part of a tile: slices, single indices and whole dimensions."""
        shape, starts, extents, single = b.shape, [], [], []
        kept = set(self.random.sample(range(len(shape)), min(len(shape), rank or self.random.randint(1, len(shape)))))
        for d, n in enumerate(shape):
            if d not in kept:
                starts.append(self.start(n, 1))
                extents.append(1)
                single.append(True)
                continue
            divisors = [k for k in (1, 2, 4) if n % k == 0]
            e = n if self.chance(0.5) else n // self.pick(*divisors) if self.chance(0.7) else self.random.randint(1, n)
            starts.append(self.start(n, e))
            extents.append(e)
            single.append(False)
        return Part(b, starts, extents, single)

    def stepped(self, part):
        """Take every second or third element along a dimension, at times, which T.copy and T.fill can."""
        if self.chance(0.12):
            room = [d for d, n in enumerate(part.buffer.shape) if part.extents[d] > 2 and not part.single[d]]
            if room:
                d, part.steps = self.pick(*room), [1] * len(part.starts)
                part.steps[d] = self.pick(2, 3)
                part.extents[d] = (part.extents[d] + part.steps[d] - 1) // part.steps[d]
        return part

    def whole(self, b):
        return Part(b, ["0"] * len(b.shape), list(b.shape), [False] * len(b.shape))

    def start(self, n, e):
        """Where a part of `e` of `n` begins; at times by a loop's or the block's number."""
        if n == e:
            return "0"
        turns = [(name, k) for name, k in [*self.turns, ("bx", self.blocks)] if e * k <= n]
        if e == 1 and self.turns and self.chance(0.3):  # buffers by turns
            return f"({self.turns[-1][0]} % {n})"
        if 2 * e <= n and self.chance(0.1):  # as a tensor says
            return f"({self.given()} * {e})"
        if turns and self.chance(0.5):
            name, k = self.pick(*turns)
            rest = n - e * k
            more = self.random.randint(0, rest) // e * e if self.chance(0.8) else self.random.randint(0, rest)
            return f"({name} * {e} + {more})" if more else f"({name} * {e})"
        at = self.random.randint(0, n - e)
        return str(at // e * e if self.chance(0.6) else at)

    def given(self):
        """A 0 or 1 from a tensor."""
        found = next((t for t in self.tensors if t.name == "I"), None)
        if found is None:
            found = Buffer("I", (8,), "int32", "global", 1)
            self.tensors.append(found)
        return f"I[{self.pick(*(name for name, _ in [*self.turns, ('bx', 0)]))}]"

    def spread(self, extents, loose=True):
        """A shape of a tensor of which these extents are a part, and the part's starts, perhaps beyond its edges."""
        sizes, starts, wide_, single = [], [], [], []
        turns = [*self.turns, ("bx", self.blocks)]
        for d, e in enumerate(extents):
            while len(sizes) + len(extents) - d < 5 and self.chance(0.25):  # a single index between
                n = self.pick(1, 2, 3, 5)
                fit = [name for name, k in turns if k <= n]
                sizes.append(n)
                by = self.pick(*fit) if fit and self.chance(0.6) else str(self.random.randint(0, n - 1))
                starts.append(self.given() if n > 1 and self.chance(0.1) else by)
                wide_.append(1)
                single.append(True)
            name, k = self.pick(*turns)
            if self.chance(0.5):
                n, s = e * k, f"({name} * {e})"
            else:
                n, s = e + self.pick(0, 0, e, 8, 5), "0"
                s = str(self.random.randint(0, n - e) // 8 * 8)
            if loose and self.chance(0.3):
                n = max(1, n - self.pick(1, 8, e // 2, 16, 3))
            if loose and self.chance(0.1):
                s = self.pick(f"({s} + bx - {self.pick(1, 8, 16)})", f"({s} + bx * 8)", f"({s} + 8)")
            sizes.append(n)
            starts.append(s)
            wide_.append(e)
            single.append(False)
        return sizes, starts, wide_, single

    # -- statements ----------------------------------------------------------------------------------------------------
    def block(self, top=False):
        lines = []
        for _ in range(self.random.randint(2, 6) if top else self.random.randint(1, 3)):
            if self.budget <= 0:
                break
            self.budget -= 1
            kinds = [self.load] * 2 + [self.move] * 3 + [self.nest] * 3 + [self.reduction] * 2 + [self.scan]
            kinds += [self.product] * 3 + [self.view, self.atomic, self.clear, self.turned, self.show_part]
            kinds += [self.through, self.spill, self.spill]
            if not self.turns:
                kinds += [self.loop, self.loop] + [self.pipeline] * (6 if self.threads % 128 == 0 else 2)
            lines += self.pick(*kinds)()
        return lines

    def clamp(self, b, least):
        """Keep a tile's values below a bound."""
        if b.bound <= least:
            return []
        names = [self.fresh("i") for _ in b.shape]
        index = ", ".join(names)
        one = f"{b.name}[{index}]"
        head = f"for {index} in T.Parallel({', '.join(map(str, b.shape))}):\n    "
        self.written(b, least, True)
        number = f"{float(least)}" if b.is_float else f"{least}"
        return [Line(f"{head}{one} = T.min({one}, T.cast({number}, {b.dtype!r}))",
                     f"{b.name}.copy_(wide({b.name}).clamp(max={least}).to({b.name}.dtype))")]  # fmt: skip

    def fits(self, bound, b):
        return bound <= EXACT[b.dtype]

    def load(self, target=None):
        """A part of a new tensor into a part of a tile."""
        lines = []
        if target is None:
            target = self.choose() if self.chance(0.5) else None
            target = target or self.alloc(self.shape(), self.dtype(), self.pick("shared", "shared", "fragment"), lines)
        part = self.whole(target) if target.scope == "fragment" or self.chance(0.5) else self.stepped(self.part(target))
        kept = [e for e in part.extents if e != 1] if self.chance(0.7) else list(part.tile_shape)
        sizes, starts, extents, single = self.spread(kept)
        dtype = target.dtype if self.chance(0.8) else self.dtype()
        source = self.tensor(sizes or [1], dtype)
        if not sizes:
            starts, extents, single = ["0"], [1], [False]
        source.bound = min(source.bound, EXACT[target.dtype])
        given = self.stepped(Part(source, starts, [*extents], single))
        given.extents = extents  # as many elements as the tile takes, farther apart
        self.written(target, source.bound, part.extents == list(target.shape))
        options = self.pick("", "", "", ", prefer_instruction='tma'", ", prefer_instruction='cp_async'",
                            ", prefer_instruction='sync'", ", disable_tma=True")  # fmt: skip
        return [*lines, self.copy(given, part, options)]

    def copy(self, a, b, options=""):
        first, to, kept = a.text, self.name_of(b), b.tile_shape
        lead = len(a.starts) - len(kept)
        fits = a.single == [True] * lead + [False] * len(kept) and tuple(a.extents[lead:]) == kept
        if fits and not a.steps and self.chance(0.3):  # its head takes the extents of the other side
            first, to = f"{a.buffer.name}[{', '.join(a.starts)}]", b.text
        text = f"T.copy({first}, {to}{options})"
        return Line(text, f"write({b.reference}, read({a.reference}))")

    def name_of(self, part):
        """The whole buffer by its name, at times. The compiler drops no dimension of 1 whose size a call brings."""
        unknown = any(isinstance(n, str) and e == 1 for n, e in zip(part.buffer.sizes, part.extents, strict=False))
        if part.extents == list(part.buffer.shape) and not part.steps and self.chance(0.6) and not unknown:
            return part.buffer.name
        return part.text

    def move(self):
        """Between parts of two tiles."""
        lines, a = [], self.choose()
        part = self.whole(a) if a.scope == "fragment" and self.chance(0.8) else self.stepped(self.part(a))
        kept = [e for e in part.extents if e != 1]
        dtype = a.dtype if self.chance(0.6) else self.dtype()
        if a.bound > EXACT[dtype]:
            dtype = a.dtype
        found = [
            t for t in self.tiles if t.memory is not a.memory and a.bound <= EXACT[t.dtype]
            and len(t.shape) >= len(kept) and all(n >= e for n, e in zip(t.shape[-len(kept) :], kept, strict=True))
        ] if kept else []  # fmt: skip
        if found and self.chance(0.5):
            b = self.pick(*found)
            lead = len(b.shape) - len(kept)
            extents = [1] * lead + kept
            starts = [self.start(n, e) for n, e in zip(b.shape, extents, strict=True)]
            to = Part(b, starts, extents, [True] * lead + [False] * len(kept))
        else:
            scope = self.pick("shared", "fragment", "fragment")
            more = [self.pick(2, 3)] if scope == "shared" and self.chance(0.3) and math.prod(kept) <= MOST // 3 else []
            b = self.alloc([*more, *(kept or [1])], dtype, scope, lines)
            starts = [self.start(n, 1) for n in more] + ["0"] * len(kept or [1])
            to = Part(b, starts, [1] * len(more) + (kept or [1]), [True] * len(more) + [False] * len(kept or [1]))
        self.written(b, a.bound, to.extents == list(b.shape))
        return [*lines, self.copy(part, to)]

    def nest(self):
        """Elementwise, by indices in another order, with steps, remainders, and from the end."""
        lines = []
        b = self.choose(lambda t: len(t.shape) <= 4)
        if self.chance(0.5):
            b = self.alloc(self.shape(), self.dtype(), self.pick("shared", "fragment"), lines)
        names = [self.fresh("i") for _ in b.shape]
        extents, index = list(b.shape), list(names)
        if b.scope == "shared":
            for d, n in enumerate(b.shape):
                step = self.pick(1, 1, 1, 2, 3)
                extents[d] = max(1, (n - self.pick(0, 0, 1)) // step)
                first = n - 1 - (extents[d] - 1) * step
                index[d] = self.pick(*[names[d]] * 2, f"{names[d]} + {first}") if step == 1 else (
                    f"{names[d]} * {step} + {self.random.randint(0, first)}" if first >= 0 else names[d])  # fmt: skip
                if step == 1 and self.chance(0.15):
                    index[d] = f"{extents[d] - 1} - {names[d]}"
        terms, bound = [], 0
        for _ in range(self.pick(1, 1, 2)):
            room = EXACT[b.dtype] - bound
            a = self.choose(lambda t, room=room: t.memory is not b.memory and t.bound <= room)
            if a is None or self.chance(0.15):
                a = self.tensor(self.spread(list(extents))[0][:4], self.dtype())
                a.bound = min(a.bound, 7)
                if bound + a.bound > EXACT[b.dtype]:
                    break
                got = []
                for n in a.shape:
                    i = self.pick(*names)
                    below = [f"{i} - 1"] * (extents[names.index(i)] > 1)  # certainly negative would count from the end
                    turns = [f"{name} * {self.pick(1, 4, 8)}" for name, _ in [*self.turns, ("bx", 0)]]
                    got.append(self.pick(i, i, f"{i} + {self.pick(*turns)}", f"{i} * 2", f"{n - 1} - {i}", *below))
                terms.append((f"{a.name}[{', '.join(got)}]", f"at({a.name}, {', '.join(got)})", a))
                bound += a.bound
                continue
            got = self.indices(a, b, names, extents)
            if got is None:
                continue
            terms.append((f"{a.name}[{', '.join(got)}]", f"at({a.name}, {', '.join(got)})", a))
            bound += a.bound
        if not terms:
            bound = min(4, EXACT[b.dtype])
            terms = [(f"({' + '.join(names)}) % {bound + 1}",) * 2 + (None,)]
        to = "float64" if b.is_float else "int64"
        text = " + ".join(f"T.cast({t}, {b.dtype!r})" for t, *_ in terms)
        reference = " + ".join(f"({r}).to(torch.{to})" for _, r, _ in terms)
        order = list(range(len(names)))
        if self.chance(0.3):
            self.random.shuffle(order)
        heads = ", ".join(names[d] for d in order), ", ".join(str(extents[d]) for d in order)
        self.written(b, bound, extents == list(b.shape))
        condition = self.pick("", "", f"({' + '.join(names)}) % 3 != 0") if b.scope == "shared" else ""
        where = ", ".join(index)
        body = f"    {b.name}[{where}] = {text}"
        value = reference
        if condition:
            body = f"    if {condition}:\n        {b.name}[{where}] = {text}"
            value = f"torch.where({condition}, {reference}, at({b.name}, {where}).to(torch.{to}))"
            self.written(b, max(bound, b.bound, 1), False)
        tail = "," if len(names) == 1 else ""
        return [*lines, Line(f"for {heads[0]} in T.Parallel({heads[1]}):\n{body}",
                             f"{heads[0]}{tail} = lanes({heads[1]})\nput({b.name}, ({where},), {value})")]  # fmt: skip

    def indices(self, a, b, names, extents):
        """Indices of `a` by the lanes; of a fragment plain ones."""
        if a.scope == "fragment":
            found, left = [], list(range(len(names)))
            for n in a.shape:
                fit = [d for d in left if extents[d] == n]
                if not fit:
                    return None
                found.append(names[fit[0]])
                left = [d for d in left if d > fit[0]]
            return found
        found = []
        for n in a.shape:
            d = self.random.randrange(len(names))
            i, e = names[d], extents[d]
            fit = [f"{i} % {n}", f"({i} * {self.pick(3, 5)} + 1) % {n}"]
            if e <= n:
                fit += [i, i, i, f"{n - e} + {i}", f"{n - 1} - {i}"]
            if 2 * e <= n:
                fit += [f"{i} * 2", f"{i} * 2 + 1"]
            if e > n and e // 2 <= n and e % 2 == 0:
                fit += [f"{i} // 2"]
            found.append(self.pick(*fit))
        return found

    def reduction(self):
        lines = []
        a = self.choose(lambda t: len(t.shape) <= 4 and (t.bound <= 2000 or t.dtype in ("int32", "float32")))
        if a is None:
            return self.load()
        part = self.whole(a) if a.scope == "fragment" or self.chance(0.5) else self.part(a)
        shape = part.tile_shape
        dim = self.random.randrange(len(shape))
        kind = self.pick("sum", "max", "min", "abssum", "absmax")
        bound = a.bound * (shape[dim] if "sum" in kind else 1)
        dtype = a.dtype if bound <= EXACT[a.dtype] else "float32" if a.is_float else "int32"
        if bound + 1 > EXACT[dtype]:
            return self.load()
        kept = [n for d, n in enumerate(shape) if d != dim]
        kept = [*shape[:dim], 1, *shape[dim + 1 :]] if self.chance(0.2) and len(shape) > 1 else kept
        b = self.alloc(kept or [1], dtype, self.pick("fragment", "fragment", "shared"), lines)
        to, clear = self.whole(b), self.chance(0.7)
        if b.scope == "shared" and self.chance(0.4) and kept:  # into a part of a larger tile
            b = self.alloc([2, *kept], dtype, "shared", lines)
            to = Part(b, [self.start(2, 1), *["0"] * len(kept)], [1, *kept], [True] + [False] * len(kept))
        self.written(b, bound + 1, to.extents == list(b.shape))
        source = a.name if part.extents == list(a.shape) and not any(part.single) else part.text
        target = b.name if len(to.starts) == len(kept or [1]) else to.text
        text = f"T.reduce_{kind}({source}, {target}, dim={dim}, clear={clear})"
        before = "None" if clear else f"read({to.reference})"
        value = f"fold({kind!r}, read({part.reference}).reshape({tuple(shape)}), {dim}, {before})"
        return [*lines, Line(text, f"write({to.reference}, {value})")]

    def scan(self):
        lines = []
        a = self.choose(lambda t: t.bound <= 300 and t.memory is t)
        if a is None:
            return self.load()
        kind, reverse = self.pick("cumsum", "cumsum", "cummax"), self.chance(0.4)
        part = self.whole(a) if a.scope == "fragment" or self.chance(0.6) else self.part(a)
        shape = part.tile_shape
        dim = self.random.randrange(len(shape))
        bound = a.bound * (shape[dim] if kind == "cumsum" else 1)
        if bound <= EXACT[a.dtype] and self.chance(0.3):
            to, b = part, a
        else:
            dtype = a.dtype if bound <= EXACT[a.dtype] else "float32" if a.is_float else "int32"
            b = self.alloc(shape, dtype, self.pick("shared", "fragment"), lines)
            to = self.whole(b)
        self.written(b, bound, to.extents == list(b.shape))
        names = [a.name if p.extents == list(p.buffer.shape) and not any(p.single) else p.text for p in (part,)]
        target = b.name if to.extents == list(b.shape) and not any(to.single) else to.text
        text = f"T.{kind}({names[0]}, {target}, dim={dim}, reverse={reverse})"
        value = f"running({kind!r}, read({part.reference}).reshape({tuple(shape)}), {dim}, {reverse})"
        return [*lines, Line(text, f"write({to.reference}, {value})")]

    def operand(self, rows, columns, dtype, lines, scope="shared"):
        """A part of a tile with values, as large as an operand: all of a tile, or a slice of a larger one.

        Only the copy of its values fills the tile, so that it may be a bulk copy.
        """
        if scope == "fragment" or self.chance(0.4):
            lead, shape = 0, (rows, columns)
        else:
            lead = self.pick(0, 0, 1)
            shape = (2,) * lead + (rows * self.pick(1, 1, 2), columns * self.pick(1, 1, 2))
        b = self.alloc(shape, dtype, scope, lines, filled=False)
        lines += self.filled(b)
        extents = [1] * lead + [rows, columns]
        starts = [self.start(n, e) for n, e in zip(shape, extents, strict=True)]
        if self.chance(0.8):  # where products begin
            starts = [s if s.startswith("(") else str(int(s) // e * e) for s, e in zip(starts, extents, strict=True)]
        return Part(b, starts, extents, [True] * lead + [False, False])

    def filled(self, b):
        """All of a tile from a new tensor of numbers up to 3."""
        sizes, starts, extents, single = self.spread(list(b.shape), self.chance(0.4))
        if self.chance(0.8):  # rows that bulk copies can read
            sizes[-1] = -(-sizes[-1] // 16) * 16
        source = self.tensor(sizes, b.dtype, plain=True)
        source.bound = 3
        self.written(b, 3, True)
        return [self.copy(Part(source, starts, extents, single), self.whole(b))]

    def product(self):
        lines = []
        big = self.threads >= 128 and self.chance(0.5)
        dtype = self.pick("float16", "bfloat16", "float16", "int8", "float8_e4m3fn", "float32")
        m = self.pick(64, 128) if big else self.pick(16, 16, 32, 48)
        n, k = self.pick(8, 16, 24, 32, 64, 128), self.pick(16, 32, 64) if dtype in ("float16", "bfloat16") else 32
        ta, tb = self.chance(0.3), self.chance(0.4)
        a = self.operand(*((k, m) if ta else (m, k)), dtype, lines, "fragment" if self.chance(0.15) else "shared")
        b = self.operand(*((n, k) if tb else (k, n)), dtype, lines)
        c = self.alloc((m, n), "int32" if dtype == "int8" else "float32", "fragment", lines)
        return together([*lines, self.multiply(a, b, c, ta, tb)])

    def multiply(self, a, b, c, ta, tb, times=1):
        k = a.tile_shape[0 if ta else 1]
        policy = self.pick("", "", "", ", policy=T.GemmWarpPolicy.FullRow", ", policy=T.GemmWarpPolicy.FullCol")
        clear = ", clear_accum=True" if times == 1 and self.chance(0.3) else ""
        self.written(c, c.bound + a.buffer.bound * b.buffer.bound * k * times, True)
        names = [self.name_of(p) for p in (a, b)]
        text = f"T.gemm({names[0]}, {names[1]}, {c.name}, transpose_A={ta}, transpose_B={tb}{policy}{clear})"
        values = [f"read({p.reference}).reshape({p.tile_shape}){'.T' * t}" for p, t in ((a, ta), (b, tb))]
        before = "0" if clear else f"wide({c.name})"
        zero = (0,) * 2
        return Line(text, f"write({c.name}, {zero}, {c.shape}, {before} + {values[0]} @ {values[1]})")

    def view(self):
        """Another name for a tile: by another shape, or another integer type."""
        b = self.choose(lambda t: t.scope == "shared" and t.memory is t and t.dtype not in PACKED)
        if b is None:
            return self.load()
        count, dtype = math.prod(b.shape), b.dtype
        if self.chance(0.15 if b.is_float else 0.6):
            dtype = self.pick("uint8", "int16", "int32", "int8")
            sizes = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2}
            sizes |= {"float32": 4, "float64": 8, "float8_e4m3fn": 1}
            count = count * sizes[b.dtype]
            if count % sizes[dtype] or b.shape[-1] * sizes[b.dtype] % 8:
                return self.load()
            count //= sizes[dtype]
        shape, rest = [], count
        for _ in range(self.pick(0, 1, 1, 2)):
            shape.insert(0, self.pick(*[d for d in (1, 2, 3, 4, 8, 16, 32, 64, 128) if rest % d == 0]))
            rest //= shape[0]
        shape.insert(0, rest)
        ratio = sizes[b.dtype] // sizes[dtype] if dtype != b.dtype else 0
        if ratio > 1 and shape[-1] % ratio:
            return self.load()
        made = Buffer(self.fresh("v"), tuple(shape), dtype, "shared", b.bound, b.memory)
        if dtype != b.dtype:
            made.bound = EXACT[dtype]
        self.tiles.append(made)
        reference = f"{made.name} = {b.name}.view(-1).view(torch.{dtype}).view({made.shape})"
        if dtype == b.dtype and self.chance(0.5):
            return [Line(f"{made.name} = T.reshape({b.name}, {made.shape})", reference)]
        return [Line(f"{made.name} = T.view({b.name}, {made.shape}, {dtype!r})", reference)]

    def atomic(self):
        """A part of a tile into a tensor that all blocks update."""
        a = self.choose(
            lambda t: (
                t.dtype in ("int32", "float32", "float16", "bfloat16")
                and t.bound * 20 < EXACT[t.dtype]
                and t.memory is t
            )
        )
        if a is None:
            return self.load()
        part = self.whole(a) if a.scope == "fragment" else self.part(a)
        kind = "add" if a.is_float else self.pick("add", "max", "min")
        sizes, starts, extents, single = self.spread([e for e in part.extents if e != 1] or [1])
        if self.turns:
            return self.load()
        o = self.tensor(sizes, a.dtype, False)
        to = Part(o, starts, extents, single)
        name = {"add": "sum"}.get(kind, kind)
        value = f"JOINS[{name!r}](read({to.reference}), read({part.reference}).reshape({tuple(extents)}))"
        return [Line(f"T.atomic_{kind}({to.text}, {part.text})", f"write({to.reference}, {value})")]

    def clear(self):
        b = self.choose(lambda t: t.scope == "shared")
        if b is None:
            return self.load()
        part, value = self.stepped(self.part(b)), self.pick(0, 2, 3)
        self.written(b, max(b.bound, value), False)
        return [Line(f"T.fill({part.text}, {value})",
                     f"write({part.reference}, torch.full({tuple(part.extents)}, {value}))")]  # fmt: skip

    def turned(self):
        lines, a = [], self.choose(lambda t: len(t.shape) >= 2)
        if a is None:
            return self.load()
        part = self.whole(a) if a.scope == "fragment" else self.part(a, 2)
        shape = part.tile_shape
        if len(shape) != 2:
            return self.load()
        b = self.alloc(shape[::-1], a.dtype, self.pick("shared", "shared", "fragment"), lines)
        self.written(b, a.bound, True)
        to = self.whole(b)
        source = a.name if part.extents == list(a.shape) and not any(part.single) else part.text
        return [*lines, Line(f"T.transpose({source}, {b.name})",
                             f"write({to.reference}, read({part.reference}).reshape({shape}).T)")]  # fmt: skip

    def show_part(self):
        return self.show(self.choose(), self.chance(0.7))

    def show(self, b, some=False):
        """A tile, or a part, into a new tensor of which each block and turn has a part of its own."""
        part = self.stepped(self.part(b)) if some and b.scope == "shared" else self.whole(b)
        kept = [e for e in part.extents if e != 1] or [1]
        if self.turns:
            return []
        sizes, starts, extents, single = [], [], [], []
        own = self.random.randrange(len(kept) + 1)  # before this dimension, or along it
        along = own < len(kept) and self.chance(0.4)
        for d, e in enumerate(kept):
            if d == own and not along:
                sizes.append(self.blocks)
                starts.append("bx")
                extents.append(1)
                single.append(True)
            if self.chance(0.15) and len(sizes) + len(kept) - d < 4:
                n = self.pick(1, 2, 3)
                sizes.append(n)
                starts.append(str(self.random.randint(0, n - 1)))
                extents.append(1)
                single.append(True)
            n = e * (self.blocks if d == own and along else 1)
            more = self.pick(0, 0, 0, 8, 3)
            less = self.pick(0, 0, 0, 1, 8, e // 2)
            sizes.append(max(1, n + more - less))
            starts.append(f"(bx * {e})" if d == own and along else self.pick("0", "0", str(more)))
            extents.append(e)
            single.append(False)
        if own == len(kept):
            sizes.insert(0, self.blocks)
            starts.insert(0, "bx")
            extents.insert(0, 1)
            single.insert(0, True)
        dtype = b.dtype if self.chance(0.8) else self.dtype()
        dtype = dtype if b.bound <= EXACT[dtype] else b.dtype
        o = self.tensor(sizes, dtype, False)
        options = self.pick("", "", "", ", prefer_instruction='tma'", ", prefer_instruction='sync'")
        to = Part(o, starts, extents, single)
        return [
            Line(f"T.copy({self.name_of(part)}, {to.text}{options})", f"write({to.reference}, read({part.reference}))")
        ]

    def through(self):
        """From one tensor to another."""
        if self.turns:
            return []
        kept = list(self.shape(self.pick(1, 2, 2)))
        sizes, starts, extents, single = self.spread(kept)
        a = self.tensor(sizes, self.dtype())
        b = self.tensor([self.blocks, *kept], a.dtype if self.chance(0.7) else "float32", False)
        a.bound = min(a.bound, EXACT[b.dtype])
        to = Part(b, ["bx", *["0"] * len(kept)], [1, *kept], [True] + [False] * len(kept))
        return [self.copy(Part(a, starts, extents, single), to)]

    def spill(self):
        """A tile into a tensor element by element, in another order of the dimensions."""
        b = self.choose()
        if self.turns or b.dtype in PACKED:
            return []
        names = [self.fresh("i") for _ in b.shape]
        order = self.random.sample(range(len(names)), len(names))
        sizes = [self.blocks, *(max(1, b.shape[d] + self.pick(0, 0, 3, -1)) for d in order)]
        o = self.tensor(sizes, b.dtype, False)
        index = ", ".join(["bx", *(names[d] + self.pick("", "", " + 1") for d in order)])
        own = ", ".join(names)
        heads = own, ", ".join(map(str, b.shape))
        tail = "," if len(names) == 1 else ""
        text = f"for {heads[0]} in T.Parallel({heads[1]}):\n    {o.name}[{index}] = {b.name}[{own}]"
        reference = f"{heads[0]}{tail} = lanes({heads[1]})\nput({o.name}, ({index},), at({b.name}, {own}))"
        return [Line(text, reference)]

    def loop(self):
        name, n = self.fresh("k"), self.pick(1, 2, 3)
        before = self.tiles[:]
        self.turns.append((name, n))
        bounds = [t.bound for t in before]
        body = self.block()
        self.turns.pop()
        self.tiles = before
        for t, bound in zip(before, bounds, strict=True):
            t.bound = max(t.bound, bound)
        kind = self.pick("T.serial({})", "T.unroll({})", "range({})").format(n)
        if any(t.bound > EXACT[t.dtype] for t in before):
            raise TooLarge
        if not body:
            return []
        return [Line(f"for {name} in {kind}:", f"for {name} in range({n}):", body)]

    def pipeline(self):
        """Loads and a product, or other ops on the tiles, in a software pipeline."""
        lines, body = [], []
        name, n, stages = self.fresh("k"), self.pick(1, 2, 3, 4, 5), self.pick(0, 1, 2, 2, 3, 4)
        before = self.tiles[:]
        if self.chance(0.75):
            big = self.threads >= 128 and self.chance(0.8)
            dtype = self.pick("float16", "bfloat16", "float16", "int8", "float8_e4m3fn", "float32")
            m = self.pick(64, 128) if big else self.pick(16, 32)
            w, k = self.pick(8, 16, 24, 32, 64), self.pick(16, 32, 64) if dtype in ("float16", "bfloat16") else 32
            ta, tb = self.chance(0.3), self.chance(0.4)
            c = self.alloc((m, w), "int32" if dtype == "int8" else "float32", "fragment", lines)
            before = [*before, c]
            allocs, loads = [], []
            self.turns.append((name, n))
            parts = [
                self.operand(*shape, dtype, loads) for shape in ((k, m) if ta else (m, k), (w, k) if tb else (k, w))
            ]
            self.turns.pop()
            for line in loads:
                (allocs if "alloc" in line.text else body).append(line)
            lines += allocs
            self.turns.append((name, n))
            body = together([*body, self.multiply(*parts, c, ta, tb, n if n > 1 else 2)])
            self.turns.pop()
        else:
            self.turns.append((name, n))
            loads, budget = [], self.budget
            self.budget = 2
            made = self.load(), self.reduction() if self.chance(0.5) else self.nest()
            self.budget = budget
            self.turns.pop()
            for line in [x for part in made for x in part]:
                (lines if "alloc" in line.text else body).append(line)
        self.tiles = [t for t in self.tiles if t in before or t.scope == "fragment"]
        if any(t.bound * n > EXACT[t.dtype] for t in self.tiles if t.memory is t):
            raise TooLarge
        loop = f"T.Pipelined({n}, num_stages={stages})"
        return [*lines, Line(f"for {name} in {loop}:", f"for {name} in range({n}):", body)]


def together(lines):
    """Lines as one, none of which can be dropped alone: tiles hold nothing before."""
    return [Line(*("\n".join(each) for each in zip(*((line.text, line.reference) for line in lines), strict=True)))]


class TooLarge(Exception):
    """Values that a type may not have exactly."""


def generated(seed, name=None):
    """The program of a seed."""
    for number in range(100):
        with contextlib.suppress(TooLarge):
            return Tiles(seed + number * 2**40, name or f"p{seed}").generate()
    raise TooLarge
