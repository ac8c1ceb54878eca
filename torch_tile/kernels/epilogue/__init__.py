# SPDX-License-Identifier: Apache-2.0
"""The epilogue language: pointwise programs that kernels run on their results."""
