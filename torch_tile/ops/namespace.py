# SPDX-License-Identifier: Apache-2.0
"""Name the nearest operator where `torch.ops.tile` lacks one.

`registration.py` gives this class to that one object, as Python allows for modules; torch's class stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.ops.registry import FORMS


class Namespace(torch._ops._OpNamespace):
    """`torch.ops.tile`, whose errors for unknown names say what is near."""

    __module__ = torch._ops._OpNamespace.__module__  # torch names packets after it

    def __getattr__(self, name: str) -> Any:
        """Return the operator of this name as torch does."""
        try:
            return super().__getattr__(name)
        except AttributeError as missing:
            if name.startswith("_"):
                raise
            from torch_tile.diagnostics.spelling import did_you_mean

            near = did_you_mean(name, FORMS) or "; dir(torch_tile.ops) has all names"
            told = AttributeError(f"{missing}{near}", name=name, obj=self)
        raise told
