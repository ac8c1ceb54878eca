# SPDX-License-Identifier: Apache-2.0
"""Products of warpgroups as CUDA C++: one function for each shape and number of steps that a program uses.

There are too many shapes to write them down in a header. How operands lie in shared memory is a template argument
(`Walk` of csrc/wgmma.h), so that of a descriptor only the start is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch_tile.codegen.wgmma_steps import Product
from torch_tile.intrinsics.wgmma import M, accumulators, shape_of, walks_of

_TYPES = {"f32": "float", "f16": "f16", "s32": "int"}  # of accumulators
_OPERANDS = "const void* a, const void* b, int a_step, int b_step, bool keep"
_EACH_LINE = 16  # operands


def wgmma_functions(products: Iterable[Product]) -> str:
    """The functions that products call, in the order of their names; empty if there are none."""
    texts = {product.name: _function(product) for product in products}
    if not texts:
        return ""
    return "\nnamespace tile {\n" + "".join(texts[name] for name in sorted(texts)) + "}  // namespace tile\n"


def _function(product: Product) -> str:
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
        *_quoted("{", [f"%{i}" for i in range(count)], "}, "),
    ]
    if product.count == 1:
        left = f"{{{_numbers(count, 4)}}}" if in_registers else f"%{count}"
        text = [*_first(keep, "keep"), *instruction, f'"{left}, %{keep - 1}, keep{options};\\n"']
    else:
        text = [*_first(keep, "keep, more"), *_steps(product, count, keep, moves)]
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


def _first(keep: int, predicates: str) -> list[str]:
    """The asm's beginning: whether the first instruction adds to the accumulators, operand number `keep`."""
    return [r'"{\n"', rf'".reg .pred {predicates};\n"', rf'"setp.ne.b32 keep, %{keep}, 0;\n"']


def _macro(instruction: Sequence[str], options: str) -> list[str]:
    """One instruction as a macro of its operands."""
    *lines, last = instruction
    return [
        "#define TILE_STEP(a, b, keep) \\",
        *(f"      {line} \\" for line in lines),
        rf'      {last} a ", " b ", " keep "{options};\n"',
    ]


def _steps(product: Product, count: int, keep: int, moves: int) -> Iterator[str]:
    """The instructions of a product, by the numbers of their operands: descriptors move, registers of A follow."""
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
    return ", ".join(f"%{first + i}" for i in range(count))


def _rows(items: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Items joined, some in each line, and whether a line is the last."""
    for start in range(0, len(items), _EACH_LINE):
        yield ", ".join(items[start : start + _EACH_LINE]), start + _EACH_LINE >= len(items)


def _quoted(opening: str, items: Sequence[str], closing: str) -> Iterator[str]:
    """Items as pieces of a string literal."""
    for text, is_last in _rows(items):
        yield f'"{opening}{text}{closing if is_last else ", "}"'
        opening = ""


def _listed(items: Sequence[str]) -> Iterator[str]:
    """Items as operands after the first colon."""
    opening = ": "
    for text, is_last in _rows(items):
        yield f"      {opening}{text}{'' if is_last else ','}"
        opening = "  "
