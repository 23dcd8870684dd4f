# SPDX-License-Identifier: Apache-2.0
"""Run the two overflow commands of msprobe.

`run_overflow_check` tells whether an overflow is normal; `overflow_check` finds the call that made the first inf or NaN, across ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ulpscope._shell import as_path, command_line
from ulpscope.compat.checker.run_overflow_check import overflow_line, tell_counts
from ulpscope.compat.msprobe.command.acc_check import existing_device
from ulpscope.compat.msprobe.compare.first_differences import frames_of
from ulpscope.compat.msprobe.compare.result_files import output_folder
from ulpscope.errors import InputError
from ulpscope.model import CallRecord, NonFiniteEvent, NonFiniteReport, Run
from ulpscope.report.escaping import visible
from ulpscope.report.replacing import replacing
from ulpscope.store import open_run
from ulpscope.store.foreign.msprobe_words import load_json
from ulpscope.workflows.check.checking import check_run
from ulpscope.workflows.nonfinite import find_nonfinite

__all__ = ["run_anomaly_analyze", "run_overflow_check"]

_ENTRY = ("input_args", "input_kwargs", "input", "output")


def run_overflow_check(given: argparse.Namespace) -> int:
    """Run the APIs of an overflow dump again; return 0 if that ran to its end."""
    if not given.api_info_file.is_file():
        raise InputError(f"there is no '{given.api_info_file}': give the dump.json of an overflow dump")
    check = check_run(
        given.api_info_file, device=existing_device(given.device[0]), overflow=True, found=lambda call: print(visible(overflow_line(call)))
    )
    tell_counts(check)
    return 0


def run_anomaly_analyze(given: argparse.Namespace) -> int:
    """Write anomaly_analyze_{ns}.json: for each rank the calls that made inf or NaN, in order."""
    if not given.input_path.is_dir():
        raise InputError(f"'{given.input_path}' is no folder: give the folder of a step, with its rank folders")
    run = open_run(given.input_path)
    report = find_nonfinite(run)
    path = output_folder(given.output_path) / f"anomaly_analyze_{time.time_ns()}.json"
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        json.dump(_nodes(report, run, given.input_path), stream, indent=2)
        temporary.chmod(0o640)
    if report.first is None:
        print("no call made inf or NaN that did harm")
    else:
        print(f"first non-finite value: {visible(report.first.headline)}")
        print(f"  {visible(report.first.cause or report.first.remedy)}")
    command = command_line("ulpscope", "nonfinite", as_path(given.input_path))
    print(f"the analysis is in '{visible(str(path))}'; the same by hand: {command}")
    return 0


def _nodes(report: NonFiniteReport, run: Run, folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for event in report.faults:
        record = next((one for one in run.records(event.rank, event.step) if one.order == event.order), None)
        found.setdefault(f"rank_{event.rank}", []).append(_node(event, record, folder))
    return found


def _node(event: NonFiniteEvent, record: CallRecord | None, folder: Path) -> dict[str, Any]:
    name = record.recorded_as if record else ""
    return {
        "op_name": name or event.call,
        "finding": event.headline,
        "cause": event.cause,
        "data_info": _entry(folder, event, name),
        "construct_info": [part for part in (record.parent if record else "", event.module) if part],
        "stack_info": frames_of(event.stack),
    }


def _entry(folder: Path, event: NonFiniteEvent, name: str) -> dict[str, Any]:
    """Return the call as its dump.json describes it."""
    names = (f"rank{event.rank}", f"step{event.step}/rank{event.rank}", "")
    files = [folder / part / "dump.json" for part in names] + sorted(folder.glob("[rp]*/dump.json"))[:1]
    for file in files:
        if file.is_file():
            body = load_json(file).get("data", {}).get(name)
            return {key: body[key] for key in _ENTRY if key in body} if isinstance(body, dict) else {}
    return {}
