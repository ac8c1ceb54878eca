# SPDX-License-Identifier: Apache-2.0
"""Import all families, so that they declare their operators. `import torch_tile` imports this module."""

import gc
import importlib
import pkgutil

from torch_tile.ops import families

# Declarations live as long as the process: a search for garbage among them would double the time of the import.
_collects = gc.isenabled()
gc.disable()
try:
    for _module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{_module.name}")
finally:
    if _collects:
        gc.enable()
