# SPDX-License-Identifier: Apache-2.0
"""Right operands of products: read where they lie if that gives the same, else copied, with zeros beyond the bounds."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import For, Stmt
from torch_tile.lowering.common.simplify import simplify_program
from torch_tile.lowering.cpu.lower_tile_ops import elide_staging, lower_tile_ops, split_parallel


def lowered(program):
    """With indices such as 0 + i simplified."""
    return simplify_program(lower_tile_ops(program))


def test_copy_converts(becomes):
    m = T.dynamic("m")

    @T.prim_func
    def before(x: T.Tensor((m, 8), "float16")):
        with T.Kernel(m) as b:
            tile = T.alloc_shared((8,), "float32")
            T.copy(x[b, 0:8], tile)
            T.copy(tile[2:6], x[b, 4])

    @T.prim_func
    def after(x: T.Tensor((m, 8), "float16")):
        with T.Kernel(m) as b:
            tile = T.alloc_shared((8,), "float32")
            for i in T.Parallel(8):
                tile[i] = T.cast(x[b, i], "float32")
            for i in T.Parallel(4):
                x[b, i + 4] = T.cast(tile[i + 2], "float16")

    becomes(lowered, before, after)


def test_fill_and_gemm(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((8, 4), "float16")
            b = T.alloc_shared((8, 4), "float16")
            c = T.alloc_fragment((4, 4), "float32")
            T.gemm(a, b, c, transpose_A=True, clear_accum=True)
            T.fill(x[1, :], 2)

    @T.prim_func
    def after(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((8, 4), "float16")
            b = T.alloc_shared((8, 4), "float16")
            c = T.alloc_fragment((4, 4), "float32")
            for i, j in T.Parallel(4, 4):
                c[i, j] = T.float32(0.0)
            where = [T.address_of(t[0, 0]) for t in (a, b, c)]
            T.evaluate(T.call("cpu_gemm", where[0], 4, where[1], 4, where[2], 4, 4, 4, 8, options=(True, False)))
            for i in T.Parallel(4):
                x[1, i] = T.float32(2.0)

    becomes(lowered, before, after)


def test_printed_regions(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            T.print(x[1:3, 2], msg="part")
            T.print(x[0, 0])

    @T.prim_func
    def after(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(2):
                T.print(x[i + 1, 2], msg="part x")
            T.print(x[0, 0])

    becomes(lowered, before, after)


def test_nothing_to_do(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                x[i] = x[i] + 1.0

    keeps(lower_tile_ops, kernel)


def test_roles_are_for_gpus():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=64) as _, T.role(0, 32):
            x[0] = 1.0

    with pytest.raises(TileError, match=r"T\.role is not supported on target cpu") as caught:
        lower_tile_ops(kernel.program)
    assert caught.value.code == "unsupported_on_target" and "T.role(0, 32)" in caught.value.span.source()


def test_every_statement_keeps_the_authors_line():
    @T.prim_func
    def kernel(x: T.Tensor((4, 4), "float32"), out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((4, 4), "float32")
            T.copy(x, tile)
            T.cumsum(tile, dim=1)
            T.reduce_sum(tile, out, dim=0)

    seen = set()
    for top in lower_tile_ops(kernel.program).kernels[0].body.stmts:
        names = {node.span.source().strip() for node in walk(top) if isinstance(node, Stmt)}
        assert len(names) == 1, names
        seen |= names
    assert [name.split("(")[0].split(" ")[-1] for name in sorted(seen)] == [
        "T.copy", "T.cumsum", "T.reduce_sum", "T.alloc_fragment"
    ]  # fmt: skip


def test_nest(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(4, 8):
                x[i, j] = x[i, j] * 2.0

    @T.prim_func
    def after(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(8):
                    x[i, j] = x[i, j] * 2.0

    becomes(split_parallel, before, after)


def test_a_loop_inside_makes_it_serial(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                for j in T.vectorized(8):
                    x[i, j] = 0.0

    @T.prim_func
    def after(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(8):
                    x[i, j] = 0.0

    becomes(split_parallel, before, after)


# The body of a loop over i < 8, with tiles x and y of 16 elements: what must run in order, and what need not.
ORDERED = {
    "sum into one place": "x[0] = x[0] + y[i]",
    "last one wins": "x[0] = y[i]",
    "last one wins, by name": "a = y[i]; x[0] = a",
    "reads what the one before wrote": "x[i + 1] = x[i] + 1.0",
    "reads the mirror image": "x[i] = x[7 - i]",
    "places meet": "x[i % 3] = y[i]",
    "places meet by division": "x[i // 2] = y[i]",
    "two writes overlap": "x[i] = 1.0; x[i + 1] = 2.0",
    "branches write one place": "T.device_assert(True)\n if i < 4:\n  x[0] = 1.0\n else:\n  x[0] = 2.0",
    "place from memory": "x[p[i]] = y[i]",
}
INDEPENDENT = {
    "elementwise": "x[i] = y[i] + x[i]",
    "shifted": "x[i + 3] = y[i]",
    "scaled": "x[2 * i + 1] = y[15 - i]",
    "from the end": "x[7 - i] = y[i]",
    "one value for one place": "x[0] = 3.0",
    "reads anywhere": "x[i] = y[i % 3] + y[i // 2]",
    "by name": "k = i + 2; a = y[k]; x[k] = a * a",
    "branches": "if i < 4:\n  x[i] = 1.0\n else:\n  x[i] = 2.0",
}


def kinds(body, loop, tmp_path):
    text = f"""
@T.prim_func
def kernel(p: T.Tensor((16,), "int32")):
    with T.Kernel(1) as _:
        x = T.alloc_shared((16,), "float32")
        y = T.alloc_shared((16,), "float32")
        for i in {loop}(8):
"""
    for line in body.replace("; ", "\n ").split("\n"):
        text += " " * 12 + line.removeprefix(" ").replace("  ", "    ") + "\n"
    path = tmp_path / "kernel.py"
    path.write_text(text.replace("            T.device_assert(True)\n", ""))
    space = {"T": T}
    exec(compile(path.read_text(), str(path), "exec"), space)
    program = split_parallel(space["kernel"].program)
    return [n.kind.value for n in walk(program) if isinstance(n, For)], program is space["kernel"].program


@pytest.mark.parametrize("loop", ["T.Parallel", "T.vectorized"])
@pytest.mark.parametrize("case", ORDERED)
def test_runs_in_order(case, loop, tmp_path):
    assert kinds(ORDERED[case], loop, tmp_path) == (["serial"], False)


@pytest.mark.parametrize("loop", ["T.Parallel", "T.vectorized"])
@pytest.mark.parametrize("case", INDEPENDENT)
def test_runs_as_a_vector(case, loop, tmp_path):
    assert kinds(INDEPENDENT[case], loop, tmp_path) == (["vectorized"], loop == "T.vectorized")


def test_only_the_variables_that_carry_are_ordered(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 8), "float32"), total: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(4, 8):
                total[j] += x[i, j]

    @T.prim_func
    def after(x: T.Tensor((4, 8), "float32"), total: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(8):
                    total[j] += x[i, j]

    becomes(split_parallel, before, after)


def test_effects_are_not_vectorised():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                T.print(x[i])
            for i in T.vectorized(4):
                T.device_assert(x[i] > 0)

    assert all(n.kind.value == "serial" for n in walk(split_parallel(kernel.program)) if isinstance(n, For))


def test_nothing_to_do_split_parallel(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(4):
                    x[i, j] = 0.0

    keeps(split_parallel, kernel)


def product(n, k, dtype="bfloat16", turned=True, columns=32, depth=32, b_type=None):
    """out[16, n] = a @ b by tiles of 16 x columns x depth."""
    shape, tile = ((n, k), (columns, depth)) if turned else ((k, n), (depth, columns))

    @T.prim_func
    def kernel(a: T.Tensor((16, k), dtype), b: b_type or T.Tensor(shape, dtype), out: T.Tensor((16, n), "float32")):
        with T.Kernel(T.ceildiv(n, columns)) as bx:
            left, right = T.alloc_shared((16, depth), dtype), T.alloc_shared(tile, dtype)
            sums = T.alloc_fragment((16, columns), "float32")
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(k, depth)):
                T.copy(a[0, step * depth], left)
                T.copy(b[bx * columns, step * depth] if turned else b[step * depth, bx * columns], right)
                T.gemm(left, right, sums, transpose_B=turned)
            T.copy(sums, out[0, bx * columns])

    return kernel


def test_what_lies_inside_is_read_in_place():
    @T.prim_func
    def before(b: T.Tensor((32, 32), "bfloat16"), out: T.Tensor((16, 32), "float32")):
        with T.Kernel(1) as _:
            left, right = T.alloc_shared((16, 32), "bfloat16"), T.alloc_shared((32, 32), "bfloat16")
            sums = T.alloc_fragment((16, 32), "float32")
            T.copy(b[0:32, 0:32], right)
            T.gemm(left, right, sums)
            T.copy(sums, out)

    assert "T.gemm(left, b, sums)" in repr(elide_staging(before.program))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_edges_are_zeros(dtype, turned, seed):
    """Sizes at run time, in and off the tiles' multiples: both forms of the product run, next to poison."""
    n, k = T.dynamic("n, k")
    kernel = torch_tile.compile(product(n, k, dtype, turned), target="cpu")
    assert kernel.get_kernel_source().count("tile::gemm<") == (2 if turned or dtype != "float32" else 1)
    kind = getattr(torch, dtype)
    for columns, depth in [(64, 64), (65, 64), (64, 65), (31, 33), (97, 1), (1, 97)]:
        whole = torch.full((columns * depth + 64,), torch.nan).to(kind)
        shape = (columns, depth) if turned else (depth, columns)
        b = whole[: columns * depth].view(shape)
        b.copy_(torch.randn(shape))
        a, out = torch.randn(16, depth).to(kind), torch.full((16, columns), torch.nan)
        kernel(a, b, out)
        want = a.double() @ (b.double().mT if turned else b.double())
        bound = (a.double().abs() @ (b.double().mT if turned else b.double()).abs()) * 2.0**-20
        assert ((out.double() - want).abs() <= bound).all(), (columns, depth)


def test_rows_that_are_not_packed_are_copied(keeps):
    """float32 in the order of the micro-kernel: a tile has its rows close together."""
    keeps(elide_staging, product(64, 64, "float32", turned=False))


def test_strided_elements_are_copied(keeps):
    n, k = T.dynamic("n, k")
    keeps(elide_staging, product(n, k, b_type=T.StridedTensor((n, k), (1, T.dynamic("s")), "bfloat16")))


def test_what_is_read_twice_or_written_is_copied(keeps):
    def kernel(twice: bool, writes: bool):
        @T.prim_func
        def kernel(b: T.Tensor((32, 32), "bfloat16"), out: T.Tensor((16, 32), "float32")):
            with T.Kernel(1) as _:
                left, right = T.alloc_shared((16, 32), "bfloat16"), T.alloc_shared((32, 32), "bfloat16")
                sums = T.alloc_fragment((16, 32), "float32")
                T.copy(b, right)
                if twice:
                    for i, j in T.Parallel(16, 32):
                        left[i, j] = right[i, j]
                if writes:
                    b[0, 0] = T.cast(1.0, "bfloat16")
                T.gemm(left, right, sums)
                T.copy(sums, out)

        return kernel

    keeps(elide_staging, kernel(True, False))
    keeps(elide_staging, kernel(False, True))
    text = repr(elide_staging(kernel(False, False).program))
    assert "T.gemm(left, b, sums)" in text
