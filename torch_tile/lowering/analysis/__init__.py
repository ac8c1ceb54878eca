# SPDX-License-Identifier: Apache-2.0
"""Facts about a program that passes ask for. No module here changes a program."""
