# SPDX-License-Identifier: Apache-2.0
"""Reads and edits FX graphs: nodes, axes, symbolic sizes, subgraphs."""
