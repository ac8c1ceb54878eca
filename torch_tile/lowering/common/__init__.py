# SPDX-License-Identifier: Apache-2.0
"""Passes of every target: checks, guards, simplification, linear addresses."""
