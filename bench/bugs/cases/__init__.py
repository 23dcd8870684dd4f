# SPDX-License-Identifier: Apache-2.0
"""Hold the cases, one module for each family; each ends in a list `CASES`."""
