# SPDX-License-Identifier: Apache-2.0
"""Kernels of state-space models and linear attention."""
