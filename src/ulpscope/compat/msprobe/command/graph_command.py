# SPDX-License-Identifier: Apache-2.0
"""Run `msprobe graph_visualize`: the old tool draws a graph for TensorBoard; ulpscope writes its page, which opens in any browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from ulpscope._shell import as_path, command_line
from ulpscope.compat.bridge import tell_finding
from ulpscope.compat.msprobe.compare.result_files import fresh_stamp, output_folder
from ulpscope.errors import InputError

__all__ = ["run_graph"]


def run_graph(given: argparse.Namespace) -> int:
    """Compare two dumps into a page; for a single dump, name `ulpscope show` instead."""
    from ulpscope.workflows.compare.comparing import compare_runs

    if given.golden_path is None:
        command = command_line("ulpscope", "show", as_path(given.target_path))
        raise InputError(f"the graph of a single dump is not there: look at it with: {command}")
    if given.rank_size or given.tp or given.pp:
        raise InputError("dumps of other parallel layouts are not merged here: give two dumps of the same layout")
    folder: Path = output_folder(given.output_path)
    comparison = compare_runs(given.target_path, given.golden_path, replay="none")
    tell_finding(comparison, folder / f"compare_{fresh_stamp(folder)}.html")
    return 0
