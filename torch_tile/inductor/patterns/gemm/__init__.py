# SPDX-License-Identifier: Apache-2.0
"""Finds matrix products and what can be fused into them."""
