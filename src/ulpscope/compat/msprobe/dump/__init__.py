# SPDX-License-Identifier: Apache-2.0
"""Write the dumps of msprobe, task by task."""
