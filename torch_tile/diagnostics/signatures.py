# SPDX-License-Identifier: Apache-2.0
"""Look at the signatures of functions that users hand over."""

from __future__ import annotations

import inspect


def can_take(function: object, count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments, as far as its signature tells."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True
