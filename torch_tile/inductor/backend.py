# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(model, backend="tile")`: Inductor with our passes.

The function below is found through the package's entry point, so torch_tile need not be imported first. Everything
that our passes do not replace is compiled by Inductor as if they were not there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import torch_tile
import torch_tile.ops
import torch_tile.ops.own_kernel  # graphs from Inductor's cache call its operator
from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.diagnostics.progress import waiting
from torch_tile.diagnostics.spelling import did_you_mean
from torch_tile.inductor import compat
from torch_tile.inductor.codegen import artifacts
from torch_tile.inductor.context import Stage
from torch_tile.inductor.driver import TilePass
from torch_tile.inductor.select.real_inputs import compiling_with
from torch_tile.inductor.settings import FAMILIES, OPTIONS, SELECT, Settings, parse_settings
from torch_tile.ops.when_imported import after_imports


def tile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, with tile kernels where they fit.

    Args:
        gm: the graph, owned (and changed) by this call.
        example_inputs: its fake or real inputs.
        mode: as for `torch.compile`'s Inductor backend.
        options: Inductor's own options, and ours: `select` ("fastest", the default: each replacement is timed against
            what Inductor makes of the same subgraph, and the winner kept; "tile": always ours) and `families` (which
            subgraphs to look for: attention, mla, norm, dequant, scaled, grouped, gemm, softmax, loss, scan; all by
            default).

    Raises:
        RuntimeError: on an unknown option or a bad value of ours.
    """
    patches, settings = split_options(mode, options)
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        from torch_tile.inductor.compile_ahead import workers  # not before: it brings the compiler along

        workers.warm()
    artifacts.record_kernels()
    with waiting("compiling a graph"), compiling_with(example_inputs):
        compiled = compat.compile_fx(gm, example_inputs, {**patches, **pass_patches(settings, patches)})
    negated = any(isinstance(x, torch.Tensor) and x.is_neg() for x in example_inputs)  # Dynamo guards this
    return _taking_negated_views(compiled) if negated else compiled


def _taking_negated_views(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Call a graph with copies of arguments whose memory holds negatives of their numbers; write results back."""

    def call(*args: Any) -> Any:
        copies = [_negated(x) if isinstance(x, torch.Tensor) and x.is_neg() else x for x in args]
        versions = [x._version if x is not arg else None for x, arg in zip(copies, args, strict=True)]
        results = compiled(*copies)
        for x, arg, version in zip(copies, args, versions, strict=True):
            if version is not None and x._version != version:
                arg.copy_(x)
        return results

    return call


def _negated(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a negated view with its strides; all memory between its elements is copied."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return torch._neg_view(x).as_strided((span,), (1,)).neg().as_strided(x.shape, x.stride())


tile.captures_scans = True  # type: ignore[attr-defined]  # integrations/scans.py asks for it
tile.reset = compat.reset_cudagraphs  # type: ignore[attr-defined]  # called by torch._dynamo.reset()


@names_parameters
def inductor_configs(*, mode: str | None = None, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return Inductor config entries for compiling as the backend does, where no backend can be named.

    For AOTInductor: `torch._inductor.aoti_compile_and_package(exported, inductor_configs=inductor_configs())`. The
    package contains our kernels' machine code; it needs no Python. Arguments and errors are those of `tile`.
    """
    patches, settings = split_options(mode, options)
    return {**patches, **pass_patches(settings, patches)}


def split_options(mode: str | None, options: Mapping[str, Any] | None) -> tuple[dict[str, Any], Settings]:
    """Split the options of `torch.compile` into Inductor's config entries and our settings."""
    if options is not None and not isinstance(options, Mapping):
        raise RuntimeError(f'options of backend "tile" must be a dict, as {{"select": "tile"}}, got {options!r}')
    patches, own = compat.mode_patches(mode), {}
    known = compat.inductor_config().get_config_copy()
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise RuntimeError(f'options of backend "tile" are named by texts, as {{"select": "tile"}}, got {key!r}')
        name = key.replace("-", "_")
        if name in OPTIONS:
            own[name] = value
        elif name in known:
            _check_kind(key, value, known[name])
            patches[name] = value
        elif name in FAMILIES:
            raise RuntimeError(f'{key!r} is a family of backend "tile", no option: "families" lists those to look for')
        elif name in OF_COMPILE:
            raise RuntimeError(f'{key!r} is no option of backend "tile": {OF_COMPILE[name]}')
        else:
            meant = f'; did you mean "select": {key!r}?' if key in SELECT else did_you_mean(key, OPTIONS)
            meant = meant or did_you_mean(key, known, 0.8)
            raise RuntimeError(
                f'unknown option {key!r} for backend "tile": ours are {", ".join(OPTIONS)}; '
                f"Inductor's are listed by torch._inductor.list_options(){meant}"
            )
    return patches, parse_settings(own, bool(patches.get("max_autotune")))


OF_COMPILE = {
    "mode": 'write what it stands for beside the others, "max_autotune": True for "max-autotune"',
    "backend": 'give it to torch.compile itself, backend="tile"',
    "fullgraph": "give it to torch.compile itself, fullgraph=True",
    "dynamic": "give it to torch.compile itself, dynamic=True",
}
"""What to write for arguments of torch.compile that stand among the options."""


def _check_kind(key: str, value: Any, now: Any) -> None:
    """Raise RuntimeError for a value of another kind than Inductor's option has: it would count as true."""
    if isinstance(now, bool) and not (value is None or (isinstance(value, int) and value in (0, 1))):
        raise RuntimeError(f"option {key!r} of Inductor must be True or False, got {value!r}")
    if type(now) is int and not isinstance(value, int | None):
        raise RuntimeError(f"option {key!r} of Inductor must be an integer, got {value!r}")


def pass_patches(settings: Settings, patches: Mapping[str, Any]) -> dict[str, Any]:
    """Return config entries that run our passes after the user's own passes of the same stage."""
    config = compat.inductor_config()
    stages: dict[str, Stage] = {
        "pre_grad_custom_pass": "pre_grad",
        "joint_custom_pre_pass": "written_out",
        "joint_custom_post_pass": "joint",
        "post_grad_custom_pre_pass": "post_grad",
    }
    return {
        key: compat.chain(patches.get(key, getattr(config, key)), TilePass(stage, settings))
        for key, stage in stages.items()
    }


def _capture_scans() -> None:
    """Let the backend see the scans of models, once transformers is imported."""
    if "transformers" in sys.modules:
        torch_tile._capture_scans()


_capture_scans()  # Dynamo imports this module before it traces a model
after_imports("transformers.models.", _capture_scans)
