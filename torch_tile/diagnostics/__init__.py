# SPDX-License-Identifier: Apache-2.0
"""Errors: their look, and the catalog of all of them."""
