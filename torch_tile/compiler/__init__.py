# SPDX-License-Identifier: Apache-2.0
"""Shared parts of all compilations: their context, the cache of sources, parallel builds and argument binding."""
