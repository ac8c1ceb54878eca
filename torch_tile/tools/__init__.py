# SPDX-License-Identifier: Apache-2.0
"""What the command line runs."""
