# SPDX-License-Identifier: Apache-2.0
"""Passes from tiles to threads: layouts, binding, vectors, shared memory."""
