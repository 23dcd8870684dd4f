# SPDX-License-Identifier: Apache-2.0
"""Give this distribution the version of ulpscope.

A checkout has it in the source of ulpscope, a source distribution in PKG-INFO; elsewhere the installed ulpscope has it.
"""

import re
from importlib import metadata
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
PLACES = {HERE.parents[1] / "src/ulpscope/__init__.py": r'^__version__ = "(.+)"$', HERE / "PKG-INFO": r"^Version: (.+)$"}

written = (
    found[1]
    for file, line in PLACES.items()
    if file.is_file() and (found := re.search(line, file.read_text(encoding="utf-8"), re.MULTILINE))
)
setup(version=next(written, None) or metadata.version("ulpscope"))
