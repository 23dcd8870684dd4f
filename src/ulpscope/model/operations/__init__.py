# SPDX-License-Identifier: Apache-2.0
"""Know operations by their names: which draw random numbers, which return views, which do not read what they overwrite."""
