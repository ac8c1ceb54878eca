# SPDX-License-Identifier: Apache-2.0
"""Translate TileLang's options of `jit` and `compile`, so that kernels written for it run unchanged.

Options without effect here are accepted. An unknown option is an error, and so is a key of pass_configs that TileLang
does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any, TypedDict

from torch_tile.compiler.context import PassOptions
from torch_tile.diagnostics.errors import error
from torch_tile.diagnostics.spelling import nearest

# TileLang's options that change nothing here: there is one way to build for each target, and it is quick.
ACCEPTED = ("target_host", "execution_backend", "verbose", "debug_root_path")
_IN_KERNELS = {  # options of other compilers that are written in the kernel
    "num_warps": "the kernel says it, in threads: T.Kernel(n, threads=128)",
    "threads": "the kernel says it: T.Kernel(n, threads=128)",
    "num_stages": "a loop of the kernel says it: T.Pipelined(n, num_stages=3)",
    "grid": "the kernel says it: T.Kernel(T.ceildiv(n, block), threads=128)",
}
KNOWN = ("out_idx", "target", "pass_configs", "compile_flags", "strict", *ACCEPTED)
BACKENDS = ("auto", "tvm_ffi", "dlpack", "cython", "ctypes", "nvrtc", "torch", "cutedsl", "tvm")  # TileLang's
FAST_MATH_FLAGS = ("--use_fast_math", "-use_fast_math")


class CompileOptions(TypedDict, total=False):
    """The keyword arguments that `jit`, `compile` and `par_compile` share. Those in `ACCEPTED` have no effect.

    strict: raise an error for everything that became slower than it could be. Log a warning for each tile that some
    path leaves unwritten before a read. pass_configs: keys of `PassConfigKey`.
    compile_flags: `--use_fast_math` is heeded.
    """

    strict: bool
    pass_configs: Mapping[str, Any] | None
    compile_flags: str | list[str] | tuple[str, ...] | None
    target_host: object
    execution_backend: str
    verbose: bool
    debug_root_path: str | None


# Keys of pass_configs: those that matter here, and TileLang's, which change no result.
EFFECTIVE = ("tl.enable_fast_math", "tl.disable_fast_math", "tl.enable_tf32", "tl.strict", "tl.disable_wgmma")
TILELANGS = """
    tl.disable_warp_specialized tl.disable_tma_lower tl.enable_async_copy tl.disable_vectorize_256
    tl.enable_lower_ldgstg tl.enable_lower_ldgstg_predicated tl.disable_shuffle_elect tl.disable_loop_unswitching
    tl.loop_unswitching_allow_non_trivial_else tl.enable_aggressive_shared_memory_merge
    tl.disable_shared_memory_reuse tl.disable_thread_storage_sync tl.force_let_inline
    tl.if_stmt_binding_inline_replayable_binds tl.storage_rewrite_detect_inplace tl.layout_cost_model
    tl.reducer_force_baseline tl.config_index_bitwidth tl.ptxas_register_usage_level tl.device_compile_flags
    tl.enable_fp32x2_reduction tl.enable_auto_warp_specialization tl.enable_auto_schedule
    tl.disable_safe_memory_legalize tl.disable_safe_memory_access tl.disable_out_of_bound_warning
    tl.disable_data_race_check tl.disable_prelower_semantic_check tl.disable_buffer_init_check
    tl.disable_dynamic_tail_split tl.dynamic_alignment tl.simplify tl.ast_print_enable tl.enable_dump_ir tl.dump_ir_path
    tl.layout_visualization_enable tl.layout_visualization_formats tl.debug_merge_shared_memory_allocations
    tl.enable_vectorize_planner_verbose tl.enable_reducer_plan_verbose tl.emit_line_directives tl.pass_profile
    tl.pass_profile_threshold_ms tl.enable_ptxas_verbose_output tir.enable_equiv_terms_in_cse_tir tir.disable_cse_tir
    tirx.disable_cse_tir tir.simplify tir.enable_debug tir.disable_storage_rewrite tir.disable_vectorize
    tir.use_async_copy tir.merge_static_smem tir.add_lower_pass tir.noalias cuda.kernels_output_dir
"""
FAMILIES = ("tl.simplify.", "tir.simplify.")  # each with keys of its own


class _Key(str):
    """A key by its name; `value` is the key as a plain string, as of members of an enumeration."""

    name: str

    @property
    def value(self) -> str:
        """Return the key as a plain string."""
        return str(self)


class _Keys(type):
    """A namespace that accepts any name as a key; `pass_options` checks which keys exist."""

    def __getattr__(cls, name: str) -> _Key:
        if name.startswith("__"):
            raise AttributeError(name)
        family, _, rest = name.lower().partition("_")
        key = _Key(f"{family}.{rest}" if family in ("tl", "tir", "tirx", "cuda") else name.lower())
        key.name = name
        return key


class PassConfigKey(metaclass=_Keys):
    """Option keys such as `PassConfigKey.TL_ENABLE_FAST_MATH`, for `jit(pass_configs={...})`.

    Those that matter here: TL_ENABLE_FAST_MATH, TL_ENABLE_TF32 (products of float32 on tensor cores), TL_STRICT.
    """


_around: ContextVar[PassOptions | None] = ContextVar("options around", default=None)


@contextmanager
def options_around(pass_configs: Mapping[str, Any]) -> Iterator[PassOptions]:
    """Let `pass_configs` be what functions that are compiled inside begin with, unless their own options differ."""
    chosen = pass_options("PassContext", pass_configs=pass_configs)
    before = _around.set(chosen)
    try:
        yield chosen
    finally:
        _around.reset(before)


def switched_on(options: PassOptions) -> set[str]:
    """Return the names of the switches that are on."""
    return {each.name for each in fields(options) if getattr(options, each.name)}


def check_key(op: str, key: str) -> None:
    """Raise TileError for an unknown key of pass_configs."""
    known = (*EFFECTIVE, *TILELANGS.split())
    if key in known or key.startswith(FAMILIES):
        return
    near = nearest(key, known)
    fix = f"did you mean {near!r}?" if near else f"leave it out; those that matter are {', '.join(EFFECTIVE)}"
    raise error(
        "bad_argument", None, op=op, name="pass_configs", why=f"has the key {key!r}, which nobody knows", fix=fix
    )


def need_backend(op: str, backend: object) -> None:
    """Raise TileError for an `execution_backend` that TileLang does not have."""
    if backend is not None and backend not in BACKENDS:
        near = nearest(str(backend), BACKENDS)
        fix = f"did you mean {near!r}?" if near else "leave it out: there is one way to launch"
        raise error("bad_argument", None, op=op, name="execution_backend", why=f"is {backend!r}"[:80], fix=fix)


def pass_options(
    op: str,
    base: PassOptions | None = None,
    own: tuple[str, ...] = (),
    /,
    strict: bool = False,
    pass_configs: Mapping[str, Any] | None = None,
    compile_flags: str | list[str] | tuple[str, ...] | None = None,
    **others: Any,
) -> PassOptions:
    """Return the compiler's switches from the keyword arguments of `op`. Raises TileError for unknown options.

    `own` are the other parameters of `op`, to name in that error.

    A switch that no argument names keeps its value in `base`, else that of `options_around`.
    """
    base = base or _around.get() or PassOptions()
    for name in others:
        if name not in ACCEPTED:
            near = nearest(name, (*own, *KNOWN))
            fix = f"did you mean {near}?" if near else f"give one of {', '.join((*own, *KNOWN))}"
            keys = {key.partition(".")[2]: key for key in EFFECTIVE}
            if not near and (key := nearest(name, keys)):
                fix = f'did you mean pass_configs={{"{keys[key]}": True}}?'
            fix = _IN_KERNELS.get(name, fix)
            raise error("bad_argument", None, op=op, name=name, why="is not an option", fix=fix)
    for name, value, wanted in (("strict", strict, bool), ("pass_configs", pass_configs or {}, Mapping)):
        if not isinstance(value, wanted):
            fix = "give True or False" if wanted is bool else 'give a dict, {"tl.enable_fast_math": True}'
            raise error("bad_argument", None, op=op, name=name, why=f"is {value!r}"[:80], fix=fix)
    need_backend(op, others.get("execution_backend", BACKENDS[0]))
    configs = {str(key).lower(): value for key, value in (pass_configs or {}).items()}
    for key, value in configs.items():
        check_key(op, key)
        if key in EFFECTIVE and not isinstance(value, bool | int):
            why = f"has {value!r} for {key!r}"[:80]
            raise error("bad_argument", None, op=op, name="pass_configs", why=why, fix="give True or False")
    is_list = compile_flags is None or isinstance(compile_flags, str | list | tuple)
    flags = compile_flags.split() if isinstance(compile_flags, str) else list(compile_flags or ()) if is_list else []
    wrong = compile_flags if not is_list else next((flag for flag in flags if not isinstance(flag, str)), None)
    if wrong is not None:
        why, fix = f"is {compile_flags!r}"[:80], 'give a text or a list of texts, ["--use_fast_math"]'
        raise error("bad_argument", None, op=op, name="compile_flags", why=why, fix=fix)
    for flag in flags:
        if flag not in FAST_MATH_FLAGS and nearest(str(flag), FAST_MATH_FLAGS, 0.85):
            fix = f"did you mean {FAST_MATH_FLAGS[0]}?"
            raise error("bad_argument", None, op=op, name="compile_flags", why=f"hold {flag!r}", fix=fix)
    fast = configs.get("tl.enable_fast_math", not configs.get("tl.disable_fast_math", not base.fast_math))
    return PassOptions(
        strict=bool(strict or configs.get("tl.strict", base.strict)),
        fast_math=bool(fast or any(flag in FAST_MATH_FLAGS for flag in flags)),
        tf32=bool(configs.get("tl.enable_tf32", base.tf32)),
        mma_sync=bool(configs.get("tl.disable_wgmma", base.mma_sync)),
        measured=base.measured,
    )
