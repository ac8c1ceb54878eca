# SPDX-License-Identifier: Apache-2.0
"""Print statements of a FLAT kernel as CUDA C++: the code of one thread, line by line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from torch_tile.codegen.c_stmt import Statements, advance
from torch_tile.codegen.c_text import PREFIX, Names, is_small, reads_memory, storage, string
from torch_tile.codegen.cuda_text import INT, CudaText, field_pair, int_type, is_entry
from torch_tile.codegen.cuda_wgmma import Product, joined_product
from torch_tile.codegen.lines import pragma
from torch_tile.diagnostics.errors import InternalError, Span
from torch_tile.hardware import VECTOR_BYTES, WARPGROUP, registers_at_start
from torch_tile.intrinsics.memory import reads_by
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.bits import reinterpret
from torch_tile.ir.bounds import Interval, dtype_interval
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Address, Binary, Call, Cast, Const, Expr, Load, Var, const
from torch_tile.ir.node import contains, equal, find
from torch_tile.ir.simplify import divides_by_size, is_below, simplify
from torch_tile.ir.stmt import Alloc, Assert, Block, Do, For, If, Kernel, Let, Print, Role, Store  # fmt: skip


class CudaStatements(Statements):
    """Collect the lines of one function; `shared` is the name of the block's shared memory."""

    language = "CUDA"
    text: CudaText
    names: Names
    shared: str
    thread: Var | None
    threads: int
    share: int

    def __init__(self, names: Names, shared: str, kernel: Kernel):
        super().__init__()
        self.names, self.shared = names, shared
        self.thread, self.threads = kernel.thread, math.prod(kernel.threads)
        self.share = registers_at_start(self.threads, kernel.min_blocks)
        self.registers: dict[int, int] = {}  # of each thread, by warpgroups that do not hold their share
        self.text = CudaText(names)
        self.products: list[Product] = []  # of warpgroups

    def body(self, block: Block) -> None:
        """Print all statements of a block."""
        for kind, stmts in groupby(block.stmts, type):
            if kind is Role:
                self.roles(whole_warpgroups([s for s in stmts if isinstance(s, Role)]))
                continue
            for stmt in stmts:
                self.statement(stmt)

    def roles(self, roles: Sequence[Role]) -> None:
        """Print consecutive roles, which run concurrently, as branches on the thread's index, uniform in each warp."""
        thread = self.thread
        assert thread is not None
        for number, role in enumerate(roles):
            test = condition(role, roles[:number], self.threads, self.names.of(thread))
            branch = f"if ({test})" if test else ""
            if number == 0:
                self.open(branch, role.span)
            else:
                self.otherwise(branch)
            if call := registers_call(role, self.registers.get(role.first // WARPGROUP, self.share)):
                self.text.headers.add("sync.h")
                self.line(call)
            if role.registers:
                groups = range(role.first // WARPGROUP, (role.first + role.count) // WARPGROUP)
                self.registers |= dict.fromkeys(groups, role.registers)
            self.within(thread, Interval(role.first, role.first + role.count - 1))
            self.body(role.body)
            self.within(thread, Interval(0, self.threads - 1))
        self.close()

    def within(self, var: Var, interval: Interval) -> None:
        """Record that `var` lies in `interval` from here on, whatever was known of `var`."""
        self.text.bind(var, interval)
        self.text.intervals.clear()

    def product(self, product: Product, span: Span | None) -> None:
        """Print one product of a warpgroup."""
        self.products.append(product)
        self.text.headers.add("wgmma.h")
        self.line(f"tile::{product.spelling}({self.text.arguments(product.call)});", span)

    def visit_For(self, loop: For) -> None:
        """Write a loop."""
        if (product := joined_product(loop)) is not None:
            self.product(product, loop.span)
            return
        var, start, stop = loop.vars[0], loop.starts[0], loop.stops[0]
        low, high = self.text.interval(start).low, self.text.interval(stop).high
        self.text.bind_loop(var, start, stop)
        paired, coded = paired_store(loop, self.text), coded_store(loop)
        last, bound = self.text.index(stop, above=8), self.text.index(stop)
        if reads_memory(stop):
            wide = stop.dtype != dt.int32 or self.text.is_long(stop, True)
            last = self.names.of(Var("stop", dt.int64))
            self.line(f"const {'int64_t' if wide else 'int'} {last} = {bound};", loop.span)
            bound = last
        if (unrolled := pragma(loop)) is not None:
            self.line(unrolled)
        kind = "int" if Interval(low, high).within(INT) and var.dtype == dt.int32 else "int64_t"
        first = self.text.index(start)
        if kind == "int" and self.text.is_long(start, True):  # beyond `stop` it does not matter where
            first = f"(int)tile::min<int64_t>({first}, {bound})"
        step, name = 4 if coded else 2 if paired else loop.step, self.names.of(var)
        leaves = not Interval(low, high + step - 1).within(INT if kind == "int" else dtype_interval(dt.int64))
        runs = f"{name} < {last}"
        divides = unrolled is None and isinstance(stop, Binary) and divides_by_size(stop) and not reads_memory(stop)
        if divides and self.text.interval(stop.b).low > 0:  # type: ignore[attr-defined]  # else it might never end
            runs = self.text.value(is_below(var, stop, low >= 0))
        self.open(f"for ({kind} {name} = {first}; {runs}; {advance(kind, name, last, step, leaves)})", loop.span)
        if coded:
            places = ", ".join(f"&{self.text.element(x.buffer, x.indices)}" for x in coded)
            self.line(f"tile::store_codes({places});", coded[0].span)
        elif paired:
            self.pair(*paired, loop)
        else:
            self.body(loop.body)
        self.close()
        self.names.release(var)

    def pair(self, store: Store, second: Expr, loop: For) -> None:
        """Print two neighbours narrowed or computed by one instruction, or already widened together."""
        where, var = self.text.element(store.buffer, store.indices), loop.vars[0]

        def order(a: Expr, b: Expr) -> bool | None:
            """Return which of two accesses is the lower neighbour."""
            a, b = (Binary("%", x, const(2, x.dtype)) for x in (a, b))
            return next((bool(x) for x in (0, 1) if _is(a, x, var) and _is(b, 1 - x, var)), None)

        fields = field_pair(store.value, second, store.buffer.dtype, order, self.text)
        if fields is not None:
            self.line(f"tile::store_pair(&{where}, {fields});", store.span)
            return
        if (found := _positive_pair(store, second)) is not None:
            values = ", ".join(self.text.value(x) for x in found)
            self.line(f"tile::narrow_positive_pair(&{where}, {values});", store.span)
            return
        if (found := _float8_pair(store, second)) is not None:
            places = ", ".join(self.text.index(x.indices[0]) for x in found)
            self.line(f"tile::widen_pair(&{where}, {self.names.of(found[0].buffer)}, {places});", store.span)
            return
        if store.buffer.dtype in (dt.float16, dt.bfloat16):
            word = _PairedOperations(store.buffer.dtype, var, self.text).operation(store.value, second)
            if word is not None:
                self.line(f"tile::store_pair(&{where}, {word});", store.span)
                return
        first, other = (self.text.unrounded(value, store.buffer.dtype) for value in (store.value, second))
        self.line(f"tile::narrow_pair(&{where}, {first}, {other});", store.span)

    def visit_If(self, node: If) -> None:
        """Write a branch."""
        read = guarded_read(node)
        if read is not None:
            dst, src = (self.text.value(a) for a in read.args)
            self.text.headers.add("memory.h")
            inside = self.text.value(node.condition)
            self.line(f"tile::vector_read<{reads_by(read)}>({dst}, {src}, {inside});", node.span)
            return
        super().visit_If(node)

    def visit_Let(self, let: Let) -> None:
        """Write a name."""
        value, text = let.value, self.text
        long = text.is_long(value, False)
        if text.is_from_indices(value):
            text.index_names.add(let.var)
        if value.dtype.is_integer:
            text.bits.known[let.var] = text.bits(value)
            text.bind(let.var, dtype_interval(value.dtype) if text.wraps(value) else text.interval(value))
            if text.is_given(value):
                text.given.add(let.var)
        kind, value_text = text.named(let) or (int_type(value.dtype, long), text.value(value))
        self.line(f"const {kind} {self.names.of(let.var)} = {value_text};", let.span)

    def visit_Alloc(self, node: Alloc) -> None:
        """Declare a local array or variable."""
        buffer = node.buffer
        if buffer.scope == "var":
            self.variable(node)
        elif buffer.scope == "global":
            self.tensor(node)
        elif buffer.scope in ("shared", "barrier"):
            name, kind = self.names.of(buffer), storage(buffer.dtype)
            if buffer.offset is None:
                raise InternalError(f"`{buffer.name}` has no place in shared memory", node.span)
            self.line(f"{kind}* const {name} = reinterpret_cast<{kind}*>({self.shared} + {buffer.offset});", node.span)
        else:
            self.local_array(node, VECTOR_BYTES)

    def visit_Do(self, node: Do) -> None:
        """Write a call for its effect."""
        if not isinstance(node.call, Call):
            raise InternalError("only calls can be statements", node.span)
        if node.call.name == "wgmma":
            self.product(Product(node.call), node.span)
            return
        self.line(f"{self.text.call(node.call)};", node.span)

    def visit_Assert(self, node: Assert) -> None:
        """Write an assertion."""
        where = f"{node.span.place}: " if node.span else ""
        self.open(f"if (!{self.text.value(node.condition, above=PREFIX)})", node.span)
        self.line(f'printf("%s\\n", {string(f"{where}{node.message}")});')
        self.line("__trap();")
        self.close()

    def visit_Print(self, node: Print) -> None:
        """Write a print."""
        self.line(self.text.print_call(node), node.span)


def guarded_read(node: If) -> Call | None:
    """Return the wide global read that a branch guards, if its other side is 0. No memory gives its address."""
    if len(node.then.stmts) != 1 or len(node.otherwise.stmts) != 1:
        return None
    do, loop = node.then.stmts[0], node.otherwise.stmts[0]
    if not isinstance(do, Do) or not isinstance(do.call, Call) or do.call.name != "vector_copy":
        return None
    dst, src = do.call.args
    assert isinstance(dst, Address) and isinstance(src, Address)
    if src.buffer.scope != "global" or contains(src, Load) or not isinstance(loop, For):
        return None
    if len(loop.body.stmts) != 1 or not isinstance(loop.body.stmts[0], Store):
        return None
    store, count, var = loop.body.stmts[0], loop.stops[0], loop.vars[0]
    whole = isinstance(count, Const) and count.value * dst.buffer.dtype.itemsize == do.call.options[0]
    ahead = Binary("-", Binary("-", store.indices[0], dst.indices[0]), var)
    zero = isinstance(store.value, Const) and store.value.value == 0
    return do.call if whole and zero and store.buffer is dst.buffer and _is(ahead, 0) else None


def paired_store(loop: For, text: CudaText) -> tuple[Store, Expr] | None:
    """Match a loop that only fills neighbours of a local array of small floats: return its store, and the next value.

    One instruction narrows two such values. The first of each pair has an even place.
    """
    stmts = loop.body.stmts
    if len(stmts) != 1 or not isinstance(stmts[0], Store) or loop.step != 1:
        return None
    store, var = stmts[0], loop.vars[0]
    start, stop = loop.starts[0], loop.stops[0]
    if not is_small(store.buffer.dtype) or store.buffer.scope != "local":
        return None
    if not (isinstance(start, Const) and isinstance(stop, Const)) or start.value % 2 or stop.value % 2:
        return None
    index, value = store.indices[0], store.value
    moved = text.unchanged(value) is not None and not is_entry(value)
    own = (n for n in find(value, Load) if n.buffer is store.buffer)  # both are read before both are written
    if moved or not all(equal(simplify(n.indices[0]), simplify(index)) for n in own):
        return None
    step = Substitute({var: Binary("+", var, const(1, var.type))})
    if not _is(Binary("-", step(index), index), 1) or not _is(Binary("%", index, const(2, index.dtype)), 0, var):
        return None
    return store, step(value)


def coded_store(loop: For) -> tuple[Store, Load, Load] | None:
    """Match a loop that fills neighbours of a local float8 array by codes from pairs of a local float16 array.

    Return its store, and the first codes of two pairs. One permutation of bytes makes four such values. The first of
    four has a place divisible by four.
    """
    store = loop.body.stmts[0] if len(loop.body.stmts) == 1 else None
    if not isinstance(store, Store) or store.buffer.dtype != dt.float8_e4m3fn or store.buffer.scope != "local":
        return None
    value, var, (start, stop) = store.value, loop.vars[0], (loop.starts[0], loop.stops[0])
    value = value.a if isinstance(value, Cast) else value
    if not isinstance(value, Call) or value.name != "float8_of_code" or loop.step != 1:
        return None
    if not all(isinstance(x, Const) and x.value % 4 == 0 for x in (start, stop)):
        return None
    code = value.args[0].a if isinstance(value.args[0], Cast) else value.args[0]
    if not isinstance(code, Load) or code.buffer.dtype != dt.float16 or code.buffer.scope != "local":
        return None
    steps = [Substitute({var: Binary("+", var, const(k, var.type)) if k else var}) for k in range(4)]
    index, four = store.indices[0], Var("four", var.type, "loop")
    here = Substitute({var: Binary("*", four, const(4, var.type))})
    if not _is(here(Binary("%", index, const(4, index.dtype))), 0):
        return None
    if not all(_is(Binary("-", step(index), index), k) for k, step in enumerate(steps)):
        return None
    codes: list[Load] = [step(code) for step in steps]
    places = [here(x.indices[0]) for x in codes]
    for low, high in (places[:2], places[2:]):
        if not _is(Binary("%", low, const(2, low.dtype)), 0) or not _is(Binary("-", high, low), 1):
            return None
    return store, codes[0], codes[2]


def _positive_pair(store: Store, second: Expr) -> tuple[Expr, Expr] | None:
    """Return the two numbers whose `positive_half` a pair of float16 numbers is, else None."""
    low, high = (x.a if isinstance(x, Cast) else x for x in (store.value, second))
    if not isinstance(low, Call) or not isinstance(high, Call) or store.buffer.dtype != dt.float16:
        return None
    return (low.args[0], high.args[0]) if low.name == high.name == "positive_half" else None


def _float8_pair(store: Store, second: Expr) -> tuple[Load, Load] | None:
    """Return the two elements of a float8 array that a pair of float16 numbers is widened from, else None."""
    low, high = (x.a if isinstance(x, Cast) else x for x in (store.value, second))
    if store.buffer.dtype != dt.float16 or not (isinstance(low, Load) and isinstance(high, Load)):
        return None
    buffer, size = low.buffer, low.buffer.static_shape
    if high.buffer is not buffer or buffer.scope != "local" or buffer.dtype != dt.float8_e4m3fn:
        return None
    return (low, high) if size is not None and len(size) == 1 and size[0] % 4 == 0 else None


_OPERATIONS = {"*": "pair_product", "+": "pair_sum", "-": "pair_difference"}


class _PairedOperations:
    """Write two values of a 16-bit float type, each operation rounded, as one register: an operation takes both.

    The first value has the even place `var` of a loop.
    """

    def __init__(self, to: DType, var: Var, text: CudaText):
        self.to, self.var, self.text = to, var, text

    def operation(self, low: Expr, high: Expr) -> str | None:
        """Print the same sum, difference or product of both values; None for others."""
        low, high = (x.a if isinstance(x, Cast) and x.a.dtype == self.to else x for x in (low, high))
        if not (isinstance(low, Binary) and isinstance(high, Binary)) or low.op != high.op:
            return None
        if low.op not in _OPERATIONS or any(x.dtype != self.to for x in (low, low.a, low.b, high.a, high.b)):
            return None
        operands = f"{self.word(low.a, high.a)}, {self.word(low.b, high.b)}"
        return f"tile::{_OPERATIONS[low.op]}<{storage(self.to)}>({operands})"

    def word(self, low: Expr, high: Expr) -> str:
        """Print any two values."""
        if (found := self.operation(low, high)) is not None:
            return found
        if isinstance(low, Const) and equal(low, high):
            bits = reinterpret(const(dt.rounded(float(low.value), self.to), self.to), dt.uint16)
            assert isinstance(bits, Const)
            return f"0x{int(bits.value) * 0x10001:08x}u"
        if isinstance(low, Load) and isinstance(high, Load) and self.are_neighbours(low, high):
            return f"tile::pair_at(&{self.text.element(low.buffer, low.indices)})"
        first, second = self.text.unchanged(low), self.text.unchanged(high)
        if first is not None and second is not None:
            return f"tile::pair_of({first}, {second})"
        first, second = (self.text.unrounded(x, self.to) for x in (low, high))
        return f"tile::pair_narrowed<{storage(self.to)}>({first}, {second})"

    def are_neighbours(self, low: Load, high: Load) -> bool:
        """Return whether two elements of a local array lie in one word."""
        if low.buffer is not high.buffer or low.buffer.scope != "local" or len(low.indices) != 1:
            return False
        first, second = low.indices[0], high.indices[0]
        return _is(Binary("-", second, first), 1) and _is(Binary("%", first, const(2, first.dtype)), 0, self.var)


def _is(expr: Expr, wanted: int, even: Var | None = None) -> bool:
    """Return whether an integer expression equals a number, `even` being a variable known to be even."""
    if even is not None:
        half = Var("half", even.type, "loop")
        expr = Substitute({even: Binary("*", half, const(2, even.type))})(expr)
    found = simplify(expr)
    return isinstance(found, Const) and found.value == wanted


# Roles of warps as branches on the thread's index, and the registers that their threads have.


def condition(role: Role, before: Sequence[Role], threads: int, thread: str) -> str:
    """Return a C++ condition for one role among so many threads, after the roles `before`; empty if it always holds."""
    end = role.first + role.count
    if sum(r.count for r in before) + role.count == threads:
        return ""
    is_least = sum(r.count for r in before if r.first < role.first) == role.first
    is_greatest = sum(r.count for r in before if r.first >= end) == threads - end
    tests = ([] if is_least else [f"{thread} >= {role.first}"]) + ([] if is_greatest else [f"{thread} < {end}"])
    return " && ".join(tests)


def whole_warpgroups(roles: Sequence[Role]) -> list[Role]:
    """Merge the roles of each warpgroup into one: all warps of a warpgroup must move registers together."""
    found: list[Role] = []
    shared: dict[int, list[Role]] = {}  # by warpgroup
    for role in roles:
        if not role.registers or role.first % WARPGROUP == role.count % WARPGROUP == 0:
            found.append(role)
            continue
        shared.setdefault(role.first // WARPGROUP, []).append(role)
    for number, parts in shared.items():
        body = Block(tuple(replace(part, registers=0) for part in parts))
        found.append(replace(parts[0], first=WARPGROUP * number, count=WARPGROUP, body=body))
    return found


def registers_call(role: Role, held: int) -> str:
    """Return the C++ text that gives a role's threads their registers; "" if they hold as many."""
    if role.registers in (0, held):
        return ""
    return f"tile::set_registers<{role.registers}, {str(role.registers > held).lower()}>();"
