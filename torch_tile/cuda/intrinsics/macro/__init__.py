# SPDX-License-Identifier: Apache-2.0
"""Modules in which TileLang keeps its emitters."""
