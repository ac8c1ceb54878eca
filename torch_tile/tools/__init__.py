# SPDX-License-Identifier: Apache-2.0
"""Commands of the command line."""

from __future__ import annotations


class Mistake(ValueError):
    """An argument of the command line that cannot be; the errors of a user's own file keep their traceback."""
