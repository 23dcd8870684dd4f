# SPDX-License-Identifier: Apache-2.0
"""Programs that nobody here wrote, recorded, compared with themselves and checked; `python -m bench.programs --help`."""
