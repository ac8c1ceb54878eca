# SPDX-License-Identifier: Apache-2.0
"""The declarations of all operators, one file for each family. Importing this package registers all of them."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
