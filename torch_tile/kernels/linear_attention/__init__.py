# SPDX-License-Identifier: Apache-2.0
"""Kernels of linear attention, whose state is one matrix for each head."""
