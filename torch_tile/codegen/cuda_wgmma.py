# SPDX-License-Identifier: Apache-2.0
"""Products of warpgroups as CUDA C++: one function for each shape that a program uses, one instruction each.

There are too many shapes to write them down in a header. How operands lie in shared memory is a template argument
(`Walk` of csrc/wgmma.h), so that of a descriptor only the start is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..intrinsics.wgmma import M, accumulators, product_name, shape_of, walks_of
from ..ir.expr import Call

_TYPES = {"f32": "float", "f16": "f16", "s32": "int"}  # of accumulators
_OPERANDS = "const void* a, const void* b, int a_step, int b_step, bool keep"
_EACH_LINE = 16  # operands


def wgmma_functions(calls: Iterable[Call]) -> str:
    """The functions that `wgmma` calls of a program need, in the order of their names; empty if there are none."""
    texts = {product_name(call): _function(call) for call in calls}
    if not texts:
        return ""
    return "\nnamespace tile {\n" + "".join(texts[name] for name in sorted(texts)) + "}  // namespace tile\n"


def _function(call: Call) -> str:
    n, k, a_type, b_type, d_type = shape_of(call)
    in_registers = walks_of(call)[0] is None
    packed = 2 if d_type == "f16" else 1  # elements of the accumulator in one register
    count, letter = accumulators(call) // packed, "f" if d_type == "f32" else "r"
    d = "d" if packed == 1 else "reinterpret_cast<unsigned*>(d)"
    a = [f'"r"(x[{i}])' for i in range(4)] if in_registers else ['"l"(A::from(a, a_step))']
    inputs = [*a, '"l"(B::from(b, b_step))', '"r"(int(keep))']
    options = ""
    if letter == "f" or packed == 2:  # a negated operand there is none of
        options = ", 1, 1"
    if k == 16:  # 16-bit types say which way memory runs
        across = ['"n"(B::is_across)'] if in_registers else ['"n"(A::is_across)', '"n"(B::is_across)']
        options += "".join(f", %{count + len(inputs) + i}" for i in range(len(across)))
        inputs += across
    left = f"{{{_numbers(count, 4)}}}" if in_registers else f"%{count}"
    right = count + (4 if in_registers else 1)
    lines = [
        f"template <class {'' if in_registers else 'A, class '}B>",
        f"TILE_DEVICE void {product_name(call)}({_TYPES[d_type]}* d, {_OPERANDS}) {{",
        *([] if not in_registers else ["  const unsigned* x = static_cast<const unsigned*>(a);"]),
        *([] if packed == 1 else [f"  unsigned* y = {d};"]),
        "  asm volatile(",
        '      "{\\n"',
        '      ".reg .pred keep;\\n"',
        f'      "setp.ne.b32 keep, %{right + 1}, 0;\\n"',
        f'      "wgmma.mma_async.sync.aligned.m{M}n{n}k{k}.{d_type}.{a_type}.{b_type} "',
        *_quoted("{", [f"%{i}" for i in range(count)], "}, "),
        f'      "{left}, %{right}, keep{options};\\n"',
        '      "}"',
        *_listed([f'"+{letter}"({"d" if packed == 1 else "y"}[{i}])' for i in range(count)]),
        f"      : {', '.join(inputs)});",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _numbers(first: int, count: int) -> str:
    return ", ".join(f"%{first + i}" for i in range(count))


def _rows(items: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Items joined, some in each line, and whether a line is the last."""
    for start in range(0, len(items), _EACH_LINE):
        yield ", ".join(items[start : start + _EACH_LINE]), start + _EACH_LINE >= len(items)


def _quoted(opening: str, items: Sequence[str], closing: str) -> Iterator[str]:
    """Items as pieces of a string literal."""
    for text, is_last in _rows(items):
        yield f'      "{opening}{text}{closing if is_last else ", "}"'
        opening = ""


def _listed(items: Sequence[str]) -> Iterator[str]:
    """Items as operands after the first colon."""
    opening = ": "
    for text, is_last in _rows(items):
        yield f"      {opening}{text}{'' if is_last else ','}"
        opening = "  "
