# SPDX-License-Identifier: Apache-2.0
"""Barriers between the threads of a block: accesses, their order, and the fewest barriers for it."""
