# SPDX-License-Identifier: Apache-2.0
"""Find norms and softmax."""
