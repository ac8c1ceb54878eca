# SPDX-License-Identifier: Apache-2.0
"""The PyTorch compiler backend: which subgraphs become tile kernels, and what is said about it."""
