# SPDX-License-Identifier: Apache-2.0
"""Finds norms and softmax."""
