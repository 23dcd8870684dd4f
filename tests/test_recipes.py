# SPDX-License-Identifier: Apache-2.0
"""The recipes of CONTRIBUTING.md, each followed to the letter in a copy of the package, with a made-up example that then has to work.

A recipe that names a file that is gone, or leaves out a place that has to change, fails here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

RUNS = """
import struct
from ulpscope.model import Arguments, CallName, CallRecord, RunInfo, Slot, TensorRecord
from ulpscope.store import DirectorySink, create_run

def write_run(path, op, given, result):
    '''One step with one call: what it was given, and what came out.'''
    create_run(path, RunInfo(tool="test"))
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    slots = []
    for slot, values in (("input.0", given), ("output.0", result)):
        content = sink.keep("float32", (len(values),), struct.pack(f"<{len(values)}f", *values))
        slots.append(TensorRecord(slot=Slot.parse(slot), dtype="float32", shape=(len(values),), strides=(1,), content=content))
    sink.write(CallRecord(rank=0, step=0, order=0, call=CallName(op, 0), phase="forward", module="block", slots=tuple(slots),
                          arguments=Arguments(args=({"$tensor": "input.0"},))))
    sink.end_step()
    sink.close()
    return path
"""


class Recipe:
    """One recipe: the files that it names, in a copy of the package, and what runs with that copy."""

    def __init__(self, title: str, folder: Path) -> None:
        found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", CONTRIBUTING, re.MULTILINE | re.DOTALL)
        assert found, f"CONTRIBUTING.md has no recipe '{title}'"
        self.text = found[1]
        self.folder = folder
        self.package = folder / "copy/ulpscope"
        shutil.copytree(ROOT / "src/ulpscope", self.package)

    def add(self, file: str, before: str, text: str) -> None:
        """Put a text before another one, in a file that the recipe names."""
        assert f"`{file}`" in self.text, f"the recipe does not name {file}"
        path = self.package / file
        source = path.read_text(encoding="utf-8")
        assert source.count(before) == 1, f"{file} has not one {before!r}"
        path.write_text(source.replace(before, text + before), encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        """Write a new file, in a folder that the recipe names."""
        assert f"`{file.partition('/')[0]}/`" in self.text
        (self.package / file).write_text(text, encoding="utf-8")

    def run(self, *words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.package.parent)}
        done = subprocess.run([sys.executable, *words], cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, code: str) -> list[str]:
        return self.run("-c", RUNS + code).splitlines()


def test_a_metric(tmp_path: Path) -> None:
    recipe = Recipe("Add a metric", tmp_path)
    entry = 'MetricEntry("rms_ratio", "rms n / rms b", "The size of the subject over that of the reference.", ".4g", "neither"),\n    '
    recipe.add("measure/metrics.py", 'MetricEntry("rms_subject"', entry)
    recipe.add("model/comparison/measurements.py", "    num_different: int\n", "    rms_ratio: Metric\n")
    value = "math.sqrt(found.sum_squares_subject / found.sum_squares_reference) if found.sum_squares_reference else _ZERO_REFERENCE"
    recipe.add("measure/tensors.py", '"snr_db": _signal', f'"rms_ratio": {value},\n        ')
    assert "docs/metrics.md" in recipe.text

    printed = recipe.python("""
from ulpscope import compare_runs
from ulpscope.report.comparison.table import write_csv
from pathlib import Path
import csv
for name, reference in (("twice", [3.0, 4.0]), ("none", [0.0, 0.0])):
    subject = write_run(f"{name}-subject", "Tensor.relu", [3.0, 4.0], [6.0, 8.0])
    comparison = compare_runs(subject, write_run(f"{name}-reference", "Tensor.relu", [3.0, 4.0], reference))
    print(next(slot.measurement.rms_ratio for call in comparison.calls for slot in call.slots if str(slot.pair.slot) == "output.0"))
    write_csv(comparison, Path(f"{name}.csv"))
    print(*(row["rms_ratio"] for row in csv.DictReader(open(f"{name}.csv")) if row["slot"] == "output.0"))
""")
    assert printed == ["2.0", "2.0", "Undefined(reason='the reference is all zero')", ""]


READER = '''
"""Runs of a made-up tool: a file of lines, each an operation and its results."""

import struct
from pathlib import Path

from ulpscope.errors import DamagedRunError
from ulpscope.model import CallName, CallRecord, Run, RunInfo, Slot, TensorRecord
from ulpscope.store.memory import MemoryRun


def recognize(path: Path) -> bool:
    return (path / "made-up.txt").is_file()


def open_made_up(path: Path) -> Run:
    run = MemoryRun(RunInfo(tool="made up"), path)
    sink = run.sink(0)
    sink.begin_step(0)
    for order, line in enumerate((path / "made-up.txt").read_text().splitlines()):
        op, *words = line.split()
        try:
            values = [float(word) for word in words]
        except ValueError as error:
            raise DamagedRunError(f"{path / 'made-up.txt'} has no numbers in line {order + 1}: {error}") from error
        content = sink.keep("float32", (len(values),), struct.pack(f"<{len(values)}f", *values))
        slot = TensorRecord(slot=Slot.parse("output.0"), dtype="float32", shape=(len(values),), content=content)
        sink.write(CallRecord(rank=0, step=0, order=order, call=CallName(op, order), phase="forward", slots=(slot,)))
    sink.end_step()
    return run
'''
READER_TEST = """
import pytest
from ulpscope import open_run
from ulpscope.errors import DamagedRunError
from ulpscope.testing.stores import RunContract

class TestMadeUp(RunContract):
    def open_example(self, folder):
        (folder / "made-up.txt").write_text("functional.relu 0 1.5 2\\nfunctional.gelu 0.1\\n")
        return open_run(folder)

def test_a_lie_is_one_sentence(tmp_path):
    (tmp_path / "made-up.txt").write_text("functional.relu 0 1.5 many")
    with pytest.raises(DamagedRunError, match="no numbers in line 1"):
        open_run(tmp_path)
"""


def test_a_reader(tmp_path: Path) -> None:
    recipe = Recipe("Add a reader", tmp_path)
    recipe.write("store/made_up.py", READER)
    recipe.add("store/sniff.py", "    readers: tuple[", "    from ulpscope.store import made_up\n\n")
    recipe.add("store/sniff.py", "(dump_json.recognize,", "(made_up.recognize, made_up.open_made_up),\n        ")
    (tmp_path / "test_made_up.py").write_text(READER_TEST)
    assert "6 passed" in recipe.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_made_up.py")


EXPLANATION = '''
"""A result that is exactly twice the reference's: somebody scaled it."""

from ulpscope.explain.views import StepView, worst
from ulpscope.explain.wording import finding_at
from ulpscope.model import Finding, TensorMeasurement


def explain_doubled(view: StepView) -> Finding | None:
    for call in view.calls:
        slot = worst(call.slots) if call.contribution == "contributed" else None
        found = slot.measurement if slot else None
        if isinstance(found, TensorMeasurement) and found.worst_reference and found.worst_subject == 2 * found.worst_reference:
            return finding_at("fault", "doubled", f"{call.pair.record.call.short} is doubled", call, slot, ["twice"], "divide by two")
    return None
'''


def test_an_explanation(tmp_path: Path) -> None:
    recipe = Recipe("Add an explanation", tmp_path)
    recipe.write("explain/doubled.py", EXPLANATION)
    recipe.add(
        "explain/causes.py", "from ulpscope.explain.arithmetic.ending import", "from ulpscope.explain.doubled import explain_doubled\n"
    )
    recipe.add("explain/causes.py", "    explain_forward,\n    explain_backward,", "    explain_doubled,\n")
    assert "docs/report-json.md" in recipe.text

    printed = recipe.python("""
from ulpscope import compare_runs
reference = write_run("reference", "Tensor.relu", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
for name, result in (("doubled", [2.0, 4.0, 6.0]), ("other", [2.0, 4.0, 7.0]), ("clean", [1.0, 2.0, 3.0])):
    found = compare_runs(write_run(name, "Tensor.relu", [1.0, 2.0, 3.0], result), reference)
    print(name, [finding.kind for finding in found.faults])
""")
    assert printed[0] == "doubled ['doubled']"
    assert printed[1].startswith("other ['")
    assert "doubled" not in printed[1]
    assert printed[2] == "clean []"


FORMULA = """def _cubed(x: Tensor, scale: float = 1.0) -> Tensor:
    if scale != 1.0:
        raise NotReplayable("a cube with a scale has no formula here")
    return (_inner(x) ** 3).to(x.dtype)


"""


def test_an_operation_to_replay(tmp_path: Path) -> None:
    recipe = Recipe("Add an operation to replay", tmp_path)
    asked = """
from ulpscope import check_run
for number, name in enumerate(("torch_npu.npu_cubed", "npu.npu_cubed", "ops.npu.npu_cubed")):
    for result in ([1.0, 8.0, 27.0], [1.0, 8.0, 27.01]):
        run = write_run(f"{prefix}-{number}-{result[-1]}", name, [1.0, 2.0, 3.0], result)
        check = check_run(run, device="cpu", isolated=False)
        print(*(status for status, count in check.counts.items() if count))
"""
    assert recipe.python("prefix = 'before'" + asked) == ["skipped"] * 6
    recipe.add("replay/formulas/vendor.py", "VENDOR_FORMULAS: dict", FORMULA)
    recipe.add("replay/formulas/vendor.py", '    "npu_ciou": _ciou', '    "npu_cubed": _cubed,\n')
    assert recipe.python("prefix = 'after'" + asked) == ["passed", "failed"] * 3
