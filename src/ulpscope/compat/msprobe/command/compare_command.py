# SPDX-License-Identifier: Apache-2.0
"""Run `msprobe compare` as one comparison: with -i that of 1.x, with -tp and -gp that of 26.x."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ulpscope._files import read_small
from ulpscope.compat.msprobe.command.flat_yaml import read_names
from ulpscope.compat.msprobe.compare.call_names import Translation
from ulpscope.compat.msprobe.compare.compare_msprobe import CompareOptions, compare_paths, read_param
from ulpscope.errors import InputError

__all__ = ["run_compare"]

_MOST_BYTES = 1 << 20


def run_compare(given: argparse.Namespace) -> int:
    """Run the command; return 0 if a result was written."""
    _refuse_what_is_not_there(given)
    is_old = given.input_path is not None
    options = CompareOptions(
        edition="1.x" if is_old else "26.x",
        xlsx=is_old or given.xlsx,
        stacks=given.stack_mode if is_old else True,
        advice=is_old and not given.compare_only,
        fuzzy=given.fuzzy_match,
        translation=_translation(given),
        analyzes=given.diff_analyze,
        is_logging=given.is_print_compare_log,
    )
    if is_old:
        target, golden, stacks, is_logging = read_param(_compare_json(given.input_path))
        is_logging = is_logging or options.is_logging
        options = replace(options, stack_path=stacks, is_logging=is_logging, names_both=target.is_dir())
        compare_paths(target, golden, given.output_path, options)
    else:
        compare_paths(given.target_path, given.golden_path, given.output_path, options)
    return 0


def _refuse_what_is_not_there(given: argparse.Namespace) -> None:
    if given.mode != "auto":
        raise InputError(
            f"mode {given.mode} compares dumps of CANN's own tools; only auto is there, and 'ulpscope compare A B' reads ACL dumps"
        )
    if given.consistent_check or given.backend or given.config:
        raise InputError(
            "--consistent_check, --backend and --config are not there; 'ulpscope compare A B --mapping FILE' pairs renamed modules"
        )
    if given.layer_mapping is not None:
        raise InputError("-lm is not there: name modules that belong together with -cm FILE, or rows with -dm FILE")
    if given.static is not None:
        raise InputError("--rank and --step belong to dumps of static graphs, which are not there; give the folder of one rank instead")
    if given.input_path is None and (given.target_path is None or given.golden_path is None):
        raise InputError("compare needs -tp and -gp (26.x), or -i with a compare.json (1.x)")
    if given.input_path is not None and (given.target_path or given.golden_path):
        raise InputError("compare takes -i, or -tp and -gp, not both")


def _translation(given: argparse.Namespace) -> Translation:
    if given.api_mapping:
        raise InputError("-am takes no file here: it lets any prefix match; name single rows with -dm FILE")
    return Translation(
        rows=read_names(given.data_mapping) if given.data_mapping else {},
        cells=read_names(Path(given.cell_mapping)) if given.cell_mapping else {},
        apis=given.api_mapping is not None,
    )


def _compare_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_small(path, _MOST_BYTES, "compare.json").decode())
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror}); give a compare.json with npu_path and bench_path") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"'{path}' is no JSON ({str(error)[:80]}); see whether a comma or a quote is missing") from None
    if not isinstance(values, dict):
        raise InputError(f"'{path}' holds a {type(values).__name__}, not an object with npu_path and bench_path")
    return values
