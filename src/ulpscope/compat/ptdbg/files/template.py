# SPDX-License-Identifier: Apache-2.0
"""Leave compare_data.py beside a dump: a comparison to be filled in. The four empty fields are meant to be empty."""

from __future__ import annotations

import os
from pathlib import Path

from ulpscope.compat.ptdbg.files.modes import DumpOptions
from ulpscope.compat.ptdbg.files.places import FILE_RIGHTS

__all__ = ["TEMPLATE_MODES", "write_template"]

TEMPLATE_MODES = frozenset({"all", "api_stack", "list", "range", "api_list"})

_TEMPLATE = """\
from ptdbg_ascend import compare

pkl_path = {pkl_path!r}
dump_data_dir = {dump_data_dir!r}

dump_path_param = {{
    "npu_pkl_path": ,
    "bench_pkl_path": ,
    "npu_dump_data_dir": ,
    "bench_dump_data_dir": ,
    "is_print_compare_log": True
}}

compare(dump_path_param, output_path="", stack_mode={stack_mode})
"""


def write_template(folder: Path, options: DumpOptions) -> Path:
    """Write the template for the dump in this rank folder."""
    file = folder / "compare_data.py"
    text = _TEMPLATE.format(
        pkl_path=str(folder / f"{options.stem}.pkl"), dump_data_dir=str(folder / options.stem), stack_mode=options.has_stacks
    )
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_RIGHTS), "w", encoding="utf-8") as stream:
        stream.write(text)
    return file
