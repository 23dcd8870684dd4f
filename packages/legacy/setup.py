# SPDX-License-Identifier: Apache-2.0
"""Gives this distribution the version of ulpscope: read from its source in a checkout, from PKG-INFO in a source distribution."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
PLACES = {HERE.parents[1] / "src/ulpscope/__init__.py": r'^__version__ = "(.+)"$', HERE / "PKG-INFO": r"^Version: (.+)$"}

version = next(
    found[1]
    for file, line in PLACES.items()
    if file.is_file() and (found := re.search(line, file.read_text(encoding="utf-8"), re.MULTILINE))
)
setup(version=version)
