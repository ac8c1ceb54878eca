# SPDX-License-Identifier: Apache-2.0
"""Time kernels and compare them with a reference, on made-up inputs on the kernel's device."""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.arguments import Count, calls_back, names_parameters
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.diagnostics.spelling import missing_attribute
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Var
from torch_tile.ir.node import find

if TYPE_CHECKING:
    import torch

    from torch_tile.kernel import JITKernel

__path__: list[str] = []  # TileLang's module of this name has modules inside: compat


FLUSHED = 256 * 2**20  # bytes written to push everything else out of a GPU's L2 cache
PICK: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median, "mean": statistics.mean, "min": min, "max": max,
}  # fmt: skip
# TileLang's names of timers, and which of ours each is.
BACKENDS = {"auto": "auto", "event": "event", "wall": "wall", "cupti": "event", "cudagraph": "event"}


class TensorSupplyType(enum.Enum):
    """The way to make inputs, with TileLang's distributions.

    Integer: -2 to 2 (0 to 2 of unsigned types, 0 or 1 of bool, -128 to 127 of 8-bit floats). Uniform: from -1 to 1.
    Normal: mean -1, deviation 1. Randn: mean 0, deviation 1. Auto: Uniform of floats up to 32 bits, else Integer.
    Uniform and Normal give ones of int8, and Integer of the other types that are no floats.
    """

    Integer = 1
    Uniform = 2
    Normal = 3
    Randn = 4
    Zero = 5
    One = 6
    Auto = 7


@names_parameters
def do_bench(
    fn: Callable[[], Any],
    warmup: float = 25,
    rep: float = 100,
    return_mode: str = "median",
    backend: str = "auto",
    fast_flush: bool = True,
    quantiles: Sequence[float] | None = None,
    n_warmup: int = 0,
    n_repeat: int = 0,
    dynamic_symbolic_constraints: Any = None,
    early_stop_baseline: Any = None,
    device: Any = None,
    _n_warmup: int = 0,
    _n_repeat: int = 0,
) -> Any:
    """Return the milliseconds of one call of `fn`: call for `warmup` ms, then sample for `rep` ms.

    `return_mode` is one of median, mean, min, max; with `quantiles` (between 0 and 1) a list has one number for each.
    `backend` chooses the clock. "event" is the GPU's own time, with its L2 cache flushed before each sample unless
    `fast_flush` is False. "wall" is the time until `fn` returns. "auto" is "event" once the process uses a GPU.
    `n_warmup` and `n_repeat` are numbers of calls instead of times, also as `_n_warmup` and `_n_repeat`.
    `dynamic_symbolic_constraints`, `early_stop_baseline` and `device` are TileLang's, and change no time. Raises
    ValueError for another mode or backend.
    """
    for name, value in (("warmup", warmup), ("rep", rep), ("n_warmup", n_warmup), ("n_repeat", n_repeat)):
        if not isinstance(value, int | float) or not value >= 0:
            raise TypeError(f"do_bench: {name} is {value!r}; expected a number of 0 or more")
    for share in quantiles or ():
        if not 0 <= share <= 1:
            raise ValueError(
                f"do_bench: quantiles holds {share!r}; expected numbers from 0 to 1, as 0.5 for the median"
            )
    n_warmup, n_repeat = n_warmup or _n_warmup, n_repeat or _n_repeat
    if return_mode not in PICK:
        raise ValueError(f"do_bench: return_mode is {return_mode!r}; expected one of {', '.join(PICK)}")
    if backend not in BACKENDS:
        raise ValueError(f"do_bench: backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    backend = BACKENDS[backend]
    if backend == "auto":
        import torch

        backend = "event" if torch.cuda.is_initialized() else "wall"
    if backend == "event":
        samples = _by_events(fn, warmup, rep, n_warmup, n_repeat, fast_flush)
    else:
        samples = _by_clock(fn, warmup, rep, n_warmup, n_repeat)
    if quantiles is None:
        return float(PICK[return_mode](samples))
    import numpy

    return [float(x) for x in numpy.quantile(samples, quantiles)]


def _by_clock(fn: Callable[[], Any], warmup: float, rep: float, n_warmup: int, n_repeat: int) -> list[float]:
    """Time calls by the wall clock; return the milliseconds of each sample."""
    end, calls = time.perf_counter() + warmup / 1e3, 1
    fn()
    while calls < n_warmup if n_warmup else time.perf_counter() < end:
        fn()
        calls += 1
    samples: list[float] = []
    end = time.perf_counter() + rep / 1e3
    while not samples or (len(samples) < n_repeat if n_repeat else time.perf_counter() < end):
        start = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def _by_events(
    fn: Callable[[], Any], warmup: float, rep: float, n_warmup: int, n_repeat: int, flush: bool
) -> list[float]:
    """Time calls by CUDA events, with the L2 cache flushed if `flush`; return the milliseconds of each sample."""
    import torch

    cache = torch.empty(FLUSHED if flush else 0, dtype=torch.int8, device="cuda")
    fn()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(5):
        cache.zero_()
        fn()
    stop.record()
    torch.cuda.synchronize()
    once = max(start.elapsed_time(stop) / 5, 1e-3)
    for _ in range(n_warmup or int(warmup / once)):
        fn()
    pairs = []
    for _ in range(n_repeat or max(1, int(rep / once))):
        cache.zero_()
        pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        pairs[-1][0].record()
        fn()
        pairs[-1][1].record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairs]


def made_up(param: Any, supply: TensorSupplyType, device: str, sizes: Mapping[str, int] | None = None) -> torch.Tensor:
    """Make a tensor for a kernel's parameter of run-time `sizes` by name. Raises LaunchError for a missing one."""
    import torch

    shape = _shape(param, sizes or {}) if isinstance(param, Buffer) else None
    if shape is None:
        what = "has no compile-time shape" if isinstance(param, Buffer) else "is a scalar"
        raise LaunchError(
            f"`{param.name}` {what}: give the profiler its inputs (input_tensors=...), or the "
            "autotuner by set_autotune_inputs"
        )
    to = param.dtype.as_torch()
    if supply is TensorSupplyType.Zero:
        return torch.zeros(shape, dtype=to, device=device)
    if supply is TensorSupplyType.One:
        return torch.ones(shape, dtype=to, device=device)
    dtype = param.dtype
    if supply is TensorSupplyType.Auto:
        small = dtype.is_float and 8 < dtype.bits < 64
        supply = TensorSupplyType.Uniform if small else TensorSupplyType.Integer
    if supply is TensorSupplyType.Randn:
        return torch.randn(shape, device=device).to(to)
    if supply is TensorSupplyType.Integer or not dtype.is_float:
        if supply is not TensorSupplyType.Integer and dtype.name == "int8":
            return torch.ones(shape, dtype=to, device=device)
        return torch.randint(*_integers(dtype), shape, device=device).to(to)
    if supply is TensorSupplyType.Uniform:
        return torch.rand(shape, device=device).mul(2).sub(1).to(to)
    return torch.randn(shape, device=device).sub(1).to(to)


def _shape(param: Buffer, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the sizes of a buffer; None if a size is unknown."""
    dims = {v: sizes[v.name] for size in param.shape for v in find(size, Var) if v.name in sizes}
    try:
        return tuple(int(evaluate(size, dims)) for size in param.shape)
    except KeyError:
        return None


class Profiler:
    """Runs a kernel on inputs that it makes itself."""

    kernel: JITKernel
    supply: TensorSupplyType

    @names_parameters
    def __init__(self, kernel: JITKernel, supply: TensorSupplyType = TensorSupplyType.Auto):
        if not hasattr(kernel, "launcher"):
            kind = type(kernel).__name__
            fix = f"{getattr(kernel, '__name__', 'f')}.compile(...)"
            raise TypeError(f"Profiler: kernel is {kind}; expected a compiled kernel, which {fix} returns")
        self.kernel, self.supply = kernel, supply

    def __getattr__(self, name: str) -> Any:
        """Name the nearest attribute for one that is not there."""
        raise missing_attribute(self, name)

    def inputs(self, sizes: Mapping[str, int] | None = None) -> list[Any]:
        """Make fresh arguments. Raises LaunchError if a run-time size is not in `sizes`."""
        return [made_up(p, self.supply, self.kernel.launcher.kind, sizes) for p in self.kernel.launcher.given]

    @property
    def func(self) -> JITKernel:
        """Return the kernel."""
        return self.kernel

    @property
    def params(self) -> list[Any]:
        """Return the buffers and scalars of the kernel's signature."""
        return list(self.kernel.params)

    @property
    def result_idx(self) -> list[int]:
        """Return the positions of the parameters that the kernel allocates."""
        return self.kernel.out_idx

    def __call__(self, *args: Any) -> Any:
        """Run the kernel."""
        return self.kernel(*args)

    def _get_inputs(
        self, with_output: bool = False, dynamic_symbolic_constraints: Mapping[str, int] | None = None
    ) -> list[Any]:
        """Return `inputs`, under TileLang's name; `with_output` makes tensors of all parameters."""
        wanted = self.kernel.params if with_output else self.kernel.launcher.given
        return [made_up(p, self.supply, self.kernel.launcher.kind, dynamic_symbolic_constraints) for p in wanted]

    @names_parameters
    def do_bench(
        self,
        func: Callable[..., Any] | None = None,
        warmup: float = 25,
        rep: float = 100,
        input_tensors: Sequence[Any] | None = None,
        return_mode: str = "median",
        backend: str | None = None,
        fast_flush: bool = True,
        quantiles: Sequence[float] | None = None,
        n_warmup: int = 0,
        n_repeat: int = 0,
        dynamic_symbolic_constraints: Mapping[str, int] | None = None,
        early_stop_baseline: Any = None,
        device: Any = None,
    ) -> Any:
        """Return the milliseconds of one run of the kernel, or of `func` on the same inputs, as do_bench does.

        `dynamic_symbolic_constraints` has sizes known only at run time, by name: {"m": 1024}.
        """
        args = list(input_tensors) if input_tensors is not None else self.inputs(dynamic_symbolic_constraints)
        run = func or self.kernel
        backend = backend or ("event" if self.kernel.launcher.kind == "cuda" else "wall")
        return do_bench(
            lambda: run(*args), warmup, rep, return_mode, backend, fast_flush, quantiles, n_warmup, n_repeat
        )  # fmt: skip

    @names_parameters
    def run_once(self, func: Callable[..., Any] | None = None) -> Any:
        """Run once on fresh inputs."""
        return (func or self.kernel)(*self.inputs())

    @names_parameters
    def assert_allclose(
        self,
        reference: Callable[..., Any],
        atol: float = 1e-2,
        rtol: float = 1e-2,
        input_tensors: Sequence[Any] | None = None,
        max_mismatched_ratio: float = 0.01,
    ) -> None:
        """Compare with `reference` on the same inputs. Where one of the two returns nothing, its last tensor counts."""
        if not 0 <= max_mismatched_ratio <= 1:
            wanted = "expected a share of the elements, 0 to 1"
            raise ValueError(f"assert_allclose: max_mismatched_ratio is {max_mismatched_ratio}; {wanted}")
        got, expected = self._both_results(reference, input_tensors)
        if len(got) != len(expected):
            raise AssertionError(f"the kernel gives {_count(got)} and the reference {_count(expected)}")
        for a, b in zip(got, expected, strict=True):
            compare(a, b, atol, rtol, max_mismatched_ratio)

    @names_parameters
    def manual_assert_close(
        self,
        reference: Callable[..., Any],
        input_tensors: Sequence[Any] | None = None,
        manual_check_prog: Callable[[Any, Any], object] | None = None,
    ) -> None:
        """Compare with `reference` on the same inputs by `manual_check_prog(result, expected)`.

        Several results are passed as a list. The function raises where the results differ.
        """
        if manual_check_prog is None:
            raise TypeError("manual_assert_close() needs manual_check_prog, which compares the two results")
        results = [x[0] if len(x) == 1 else x for x in self._both_results(reference, input_tensors)]
        manual_check_prog(*results)

    @names_parameters
    def assert_consistent(self, repeat: Count = 10) -> None:
        """Raise AssertionError unless the same inputs give the same bits `repeat` times."""
        args = self.inputs()

        def once() -> list[Any]:
            copies = _copies(args)
            return _listed(self.kernel(*copies), copies)

        first = once()
        for _ in range(repeat - 1):
            for a, b in zip(first, once(), strict=True):
                if not _same_bits(a, b):
                    raise AssertionError(f"results of the same inputs differ: {a} and {b}")

    def _both_results(self, reference: Callable[..., Any], given: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
        """Return the kernel's and the reference's results on the same inputs; without a result, the last tensor."""
        args = list(given) if given is not None else self.inputs()
        copies = _copies(args)
        with calls_back(f"the profiler calls reference(*inputs), with {_count(copies)}"):
            result = reference(*copies)
        if result is None and all(_same_bits(a, b) for a, b in zip(args, copies, strict=True) if hasattr(a, "clone")):
            raise AssertionError("the reference returns nothing and writes nothing: let it return the expected tensors")
        expected = _listed(result, copies)
        if wrong := [type(each).__name__ for each in expected if not hasattr(each, "data_ptr")]:
            raise TypeError(f"the reference returns {wrong[0]}; expected a tensor, or a tuple of tensors")
        return _listed(self.kernel(*args), args), expected


def _integers(dtype: DType) -> tuple[int, int]:
    """Return the least integer to make up, and the first integer that is too large."""
    if dtype.is_float:
        return (-128, 128) if dtype.bits == 8 else (-2, 3)
    return {"bool": (0, 2), "uint": (0, 3)}.get(dtype.kind, (-2, 3))


def _copies(args: Sequence[Any]) -> list[Any]:
    """Clone the tensors among the arguments."""
    return [a.clone() if hasattr(a, "clone") else a for a in args]


def _listed(result: Any, args: Sequence[Any]) -> list[Any]:
    """Return the tensors of a result, or the last tensor argument if there is no result."""
    if result is None:
        return [next(a for a in reversed(args) if hasattr(a, "clone"))]
    return list(result) if isinstance(result, tuple | list) else [result]


def _count(results: Sequence[Any]) -> str:
    """Return the number of results as text."""
    return "1 tensor" if len(results) == 1 else f"{len(results)} tensors"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit by bit."""
    import torch

    # A clone has the usual stride in a dimension of size 1, too; `contiguous` keeps any, which `view` refuses.
    a, b = (x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def compare(a: torch.Tensor, b: torch.Tensor, atol: float, rtol: float, ratio: float, equal_nan: bool = True) -> None:
    """Raise AssertionError if the shapes differ, or more than `ratio` of the elements."""
    import torch

    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    wrong = ~torch.isclose(a.double(), b.double(), atol=atol, rtol=rtol, equal_nan=equal_nan)
    share = wrong.double().mean().item() if wrong.numel() else 0.0
    if share > ratio:
        worst = (a.double() - b.double()).abs().max().item()
        raise AssertionError(f"{share:.2%} of {wrong.numel()} elements differ (largest difference {worst:.3g})")
