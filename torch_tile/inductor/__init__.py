# SPDX-License-Identifier: Apache-2.0
"""The PyTorch compiler backend: choose subgraphs, replace them by tile kernels, and report the choices."""
