# SPDX-License-Identifier: Apache-2.0
"""Print products of warpgroups as CUDA C++: one function for each shape and number of steps of a program.

There are too many shapes to write them down in a header. The strides of operands in shared memory are a template
argument (`Walk` of csrc/wgmma.h). Code computes only a descriptor's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_tile.codegen.lines import iterations_of
from torch_tile.intrinsics.wgmma import Descriptor, M, a_registers, accumulators, product_name, shape_of, walks_of
from torch_tile.ir.arith_util import Substitute, evaluate, terms_of
from torch_tile.ir.expr import Address, Call, Const, Expr, Var, const
from torch_tile.ir.node import rebuilt, symbols
from torch_tile.ir.simplify import is_literal, simplify
from torch_tile.ir.stmt import Do, For

_TYPES = {"f32": "float", "f16": "f16", "s32": "int"}  # of accumulators
_OPERANDS = "const void* a, const void* b, int a_step, int b_step, bool keep"
_EACH_LINE = 16  # operands


def wgmma_functions(products: Iterable[Product]) -> str:
    """Write the functions that products call, in the order of their names; empty if there are none."""
    texts = {product.name: _function(product) for product in products}
    if not texts:
        return ""
    return "\nnamespace tile {\n" + "".join(texts[name] for name in sorted(texts)) + "}  // namespace tile\n"


def _function(product: Product) -> str:
    """Print the C++ function of one product."""
    call = product.call
    n, k, a_type, b_type, d_type = shape_of(call)
    in_registers = walks_of(call)[0] is None
    shared = "B" if in_registers else "AB"  # operands
    packed = 2 if d_type == "f16" else 1  # elements of the accumulator in one register
    count, letter = accumulators(call) // packed, "f" if d_type == "f32" else "r"
    a = [f'"r"(x[{i}])' for i in range(4 * product.count)] if in_registers else ['"l"(A::from(a, a_step))']
    inputs = [*a, '"l"(B::from(b, b_step))', '"r"(int(keep))']
    keep = count + len(a) + 1
    options = ""
    if letter == "f" or packed == 2:  # a negated operand there is none of
        options = ", 1, 1"
    if k == 16:  # 16-bit types say which way memory runs
        options += "".join(f", %{count + len(inputs) + i}" for i in range(len(shared)))
        inputs += [f'"n"({operand}::is_across)' for operand in shared]
    moves = count + len(inputs)  # the first of the numbers by which steps move operands
    inputs += [f'"n"({operand}::step({i}))' for i in range(1, product.count) for operand in shared]
    instruction = [
        f'"wgmma.mma_async.sync.aligned.m{M}n{n}k{k}.{d_type}.{a_type}.{b_type} "',
        *_braced([f"%{i}" for i in range(count)]),
    ]
    if product.count == 1:
        left = f"{{{_numbers(count, 4)}}}" if in_registers else f"%{count}"
        text = [*_first_lines(keep, "keep"), *instruction, f'"{left}, %{keep - 1}, keep{options};\\n"']
    else:
        text = [*_first_lines(keep, "keep, more"), *_steps(product, count, keep, moves)]
    lines = [
        f"template <{', '.join(f'class {operand}' for operand in shared)}>",
        f"TILE_DEVICE void {product.name}({_TYPES[d_type]}* d, {_OPERANDS}) {{",
        *(["  const unsigned* x = static_cast<const unsigned*>(a);"] if in_registers else []),
        *(["  unsigned* y = reinterpret_cast<unsigned*>(d);"] if packed == 2 else []),
        *(_macro(instruction, options) if product.count > 1 else []),
        "  asm volatile(",
        *(f"      {line}" for line in text),
        '      "}"',
        *_listed([f'"+{letter}"({"d" if packed == 1 else "y"}[{i}])' for i in range(count)]),
        f"      : {', '.join(inputs)});",
        *(["#undef TILE_STEP"] if product.count > 1 else []),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _first_lines(keep: int, predicates: str) -> list[str]:
    """Print the first lines of the asm: a predicate from operand `keep` makes the first wgmma add to its sums."""
    return [r'"{\n"', rf'".reg .pred {predicates};\n"', rf'"setp.ne.b32 keep, %{keep}, 0;\n"']


def _macro(instruction: Sequence[str], options: str) -> list[str]:
    """Print one instruction as a macro of its operands."""
    *lines, last = instruction
    return [
        "#define TILE_STEP(a, b, keep) \\",
        *(f"      {line} \\" for line in lines),
        rf'      {last} a ", " b ", " keep "{options};\n"',
    ]


def _steps(product: Product, count: int, keep: int, moves: int) -> Iterator[str]:
    """Print the instructions of a product, by operand numbers: descriptors move, registers of A follow."""
    in_registers = walks_of(product.call)[0] is None
    yield r'".reg .b64 x, y;\n"'
    yield rf'"setp.eq.b32 more, %{keep}, %{keep};\n"'
    for i in range(product.count):
        a, b = f"%{count}", f"%{keep - 1}"
        if i:
            move = moves + (i - 1) * (1 if in_registers else 2)
            if not in_registers:
                yield rf'"add.s64 x, {a}, %{move};\n"'
                move += 1
            yield rf'"add.s64 y, {b}, %{move};\n"'
            a, b = "x", "y"
        if in_registers:
            a = f"{{{_numbers(count + 4 * i, 4)}}}"
        yield f'TILE_STEP("{a}", "{b}", "{"more" if i else "keep"}")'


def _numbers(first: int, count: int) -> str:
    """Write a list of assembly operands."""
    return ", ".join(f"%{first + i}" for i in range(count))


def _rows(items: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Join items, some in each line, and tell whether a line is the last."""
    for start in range(0, len(items), _EACH_LINE):
        yield ", ".join(items[start : start + _EACH_LINE]), start + _EACH_LINE >= len(items)


def _braced(items: Sequence[str]) -> Iterator[str]:
    """Write items in braces, as pieces of a string literal."""
    opening = "{"
    for text, is_last in _rows(items):
        yield f'"{opening}{text}' + ('}, "' if is_last else ', "')
        opening = ""


def _listed(items: Sequence[str]) -> Iterator[str]:
    """Write items as operands after the first colon."""
    opening = ": "
    for text, is_last in _rows(items):
        yield f"      {opening}{text}{'' if is_last else ','}"
        opening = "  "


# Loops along K that are one product of a warpgroup: their instructions become one `asm` of the generated C++. For the
# C++ compiler each `asm` reads and writes every accumulator, so many of them take long to compile.


@dataclass(frozen=True)
class Steps:
    """Starts of steps along K in an operand: step i is `i % run * near + i // run * far` bytes after the first one."""

    near: int = 0
    run: int = 1
    far: int = 0

    @staticmethod
    def of(starts: Sequence[int]) -> Steps | None:
        """Describe two or more `starts`, the first 0, as regular steps; None if they are not regular."""
        run = next((i for i, start in enumerate(starts) if start != i * starts[1]), len(starts))
        steps = Steps(starts[1], run, starts[run] if run < len(starts) else 0)
        return steps if all(start == steps.start(i) for i, start in enumerate(starts)) else None

    def start(self, i: int) -> int:
        """Return the start of step i, in bytes."""
        return i % self.run * self.near + i // self.run * self.far


@dataclass(frozen=True)
class Product:
    """`count` instructions along K, of which `call` is the first, and the steps of A and B in shared memory."""

    call: Call
    count: int = 1
    steps: tuple[Steps, Steps] = (Steps(), Steps())

    @property
    def name(self) -> str:
        """Name of the product's C++ function."""
        return product_name(self.call) + (f"_x{self.count}" if self.count > 1 else "")

    @property
    def spelling(self) -> str:
        """Return the product's C++ function with its walks as template arguments."""
        operands = zip(walks_of(self.call), self.steps, strict=True)
        return f"{self.name}<{', '.join(self._walk(walk, steps) for walk, steps in operands if walk is not None)}>"

    def _walk(self, walk: Descriptor, steps: Steps) -> str:
        """Write the template arguments of an operand's address walk."""
        numbers = [walk.swizzle, walk.leading, walk.stride, str(walk.across).lower()]
        if self.count > 1:
            numbers += [steps.near, steps.run, steps.far]
        return f"tile::Walk<{', '.join(map(str, numbers))}>"


def joined_product(loop: For) -> Product | None:
    """Join a loop's iterations as steps along K of one product; return None if the loop does anything else."""
    count, stmts = iterations_of(loop), loop.body.stmts
    call = stmts[0].call if len(stmts) == 1 and isinstance(stmts[0], Do) else None
    if not isinstance(call, Call) or call.name != "wgmma" or count is None or count < 2 or loop.step != 1:
        return None
    k, start, (d, a, b, a_step, b_step, keep) = loop.vars[0], loop.starts[0], call.args
    assert isinstance(a, Address)
    each = a_registers(call) if walks_of(call)[0] is None else 0
    starts = [_starts(x, k, count) for x in (a_step, b_step)]
    steps = [Steps.of(found) for found in starts if found is not None]
    if len(steps) < 2 or steps[0] is None or steps[1] is None or k in symbols(d) | symbols(b):
        return None
    if _starts(a.indices[0], k, count) != [i * each for i in range(count)]:
        return None
    keeps = (is_literal(_value_at(i, k, keep), True) for i in range(1, count))
    if not (isinstance(start, Const) and start.value == 0 and all(keeps)):
        return None
    first = rebuilt(a, indices=tuple(_value_at(0, k, i) for i in a.indices))
    args = d, first, b, *(_value_at(0, k, x) for x in (a_step, b_step, keep))
    return Product(rebuilt(call, args=args), count, (steps[0], steps[1]))


def _value_at(iteration: int, k: Var, expr: Expr) -> Expr:
    """Return an operand's value in one iteration."""
    found: Expr = Substitute({k: const(iteration, k.type)})(expr)
    return expr if found is expr else simplify(found)


def _starts(expr: Expr, k: Var, count: int) -> list[int] | None:
    """Return by how much the value exceeds its first value in each iteration; None if that is not known here."""
    terms = [term for term in terms_of("+", expr) if k in symbols(term)]
    try:
        values = [sum(int(evaluate(term, {k: i})) for term in terms) for i in range(count)]
    except (KeyError, ValueError):
        return None
    return [value - values[0] for value in values]
