# SPDX-License-Identifier: Apache-2.0
"""Targets by TVM's spelling: `Target("cuda -arch=sm_90a")`, `Target("c")`, `Target("llvm")`."""

from __future__ import annotations

from torch_tile.hardware import Target as _Target


class _Made(type):
    """A class whose calls give the targets of torch_tile."""

    def __call__(cls, target: object = "auto", host: object = None) -> _Target:
        return _Target.of(target)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Target)


class Target(metaclass=_Made):
    """`Target("cuda")` is torch_tile.Target.of("cuda"); `with Target(...):` sets what target="auto" means inside."""

    @staticmethod
    def current(allow_none: bool = True) -> _Target | None:
        """Return the target of the enclosing `with`; without one None, or ValueError where `allow_none` is False."""
        found = _Target.current()
        if found is None and not allow_none:
            raise ValueError("there is no target around: write `with Target(...):`")
        return found
