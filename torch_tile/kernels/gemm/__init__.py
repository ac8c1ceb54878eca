# SPDX-License-Identifier: Apache-2.0
"""Matrix products: dense, grouped and dequantizing kernels, and their tilings."""
