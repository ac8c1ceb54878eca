# SPDX-License-Identifier: Apache-2.0
"""The declarations of all operators, one file for each family. Importing this package registers all of them."""

import gc
import importlib
import pkgutil

# Declarations live as long as the process: a search for garbage among them would double the time of the import.
_collects = gc.isenabled()
gc.disable()
try:
    for _module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{_module.name}")
finally:
    if _collects:
        gc.enable()
