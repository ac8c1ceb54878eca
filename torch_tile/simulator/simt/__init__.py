# SPDX-License-Identifier: Apache-2.0
"""Run the threads of a lowered GPU kernel and detect races."""
