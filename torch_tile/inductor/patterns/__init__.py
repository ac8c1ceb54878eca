# SPDX-License-Identifier: Apache-2.0
"""The families: each file registers its functions with stage and order (`context.family`); nothing lists them.

Steps of post_grad are numbered by phase. What only asserts goes away (100). The decomposed softmax becomes an op
first: it anchors attention (200). Absorbed MLA is looked for before attention, of which it is a special case (300).
Norms go before products so that no epilogue takes a part of one (400, 500). They take a residual sum after those, if no
product did (600).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from torch_tile.inductor.context import Stage


@functools.cache
def load(stage: Stage) -> None:
    """Import the modules whose families run at a stage: only patterns/pre_grad for pre_grad, all for other stages.

    A Dynamo graph passes pre_grad even when Inductor's cache has the rest. So that stage imports only its own folder.
    """
    path = [f"{folder}/pre_grad" for folder in __path__] if stage == "pre_grad" else __path__
    prefix = f"{__name__}.pre_grad." if stage == "pre_grad" else f"{__name__}."
    for module in pkgutil.walk_packages(path, prefix):
        importlib.import_module(module.name)
    if stage == "post_grad":
        importlib.import_module("torch_tile.inductor.finalize")
