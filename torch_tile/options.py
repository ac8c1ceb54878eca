# SPDX-License-Identifier: Apache-2.0
"""TileLang's pass options by name, so that kernels written for it run unchanged. On the CPU none changes a result."""

from __future__ import annotations


class _Keys(type):
    """Any name is a key: an unknown option of another version is accepted, as TileLang asks."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name.lower().replace("tl_", "tl.", 1).replace("tir_", "tir.", 1)


class PassConfigKey(metaclass=_Keys):
    """`PassConfigKey.TL_ENABLE_FAST_MATH` and the like, for `jit(pass_configs={...})`."""
