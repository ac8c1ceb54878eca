# SPDX-License-Identifier: Apache-2.0
"""Report to users: the table of replacements, the HTML page, `explain`."""
