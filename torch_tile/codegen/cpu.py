# SPDX-License-Identifier: Apache-2.0
"""Print a FLAT program as C++ for the CPU: a function per kernel for one block, and an entry over all blocks.

The entry runs the blocks under OpenMP. Small on-chip buffers are arrays on the stack. Large ones lie in an arena that
each thread allocates once per launch.
"""

from __future__ import annotations

from torch_tile.codegen.c_stmt import Statements, advance
from torch_tile.codegen.c_text import PREFIX, Names, Text, foreign_lines, held, is_small, reads_memory, storage
from torch_tile.codegen.tensors import disjoint_tensors, tensors_of
from torch_tile.compiler.sources import ENTRY, CpuSource
from torch_tile.diagnostics.errors import InternalError, Span
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import COMPARISONS, Address, Binary, Call, Const, Expr, Load, Unary, Var
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Node, children, contains, find, symbols, walk
from torch_tile.ir.stmt import (
    Alloc,
    Assert,
    Block,
    Do,
    For,
    If,
    Kernel,
    Let,
    LoopKind,
    Print,
    Program,
    Stmt,
    Store,
    While,
    dimensions,
)  # fmt: skip
from torch_tile.ir.widths import SIGNED, WRAPPING, WRAPS, IndexBits

HEADERS = ("cpu_types.h", "cpu_math.h", "cpu_reduce.h", "cpu_gemm.h", "cpu_atomic.h")
STACK_LIMIT = 16 * 1024  # bytes of one buffer on the stack
STACK_TOTAL = 48 * 1024  # bytes of all of them: threads may have no more than 128 KiB for everything
ALIGN = 64
# Names of the entry's own variables.
AXES = ("grid_x", "grid_y", "grid_z")
FRAME = (*AXES, "buffers", "numbers", "reals", "failed", "blocks", "chunk", "arena", "block", "code")


def emit_cpu(program: Program, sizes: list[Var] | None = None) -> CpuSource:
    """Print a FLAT program as C++. The entry takes pointers (params, outputs, workspaces), and 64-bit numbers."""
    return _Cpu(program, dimensions(program) if sizes is None else sizes).run()


class _Cpu(Statements):
    """Write the C++ of a program for the CPU."""

    language = "C++"

    def __init__(self, program: Program, sizes: list[Var]):
        super().__init__()
        self.program, self.sizes = program, sizes
        functions = [ENTRY, *(f"block_{n}" for n in range(len(program.kernels)))]
        self.names = Names(reserved=(*functions, *FRAME))
        self.text = Text(self.names)
        self.asserts: list[tuple[str, Span | None]] = []
        self.prints = contains(program, Print)
        self.nodes = [list(walk(kernel.body)) for kernel in program.kernels]
        self.buffers = tensors_of(program)
        self.scalars = [p for p in program.params if isinstance(p, Var)]

    def run(self) -> CpuSource:
        """Return the whole text."""
        if _computes_numbers(self.program) or _leaves_64_bits(self.program):
            self.line(WRAPS)
        for header in ("<stdio.h>",) if self.prints else ():
            self.line(f"#include {header}")
        self.line("#include <stdlib.h>")
        for header in HEADERS:
            self.line(f'#include "{header}"')
        for text in foreign_lines(self.nodes, is_cuda=False):
            self.lines.append(text)
        symbols: list[Buffer | Var] = [*self.buffers, *self.sizes, *self.scalars]
        for symbol in symbols:
            self.names.of(symbol)
        arenas = [self.block_function(n, kernel) for n, kernel in enumerate(self.program.kernels)]
        self.entry(arenas)
        apart = disjoint_tensors(self.buffers, self.nodes)
        return CpuSource("\n".join(self.lines) + "\n", tuple(self.asserts), apart)

    # -- functions -----------------------------------------------------------------------------------------------------
    def arguments(self, typed: bool) -> list[str]:
        """Return buffers, sizes and scalars, as declared or as passed on."""
        names = self.names
        found = [f"{storage(b.dtype)}* {names.of(b)}" if typed else names.of(b) for b in self.buffers]
        numbers = [*self.sizes, *self.scalars]
        return found + [f"{scalar_type(v)} {names.of(v)}" if typed else names.of(v) for v in numbers]

    def block_function(self, number: int, kernel: Kernel) -> int:
        """Print the function that runs one block; return its bytes of arena."""
        offsets, total = place_tiles(kernel)
        outside = set(self.names.taken)
        blocks = [f"int64_t {self.names.of(v)}" for v in kernel.blocks]
        self.line("")
        self.open(
            f"static int64_t block_{number}({', '.join([*self.arguments(True), 'char* arena', *blocks])})", kernel.span
        )
        for buffer, offset in offsets:
            kind = storage(buffer.dtype)
            self.line(
                f"{kind}* const {self.names.of(buffer)} = ({kind}*)__builtin_assume_aligned(arena + {offset}, {ALIGN});"
            )
        self.arena = IdSet(b for b, _ in offsets)
        self.body(kernel.body)
        self.line("return 0;")
        self.close()
        self.names.taken = outside
        return total

    def entry(self, arenas: list[int]) -> None:
        """Write the entry function that unpacks the arguments."""
        self.line("")
        self.open(f'extern "C" int64_t {ENTRY}(void* const* buffers, const int64_t* numbers)')
        for n, buffer in enumerate(self.buffers):
            kind = storage(buffer.dtype)
            self.line(f"{kind}* {self.names.of(buffer)} = ({kind}*)buffers[{n}];")
        if any(v.dtype.is_float for v in self.scalars):
            self.line("const double* reals = (const double*)numbers;")
        for n, var in enumerate((*self.sizes, *self.scalars)):
            self.line(f"{scalar_type(var)} {self.names.of(var)} = {scalar_value(var, n)};")
        self.line("int64_t failed = 0;")
        for number, (kernel, arena) in enumerate(zip(self.program.kernels, arenas, strict=True)):
            self.launch(number, kernel, arena)
        self.line("return 0;")
        self.close()

    def launch(self, number: int, kernel: Kernel, arena: int) -> None:
        """Print the loop over all blocks of one kernel, divided among the threads."""
        self.open(span=kernel.span)
        axes = AXES[: len(kernel.grid)]
        for axis, extent in zip(axes, kernel.grid, strict=True):
            self.line(f"const int64_t {axis} = {self.text.index(extent)};")
        self.line(f"const int64_t blocks = {' * '.join(axes)};")
        self.line("const int64_t chunk = blocks / 256 + 1;")
        self.line("#pragma omp parallel if (blocks > 1)")
        self.open()
        self.line(f"char* arena = {f'(char*)aligned_alloc({ALIGN}, {arena})' if arena else 'nullptr'};")
        if arena:
            self.line("if (!arena) __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);")
        self.line("#pragma omp for schedule(dynamic, chunk)")
        self.open("for (int64_t block = 0; block < blocks; ++block)")
        if arena:
            self.line("if (!arena) continue;")
        rest, indices = "block", []
        for axis in axes[:-1]:
            indices.append(f"{rest} % {axis}")
            rest = f"{rest} / {axis}" if rest == "block" else f"({rest}) / {axis}"
        arguments = ", ".join([*self.arguments(False), "arena", *indices, rest])
        self.line(f"int64_t code = block_{number}({arguments});")
        self.line("if (code) __atomic_store_n(&failed, code, __ATOMIC_RELAXED);")
        self.close()
        if arena:
            self.line("free(arena);")
        self.close()
        self.line("if (failed) return failed;")
        self.close()

    # -- statements ----------------------------------------------------------------------------------------------------
    def visit_For(self, loop: For) -> None:
        stop = self.text.index(loop.stops[0], above=8)
        if reads_memory(loop.stops[0]):
            stop, bound = self.names.of(Var("stop", dt.int64)), self.text.index(loop.stops[0])
            self.line(f"const int64_t {stop} = {bound};", loop.span)
        var = self.names.of(loop.vars[0])
        if loop.kind is LoopKind.VECTOR and all(
            isinstance(s, Store | Let | If | Block | Alloc) for s in find(loop.body, Stmt)
        ):
            self.line("#pragma omp simd")
        elif loop.kind is LoopKind.UNROLLED:
            self.line("#pragma GCC unroll 16")
        start = self.text.index(loop.starts[0])
        leaves = loop.stops[0].dtype.bits == 64 and not isinstance(loop.stops[0], Const)
        advanced = advance("int64_t", var, stop, loop.step, leaves)
        self.open(f"for (int64_t {var} = {start}; {var} < {stop}; {advanced})", loop.span)
        if self.text.is_natural(loop.starts[0]):
            self.text.natural.add(loop.vars[0])
        self.body(loop.body)
        self.close()
        self.names.release(loop.vars[0])

    def visit_Let(self, let: Let) -> None:
        kind = held(let.var.dtype)
        if let.var.dtype.is_integer and self.text.is_index(let.value):
            kind = "int64_t"
            self.text.index_names.add(let.var)
        kind, value = self.text.named(let) or (kind, self.text.value(let.value))
        self.line(f"const {kind} {self.names.of(let.var)} = {value};", let.span)

    def visit_Alloc(self, node: Alloc) -> None:
        buffer = node.buffer
        if buffer in self.arena:
            return
        if buffer.scope == "var":
            self.variable(node)
        elif buffer.scope == "global":
            self.tensor(node)
        else:
            self.local_array(node, ALIGN)

    def visit_Do(self, node: Do) -> None:
        call = node.call
        if not isinstance(call, Call):
            raise InternalError("only calls can be statements", node.span)
        if call.name == "cpu_gemm":
            self.line(self._gemm(call), node.span)
        else:
            self.line(f"{self.text.update(call) if call.name == 'atomic' else self.text.value(call)};", node.span)

    def _gemm(self, call: Call) -> str:
        """Write the call of the matrix product."""
        types = [a.buffer.dtype for a in call.args if isinstance(a, Address)]
        flags = ["true" if option else "false" for option in call.options]
        template = ", ".join([*map(storage, types), *flags])
        args = ", ".join(self.text.value(a) if isinstance(a, Address) else self.text.index(a) for a in call.args)
        return f"tile::gemm<{template}>({args});"

    def visit_Assert(self, node: Assert) -> None:
        self.asserts.append((node.message, node.span))
        self.line(f"if (!{self.text.value(node.condition, above=PREFIX)}) return {len(self.asserts)};", node.span)

    def visit_Print(self, node: Print) -> None:
        self.line(f"{self.text.print_call(node)} fflush(stdout);", node.span)


def scalar_type(var: Var) -> str:
    """Return the C++ type of a size or scalar parameter; signed ones are index values (see `Text.is_index`)."""
    return "int64_t" if var.role == "dim" or var.dtype in SIGNED else held(var.dtype)


def scalar_value(var: Var, position: int) -> str:
    """Return the text of a size or scalar parameter among the entry's numbers."""
    if not var.dtype.is_float:
        return f"({scalar_type(var)})numbers[{position}]"
    text = f"({held(var.dtype)})reals[{position}]"
    return f"tile::rounded<{storage(var.dtype)}>({text})" if is_small(var.dtype) else text


def place_tiles(kernel: Kernel) -> tuple[list[tuple[Buffer, int]], int]:
    """Return offsets of the large on-chip buffers in the arena, and its size in bytes."""
    offset = stack = 0
    placed = []
    for node in walk(kernel.body):
        if isinstance(node, Alloc) and node.buffer.scope not in ("var", "global"):
            size = node.buffer.static_shape
            count = size[0] if size else 0
            amount = count * node.buffer.dtype.itemsize
            if amount <= STACK_LIMIT and stack + amount <= STACK_TOTAL:
                stack += amount
            else:
                placed.append((node.buffer, offset))
                offset += -(-amount // ALIGN) * ALIGN
    return placed, offset


def _computes_numbers(program: Program) -> bool:
    """Return whether signed elements are computed outside of indices: they wrap, which is undefined in C++.

    Values of stores count, and conditions, arguments of calls and names that enter them. Numbers that are compared are
    computed in 64 bits, where they do not wrap.
    """
    named: dict[Var, Expr] = {}
    elements: set[Var] = set()  # names of what is computed from elements
    for let in find(program, Let):
        named[let.var] = let.value
        if _reads(let.value, elements):
            elements.add(let.var)
    waiting: list[Node] = []
    for node in walk(program):
        if isinstance(node, Store | Print) and node.value is not None:
            waiting.append(node.value)
        elif isinstance(node, If | While | Assert):
            waiting.append(node.condition)
        elif isinstance(node, Do):
            waiting.append(node.call)
        elif isinstance(node, Alloc) and node.init is not None:
            waiting.append(node.init)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Binary | Unary) and node.dtype in SIGNED and node.op in WRAPPING and _reads(node, elements):
            return True
        if isinstance(node, Var):
            waiting += [named.pop(node)] if node in named else []
        elif not isinstance(node, Load | Address | Region) and getattr(node, "op", "") not in COMPARISONS:
            waiting += children(node)
    return False


def _leaves_64_bits(program: Program) -> bool:
    """Return whether an index, or a number that is compared, may leave 64 bits: it wraps, too.

    C++ takes for granted that it does not. g++ 12 then drops the end of the loop around `(k * (2**63 - 1)) & 255`.
    """
    bits = IndexBits()
    for node in walk(program):
        if isinstance(node, Let) and node.value.dtype.is_integer:
            bits.known[node.var] = bits(node.value)
        if isinstance(node, Binary | Unary) and bits.leaves_64(node):
            return True
    return False


def _reads(node: Node, elements: set[Var]) -> bool:
    """Return whether a value is computed from elements, or from names of such values."""
    return contains(node, Load) or not elements.isdisjoint(symbols(node))
