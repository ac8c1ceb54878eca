# SPDX-License-Identifier: Apache-2.0
"""What users see: the table of replacements, the HTML page, `explain`."""
