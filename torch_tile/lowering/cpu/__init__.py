# SPDX-License-Identifier: Apache-2.0
"""Passes of the CPU target: tile ops become loops over elements."""
