# SPDX-License-Identifier: Apache-2.0
"""Collect all uses of torch's private interfaces in one module, by feature and not by version.

Written against torch 2.11 to 2.15. Each helper names the interface that it hides; the rest of `inductor/` imports only
these.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["ChainPass", "CustomGraphPass"]

BACKEND_WRAPPERS = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn", "func")
"""Attributes by which wrappers of a backend, of Dynamo and of functools, name it."""
STAGES = ("pre_grad_custom_pass", "post_grad_custom_pre_pass")
JOINT_STAGES = ("joint_custom_pre_pass", "joint_custom_post_pass")


class ChainPass(CustomGraphPass):
    """Several passes as one: torch 2.11 takes a single callable where later versions also take a list."""

    def __init__(self, passes: Sequence[Callable[[torch.fx.Graph], Any]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Run the passes in order."""
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        """Return the passes' identities; None (no caching) if one pass has none, as torch treats a bare function."""
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if any(i is None for i in ids) else tuple(ids)


def chain(existing: Any, ours: CustomGraphPass) -> CustomGraphPass:
    """Append our pass to the passes that the user configured for the stage."""
    if existing is None:
        return ours
    return ChainPass([*(existing if isinstance(existing, list | tuple) else (existing,)), ours])


def add_backend(entry: EntryPoint) -> None:
    """Register a backend with Dynamo, which may have searched for all backends already."""
    from torch._dynamo.backends.registry import _BACKENDS

    _BACKENDS.setdefault(entry.name, entry)


def backend_in_use() -> tuple[Any, Mapping[str, Any]]:
    """Return what compiles the frame that Dynamo traces (else None), without wrappers, and the user's options."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    options: Mapping[str, Any] = {}
    if dynamo is None:
        return None, options
    try:
        found = dynamo.InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # no trace
        return None, options
    while True:
        for name in ("kwargs", "keywords"):  # of torch.compile's wrapper, and of a partial
            options = (getattr(found, name, None) or {}).get("options") or options
        inner = next((wrapped for n in BACKEND_WRAPPERS if (wrapped := getattr(found, n, None)) is not None), None)
        if inner is None:
            return found, options
        found = inner


def constant_in_traces(function: Callable[[], bool]) -> Callable[[], bool]:
    """Let Dynamo call a function while it traces, and take what it returns as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def inductor_config() -> Any:
    """Return Inductor's config module."""
    from torch._inductor import config

    return config


def mode_patches(mode: str | None) -> dict[str, Any]:
    """Return the config entries of a `torch.compile` mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode and mode != "default" else {}


def compile_fx(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """Compile a graph by Inductor's whole pipeline."""
    from torch._inductor.compile_fx import compile_fx as inductor_compile

    compiled: Any = inductor_compile(gm, list(example_inputs), config_patches=patches)
    return cast("Callable[..., Any]", compiled)


def reset_cudagraphs() -> None:
    """Reset CUDA graphs, as Inductor's own backend does on `torch._dynamo.reset()`."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


Sizes = dict[Any, int]
"""Values to assume for symbols of shapes."""

_sizes: contextvars.ContextVar[Sizes | None] = contextvars.ContextVar("sizes", default=None)


@contextlib.contextmanager
def at_sizes(sizes: Sizes) -> Iterator[None]:
    """Make `size_hint` use these sizes for symbols, instead of the traced sizes."""
    token = _sizes.set(sizes)
    try:
        yield
    finally:
        _sizes.reset(token)


def symbols_of(values: Iterable[Any]) -> dict[Any, tuple[int, int, int]]:
    """Return the symbols in tensor shapes and sizes: traced value, least and most. Empty if a value is unknown."""
    found: dict[Any, tuple[int, int, int]] = {}
    for value in values:
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            env = size.node.shape_env
            hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # until torch 2.9
            for symbol in size.node.expr.free_symbols:
                if symbol not in hints:
                    return {}
                bounds = env.var_to_range.get(symbol)
                low, high = (2, sys.maxsize) if bounds is None else (bounds.lower, bounds.upper)
                low, high = int(max(low, 2)), int(min(high, sys.maxsize))
                found[symbol] = (int(hints[symbol]), low, high)
    return found


def size_hint(size: Any, fallback: int = 64) -> int:
    """Return a typical value of a (possibly symbolic) size: that of `at_sizes`, else the traced value if known."""
    if isinstance(size, int):
        return size
    node = size.node
    if (sizes := _sizes.get()) is not None:
        chosen = node.expr.xreplace(sizes)
        if getattr(chosen, "is_number", True):  # a symbol alone becomes the int itself
            return int(chosen)
    hint = node.hint if getattr(node, "has_hint", lambda: node.hint is not None)() else None
    return int(hint) if hint is not None else fallback


def empty_for(value: Any) -> Any:
    """Allocate a tensor like a fake one, integers zero so that they are valid indices; or return a typical size."""
    if not isinstance(value, torch.Tensor):
        return size_hint(value)
    sizes, strides = (tuple(map(size_hint, s)) for s in (value.shape, value.stride()))
    out = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return out if value.dtype.is_floating_point else out.zero_()


def elements(x: torch.Tensor) -> torch.Tensor:
    """Return what lies under a tensor, each element once. In-place operations refuse one that overlaps itself."""
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Leave the trace around, in this thread: no tracing context, no fake mode, no grad."""
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with tracing(None), _disable_current_modes(), torch.no_grad():
        yield


@contextlib.contextmanager
def nested_compile() -> Iterator[None]:
    """Allow another compile or run during a compile, as `outside_trace` does. Only the compiling thread may enter.

    Who looks at Inductor's counters, or at the code that it saves, sees nothing of it.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.graph import GraphLowering

    counted = {name: counts.copy() for name, counts in counters.items()}
    watched = vars(GraphLowering)["save_output_code"]  # None, unless a tool collects texts
    GraphLowering.save_output_code = None
    try:
        with outside_trace():
            yield
    finally:
        GraphLowering.save_output_code = watched
        counters.clear()
        counters.update(counted)


@contextlib.contextmanager
def no_graph_caches() -> Iterator[None]:
    """Disable the caches of whole graphs, in which no pass would run; single kernels are still found in caches."""
    from torch._functorch import config as aot_autograd

    with (
        inductor_config().patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        aot_autograd.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


def compile_alone(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile an ATen graph by Inductor's whole pipeline, without custom passes and CUDA graphs, for Python."""
    from torch._inductor.virtualized import V

    none = dict.fromkeys((*STAGES, *JOINT_STAGES, "post_grad_custom_post_pass"))
    with V.set_aot_compilation(False):
        return compile_fx(gm, inputs, {**(options or {}), **none, "triton.cudagraphs": False, "cpp_wrapper": False})


def in_cpp() -> bool:
    """Return whether C++ will call the compiled code: with `cpp_wrapper`, and by AOTInductor."""
    return bool(inductor_config().cpp_wrapper) or in_package()


def in_package() -> bool:
    """Return whether AOTInductor compiles, so that the code runs in another process."""
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation)


def graph_module(graph: torch.fx.Graph, parts: Mapping[str, torch.nn.Module] | None = None) -> torch.fx.GraphModule:
    """Make a module of a graph, with the submodules `parts`. Its Python is written at the first call."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    root = torch.nn.Module()
    for name, part in (parts or {}).items():
        root.add_module(name, part)
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def register_lowering(op: torch._ops.OpOverload, lower: Callable[..., Any]) -> None:
    """Make `lower` Inductor's lowering of `op`, unless the op already has one."""
    from torch._inductor import lowering

    if op not in lowering.lowerings:
        lowering.register_lowering(op, type_promotion_kind=None)(lower)


def decomposed(call: Callable[..., Any], inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Trace a call to ATen operations, decomposed as Inductor does."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(call, decomposition_table=select_decomp_table())(*inputs)


def lower_inline(call: Callable[..., Any], fakes: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Lower the operations of `call`, traced on `fakes`, as part of the graph being lowered, on `inputs`."""
    from torch._inductor.virtualized import V

    with V.graph.fake_mode, torch.no_grad():
        traced = decomposed(call, fakes)
    queue, outer = iter(inputs), V.graph.current_node
    try:
        for node in traced.graph.nodes:
            if node.op == "output":
                return torch.fx.map_arg(node.args[0], V.graph.env.__getitem__)
            V.graph.current_node = node
            if node.op == "placeholder":
                V.graph.env[node] = next(queue)
            elif node.op == "get_attr":
                V.graph.env[node] = V.graph.add_tensor_constant(getattr(traced, node.target))
            else:
                V.graph.env[node] = V.graph.run_node(node)
    finally:
        V.graph.current_node = outer
    raise AssertionError("a graph has an output")


def compile_without_codegen(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], refine: Callable[[torch.fx.GraphModule], Callable[..., Any]]
) -> Callable[..., Any]:
    """Run AOTAutograd and Inductor's joint passes; then run each graph by the callable from `refine`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    def compile_graph(graph: torch.fx.GraphModule, fakes: list[Any], joint: bool = True) -> Callable[..., Any]:
        """Run the joint passes on a graph of AOTAutograd's, unless they ran before, and then `refine`."""
        with V.set_fake_mode(detect_fake_mode(fakes)):
            if joint:
                graph = joint_graph_passes(graph)
            view_to_reshape(graph)
            run = refine(graph)
        graph.graph.lint()
        graph.recompile()
        return cast("Callable[..., Any]", make_boxed_func(run))

    def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(joint_inputs)):
            joint = joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **kwargs)

    compiler = aot_autograd(
        fw_compiler=functools.partial(compile_graph, joint=False),
        bw_compiler=functools.partial(compile_graph, joint=False),
        inference_compiler=compile_graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return compiler(gm, list(inputs))


def worker_pool(ready: bool) -> Any:
    """Return Inductor's worker processes, which start at the first call; else None.

    None if Inductor has no workers, or if `ready` is set and they have not started. Inductor has none with one compile
    thread and in daemons. In newer torch without Python's lock, threads do their work.
    """
    from torch._inductor.async_compile import AsyncCompile

    if getattr(AsyncCompile, "should_use_thread_workers", bool)():
        return None
    are_ready = AsyncCompile.use_process_pool()
    if AsyncCompile._ready_future is None or (ready and not are_ready):
        return None
    pool = AsyncCompile.process_pool()
    parent = getattr(pool, "process", None)  # of the workers; they are forked from this process where there is none
    return pool if parent is None or parent.poll() is None else None


def worker_count() -> int:
    """Return the number of processes of the pool."""
    return inductor_config().compile_threads or 1


def graph_breaks() -> int:
    """Return Dynamo's count of graph breaks in this process; a break in an inlined call counts for each caller."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def compiled_graphs() -> int:
    """Return Dynamo's count of compiled graphs in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def no_recompile_limit() -> Iterator[None]:
    """Lift the limit of recompiles, and treat changed sizes as constants instead of dynamic sizes."""
    from torch._dynamo import config

    with config.patch(
        recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize, automatic_dynamic_shapes=False
    ):
        yield


def has_flex_flash(device: torch.device) -> bool:
    """Return whether Inductor has its FLASH backend of `flex_attention` for a device, and its package is installed."""
    if device.type != "cuda":
        return False
    try:
        from torch._inductor.kernel.flex.flex_flash_attention import ensure_flash_available
    except ImportError:
        return False
    return bool(ensure_flash_available())


def distributed_store() -> Any:
    """Return the store of torch.distributed if there are several ranks, else None; import nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() == 1:
        return None
    return distributed.distributed_c10d._get_default_store()


def jagged_like(like: Any, rows: torch.Tensor) -> Any:
    """Return rows `[T, ...]` as a jagged tensor `[B, j, ...]` with the lengths of another one; may be traced."""
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths as view

    bounds = {"min_seqlen": like._maybe_min_seqlen, "max_seqlen": like._maybe_max_seqlen}
    return view(rows, like.offsets(), None, **bounds)
