# SPDX-License-Identifier: Apache-2.0
"""Files with `import tilelang` run unchanged once torch_tile.compat.install() was called, and not before."""

import importlib
import importlib.util
import subprocess
import sys
import types
from types import ModuleType

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile import compat
from torch_tile.diagnostics.errors import TileError
from torch_tile.language.misuse import instead

FILE = """
import tilelang
import tilelang.language as T
import tilelang.testing
import tvm
from tilelang import tvm as same
from tilelang.autotuner import AutoTuner, autotune
from tilelang.layout import make_swizzled_layout
from tilelang.profiler import do_bench
from tilelang.transform import PassConfigKey, simplify_prim_func
from tilelang.utils.tensor import map_torch_type
from tvm import DataType, tirx
from tvm.target import Target

assert tvm is same and tirx is tvm.tir
bits = DataType("float16").bits


@tilelang.jit(out_idx=[-1], target=Target("c"))
def scaled(rows, columns, dtype="float32"):
    @simplify_prim_func
    @T.prim_func
    def main(A: T.Tensor((rows, columns), dtype), B: T.Tensor((rows, columns), dtype)):
        with T.Kernel(tilelang.cdiv(rows, 4), threads=tilelang.next_power_of_2(100)) as (bx,):
            for i, j in T.Parallel(4, columns):
                B[bx * 4 + i, j] = A[bx * 4 + i, j] * tirx.const(2, dtype)

    return main
"""


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()
    assert not any(name.partition(".")[0] in ("tilelang", "tvm") for name in sys.modules)


def test_a_file_of_tilelangs(installed, tmp_path):
    path = tmp_path / "kernel_file.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("kernel_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    a = torch.randn(10, 7)
    assert torch.equal(module.scaled(10, 7)(a), 2 * a) and module.bits == 16
    assert module.map_torch_type("bfloat16") is torch.bfloat16


def test_served_modules_are_the_same_objects(installed):
    for served, ours in (
        ("tilelang", "torch_tile"),
        ("tilelang.language", "torch_tile.language"),
        ("tilelang.layout", "torch_tile.language.layout"),
        ("tilelang.jit", "torch_tile.jit"),
        ("tilelang.utils.tensor", "torch_tile.utils.tensor"),
        ("tilelang.intrinsics", "torch_tile.cuda.intrinsics"),
        ("tilelang.intrinsics.mma_macro_generator", "torch_tile.cuda.intrinsics.macro.mma_macro_generator"),
        ("tilelang.jit.adapter.base", "torch_tile.compat.adapter"),
        ("tvm.tirx", "torch_tile.compat.tvm.tir"),
    ):
        module = importlib.import_module(served)
        assert module is importlib.import_module(ours) and module.__spec__.name == ours, served
    compat.install()  # again: no change
    assert compat.is_installed() and importlib.import_module("tilelang") is torch_tile


@pytest.mark.parametrize("name", ["tilelang.nothing", "tilelang.language.nothing", "tilelang.carver.nothing"])
def test_modules_that_tilelang_has_not(installed, name):
    with pytest.raises(ModuleNotFoundError, match="no counterpart") as caught:
        importlib.import_module(name)
    assert caught.value.name == name


ABSENT = {  # names that only TileLang's or TVM's compiler has, and what their use says
    "from tilelang.instrumentation import pass_phase as name": "about the passes",
    "from tilelang import _ffi_api as name": "a private name",
    "from tilelang.language.kernel import _normalize_threads as name": "a private name",
    "from tilelang.cuda.language.intrinsics import TCGEN05TensorCoreIntrinEmitter as name": "sm_100",
    "from tilelang.layout import cute as name": "TileLang's compiler",
    "from tilelang.rocm.target import target_is_cdna as name": "AMD's GPUs",
    "from tilelang.metal.language import copy as name": "Apple's GPUs",
    "from tilelang.cpu import language as name": "TileLang's compiler",
    "from tilelang.contrib import hipcc as name": "AMD's GPUs",
    "from tilelang.contrib.cc import create_shared as name": "TileLang's compiler",
    "from tilelang.cuda import transform as name": "TileLang's compiler",
    "from tilelang.ir import get_stmt_span as name": "TileLang's compiler",
    "from tilelang.language.eager.ast import mutate as name": "TileLang's compiler",
    "from tilelang.transform import LayoutInference as name": "TileLang's compiler",
    "from tvm.tirx.stmt_functor import post_order_visit as name": "TVM",
    "from tvm.relax import BlockBuilder as name": "TVM",
    "from tvm import IRModule as name": "TVM",
}

CHANGED = """
import torch_tile.layout.swizzle
from torch_tile.engine.callback import register_cuda_postproc_callback
from torch_tile.engine.lower import lower
from torch_tile.jit.kernel import JITKernel
from torch_tile import _ffi_api
from torch_tile.language.dtypes import dtype
from torch_tile.language.fp8 import determine_fp8_type
from torch_tile.layout import Layout
from torch_tile.layout.swizzle import make_full_bank_swizzled_layout
from torch_tile.profiler.bench import do_bench
from torch_tile.rocm.target import target_is_gfx950
from torch_tile.transform.pass_config import PassConfigKey
from torch_tile.tvm.tirx.expr import PrimExpr
from torch_tile.cuda.op.gemm.gemm_mma import GemmMMA
from torch_tile.tools import plot_layout
import sys, torch_tile
assert torch_tile.engine.lower is lower and callable(lower) and Layout is torch_tile.Layout
assert JITKernel is torch_tile.JITKernel and do_bench is torch_tile.do_bench and "tilelang" not in sys.modules
for absent in (GemmMMA, plot_layout, _ffi_api):
    try:
        absent()
    except torch_tile.TileError:
        pass
    else:
        raise AssertionError(absent)
for line in ("import torch_tile.layouts", "from torch_tile import _fast", "from torch_tile.tools import plot"):
    try:
        exec(line)
    except ImportError:
        pass
    else:
        raise AssertionError(line)
"""


def test_names_of_modules_can_be_changed_in_place() -> None:
    """`from torch_tile.X import Y` serves a file that says `from tilelang.X import Y`, without `install()`."""
    subprocess.run([sys.executable, "-c", CHANGED], check=True)


COPIES = """
import importlib, sys
import torch_tile.compat
for name, served in torch_tile.compat.ELSEWHERE.items():
    changed = f"torch_tile.{name.removeprefix('tilelang.')}"
    inner = importlib.import_module(served)
    if importlib.import_module(changed) is not inner:
        continue  # a module of ours has this name, too
    for part in [n for n, m in vars(inner).items() if getattr(m, "__name__", "") == f"{served}.{n}"]:
        importlib.import_module(f"{changed}.{part}")
import torch_tile.backend.target, torch_tile.layout.swizzle, torch_tile.tvm.target, torch_tile.tvm.tir
files = {}
for name, module in sys.modules.items():
    if name.startswith("torch_tile.") and getattr(module, "__file__", None):
        assert files.setdefault(module.__file__, module) is module, name
"""


def test_a_module_of_two_names_is_loaded_once() -> None:
    """Inside a module that was imported by TileLang's name for it, too: a second copy would have its own state."""
    subprocess.run([sys.executable, "-c", COPIES], check=True)


@pytest.mark.parametrize("line", ABSENT)
def test_names_without_a_counterpart_are_imported_and_refused_in_use(installed, line):
    found: dict = {}
    exec(line, found)
    absent = found["name"]
    assert not isinstance(3, absent) and "does not have" in repr(absent)
    for use in (lambda: absent(1), lambda: absent.part(2), lambda: list(absent)):
        with pytest.raises(torch_tile.TileError, match=ABSENT[line]) as caught:
            use()
        assert caught.value.code == "absent_name" and caught.value.span.file == __file__


def test_names_that_were_lacking_are_lacking_again():
    compat.install()
    exec("from tilelang import _other_api\nfrom tilelang.language.tir import ir", {})
    compat.uninstall()
    assert not hasattr(torch_tile, "_other_api") and not hasattr(T, "ir")
    with pytest.raises(ImportError):
        exec("from torch_tile import _other_api", {})


@pytest.mark.filterwarnings("error::UserWarning")
def test_tiles_that_nothing_wrote_begin_at_0(installed):
    def program(rows):
        @T.prim_func
        def main(A: T.Tensor((rows,), "float32"), B: T.Tensor((rows,), "float32")):
            with T.Kernel(1, threads=32):
                tile = T.alloc_shared((rows,), "float32")
                T.copy(A[0 : rows // 2], tile[0 : rows // 2])
                T.copy(tile, B)

        return main

    given, result = torch.randn(64), torch.full((64,), 7.0)
    with pytest.warns(UserWarning, match="what nothing wrote begins at 0"):
        kernel = torch_tile.compile(program(64), target="cpu")
    kernel(given, result)
    assert torch.equal(result[:32], given[:32]) and not result[32:].any()
    with pytest.warns(UserWarning, match="what nothing wrote begins at 0"):
        assert torch_tile.compile(program(64), target="cuda:sm_90a").interpret(given, result).kinds == set()


def test_tiles_of_the_sizes_of_calls_that_nothing_wrote_begin_at_0(installed):
    length = T.symbolic("length")

    @T.prim_func
    def main(B: T.Tensor((length,), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((length,), "int32")
            T.copy(tile, B)

    for target in ("cpu", "cuda:sm_90a"):
        with pytest.warns(UserWarning, match="what nothing wrote begins at 0"):
            kernel = torch_tile.compile(main, target=target)
        for size in (100, 200, 100):
            result = torch.ones(size, dtype=torch.int32)
            (kernel if target == "cpu" else kernel.interpret)(result)
            assert not result.any()
    torch_tile.tolerance.tolerate(False)
    with pytest.raises(TileError, match="no statement before can have written"):
        torch_tile.compile(main, target="cpu")


def test_floats_are_cut_off_in_integers(installed):
    def program():
        @T.prim_func
        def main(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(8):
                    held = T.alloc_var(T.int)
                    held = A[i] * 2
                    B[i] = held

        return main

    given, result = torch.randn(8) * 10, torch.zeros(8, dtype=torch.int32)
    with pytest.warns(UserWarning, match="the fraction is cut off"):
        made = program()
    for target in ("cpu", "cuda:sm_90a"):
        kernel = torch_tile.compile(made, target=target)
        (kernel if target == "cpu" else kernel.interpret)(given, result)
        assert torch.equal(result, (given * 2).int())
    torch_tile.tolerance.tolerate(False)
    with pytest.raises(TileError, match="wrong_dtype_store"):
        program()


def test_nothing_is_served_unasked():
    script = (
        "import torch_tile, torch_tile.compat, sys, importlib.util as u; sys.exit(u.find_spec('tilelang') is not None)"
    )
    if importlib.util.find_spec("tilelang") is None:
        assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("name", ["tilelang", "tvm"])
def test_the_real_modules_are_never_replaced(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ImportError, match=f"the real {name} is imported already"):
        compat.install()
    compat.uninstall()
    if name == "tvm":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        real = sys.modules[name]
        compat.install(tvm=False)
        assert importlib.import_module("tvm") is real and importlib.import_module("tilelang") is torch_tile
        compat.uninstall()
        assert sys.modules[name] is real


IMPORTS = """
from tilelang.autotuner.capture import set_autotune_inputs
from tilelang.autotuner.tuner import AutoTuner
from tilelang.backend.target import determine_target
from tilelang.carver.arch import CUDA, driver
from tilelang.carver.arch.driver.cuda_driver import get_num_sms
from tilelang.carver.roller.rasterization import NoRasterization
from tilelang.carver.template import MatmulTemplate
from tilelang.contrib import nvcc
from tilelang.contrib.cc import get_cplus_compiler
from tilelang.cuda.intrinsics.layout.mma_layout import make_mma_swizzle_layout
from tilelang.cuda.language.pdl import pdl_sync
from tilelang.cuda.target import target_is_hopper
from tilelang.dtypes import float16
from tilelang.jit.kernel import JITKernel
from tilelang.language.annotations import annotate_layout
from tilelang.language.atomic import atomic_add
from tilelang.language.dtypes import *
from tilelang.language.eager.builder import prim_func
from tilelang.language.kernel import get_thread_binding
from tilelang.language.tir.entry import macro
from tilelang.layout.swizzle import make_swizzled_layout
from tilelang.profiler.bench import do_bench
from tilelang.transform.pass_config import PassConfigKey
from tilelang.utils.device import IS_CUDA, get_current_device
from tilelang.utils.target import determine_target
from tvm import testing
"""


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_modules_inside_modules(installed, line):
    exec(line, {})


def test_a_target_that_is_not_served_is_refused_in_use(installed):
    """A file whose one kernel is for an older GPU runs its others."""
    import tilelang

    @tilelang.jit(target={"kind": "cuda", "arch": "sm_75"})
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.clear(A)

    with pytest.raises(torch_tile.TileError, match="sm_75"):
        kernel.compile()
    same = kernel.on({"kind": "cuda", "arch": "sm_90a"})
    assert same is kernel.on("cuda:sm_90a") and same.compile().target.arch == "sm_90a"


def test_a_module_never_hides_a_function(installed):
    before = dict(vars(torch_tile.language))
    for whole, (_, parts) in compat.PARTS.items():
        for part in parts.split():
            importlib.import_module(f"{whole}.{part}")
        if whole == "tilelang.language":  # a refused name stays one
            assert not any(instead(part) for part in parts.split() if "." not in part)
    same = {name: value for name, value in vars(torch_tile.language).items() if name in before}
    assert all(same[name] is value for name, value in before.items())
    with pytest.raises(ModuleNotFoundError, match="no counterpart"):
        importlib.import_module("tilelang.language.no_such_part")


def test_an_import_of_a_module_that_is_lacking_hides_no_module(installed):
    """Importing a.b puts b into the place of a's global b."""
    for name in ("tvm", "tvm.tirx", "tvm.target", "tvm.transform", "tvm.testing", "tvm.error"):
        module = importlib.import_module(name)
        before = {n: v for n, v in vars(module).items() if n[0] != "_" and type(v) is types.ModuleType}
        for inner in before:
            importlib.import_module(f"{name}.{inner}")
        assert all(vars(module)[inner] is value for inner, value in before.items()), name
    importlib.import_module("tvm.tirx.expr")
    tirx = importlib.import_module("tvm.tirx")
    assert tirx.FloatImm("float32", 0.5).value == 0.5


def test_an_adapter_that_files_patch(installed):
    from tilelang.jit.adapter.base import BaseKernelAdapter

    made = BaseKernelAdapter()
    made.params = (1, 2, 3)
    assert [made._legalize_result_idx(n) for n in (None, -1, [0, -2])] == [[], [2], [0, 1]]
    with pytest.raises(ValueError, match="3 parameters"):
        made._legalize_result_idx([3])


def test_modules_beside_functions_of_their_name(installed):
    import tilelang
    from tilelang.engine.lower import lower

    assert tilelang.engine.lower is lower and callable(tilelang.lower)


@pytest.mark.parametrize("decorate", [lambda register: register, lambda register: register(override=True)])
def test_a_function_changes_the_text(installed, decorate):
    from tilelang.engine.callback import register_cuda_postproc_callback, register_hip_postproc_callback

    from torch_tile.compiler import postprocess

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                A[i] += 1

    try:

        @decorate(register_cuda_postproc_callback)
        def changed(code, target):
            return f"// for {target}\n{code}"

        register_hip_postproc_callback(lambda code, _: 1 / 0)
        register_cuda_postproc_callback(lambda code, _: 1 / 0, override=False)
        assert torch_tile.compile(kernel, target="cuda:sm_80").source.startswith("// for cuda:sm_80\n")
        postprocess.choose(lambda code, target: None)
        with pytest.raises(TypeError, match="returned NoneType"):
            torch_tile.compile(kernel, target="cuda:sm_90a")
    finally:
        postprocess.choose(None)
    assert not torch_tile.compile(kernel, target="cuda:sm_90a").source.startswith("// for")


def test_gradients_are_a_warning(installed):
    """TileLang's files call kernels on parameters, and write into tensors that require gradients."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                B[i] = A[i] * 2

    twice = torch_tile.compile(kernel, target="cpu")
    a, b = torch.randn(64), torch.empty(64, requires_grad=True)
    with pytest.warns(UserWarning, match="`B` of kernel requires gradients"):
        twice(a, b)
    assert torch.equal(b.detach(), 2 * a)
    compat.uninstall()
    with pytest.raises(torch_tile.LaunchError, match="requires gradients"):
        twice(a, b)


def test_storage_of_dtypes(installed):
    from tilelang.language.dtypes import resolve_torch_storage_dtype

    assert [resolve_torch_storage_dtype(t) for t in ("float16", T.int4, "uint4")] == [T.float16, T.int8, T.uint8]


MODULES = ["contrib.cc", "contrib.nvcc", "utils.target", "math", "testing", "profiler", "layout", "transform"]


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_attributes_of_the_package(installed, name):
    """Files say `tilelang.contrib.nvcc.get_target_compute_version()` behind `import tilelang` alone."""
    code = f"import tilelang\nassert tilelang.{name}.__name__.endswith({name.rpartition('.')[2]!r})"
    done = subprocess.run(
        [sys.executable, "-c", "from torch_tile import compat\ncompat.install()\n" + code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
