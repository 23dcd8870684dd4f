# SPDX-License-Identifier: Apache-2.0
"""`msprobe parse`: the shell of 1.x for dumps of Ascend's runtime, with `cad`; with -d it converts such dumps, as 26.x does.

    Parse >>> cad -m my_dump/20240101000000/0       every operator's files as .npy in folders by its name and its time
    Parse >>> vc -m converted/a -g converted/b      two such folders compared into batch_compare_{time}.csv
"""

from __future__ import annotations

import argparse
import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.compat.bridge import tell_finding
from ulpscope.compat.file_pairs import measure_pair
from ulpscope.compat.msprobe.compare_files import output_folder
from ulpscope.compat.msprobe.compare_numbers import tensor_numbers
from ulpscope.compat.ptdbg.shell import ParseShell, main
from ulpscope.compat.ptdbg.shell.arguments import PARSERS, ShellParser, with_ascend_path
from ulpscope.errors import InputError
from ulpscope.report.replacing import replacing
from ulpscope.report.table import defused

__all__ = ["run_parse"]
