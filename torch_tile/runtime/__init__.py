# SPDX-License-Identifier: Apache-2.0
"""Build and run kernels from their source text: compilers, cache and launch."""
