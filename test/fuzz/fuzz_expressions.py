# SPDX-License-Identifier: Apache-2.0
"""Random expressions of the tile language, as text. Values stay bounded, on-chip indices inside."""

from dataclasses import dataclass

from fuzz_lines import Choices

FLOATS = {"float32": ["float32", "float32", "float64"], "float16": ["float16", "float32"],
          "bfloat16": ["bfloat16", "float32"],
          "float8": ["float8_e4m3fn", "float8_e5m2", "float16", "float32"]}  # fmt: skip
INTS = ["int32", "int32", "uint8", "int64", "uint32", "int16"]


@dataclass
class Tile:
    name: str
    shape: tuple
    dtype: str
    is_input: bool = False

    @property
    def is_float(self):
        return "float" in self.dtype


class Expressions(Choices):
    """What a random program can say with the names in scope: tiles, variables, named values, and index variables with
    their extents.
    """

    def float_type(self):
        return self.pick(*FLOATS[self.family])

    def index(self, outside=False):
        """An index expression; in [-9, 60] or so."""
        name = self.pick(*self.indices, "limit")
        if not outside or self.chance(0.3):
            return name
        number = self.random.randint(0, 9)
        return self.pick(
            f"{name} * {self.pick(1, 3, 4, 8, 16)}", f"{name} + {number}", f"{name} * 8 - {number}", str(2 * number)
        )

    def inside(self, size):
        """An index expression certainly in [0, size)."""
        name, extent = self.pick(*self.indices.items())
        if extent <= size and self.chance(0.8):
            return self.pick(name, name, name, f"{size - 1} - {name}", f"{name} // 2")
        return self.pick(f"{name} % {size}", str(self.random.randint(0, size - 1)), f"T.min({name}, {size - 1})")

    def load(self, test):
        """A tile element, a global element, or a variable that passes the test; None if there is none."""
        found = [t for t in (*self.tiles, *self.tiles, *self.inputs, *self.vars) if test(t)]
        if not found:
            return None
        one = self.pick(*found)
        if not one.shape:
            return one.name
        if one.is_input:
            return f"{one.name}[{', '.join(self.index(outside=True) for _ in one.shape)}]"
        return f"{one.name}[{', '.join(self.inside(n) for n in one.shape)}]"

    def number(self, depth=2):
        """A float expression and a bound of its magnitude."""
        if depth == 0 or self.chance(0.25):
            kind = self.pick("load", "load", "load", "const", "index", "let")
            if kind == "load":
                text = self.load(lambda t: t.is_float)
                if text is not None:
                    return text, 4.0
            lets = [n for n, is_float in self.lets if is_float]
            if kind == "let" and lets:
                return self.pick(*lets), 4.0
            if kind == "index":
                return f"T.cast({self.integer(0)} % 4, {self.float_type()!r})", 4.0
            value = self.pick(0.0, 0.5, 1.0, -1.5, 2.0)
            return f"T.{self.float_type()}({value})", 2.0
        (a, x), (b, y) = self.number(depth - 1), self.number(depth - 1)
        kind = self.pick("+", "-", "*", "max", "min", "select", "call", "cast", "neg", "/")
        if kind in "+-":
            return f"({a} {kind} {b})", x + y
        if kind == "*":
            return f"({a} * {b})", x * y
        if kind == "/":
            return f"({a} / (T.abs({b}) + 1.0))", x
        if kind in ("max", "min"):
            return f"T.{kind}({a}, {b})", max(x, y)
        if kind == "select":
            return f"T.if_then_else({self.condition()}, {a}, {b})", max(x, y)
        if kind == "cast":
            return f"T.cast({a}, {self.float_type()!r})", x
        if kind == "neg":
            return f"(-{a})", x
        call = self.pick(
            "T.tanh({})", "T.abs({})", "T.sigmoid({})", "T.exp2(T.min({}, 2.0))", "T.sqrt(T.abs({}))", "T.sin({})"
        )
        return call.format(a), max(x, 4.0)

    def bounded(self):
        """A float expression kept small."""
        text, size = self.number()
        return text if size <= 4 else f"T.max(T.min({text}, 4.0), -4.0)"

    def integer(self, depth=1):
        """An integer expression that stays far from the ends of int32."""
        if depth == 0 or self.chance(0.3):
            kind = self.pick("index", "index", "load", "let", "const")
            text = (
                self.load(lambda t: not t.is_float and t.dtype in ("int32", "uint8", "int16"))
                if kind == "load"
                else None
            )
            lets = [n for n, is_float in self.lets if not is_float]
            if text is not None:
                return f"(T.cast({text}, 'int32') % 50)"
            if kind == "let" and lets:
                return f"({self.pick(*lets)} % 100)"
            return self.index() if kind == "index" else str(self.random.randint(-7, 30))
        a, b = self.integer(depth - 1), self.integer(depth - 1)
        kind = self.pick("+", "-", "*", "//", "%", "min", "max", "&", "|", "^", "<<", ">>", "select")
        if kind in ("min", "max"):
            return f"T.{kind}({a}, {b})"
        if kind in ("//", "%"):
            return f"({a} {kind} {self.pick(1, 2, 3, 7, 8)})"
        if kind in ("<<", ">>"):
            return f"(T.int32({a}) {kind} {self.pick(0, 1, 3)})"
        if kind == "select":
            return f"T.if_then_else({self.condition()}, {a}, {b})"
        return f"(T.int32({a}) {kind} {b})"

    def value_for(self, tile):
        if tile.is_float:
            return self.bounded() if self.chance(0.85) else self.integer()
        if tile.dtype == "bool":
            return self.condition()
        if tile.dtype in ("uint8", "uint32", "int16") and self.chance(0.5):
            text = self.load(lambda t: t.dtype == tile.dtype)
            if text is not None:
                return f"({text} {self.pick('+', '-', '*')} T.{tile.dtype}({self.random.randint(0, 200)}))"
        return f"T.cast({self.integer()}, {tile.dtype!r})"

    def condition(self, exact=False, depth=1):
        """A condition on integers, or on inputs as they came."""
        if depth and self.chance(0.3):
            word = self.pick("and", "or")
            return f"({self.condition(exact, 0)} {word} {self.condition(exact, 0)})"
        source = self.load(lambda t: t.is_input and t.is_float) if self.chance(0.3) else None
        if source is not None:
            return f"{source} {self.pick('<', '>', '>=')} {self.pick(0.0, 0.5, -0.25)}"
        return f"{self.integer()} {self.pick('<', '<', '<=', '==', '!=', '>')} {self.integer(0)}"
