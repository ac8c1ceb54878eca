# SPDX-License-Identifier: Apache-2.0
"""The backend without code generation: our passes on the graphs that Inductor would hand them, run by torch itself.

For `explain`, for tests, and for telling a wrong match from wrong generated code:
`torch.compile(model, backend=torch_tile.inductor.dry_run.dry_run)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_tile.inductor import compat
from torch_tile.inductor.backend import split_options
from torch_tile.inductor.passes.manager import TilePass


def dry_run(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph as `tile` does, up to and without Inductor's code generation.

    The arguments are `tile`'s. The graph goes through the same AOTAutograd, decompositions, partitioner and joint
    passes; what our passes leave is run operator by operator.

    Raises:
        RuntimeError: on an unknown option or a bad value of ours.
    """
    patches, settings = split_options(mode, options)

    def refine(graph: torch.fx.GraphModule) -> None:
        TilePass("post_grad", settings)(graph.graph)

    with compat.inductor_config().patch(patches):
        TilePass("pre_grad", settings)(gm.graph)
        gm.recompile()
        return compat.compile_without_codegen(gm, example_inputs, refine)
