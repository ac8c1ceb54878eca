# SPDX-License-Identifier: Apache-2.0
"""Finds attention and MLA decoding in graphs."""
