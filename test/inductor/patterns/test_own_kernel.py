# SPDX-License-Identifier: Apache-2.0
"""Epilogues fused into users' kernels: numbers, forms of stores, refusals, and graphs from the cache."""

import random
import zipfile

import pytest
import torch
from rounding import Rounding
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import torch_tile
import torch_tile.language as T
from torch_tile.ir.dtype import to_dtype
from torch_tile.kernels.epilogue.functions import FUNCTIONS
from torch_tile.kernels.epilogue.fuse_into_stores import CannotFuseError, fuse_into_stores
from torch_tile.kernels.epilogue.program import evaluate, parse
from torch_tile.ops import own_kernel

FORMS = ["copy", "staged", "loop", "branches", "empty"]
TILE = {"select": "tile"}
JUMPS = {"gt", "ge", "lt", "le", "eq", "ne", "where", "floor", "sign"}  # an ulp of the operand changes all of the value


def scaled(form, rows, cols, dtype):
    """A kernel that doubles a matrix, and stores it in one of the forms that authors use."""
    if form == "empty":

        @torch_tile.jit
        def doubled(A):
            A: T.Tensor((rows, cols), dtype)
            C = T.empty((rows, cols), dtype)
            with T.Kernel(T.ceildiv(cols, 32), T.ceildiv(rows, 16), threads=64) as (bx, by):
                t = T.alloc_fragment((16, 32), "float32")
                T.copy(A[by * 16, bx * 32], t)
                for i, j in T.Parallel(16, 32):
                    t[i, j] = t[i, j] * 2
                T.copy(t, C[by * 16, bx * 32])
            return C

        return doubled

    @T.prim_func
    def doubled(A: T.Tensor((rows, cols), dtype), C: T.Tensor((rows, cols), dtype)):
        with T.Kernel(T.ceildiv(cols, 32), T.ceildiv(rows, 16), threads=64) as (bx, by):
            t = T.alloc_fragment((16, 32), "float32")
            T.copy(A[by * 16, bx * 32], t)
            for i, j in T.Parallel(16, 32):
                t[i, j] = t[i, j] * 2
            if form == "copy":
                T.copy(t, C[by * 16, bx * 32])
            elif form == "staged":
                s = T.alloc_shared((16, 32), dtype)
                T.copy(t, s)
                T.copy(s, C[by * 16 : by * 16 + 16, bx * 32 : bx * 32 + 32])
            elif form == "loop":
                for i, j in T.Parallel(16, 32):
                    C[by * 16 + i, bx * 32 + j] = t[i, j]
            else:
                for i, j in T.Parallel(16, 32):
                    if by * 16 + i < rows and bx * 32 + j < cols:
                        if t[i, j] > 0:
                            C[by * 16 + i, bx * 32 + j] = t[i, j]
                        else:
                            C[by * 16 + i, bx * 32 + j] = t[i, j] + 1

    return doubled


def meaning(form, x):
    """What `scaled` computes."""
    y = (x.float() * 2) if x.dtype != torch.float64 else x.float().double() * 2
    return (torch.where(y > 0, y, y + 1) if form == "branches" else y).to(x.dtype)


def compiled(form, rows, cols, dtype):
    """The kernel as a caller holds it, which returns its result."""
    made = scaled(form, rows, cols, dtype)
    return made if form == "empty" else torch_tile.compile(made, out_idx=[-1], target="cpu")


def check(got, want, tolerance, rounding):
    """No error is larger than a share of 1 + |want|, or than rounding makes it in these functions."""
    size = 1 + want.abs()
    error = ((got.double() - want).abs() / size).max() if got.numel() else 0
    assert error <= tolerance or error <= (rounding[0]() / size).max()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def fused_calls(function, *args, options=TILE):
    """Run a function under the backend; return what it computes and how often the fused operator is called."""
    run = torch.compile(function, backend="tile", fullgraph=True, options=options)
    result, code = run_and_get_code(run, *args)
    return result, sum(text.count("torch_tile_kernels.with_epilogue.default(") for text in code)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_operands_of_each_kind(form, dtype, seed):
    torch.manual_seed(seed)
    rows, cols = random.Random(seed).choices([1, 7, 16, 33, 64], k=2)
    kernel = compiled(form, rows, cols, str(dtype).removeprefix("torch."))
    x, full = (torch.randn(rows, cols, dtype=dtype) for _ in range(2))
    row, column, one = torch.randn(cols), torch.randn(rows, 1), torch.randn(())

    def function(x, full, row, column, one):
        y = kernel(x).float() * column + row
        return (torch.nn.functional.gelu(y) * one).to(x.dtype) + full

    got, calls = fused_calls(function, x, full, row, column, one)
    assert calls == 1

    def exact(y, full, row, column, one):
        return torch.nn.functional.gelu(y * column + row) * one + full

    operands = [t.double() for t in (meaning(form, x), full, row, column, one)]
    check(got, exact(*operands), 2 * torch.finfo(dtype).eps, Rounding(exact, *operands, dtype=dtype))


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("form", FORMS[:4])
def test_random_epilogues(form, target, seed):
    """The fused kernel on CPUs and in the thread interpreter, against the epilogue's own meaning."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    rows, cols = choose.choices([5, 16, 40], k=2)
    statements, names = [], ["acc0", "x0", "x1"]
    for n in range(choose.randint(1, 5)):
        name = choose.choice(sorted(n for n, f in FUNCTIONS.items() if not f.singular and n not in JUMPS))
        operands = [choose.choice(names) for _ in range(FUNCTIONS[name].arity)]
        statements.append(f"v{n}={name}({','.join(operands)})")
        names.append(f"v{n}")
    text, kinds = ";".join([*statements, f"ret {names[-1]}"]), "".join(choose.choices("trcs", k=2))
    kernel = torch_tile.compile(scaled(form, rows, cols, "float32"), out_idx=[-1], target=target)
    fused = own_kernel.with_epilogue(kernel, kinds, text, (torch.float32,) * 2, torch.float32)
    shapes = {"t": (rows, cols), "r": (cols,), "c": (rows, 1), "s": ()}
    x, aux = torch.randn(rows, cols) * 2, [torch.randn(shapes[kind]) for kind in kinds]
    if target == "cpu":
        got = fused(x, *aux)
    else:
        findings = fused.interpret(x, *aux)
        assert not findings, findings
        (got,) = findings.outputs
    operands = [meaning(form, x).double()], [a.double() for a in aux]
    want = evaluate(text, *operands)
    keep = want.abs() < 1e4
    check(got[keep], want[keep], 2e-5, Rounding(lambda *operands: evaluate(text, *operands)[keep], *operands))


def test_numbers_are_those_of_two_kernels():
    """The kernel's value is rounded before the epilogue, as where its result lies in memory between two kernels."""
    kernel = compiled("copy", 48, 64, "bfloat16")
    x = torch.randn(48, 64).bfloat16()
    got, calls = fused_calls(lambda x: kernel(x) * 3 + 1, x)
    assert calls == 1
    assert torch.equal(got, (kernel(x).float() * 3 + 1).bfloat16())


def test_dynamic_sizes():
    n = T.dynamic("n")

    @T.prim_func
    def doubled(A: T.Tensor((n,), "float32"), by: T.float32, C: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < n:
                    C[bx * 128 + i] = A[bx * 128 + i] * by

    kernel = torch_tile.compile(doubled, out_idx=[-1], target="cpu")
    counter = CompileCounterWithBackend("tile")
    run = torch.compile(lambda x: torch.relu(kernel(x, 2.0)) + x, fullgraph=True, dynamic=True, backend=counter)
    for size in (10, 129, 300):
        x = torch.randn(size)
        torch.testing.assert_close(run(x), torch.relu(2 * x) + x)
    assert counter.frame_count == 1


def test_packages_call_the_kernel_itself(tmp_path):
    """Its operator is all that the process needs that loads a package."""
    kernel = torch_tile.compile(scaled("copy", T.dynamic("rows"), 40, "float32"), out_idx=[-1], target="cpu")

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return kernel(x) + 1

    rows = torch.export.Dim("n", min=2, max=100)
    exported = torch.export.export(Doubled(), (torch.randn(20, 40),), dynamic_shapes=({0: rows},))
    configs = torch_tile.inductor_configs(options=TILE)
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=configs
    )
    with zipfile.ZipFile(package) as files:
        assert not any(b"with_epilogue" in files.read(name) for name in files.namelist())
    x = torch.randn(33, 40)
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), x * 2 + 1)


def test_the_family_can_be_turned_off():
    kernel, x = compiled("copy", 16, 32, "float32"), torch.randn(16, 32)
    got, calls = fused_calls(lambda x: kernel(x) + 1, x, options={"select": "tile", "families": ["gemm"]})
    assert calls == 0
    torch.testing.assert_close(got, 2 * x + 1)


def test_a_result_that_is_used_twice_is_stored():
    kernel, x = compiled("copy", 16, 32, "float32"), torch.randn(16, 32)

    def function(x):
        y = kernel(x)
        return y, y + 1

    (plain, more), calls = fused_calls(function, x)
    assert calls == 0
    torch.testing.assert_close((plain, more), (2 * x, 2 * x + 1))


def test_a_kernel_with_a_gradient():
    kernel = torch_tile.custom_op(compiled("copy", 16, 32, "float32"), backward=lambda ctx, grad: grad * 2)
    x = torch.randn(16, 32, requires_grad=True)
    run = torch.compile(lambda x: torch.sigmoid(kernel(x) * 3).sum(), fullgraph=True, backend="tile", options=TILE)
    (got,) = torch.autograd.grad(run(x), x)
    (want,) = torch.autograd.grad(torch.sigmoid(x * 6).sum(), x)
    torch.testing.assert_close(got, want)


def test_a_kernel_from_the_cache_that_takes_no_epilogue():
    """A graph of another process may call a kernel of this name whose stores take no epilogue: both steps run."""

    @T.prim_func
    def filled(A: T.Tensor((16, 32), "float32"), C: T.Tensor((16, 32), "float32")):
        with T.Kernel(1, threads=64):
            T.copy(A, C)
            for i, j in T.Parallel(16, 32):
                C[i, j] = C[i, j] * 2

    kernel = torch_tile.compile(filled, out_idx=[-1], target="cpu")
    operator = torch_tile.custom_op(kernel)
    x = torch.randn(16, 32)
    run = torch.ops.torch_tile_kernels.with_epilogue
    got = run(operator.name(), [x], [], [], [x[:1]], "r", "v0=mul(acc0,x0);ret v0", torch.float16)
    torch.testing.assert_close(got, (2 * x * x[:1]).half())


def multiplied(by):
    """A kernel that is the same for each `by` but for this number."""

    @T.prim_func
    def product(A: T.Tensor((16, 32), "float32"), C: T.Tensor((16, 32), "float32")):
        with T.Kernel(1, threads=64):
            t = T.alloc_fragment((16, 32), "float32")
            for i, j in T.Parallel(16, 32):
                t[i, j] = A[i, j] * by
            T.copy(t, C)

    return torch_tile.compile(product, out_idx=[-1], target="cpu")


def test_a_kernel_that_is_defined_again_is_not_stale():
    """As in a notebook's cell that is run again: the name stands for a new kernel of the same name and line."""
    module = {"torch": torch}
    exec("def function(x): return torch.relu(kernel(x)) + 1", module)
    x = torch.randn(16, 32)
    for by in (2, -3, 2, 5):
        module["kernel"] = multiplied(by)
        if "run" not in module:
            module["run"] = torch.compile(module["function"], fullgraph=True, backend="tile", options=TILE)
        for run in (module["run"], torch.compile(module["function"], fullgraph=True, backend="tile", options=TILE)):
            torch.testing.assert_close(run(x), torch.relu(x * by) + 1)


REFUSED = {
    "reads": "reads its result",
    "atomic": "reads its result",
    "fill": "reads its result",
    "integers": "is of int32",
    "view": "view of its result",
}


@pytest.mark.parametrize("what", REFUSED)
def test_kernels_that_take_no_epilogue(what):
    dtype = "int32" if what == "integers" else "float32"

    @T.prim_func
    def kernel(A: T.Tensor((16, 32), dtype), C: T.Tensor((16, 32), dtype)):
        with T.Kernel(1, threads=64):
            T.copy(A, C)
            if what == "reads":
                for i, j in T.Parallel(16, 32):
                    C[i, j] = C[i, j] * 2
            elif what == "atomic":
                T.atomic_add(C[0, 0], 1.0)
            elif what == "fill":
                T.fill(C[0:4, :], 1.0)
            elif what == "view":
                flat = T.view(C, (512,))
                flat[3] = 1.0

    result = kernel.program.params[1]
    with pytest.raises(CannotFuseError, match=REFUSED[what]):
        fuse_into_stores(kernel.program, result, parse("v0=exp(acc0);ret v0"), [], to_dtype("float32"))


def test_explain_says_why():
    @T.prim_func
    def twice(A: T.Tensor((16, 32), "float32"), C: T.Tensor((16, 32), "float32")):
        with T.Kernel(1, threads=64):
            T.copy(A, C)
            for i, j in T.Parallel(16, 32):
                C[i, j] = C[i, j] * 2

    kernel = torch_tile.compile(twice, out_idx=[-1], target="cpu")
    report = torch_tile.explain(lambda x: torch.relu(kernel(x)), torch.randn(16, 32), select="tile")
    assert "the kernel twice takes no epilogue: it reads its result `C`" in str(report)
