# SPDX-License-Identifier: Apache-2.0
"""From source text to a running kernel: compiler, cache, launch."""
