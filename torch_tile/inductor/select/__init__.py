# SPDX-License-Identifier: Apache-2.0
"""Decides whether a tile op replaces Inductor's code for a subgraph."""
