# SPDX-License-Identifier: Apache-2.0
"""Act when a module is imported, without importing it: rules for DTensor and FLOP formulas wait for torch's.

The backend waits for model files of transformers.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call `action` now if module `name` is imported, else as soon as it is."""
    if name in sys.modules:
        action()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(action)


def after_imports(prefix: str, action: Callable[[], object]) -> None:
    """Call `action` each time that a module is imported whose name begins with `prefix`."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.prefixes[prefix] = action


class _Finder:
    """A finder in `sys.meta_path` that adds actions to the loaders of modules that something waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], object]]] = {}
        self.prefixes: dict[str, Callable[[], object]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with a loader that calls the actions when it is done."""
        always = [action for prefix, action in self.prefixes.items() if name.startswith(prefix)]
        if name not in self.waiting and not always:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                load(module)
                for action in [*self.waiting.pop(name, []), *always]:
                    action()
                if not self.waiting and not self.prefixes and self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


_finder = _Finder()
