# SPDX-License-Identifier: Apache-2.0
"""Find matrix products and the operations that can be fused into them."""
