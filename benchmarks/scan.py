# SPDX-License-Identifier: Apache-2.0
"""Scans of linear attention and their gradients: `python -m benchmarks.scan [--quick] [--only delta,8192]`.

Mamba-2 (SSD), its kernels for chunks, and the gated delta rule. Work counts the products of the recurrence. Rivals:
mamba-ssm and fla, where a module `rivals` makes them importable; on the CPU plain torch.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.problem import Case, Prepare, Problem, rival, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile.kernels.linear_attention import delta
from torch_tile.kernels.ssm import ssd

Tensors = Sequence[torch.Tensor]
LN_2 = math.log(2.0)
ROUNDINGS = 3.0  # of states, of weights and of products with them


@dataclass(frozen=True)
class Shape:
    """Batch, times and heads of a scan; `keys` and `values` are the sizes of a head's state."""

    batch: int
    length: int
    heads: int
    keys: int
    values: int
    quick: bool = False

    @property
    def name(self) -> str:
        """Name the sizes."""
        return f"b{self.batch} s{self.length} h{self.heads} {self.keys}x{self.values}"

    @property
    def flops(self) -> float:
        """Return what it takes to add to each state and to ask it."""
        return 4.0 * self.batch * self.length * self.heads * self.keys * self.values


SSD_ON_GPU = Shape(1, 8192, 64, 128, 64, quick=True), Shape(8, 2048, 64, 128, 64)
DELTA_ON_GPU = Shape(1, 4096, 16, 128, 128, quick=True), Shape(4, 2048, 32, 128, 128)
SSD_ON_CPU = Shape(1, 300, 4, 32, 16, quick=True), Shape(1, 2000, 4, 64, 64)
DELTA_ON_CPU = Shape(1, 300, 4, 32, 32, quick=True), Shape(1, 2000, 4, 64, 64)
SSD_KINDS = {"chunk_state": 2.2, "chunk_scan": 2.0, "forward": 1.0, "with gradients": 1.5}
DELTA_KINDS = {"forward": 2.0, "gradients": 1.5, "with gradients": 1.0}


def problems(device: str) -> Iterator[Problem]:
    """Mamba-2 and the delta rule, of each size."""
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    families: tuple[tuple[str, Any, Any, Any, str], ...] = (
        ("ssd", SSD_ON_GPU if on_gpu else SSD_ON_CPU, SSD_KINDS, ssd_case, "mamba-ssm"),
        ("delta", DELTA_ON_GPU if on_gpu else DELTA_ON_CPU, DELTA_KINDS, delta_case, "fla"),
    )
    for family, shapes, kinds, make, other in families:
        for shape in shapes:
            for kind, asked in kinds.items():
                passes = {"gradients": 2.0, "with gradients": 3.0}.get(kind, 1.0)
                elements = shape.batch * shape.length * (shape.heads * 2 * shape.values + 2 * shape.keys)
                yield Problem(
                    f"{family} {kind} {shape.name} {name_of(dtype)}", f"{family} {kind}", dtype, passes * shape.flops,
                    passes * elements * dtype.itemsize, partial(make, kind, shape, dtype, device),
                    {other if on_gpu else "torch": asked}, quick=shape.quick,
                )  # fmt: skip


def operator(name: str) -> Any:
    """Return an operator of the library, which replays its launches, as in models; a kernel's function does not."""
    import torch_tile.ops  # noqa: F401 - registers it

    return getattr(torch.ops.tile, name)


def in_rows(results: Any) -> torch.Tensor:
    """Join tensors that have one last size, or multiples of it, row by row."""
    found = [results] if isinstance(results, torch.Tensor) else list(results)
    size = min(t.shape[-1] for t in found)
    return torch.cat([t.reshape(-1, size) for t in found])


def compared(
    ours: Call, rivals: dict[str, Prepare], expected: Callable[[], Tensors], read: Callable[[Any], Any]
) -> Case:
    """Make a case that looks at some rows of the tensors that `read` takes from a result."""
    wanted = functools.cache(lambda: in_rows(expected()))
    rows = functools.cache(lambda: sample_of(len(wanted()), 4096, "cpu"))

    def sample(x: torch.Tensor) -> torch.Tensor:
        return x[rows().to(x.device)]

    return Case(ours, rivals, sample, lambda: sample(wanted()), read=lambda out: in_rows(read(out)), leeway=ROUNDINGS)


def differentiated(function: Callable[..., Any], given: Tensors, leaves: int, upstream: torch.Tensor) -> Prepare:
    """Make a rival's forward and gradients by autograd, in the first `leaves` tensors."""

    def prepare() -> Call:
        return lambda: gradients(function, given, leaves, upstream)[1]

    return prepare


def gradients(function: Callable[..., Any], given: Tensors, leaves: int, upstream: torch.Tensor) -> tuple[Any, Tensors]:
    """Compute a result and the gradients in the first `leaves` tensors."""
    with torch.enable_grad():
        first = [t.detach().requires_grad_() for t in given[:leaves]]
        out = function(*first, *given[leaves:])
        return out, torch.autograd.grad(out, first, upstream)


def gradients_only(function: Callable[..., Any], given: Tensors, leaves: int, upstream: torch.Tensor) -> Prepare:
    """Make the gradients of a rival whose forward is done before."""

    def prepare() -> Call:
        with torch.enable_grad():
            first = [t.detach().requires_grad_() for t in given[:leaves]]
            out = function(*first, *given[leaves:])
        return lambda: torch.autograd.grad(out, first, upstream, retain_graph=True)

    return prepare


def ssd_case(kind: str, s: Shape, dtype: torch.dtype, device: str) -> Case:
    """One size of Mamba-2; the rows of gradients are those of x, B and C."""
    draw = partial(torch.randn, device=device, dtype=dtype)
    x, b, c = draw(s.batch, s.length, s.heads, s.values), *(draw(s.batch, s.length, 1, s.keys) for _ in range(2))
    b, c = b * s.keys**-0.25, c * s.keys**-0.25
    dt = torch.rand(s.batch, s.length, s.heads, device=device) * 0.1
    a, d = -torch.rand(s.heads, device=device) - 0.1, torch.randn(s.heads, device=device)
    given, upstream = (x, b, c, dt, a, d), draw(x.shape)

    def in_torch(x: Any, b: Any, c: Any, dt: Any, a: Any, d: Any) -> Any:
        return ssd.reference(x, dt, a, b, c, d)[0]

    def by_mamba(x: Any, b: Any, c: Any, dt: Any, a: Any, d: Any) -> Any:
        scan = rival("mamba_chunk_scan_combined", "mamba_ssm.ops.triton.ssd_combined")
        return scan(x, dt, a, b, c, chunk_size=256, D=d)

    if kind in ("chunk_state", "chunk_scan"):
        return ssd_kernel_case(kind, s, given)
    wide = [t.double() for t in given]
    other, name = (in_torch, "torch") if device == "cpu" else (by_mamba, "mamba-ssm")
    ours = partial(operator("ssd_chunk_scan"), x, dt, a, b, c, d)
    if kind == "forward":
        rivals: dict[str, Prepare] = {name: lambda: partial(other, *given)}
        return compared(ours, rivals, lambda: [in_torch(*wide)], lambda out: out[0] if isinstance(out, tuple) else out)

    def both() -> Tensors:
        ours()
        dx, _, _, db, dc, *_ = operator("ssd_chunk_scan_backward")(upstream, None, x, dt, a, b, c, d)
        return dx, db, dc

    rivals = {name: differentiated(other, given, 3, upstream)}
    return compared(both, rivals, lambda: gradients(in_torch, wide, 3, upstream.double())[1], lambda out: out)


def ssd_kernel_case(kind: str, s: Shape, given: Tensors) -> Case:
    """One kernel of Mamba-2's scan, from what the kernels before it compute."""
    x, b, c, dt, a, d = given
    scan = ssd.Scan(ssd.SsdChunkScanArgs(x, dt, a, b, c, d), None, x)
    size, chunks = scan.config.chunk, int(scan.chunks)
    if kind == "chunk_state":
        pad = (0, 0, 0, 0, 0, chunks * size - s.length)

        def states() -> Tensors:
            cut = lambda t: torch.nn.functional.pad(t.double(), pad).view(s.batch, chunks, size, *t.shape[2:])  # noqa: E731
            decays, steps = (t.double().view(s.batch, s.heads, chunks, size) for t in (scan.decays, scan.steps))
            weights = torch.exp2(decays[..., -1:] - decays) * steps
            return [torch.einsum("bcqhp,bcqn,bhcq->bchpn", cut(x), cut(b)[:, :, :, 0], weights)]

        def mamba() -> Call:
            steps, decays = (t.view(s.batch, s.heads, chunks, size) for t in (scan.steps, scan.decays * LN_2))
            return partial(rival("mamba_chunk_state"), b, x, steps, decays)

        rivals: dict[str, Prepare] = {"mamba-ssm": mamba} if x.is_cuda else {}
        return compared(lambda: scan.own_states(scan.x), rivals, states, lambda out: out[:, :chunks])
    last = scan.empty(s.batch, s.heads, s.values, s.keys)
    scores, before = scan.scores(), scan.passed(scan.own_states(scan.x), None, last)
    spec = replace(scan.plain, D=d.dtype)

    def outputs() -> torch.Tensor:
        out = torch.empty_like(x)
        scan.outputs(spec, scores, scan.x, scan.C, scan.steps, scan.decays, before, *scan.skip(), out)
        return out

    def mamba_scan() -> Call:
        steps, decays = (t.view(s.batch, s.heads, chunks, size) for t in (scan.steps, scan.decays * LN_2))
        of_chunks = [t.view(s.batch, chunks, size, 1, s.keys) for t in (c, b)]
        cb = torch.einsum("bcqgn,bckgn->bcgqk", *of_chunks).contiguous()
        return partial(rival("mamba_chunk_scan"), cb, x, steps, decays, c, before[:, :chunks].contiguous(), d)

    wide = [t.double() for t in (x, dt, a, b, c, d)]
    rivals = {"mamba-ssm": mamba_scan} if x.is_cuda else {}
    return compared(outputs, rivals, lambda: [ssd.reference(*wide)[0]], lambda out: out)


def delta_case(kind: str, s: Shape, dtype: torch.dtype, device: str) -> Case:
    """One size of the gated delta rule; the rows of gradients are those of q, k and v."""
    draw = partial(torch.randn, device=device, dtype=dtype)
    q, k = (draw(s.batch, s.length, s.heads, s.keys) for _ in range(2))
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
    v, upstream = (draw(s.batch, s.length, s.heads, s.values) for _ in range(2))
    g = -torch.rand(s.batch, s.length, s.heads, device=device)
    beta = torch.rand(s.batch, s.length, s.heads, device=device).to(dtype)
    given = q, k, v, g, beta

    def in_torch(*given: Any) -> Any:
        return delta.reference(*given)[0]

    other: Callable[..., Any] = in_torch
    if device != "cpu":
        other = lambda *given: rival("fla_gated_delta_rule")(*given)  # noqa: E731
    name = "torch" if device == "cpu" else "fla"
    ours, wide = partial(operator("gated_delta_rule"), *given), [t.double() for t in given]

    def backward() -> Tensors:
        found: Tensors = operator("gated_delta_rule_backward")(upstream, None, *given)[:3]
        return found

    def both() -> Tensors:
        ours()
        return backward()

    if kind == "forward":
        rivals: dict[str, Prepare] = {name: lambda: partial(other, *given)}
        return compared(ours, rivals, lambda: [in_torch(*wide)], lambda out: out[0] if isinstance(out, tuple) else out)
    make = gradients_only if kind == "gradients" else differentiated
    rivals = {name: make(other, given, 3, upstream)}
    wanted: Callable[[], Tensors] = lambda: gradients(in_torch, wide, 3, upstream.double())[1]  # noqa: E731
    return compared(backward if kind == "gradients" else both, rivals, wanted, lambda out: out)


if __name__ == "__main__":
    sys.exit(main(["scan"], __doc__))
