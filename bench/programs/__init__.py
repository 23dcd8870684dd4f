# SPDX-License-Identifier: Apache-2.0
"""Record programs that nobody here wrote, compare them with themselves and check them; `python -m bench.programs --help`."""
