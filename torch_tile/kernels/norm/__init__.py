# SPDX-License-Identifier: Apache-2.0
"""Normalisations over rows, and softmax."""
