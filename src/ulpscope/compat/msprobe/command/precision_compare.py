# SPDX-License-Identifier: Apache-2.0
"""Run `msprobe api_precision_compare`: compare the checks of two devices, by the ratios of their errors.

api_precision_compare_result_{time}.csv     one row for each API
api_precision_compare_details_{time}.csv    one row for each result: every figure, what it means, and the standard that was taken
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ulpscope._shell import as_path, command_line
from ulpscope.compat.msprobe.command.acc_check import write_table
from ulpscope.compat.msprobe.compare.result_files import fresh_stamp
from ulpscope.errors import InputError
from ulpscope.model.check.checks import CheckStatus
from ulpscope.model.check.standards import DeviceComparison, DevicePair
from ulpscope.report.escaping import visible
from ulpscope.workflows.check.old_tables import STATUS_WORDS
from ulpscope.workflows.check.two_devices import compare_devices

__all__ = ["DETAIL_COLUMNS", "RESULT_COLUMNS", "run_precision_compare"]

RESULT_COLUMNS = ("API Name", "Forward Test Success", "Backward Test Success", "Message")
_RATIOS = {
    "small_errors": ("小值域错误比值", "小值域判定结果"),
    "rms_error": ("均方根误差比值", "均方根误差判定结果"),
    "max_rel": ("相对误差最大值比值", "相对误差最大值判定结果"),
    "mean_rel": ("相对误差平均值比值", "相对误差平均值判定结果"),
    "balance": ("误差均衡性比值", "误差均衡性判定结果"),
}
_FIGURES = {
    "nonfinite_errors": ("inf/nan错误率", "inf/nan判定结果"),
    "rel_errors": ("相对误差错误率", "相对误差判定结果"),
    "abs_errors": ("绝对误差错误率", "绝对误差判定结果"),
    "mismatch": ("二进制一致错误率", "二进制一致错误率判定结果"),
}
_ULP = ("ULP误差平均值", "ULP误差大于阈值占比", "ULP误差大于阈值占比比值", "ULP误差判定结果")
_THOUSANDTH = ("双千指标", "双千指标判定结果")
DETAIL_COLUMNS = (
    "API Name",
    *(heading for pair in (*_RATIOS.values(), *_FIGURES.values()) for heading in pair),
    *_ULP,
    *_THOUSANDTH,
    *("比对结果", "比对算法", "Message"),
)
_STANDARDS = {
    "benchmark": "标杆比对法",
    "binary": "二进制一致法",
    "absolute": "绝对阈值法",
    "ulp": "ULP误差比对法",
    "thousandth": "双千指标法",
}


def run_precision_compare(given: argparse.Namespace) -> int:
    """Run the command; return 0 if the tables were written, whatever is in them."""
    if not given.out_path.is_dir():
        raise InputError(f"the out_path '{given.out_path}' is no folder; make it first")
    comparison = compare_devices(given.npu_csv_path, given.gpu_csv_path, edition="2024" if given.framework else "26.2")
    stamp = fresh_stamp(given.out_path)
    result, details = (given.out_path / f"api_precision_compare_{kind}_{stamp}.csv" for kind in ("result", "details"))
    write_table(result, RESULT_COLUMNS, _results(comparison))
    write_table(details, DETAIL_COLUMNS, map(_detail, comparison.pairs))
    counts = ", ".join(f"{count} {STATUS_WORDS[status]}" for status, count in comparison.counts.items() if count)
    print(visible(f"the results are in '{result}' and '{details}': {counts}"))
    print(f"the same by hand: {command_line('ulpscope', 'check-devices', as_path(given.npu_csv_path), as_path(given.gpu_csv_path))}")
    return 0


def _results(comparison: DeviceComparison) -> Iterator[list[str]]:
    """Yield one row for each API, in the order of the table; its worst result counts."""
    pairs: dict[str, list[DevicePair]] = {}
    for pair in comparison.pairs:
        pairs.setdefault(pair.row.call, []).append(pair)
    for call, results in pairs.items():
        statuses = [comparison.calls.get((call, phase)) for phase in ("forward", "backward")]
        reasons = dict.fromkeys(pair.verdict.reason for pair in results if pair.verdict.reason)
        yield [_api_name(results[0]), *map(_word, statuses), "; ".join(reasons)]


def _api_name(pair: DevicePair) -> str:
    name = pair.row.name
    return name.rpartition(f".{pair.row.phase}.")[0] if pair.row.phase and f".{pair.row.phase}." in name else name or pair.row.call


def _word(status: CheckStatus | None) -> str:
    return STATUS_WORDS[status] if status else ""


def _detail(pair: DevicePair) -> list[str]:
    verdict, metrics = pair.verdict, pair.subject.metrics if pair.subject else {}
    words = {name: STATUS_WORDS[status] for name, status in verdict.statuses.items()}
    cells = [pair.row.name or pair.row.call]
    for name in _RATIOS:
        cells += [_number(verdict.ratios.get(name)), words.get(name, " ")]
    for name in _FIGURES:
        cells += [_number(metrics.get(name)) if name in words else " ", words.get(name, " ")]
    is_ulp, is_thousandth = verdict.standard == "ulp", verdict.standard == "thousandth"
    cells += [_number(metrics.get(name)) if is_ulp else " " for name in ("ulp_mean", "ulp_beyond")]
    cells += [_number(verdict.ratios.get("ulp_beyond")), words.get("ulp_beyond", STATUS_WORDS[verdict.status] if is_ulp else " ")]
    cells += [_number(metrics.get("within_1e3")) if is_thousandth else " ", STATUS_WORDS[verdict.status] if is_thousandth else " "]
    return [*cells, STATUS_WORDS[verdict.status], _STANDARDS.get(verdict.standard, verdict.standard), verdict.reason]


def _number(value: float | None) -> str:
    return " " if value is None else repr(value)
