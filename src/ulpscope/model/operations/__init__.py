# SPDX-License-Identifier: Apache-2.0
"""What is known of operations by their names: which draw random numbers, which do not read what they overwrite."""
