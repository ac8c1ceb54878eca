# SPDX-License-Identifier: Apache-2.0
"""Losses of training."""
