# SPDX-License-Identifier: Apache-2.0
"""Run `vc` and `dc`: compare and convert dumps of Ascend's runtime with ulpscope's own reader.

`vc` runs ulpscope's own comparison. Its csv file has a row for each tensor, with the metrics that CANN's tool and ulpscope share.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from ulpscope.compat.bridge import tell_finding
from ulpscope.compat.ptdbg.shell.programs import hand_over
from ulpscope.errors import InputError
from ulpscope.model import Comparison, JudgedCall, JudgedSlot, NotMeasured, TensorMeasurement, Undefined
from ulpscope.report.comparison.table import defused
from ulpscope.report.escaping import visible
from ulpscope.report.replacing import replacing
from ulpscope.store.acl.file import AclTensor, read_acl_file
from ulpscope.store.acl.file_names import match_acl_name
from ulpscope.store.acl.folder import AclFile, AclRun, acl_files, open_dump

__all__ = ["compare_acl", "convert_acl"]

COMPARE_RESULT = Path("parse_data/compare_result")
CONVERT_RESULT = Path("parse_data/dump_convert")
_COLUMNS = (
    *("Index", "OpType", "OpName", "NPUDump", "GroundTruth", "TensorIndex", "DataType", "Shape"),
    *("CosineSimilarity", "MaxAbsoluteError", "RelativeEuclideanDistance", "MeanAbsoluteError", "RootMeanSquareError", "MaxRelativeError"),
    "CompareFailReason",
)
_METRICS = ("cosine", "max_abs", "rel_l2", "mean_abs", "rms_error", "max_rel")


def compare_acl(my_dump: Path, golden: Path, output: Path | None, msaccucmp: Path | None) -> None:
    """Compare two dumps into `result_{time}.csv`."""
    started = time.monotonic()
    for path in (my_dump, golden):
        _check_there(path)
    folder = _folder(output, COMPARE_RESULT)
    if msaccucmp is not None:
        hand_over(msaccucmp, ["compare", "-m", my_dump, "-g", golden, "-out", folder])
        print("[INFO] Compare finished!!")
        return
    from ulpscope.workflows.compare.comparing import compare_runs

    comparison = compare_runs(_opened(my_dump), _opened(golden), replay="none")
    table = _fresh(folder, "result", ".csv")
    _write_rows(comparison, table)
    print(f'[INFO] The comparison result have been written to "{visible(str(table))}".')
    print(f"[INFO] The command was completed and took {round(time.monotonic() - started)} seconds.")
    tell_finding(comparison, table.with_suffix(".html"))
    print("[INFO] Compare finished!!")


def _check_there(path: Path) -> None:
    if not path.exists():
        raise InputError(f"there is no dump at '{path}': give a dump file or the folder that holds dump files")


def _folder(given: Path | None, usual: Path) -> Path:
    if given is None:
        usual.mkdir(parents=True, exist_ok=True)
        return usual
    if not given.is_dir():
        raise InputError(f"the output folder '{given}' is not there: create it first")
    return given


def _fresh(folder: Path, stem: str, ending: str) -> Path:
    """Return a path named by the time to the second, or a later second if that is taken."""
    now = time.time()
    while (path := folder / f"{stem}_{time.strftime('%Y%m%d%H%M%S', time.localtime(now))}{ending}").exists():
        now += 1
    return path


def _opened(path: Path) -> AclRun:
    """Open a folder of dump files as one step of one rank, whatever device it came from; open any other folder as a dump."""
    files = acl_files(path) if path.is_dir() else []
    return AclRun(path, {(0, 0): files}) if files else open_dump(path)


def _write_rows(comparison: Comparison, table: Path) -> None:
    with replacing(table) as temporary, temporary.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for index, call in enumerate(comparison.calls):
            for slot in call.slots or (None,):
                writer.writerow([str(index), *map(defused, _cells(call, slot)), *_numbers(slot)])
        temporary.chmod(0o640)


def _cells(call: JudgedCall, slot: JudgedSlot | None) -> Iterator[str]:
    record = call.pair.record
    yield record.call.op.removeprefix("acl.")
    yield record.module
    sides = (slot.pair.subject, slot.pair.reference) if slot else (None, None)
    for side, tensor in zip((call.pair.subject, call.pair.reference), sides, strict=True):
        content = tensor.content.rpartition(":")[0] if tensor and tensor.content else ""
        yield "*" if side is None else content or str(side.call)
    tensor = sides[0] or sides[1]
    yield str(slot.pair.slot) if slot else "*"
    yield tensor.dtype if tensor else "NaN"
    yield str(list(tensor.shape)) if tensor else "NaN"


def _numbers(slot: JudgedSlot | None) -> list[str]:
    found = slot.measurement if slot else NotMeasured("The operator is in one dump only.")
    if not isinstance(found, TensorMeasurement):
        reason = found.reason if isinstance(found, NotMeasured) else "Only statistics were dumped."
        return [*["NaN"] * len(_METRICS), defused(reason)]
    metrics = [getattr(found, name) for name in _METRICS]
    reasons = sorted({metric.reason for metric in metrics if isinstance(metric, Undefined)})
    disagreeing = found.num_nan_disagree + found.num_inf_disagree
    if disagreeing:
        reasons.append(f"NaN or infinities disagree at {disagreeing} positions")
    return [*("NaN" if isinstance(metric, Undefined) else f"{metric:.12f}" for metric in metrics), "; ".join(reasons)]


def convert_acl(source: Path, format: str | None, output: Path | None, msaccucmp: Path | None, console: Console) -> None:
    """Convert a dump file, or all of a folder, and list the .npy files."""
    _check_there(source)
    folder = _folder(output, CONVERT_RESULT)
    if msaccucmp is not None:
        hand_over(msaccucmp, ["convert", "-d", source, "-out", folder, *(["-f", format] if format else [])])
        stems = [file.path.name for file in _dump_files(source)] or [source.name]
        written = sorted(file.name for file in folder.glob("*.npy") if any(file.name.startswith(f"{stem}.") for stem in stems))
    else:
        written = list(_convert(source, format.upper() if format else None, folder))
    lines = [Text(f"SrcFile: {visible(str(source))}"), *(Text(f" - {visible(name)}") for name in written)]
    console.print(Panel.fit(Group(*lines)))
    print(f"The .npy files are in {visible(str(folder))}.")


def _dump_files(source: Path) -> list[AclFile]:
    if source.is_dir():
        return acl_files(source)
    name = match_acl_name(source.name)
    return [AclFile(source, name)] if name else []


def _convert(source: Path, format: str | None, folder: Path) -> Iterator[str]:
    """Yield the names of the files as they are written. A file that cannot be read is reported, and the others go on."""
    paths = [file.path for file in _dump_files(source) if not file.is_statistics] if source.is_dir() else [source]
    if not paths:
        raise InputError(f"'{source}' holds no dump file of Ascend: their names are type.name.task.stream.time")
    failures = []
    for path in paths:
        try:
            for tensor in read_acl_file(path).tensors:
                yield _save(tensor, format, folder)
        except InputError as error:
            failures.append(str(error))
    for failure in failures:
        print(f"[WARNING] {visible(failure)}")
    if len(failures) == len(paths):
        raise InputError(f"nothing in '{source}' could be converted")


def _save(tensor: AclTensor, format: str | None, folder: Path) -> str:
    values: np.ndarray[Any, Any] = tensor.array(format)
    shape = f".{'x'.join(map(str, values.shape))}" if format else ""
    name = f"{tensor.path.name}.{tensor.role}.{tensor.index}{shape}.npy"
    with replacing(folder / name) as temporary, temporary.open("xb") as stream:
        np.save(stream, values, allow_pickle=False)
    return name
