# SPDX-License-Identifier: Apache-2.0
"""Reductions and scans over the dimensions of a tile."""
