# SPDX-License-Identifier: Apache-2.0
"""Run kernels without a GPU: tile by tile, or thread by thread with race detection."""
