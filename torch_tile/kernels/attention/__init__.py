# SPDX-License-Identifier: Apache-2.0
"""Attention kernels: forward, backward, score functions, masks, tilings."""
