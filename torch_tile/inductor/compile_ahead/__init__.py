# SPDX-License-Identifier: Apache-2.0
"""Starts to compile kernels before the code that calls them is generated."""
