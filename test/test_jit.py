# SPDX-License-Identifier: Apache-2.0
import importlib.util
import threading
import time
import warnings

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile import jit
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import alike
from torch_tile.kernels.attention import forward as attention_kernels
from torch_tile.kernels.gemm import gemm as gemm_kernels
from torch_tile.lowering import CPU_PASSES, lower


@torch_tile.jit(out_idx=[-1])
def scaled(n, factor=2, dtype="float32"):
    """x times a factor that is known when it is compiled."""

    @T.prim_func
    def kernel(x: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype)):
        with T.Kernel(1) as _:
            for i in T.Parallel(n):
                out[i] = x[i] * factor

    return kernel


def test_lazy_kernels_are_kept_per_arguments():
    kernel = scaled(5)
    assert (
        scaled(5) is kernel
        and scaled(n=5) is kernel
        and scaled(5, 2) is kernel
        and scaled(5, dtype="float32") is kernel
    )
    others = [scaled(6), scaled(5, 3), scaled(5, 2.0), scaled(5, dtype="float16"), scaled(5, True)]
    assert len({id(k) for k in (kernel, *others)}) == 6
    x = torch.randn(5)
    torch.testing.assert_close(kernel(x), x * 2)
    torch.testing.assert_close(scaled(5, 3)(x), x * 3)
    assert scaled(5, dtype=torch.float64)(x.double()).dtype == torch.float64
    assert scaled.__name__ == "scaled" and "known when it is compiled" in scaled.__doc__
    with pytest.raises(TypeError, match="factors"):
        scaled(5, factors=3)


def test_many_kernels_side_by_side(caplog):
    made = scaled.par_compile([{"n": 5}, (6, 3), {"n": 7, "dtype": "float16"}], num_workers=2)
    assert made == [scaled(5), scaled(6, 3), scaled(7, dtype="float16")]
    funcs = [scaled.make(n) for n in (3, 4)]
    for kernel, n in zip(torch_tile.par_compile(funcs, out_idx=[-1], target="cpu"), (3, 4), strict=True):
        torch.testing.assert_close(kernel(torch.ones(n)), torch.full((n,), 2.0))
    with pytest.raises(TileError, match="is not a dtype"):
        scaled.par_compile([(5,), (5, 2, "no dtype"), (6,)])
    found = scaled.par_compile([(5,), (5, 2, "no dtype"), (6,)], ignore_error=True)
    assert found == [scaled(5), None, scaled(6)] and "kernel 1 of 3 does not compile" in caplog.text
    assert torch_tile.par_compile([]) == []
    with pytest.raises(TileError, match="num_workers"):
        scaled.par_compile([(5,)], num_workers=0)


def test_tracing_and_building_by_hand():
    program, tensors = scaled.trace(5, factor=3)
    assert tensors == [] and scaled.build(program, "cpu")(torch.ones(5))[0] == 3
    fast = scaled.with_pass_configs({"tl.enable_fast_math": True})
    assert fast.options.fast_math and not scaled.options.fast_math
    assert fast(5) is not scaled(5) and fast.on("cpu") is not scaled.on("cpu")


def test_unhashable_arguments_are_compared_by_value():
    made = []

    @torch_tile.jit
    def shaped(shape, table):
        made.append(shape)

        @T.prim_func
        def kernel(out: T.Tensor(tuple(shape), "float32")):
            with T.Kernel(1) as _:
                T.fill(out, table["value"])

        return kernel

    assert shaped([2, 3], {"value": 1.0}) is shaped([2, 3], {"value": 1.0})
    assert shaped([2, 3], {"value": 1.0}) is not shaped([2, 3], {"value": 2.0})
    assert len(made) == 2
    out = torch.zeros(2, 3)
    shaped([2, 3], {"value": 2.0})(out)
    assert (out == 2).all()


@torch_tile.jit
def eager_sum(x, y, block: int = 8):
    m, n = T.const("m, n")
    x: T.Tensor((m, n), "float32")
    y: T.Tensor((n,), "float32")
    out = T.empty((m, n), "float32")
    with T.Kernel(m) as b:
        if n % 2 == 0:  # Python's own choice: n is a number
            for j in T.Parallel(n):
                out[b, j] = x[b, j] + y[j]
        else:
            for k in range(n):
                out[b, k] = x[b, k] - y[k]
    return out


def test_eager_constants_steer_python():
    before = len(eager_sum.kernels)
    for m, n in ((3, 4), (3, 5), (2, 4), (3, 4)):
        x, y = torch.randn(m, n), torch.randn(n)
        torch.testing.assert_close(eager_sum(x, y), x + y if n % 2 == 0 else x - y)
    assert len(eager_sum.kernels) == before + 3
    eager_sum(x, y, block=16)
    assert len(eager_sum.kernels) == before + 4
    assert "for j in T.Parallel(4)" in next(
        k.script() for k in eager_sum.kernels.values() if k.params[1].static_shape == (4,)
    )


def test_eager_dynamic_sizes_and_scalars():
    m, s = T.dynamic("m, s")

    @torch_tile.jit
    def total(x: T.StridedTensor((m, 4), (s, 1), "float32"), scale: T.float32, offset: int):
        out = T.empty((m,), "float32")
        with T.Kernel(m) as b:
            out[b] = offset
            for j in T.serial(4):
                out[b] += x[b, j] * scale
        return out

    for rows, factor in ((3, 0.5), (7, 2.0)):
        x = torch.randn(rows, 6)[:, 1:5]
        torch.testing.assert_close(total(x, factor, 1), x.sum(1) * factor + 1)
    assert len(total.kernels) == 1
    total(x, 1.0, 2)
    assert len(total.kernels) == 2


@pytest.mark.parametrize("dtype", [T.float32, T.float64, T.int8, T.int32, T.uint16, T.bool], ids=str)
def test_numbers_that_the_body_declares_are_passed_at_run_time(dtype):
    @torch_tile.jit
    def total(x, scale, y, offset):
        n = T.const("n")
        x: T.Tensor((n,), "float32")
        scale: dtype
        y: T.Tensor((n,), "float32")
        offset: T.int32
        with T.Kernel(1):
            for i in T.Parallel(n):
                y[i] = x[i] * T.cast(scale, "float32") + offset

    x, y = torch.randn(5), torch.zeros(5)
    for scale, offset in ((1, 7), (0, -3)):
        total(x, scale, y, offset)
        assert torch.equal(y, x * scale + offset)
    assert len(total.kernels) == 1
    compiled = torch.compile(lambda x, scale, y: total(x, scale, y, 1), backend="tile", fullgraph=True)
    compiled(x, 1, y)
    assert torch.equal(y, x + 1)
    with pytest.raises(torch_tile.LaunchError, match="argument `scale` must be a number of type"):
        total(x, "1", y, 1)


def test_eager_dynamic_beside_const():
    @torch_tile.jit
    def kernel(x):
        m = T.dynamic("m")
        n = T.const("n")
        x: T.Tensor((m, n), "float32")
        out = T.empty((n, m), "float32")
        with T.Kernel(m) as b:
            for j in T.Parallel(n):
                out[j, b] = x[b, j]
        return out

    for shape in ((3, 4), (5, 4), (5, 6)):
        x = torch.randn(shape)
        assert torch.equal(kernel(x), x.T)
    assert len(kernel.kernels) == 2


def test_eager_mistakes():
    @torch_tile.jit
    def unannotated(x, y):
        x: T.Tensor((4,), "float32")
        with T.Kernel(1) as _:
            x[0] = 1.0

    @torch_tile.jit
    def unbound(x):
        x: T.Tensor((4,), "float32")
        k = T.const("k")
        with T.Kernel(k) as b:
            x[b] = 1.0

    for function, args, code in (
        (unannotated, (torch.zeros(4), torch.zeros(4)), "tensor_not_annotated"),
        (unbound, (torch.zeros(4),), "unbound_const"),
    ):
        with pytest.raises(TileError) as caught:
            function(*args)
        assert caught.value.code == code
        assert caught.value.span.file == __file__
    with pytest.raises(torch_tile.LaunchError, match=r"`x` must have 2 dimensions, got shape \[4\]"):
        eager_sum(torch.zeros(4), torch.zeros(4))


def test_options_of_tilelang_are_accepted():
    options = {
        "target": "cpu", "execution_backend": "cython", "verbose": True, "compile_flags": ["-O3"], "target_host": None,
        "pass_configs": {torch_tile.PassConfigKey.TL_ENABLE_FAST_MATH: True}, "debug_root_path": None,
    }  # fmt: skip

    @torch_tile.jit(out_idx=1, **options)
    def make():
        @T.prim_func
        def kernel(x: T.Tensor((4,), "float32"), out: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                T.copy(x, out)

        return kernel

    x = torch.randn(4)
    assert torch.equal(make()(x), x)
    program = make.function()
    assert torch.equal(torch_tile.compile(program, out_idx=[1], **options)(x), x)


@pytest.mark.parametrize("out_idx", [2, -3, [0, 2]])
def test_out_idx_must_exist(out_idx):
    with pytest.raises(TileError, match=r"out_idx` is -?\d"):
        torch_tile.compile(scaled.function(4), out_idx=out_idx)


@pytest.mark.parametrize("out_idx", ["out", ["out"], 1.0, [None]])
def test_out_idx_is_positions(out_idx):
    with pytest.raises(TileError, match=r"parameters of kernel \(x, out\): -?1 is `out`"):
        torch_tile.compile(scaled.function(4), out_idx=out_idx)


def test_out_idx_may_be_any_sequence():
    assert torch_tile.compile(scaled.function(4), out_idx=range(1, 2)).out_idx == [1]


def test_out_idx_names_each_tensor_once():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            x[n] = 1.0

    with pytest.raises(TileError, match="names the scalar `n`"):
        torch_tile.compile(kernel, out_idx=1)
    with pytest.raises(TileError, match="once"):
        torch_tile.compile(kernel, out_idx=[0, -2])


@pytest.mark.parametrize(
    "form",
    [
        lambda k, n: k + 1,
        lambda k, n: 3 * k,
        lambda k, n: 2 * k - 3,
        lambda k, n: n - k + 40,
        lambda k, n: k * n,
        lambda k, n: (k + n) * (n + 1),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_constant_follows_from_a_linear_size(form, first):
    """Offsets are one more than their groups: T.const takes what a launch would compute of T.dynamic."""

    @torch_tile.jit
    def by_form(x, y):
        k, n = T.const("k, n")
        if first:
            x: T.Tensor((form(k, n),), "float32")
        y: T.Tensor((n,), "float32")
        if not first:
            x: T.Tensor((form(k, n),), "float32")
        out = T.empty((k, n), "float32")
        with T.Kernel(k, threads=32) as b:
            for j in T.Parallel(n):
                out[b, j] = x[form(k, n) - 1] + y[j]
        return out

    for k, n in ((5, 4), (5, 6), (3, 4), (5, 4)):
        x, y = torch.randn(form(k, n)), torch.randn(n)
        torch.testing.assert_close(by_form(x, y), (x[-1] + y).expand(k, n))
    assert len(by_form.kernels) == 3


@pytest.mark.parametrize("form", [lambda k: k * 2, lambda k: k * k, lambda k: k // 2, lambda k: T.ceildiv(k, 2)])
def test_a_constant_that_no_size_determines(form):
    """The error names the argument, its size and what it should have told."""

    @torch_tile.jit
    def kernel(x):
        k = T.const("k")
        x: T.Tensor((form(k),), "float32")
        with T.Kernel(1) as _:
            x[0] = 1.0

    with pytest.raises(torch_tile.LaunchError, match=r"`x` has size 5 in dimension 0, from which k of .* does not"):
        kernel(torch.zeros(5))


def test_a_constant_beside_a_size_of_the_launch():
    """A size known only at run time makes no kernel of its own, whatever its value."""

    @torch_tile.jit
    def ends(x, offsets):
        k, n = T.const("k"), T.dynamic("n")
        x: T.Tensor((n, 8), "float32")
        offsets: T.Tensor((k + 1,), "int32")
        out = T.empty((k, 8), "float32")
        with T.Kernel(k, threads=32) as b:
            T.copy(x[offsets[b + 1] - 1, 0], out[b, 0:8])
        return out

    for rows in (7, 11):
        x, offsets = torch.randn(rows, 8), torch.tensor([0, 2, 3, rows], dtype=torch.int32)
        torch.testing.assert_close(ends(x, offsets), x[offsets[1:].long() - 1])
    assert len(ends.kernels) == 1


def test_compile_takes_prim_funcs_only():
    with pytest.raises(TileError, match="decorate the kernel with @T"):
        torch_tile.compile(lambda: 1)


def test_a_name_outside_every_tensor():
    """A size that no argument tells is the author's mistake, not the compiler's."""
    k = T.dynamic("k")

    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(k) as b:
            x[b] = 1.0

    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel)
    assert caught.value.code == "unbound_const" and "`k`" in str(caught.value)


def test_threads_share_one_compilation(monkeypatch):
    compiled = []
    original = jit.compile_shared

    def slow(source):
        compiled.append(source)
        time.sleep(0.05)
        return original(source)

    monkeypatch.setattr(jit, "compile_shared", slow)
    got = []
    threads = [threading.Thread(target=lambda: got.append(scaled(11, 7))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(compiled) == 1 and len(got) == 4 and len({id(k) for k in got}) == 1


def test_dumped_stages_trace_back(monkeypatch, tmp_path):
    """TORCH_TILE_DUMP writes each stage that changed something, as a program of the language."""
    m = T.dynamic("m")

    @T.prim_func
    def dumped(x: T.Tensor((m, 8), "float16"), out: T.Tensor((m, 8), "float32"), n: T.int32):
        with T.Kernel(T.ceildiv(m, 4)) as b:
            tile = T.alloc_shared((4, 8), "float16")
            total = T.alloc_fragment((4,), "float32")
            T.copy(x[b * 4, 0], tile)
            T.reduce_sum(tile, total, dim=1)
            for i, j in T.Parallel(4, 8):
                if j < n:
                    out[b * 4 + i, j] = tile[i, j] * total[i]

    monkeypatch.setenv("TORCH_TILE_DUMP", str(tmp_path / "stages"))
    last = lower(dumped.program)
    files = sorted((tmp_path / "stages").iterdir())
    names = [step.__name__ for step, _ in CPU_PASSES]
    assert [f.stem.split("_", 2)[2] for f in files] == [
        n for n in names if n not in ("resolve_own_rows", "part_overlaps", "elide_staging")
    ]  # no rows of a warpgroup, no copy within a buffer, and no product
    for file in files:
        assert file.read_text().startswith("# ")
        source = tmp_path / file.name
        source.write_text("import torch_tile.language as T\n" + file.read_text())
        spec = importlib.util.spec_from_file_location(file.stem, source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert repr(module.dumped.program) in file.read_text()
    assert alike(module.dumped.program, last)


def test_dumped_programs_of_one_name_lie_side_by_side(monkeypatch, tmp_path):
    """And those of one program compiled again replace the first ones."""

    def made(factor):
        @T.prim_func
        def main(x: T.Tensor((8,), "float32")):
            with T.Kernel(1):
                for i in T.Parallel(8):
                    x[i] = x[i] * factor

        return main.program

    monkeypatch.setenv("TORCH_TILE_DUMP", str(tmp_path))
    counts = []
    for factor in (2.0, 3.0, 2.0):
        lower(made(factor))
        counts.append(len(list(tmp_path.iterdir())))
    assert counts[1] == counts[2] == 2 * counts[0]
    assert len({file.name.split("_")[0] for file in tmp_path.iterdir()}) == 2


def run_gemm():
    a = torch.ones(64, 64)
    epilogue = "v0=add(acc0,x0);v1=gelu(v0);ret v1"
    gemm_kernels.gemm(a, [a], [torch.ones(64)], "r", epilogue, torch.float32)


def run_attention():
    q = torch.ones(1, 2, 64, 32)
    attention_kernels.attention(q, q, q, None, True, None, 0, 0)


COLD = {"gemm": (gemm_kernels, run_gemm), "attention": (attention_kernels, run_attention)}


@pytest.mark.parametrize("name", COLD)
def test_cold_compile_is_quick_outside_the_host_compiler(name, monkeypatch):
    """Tracing, passes and text of our largest kernels without the host compiler and the launch: <= 0.3 s of a core."""
    module, run = COLD[name]
    run()  # what is imported once
    seconds = []
    for _ in range(3):
        for function in [f for f in vars(module).values() if isinstance(f, jit.JITFunction)]:
            monkeypatch.setattr(function, "kernels", {})
            monkeypatch.setattr(function, "by_position", {})
            monkeypatch.setattr(function, "on_targets", {})
        inside = []
        original = jit.compile_shared

        def timed(source, inside=inside, original=original):
            start = time.process_time()
            found = original(source)
            inside.append(time.process_time() - start)
            return found

        monkeypatch.setattr(jit, "compile_shared", timed)
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start - sum(inside))
        assert inside
        monkeypatch.setattr(jit, "compile_shared", original)
    print(f"{name}: {min(seconds):.3f} s")
    assert min(seconds) <= 0.3


def test_no_warning_for_the_cpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled(3, 4)


@pytest.mark.parametrize("threads", [128, 512])
def test_spilt_fragments_are_named(threads):
    @T.prim_func
    def kernel(A: T.Tensor((64, 1024), "float32"), B: T.Tensor((64, 1024), "float32")):
        with T.Kernel(1, threads=threads) as _:
            rows = T.alloc_fragment((64, 1024), "float32")
            top = T.alloc_fragment((64,), "float32")
            T.copy(A, rows)
            T.reduce_max(rows, top, dim=1)
            for i, j in T.Parallel(64, 1024):
                B[i, j] = rows[i, j] - top[i]

    slow = str(torch_tile.compile(kernel, target="cuda:sm_90a").schedule.slow)
    named = "`rows` alone takes 512 of the 255 registers of a thread; take more threads or smaller tiles"
    assert "spilled to memory" in slow and (named in slow) == (threads == 128)


def test_results_have_no_gradients():
    """Only where gradients are recorded."""

    @torch_tile.jit
    def double(X):
        N = T.const("N")
        X: T.Tensor((N,), "float32")
        Y = T.empty((N,), "float32")
        with T.Kernel(T.ceildiv(N, 64), threads=64) as bx:
            for i in T.Parallel(64):
                Y[bx * 64 + i] = X[bx * 64 + i] * 2
        return Y

    x = torch.randn(100, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(double(x), x * 2)
    torch.testing.assert_close(double(x.detach()), x.detach() * 2)
    y = double(x)
    torch.testing.assert_close(y, x.detach() * 2)
    with pytest.raises(RuntimeError, match=r"`X` of double requires gradients.*torch_tile.custom_op"):
        (y + x).sum().backward()
