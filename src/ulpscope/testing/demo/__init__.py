# SPDX-License-Identifier: Apache-2.0
"""Hold the script that `ulpscope demo` records: `train.py`, an ordinary training script that knows nothing of being recorded."""
