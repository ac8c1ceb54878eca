# SPDX-License-Identifier: Apache-2.0
"""Stand for modules of TileLang and TVM that have no counterpart, so that files which import them run.

A name of such a module can be imported. It is no type of any object, and its use is an error that says what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.language.misuse import instead
from torch_tile.language.trace import author_span

# What modules are, by the names that begin theirs.
MODULES = {
    "tvm": "a part of TVM, whose IR no kernel needs",
    "tilelang.ascend": "for Huawei's chips",
    "tilelang.rocm": "for AMD's GPUs",
    "tilelang.metal": "for Apple's GPUs",
    "tilelang.webgpu": "for browsers",
    "tilelang.contrib.cutedsl": "for another generator of code",
    "tilelang.contrib.bisheng": "for Huawei's chips",
    "tilelang.contrib.hip_resource_info": "for AMD's GPUs",
    "tilelang.contrib.hipcc": "for AMD's GPUs",
    "tilelang.contrib.msvc": "about the host's compiler, which torch_tile finds itself",
    "tilelang.contrib.nvrtc": "a part of TileLang's compiler",
    "tilelang.contrib.rocm": "for AMD's GPUs",
    "tilelang.analysis": "about TVM's IR, which no kernel needs",
    "tilelang.autodd": "a tool of TileLang's that makes failing programs smaller",
    "tilelang.autotuner.grouped_compile": "a part of TileLang's compiler",
    "tilelang.carver.analysis": "about TVM's IR, which no kernel needs",
    "tilelang.carver.arch.cdna": "for AMD's GPUs",
    "tilelang.carver.arch.driver.ascend_driver": "for Huawei's chips",
    "tilelang.carver.arch.metal": "for Apple's GPUs",
    "tilelang.carver.arch.rdna": "for AMD's GPUs",
    "tilelang.carver.common_schedules": "about TVM's IR, which no kernel needs",
    "tilelang.carver.roller.bestfit": "a part of TileLang's compiler",
    "tilelang.carver.roller.node": "about TVM's IR, which no kernel needs",
    "tilelang.carver.roller.policy": "a part of TileLang's compiler",
    "tilelang.carver.roller.shape_inference": "about TVM's IR, which no kernel needs",
    "tilelang.carver.utils": "about TVM's IR, which no kernel needs",
    "tilelang.cpu": "a part of TileLang's compiler",
    "tilelang.engine.semantic_check": "a part of TileLang's compiler",
    "tilelang.layout.ascend": "for Huawei's chips",
    "tilelang.libinfo": "about TileLang's own files",
    "tilelang.profiler.msprof": "for Huawei's chips",
    "tilelang.jit.adapter.cutedsl": "for another generator of code",
    "tilelang.jit.abi": "a part of TileLang's launchers",
    "tilelang.jit.adapter": "a part of TileLang's launchers",
    "tilelang.jit.diagnostics": "a part of TileLang's compiler",
    "tilelang.backend": "a part of TileLang's compiler",
    "tilelang.cache": "a part of TileLang's cache",
    "tilelang.cuda.backend": "a part of TileLang's compiler",
    "tilelang.cuda.codegen": "a part of TileLang's compiler",
    "tilelang.cuda.cutedsl_backend": "for another generator of code",
    "tilelang.cuda.debug": "a part of TileLang's compiler",
    "tilelang.cuda.execution_backend": "a part of TileLang's launchers",
    "tilelang.cuda.op": "a part of TileLang's compiler",
    "tilelang.cuda.pipeline": "a part of TileLang's compiler",
    "tilelang.cuda.transform": "a pass of TileLang's compiler",
    "tilelang.cuda.intrinsics": "for GPUs that this compiler does not serve",
    "tilelang.cuda.intrinsics.layout.mma_sm100_layout": "for GPUs that this compiler does not serve",
    "tilelang.cuda.intrinsics.macro.mma_sm120_macro_generator": "for GPUs that this compiler does not serve",
    "tilelang.cuda.intrinsics.macro.mma_sm75_macro_generator": "for GPUs that this compiler does not serve",
    "tilelang.cuda.intrinsics.macro.tcgen05_macro_generator": "for GPUs that this compiler does not serve",
    "tilelang.errors": "a part of TileLang's compiler",
    "tilelang.instrumentation": "about the passes of TileLang's compiler",
    "tilelang.ir": "about TVM's IR, which no kernel needs",
    "tilelang.language.eager": "a part of TileLang's front end",
    "tilelang.language.tir.exports": "a list of TVM's names",
    "tilelang.layout.cute": "a part of TileLang's compiler",
    "tilelang.tileop": "a part of TileLang's compiler",
    "tilelang.tools": "about the passes of TileLang's compiler",
    "tilelang.transform": "a pass of TileLang's compiler",
    "tilelang.utils": "a part of TileLang's compiler",
}


# Names of TileLang's that a module of ours lacks.
NAMES = {
    "torch_tile": "_ffi_api",
    "torch_tile.autotuner": "AutoTuneImpl AutotuneInputsCapture BEST_CONFIG_PATH CaptureStack CompileArgs "
    "DEVICE_KERNEL_PATH EXECUTABLE_PATH FUNCTION_PATH HOST_KERNEL_PATH KERNEL_CUBIN_PATH KERNEL_LIB_PATH "
    "KERNEL_PY_PATH LATENCY_PATH OUT_IDX_PATH PARAMS_PATH ProfileArgs",
    "torch_tile.carver.roller": "Edge OutputNode PrimFuncNode",
    "torch_tile.compat.adapter": "CachedTextSource CachedTextSourceLike",
    "torch_tile.contrib.cc": "create_executable create_shared create_staticlib cross_compiler get_cc "
    "get_global_symbol_section_map get_target_by_dump_machine is_darwin",
    "torch_tile.contrib.nvcc": "compile_cuda get_nvcc_compiler get_ptx_from_source get_sass_from_source "
    "get_target_arch_and_code get_target_code_list",
    "torch_tile.cuda.intrinsics": "mma_load_a_32x32_to_shared_16x64_layout shared_16x16_to_mma_32x8_layout_sr_a "
    "shared_16x32_to_mma_32x16_layout_sr_a shared_16x8_to_mma_32x4_layout_sr_a",
    "torch_tile.cuda.intrinsics.macro.mma_macro_generator": "INT4TensorCoreIntrinEmitter "
    "TensorCoreIntrinEmitterWithLadderTransform",
    "torch_tile.cuda.intrinsics.macro.wgmma_macro_generator": "WGMMADescriptorParams compute_gmma_descriptor",
    "torch_tile.engine": "KernelParam device_codegen device_codegen_without_compile dump_kernel_params extrac_params "
    "get_device_call get_host_call host_codegen is_cpu_device_backend is_device_call load_kernel_params",
    "torch_tile.env": "CacheState EnvVar Environment resolve_pass_profile_threshold_ms",
    "torch_tile.ir": "get_buffer_span get_prim_func_span get_stmt_span make_span set_buffer_span set_prim_func_span "
    "set_stmt_span span_coverage span_to_location stamp_stmt_spans",
    "torch_tile.jit": "ExecutionBackend JITImpl",
    "torch_tile.language": "_VALID_CAST_ROUNDING_MODES _normalize_threads BaseBuilder Builder DSLMutator IRGenerator "
    "LetFrame Macro TirTemplate disk_compile get_ast "
    "get_compiled_object get_type_hints has_internal_prim_func mutate register_let_value unwrap_cond unwrap_expr",
    "torch_tile.language.layout": "SwizzleMode cute make_tcgen05mma_swizzled_layout",
    "torch_tile.tools": "plot_layout",
    "torch_tile.transform": "AnnotateDeviceRegions ConfigIndexBitwidth DecoupleTypeCast FlattenBuffer InjectAssumes "
    "InjectSoftwarePipeline LayoutInference LegalizeNegativeIndex LegalizeSafeMemoryAccess LegalizeVectorizedLoop "
    "LetInline LoopUnswitching LowerAccessPtr LowerOpaqueBlock LowerThreadAllreduce LowerTileOp MakePackedAPI "
    "MergeIfStmt MergeSharedMemoryAllocations PassContext PipelinePlanning PlanAndUpdateBufferAllocationLocation "
    "Simplify SplitHostDevice StorageRewrite ThreadSync UnrollLoop VectorizeLoop VerifyBufferInit VerifyParallelLoop",
    "torch_tile.utils": "BackendContext create_backend_context get_backend list_backends pass_diff_hook "
    "register_backend",
    "torch_tile.utils.target": "auto_detect_target list_target_detectors normalize_cuda_target "
    "normalize_cutedsl_target register_target_detector register_target_normalizer target_has_async_copy "
    "target_has_ldmatrix target_has_stmatrix target_is_turing target_is_volta",
}


def reason(name: str) -> str:
    """Say what a name of TileLang's or TVM's is that has no counterpart; "" for a name that neither has."""
    while name:
        if name in MODULES:
            return MODULES[name]
        name = name.rpartition(".")[0]
    return ""


def reason_of_name(module: str, name: str) -> str:
    """Say what a name is that a module of ours lacks and TileLang's has; "" for one that TileLang has not, either.

    Private names are taken for TileLang's.
    """
    if name.startswith("_"):
        return "" if name.startswith("__") else "a private name of TileLang's"
    if name in NAMES.get(module, "").split():
        return "a part of TileLang's compiler"
    if (inside := f"tilelang{module.removeprefix('torch_tile')}.{name}") in MODULES:
        return MODULES[inside]
    return instead(name) if module == "torch_tile.language" else ""


class _Absent(type):
    """The class of absent names: each is a class itself, so that `isinstance(x, name)` is False for all x."""

    _why: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}", cls._why)

    def __call__(cls, *args: Any, **named: Any) -> NoReturn:
        raise _refusal(cls)

    def __iter__(cls) -> Iterator[Any]:
        raise _refusal(cls)

    def __instancecheck__(cls, value: object) -> bool:
        return False

    def __repr__(cls) -> str:
        return f"<{cls.__qualname__}, which torch_tile does not have>"


def absent(name: str, why: str = "") -> Any:
    """Return what stands for the name of a module: an object whose use is an error that says why."""
    why = why or reason(name)
    return _Absent(name.rpartition(".")[2], (), {"__qualname__": name, "__doc__": f"`{name}` is {why}.", "_why": why})


def is_absent(found: object) -> bool:
    """Return whether an object is what `absent` returned."""
    return type(found) is _Absent


def _refusal(cls: _Absent) -> TileError:
    """Say what an absent name is, on the line that uses it."""
    return error("absent_name", author_span(), name=cls.__qualname__, why=cls._why)


__all__ = ["MODULES", "NAMES", "absent", "is_absent", "reason", "reason_of_name"]
