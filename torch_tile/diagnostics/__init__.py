# SPDX-License-Identifier: Apache-2.0
"""How errors look, and the catalog of all of them."""
