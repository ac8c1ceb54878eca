# SPDX-License-Identifier: Apache-2.0
"""Runs the threads of a lowered GPU kernel and detects races."""
