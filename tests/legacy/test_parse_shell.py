# SPDX-License-Identifier: Apache-2.0
"""Test the shell of `python -m ptdbg_ascend.parse`, as a real process: typed commands, the screen, and the disk."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.legacy.ptdbg_dumps import only
from tests.legacy.test_ptdbg_compare import GUIDES_PAGE, guides_convolution
from tests.store.acl_writer import described, dump_bytes, fractal_nz, nc1hwc0

PROMPT = "Parse >>> "
COMMAND = [sys.executable, "-m", "ptdbg_ascend.parse"]
DUMP = "Add.layer_add_1.24.5.1636595794631347"
Array = np.ndarray[Any, Any]


def typed(folder: Path, *lines: str) -> list[str]:
    """Return the output of each command; the shell ends with its input."""
    finished = subprocess.run(
        COMMAND, input="".join(f"{line}\n" for line in lines), cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    start, *answers, end = finished.stdout.split(PROMPT)
    assert (start, end) == ("", "\n")
    assert len(answers) == len(lines)
    return answers


def saved(folder: Path, **arrays: Array) -> None:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


@pytest.mark.promise("R01", "R02")
def test_prompt_programs_help_and_a_clean_end(tmp_path: Path) -> None:
    saved(tmp_path, a=np.zeros(2), b=np.zeros(2))
    (tmp_path / "sub").mkdir()
    help_, listing, explicit, piped, unknown, _, where, blank, history = typed(
        tmp_path, "help", "ls *.npy", "run echo 'two words' x", "ls | wc", "no_such_program -x", "cd sub", "pwd", "", "history"
    )
    assert all(f"  {command} " in help_ for command in ("vc", "dc", "pt", "pk", "cn", "run"))
    assert listing.split() == ["a.npy", "b.npy"]
    assert explicit == "two words x\n"
    assert "'|' is not understood" in piped
    assert "'no_such_program' cannot be run" in unknown
    assert where.strip() == str(tmp_path / "sub")
    assert blank == ""
    assert "    1  help" in history
    assert (tmp_path / "parse_data").is_dir()


def test_nothing_typed_reaches_a_shell(tmp_path: Path) -> None:
    typed(tmp_path, "echo $(touch made1) `touch made2`", "run echo x;touch made3", "pk -f none -n '; touch made4'")
    assert not list(tmp_path.glob("made*"))


def test_a_mistyped_command_is_one_sentence_and_the_shell_goes_on(tmp_path: Path) -> None:
    saved(tmp_path, a=np.zeros(2))
    compare = "cn -m a.npy -g a.npy"
    *answers, after = typed(
        tmp_path, "cn -m a", "pt", "pt -x 1", "pt -n 'x", f"{compare} -p -3", f"{compare} -al none", "dc -n . -out none", "echo still here"
    )
    assert [len(answer.splitlines()) for answer in answers] == [1] * len(answers)
    assert after == "still here\n"


def test_every_command_tells_its_options(tmp_path: Path) -> None:
    answers = typed(tmp_path, "vc -h", "dc -h", "pt -h", "pk -h", "cn -h", "help cn")
    long_forms = [
        ("--my_dump_path", "--golden_dump_path", "--output_path", "--ascend_path"),
        ("--name", "--format", "--output_path", "--ascend_path"),
        ("--name",),
        ("--file", "--name"),
        ("--my_dump_path", "--golden_dump_path", "--print", "--save", "--atol", "--rtol"),
        ("--atol",),
    ]
    for answer, forms in zip(answers, long_forms, strict=True):
        assert all(form in answer for form in forms)


# --- a terminal


class Terminal:
    """Runs the shell with someone at the keyboard."""

    def __init__(self, folder: Path) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(COMMAND, cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.unread = ""
        self.until(PROMPT)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, word: str) -> None:
        """Read on until the word has come; the rest stays to be read."""
        while word not in self.unread:
            ready, _, _ = select.select([self.master], [], [], 60)
            assert ready, f"{word!r} did not come, but {self.unread!r}"
            self.unread += os.read(self.master, 4096).decode(errors="replace")
        self.unread = self.unread.partition(word)[2]

    def ended(self) -> int:
        status = self.process.wait(timeout=60)
        os.close(self.master)
        return status


@pytest.mark.promise("R01")
def test_ctrl_c_leaves(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    for _ in range(60):  # between the prompt and the wait for a key Python's line editor sleeps through a signal: one presses again
        terminal.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(timeout=1)
            break
    assert terminal.ended() == 0


def test_tab_completes_commands_and_paths_and_the_arrow_brings_back_what_was_typed(tmp_path: Path) -> None:
    saved(tmp_path, some_tensor=np.ones(3, "f4"))
    terminal = Terminal(tmp_path)
    terminal.type("hist\t\n")
    terminal.until("1  history")
    terminal.until(PROMPT)
    terminal.type("pt -n some_t\t\n")
    terminal.until("[Shape: (3,)]")
    terminal.until(PROMPT)
    terminal.type("\x1b[A\n")
    terminal.until("[Shape: (3,)]")
    terminal.until(PROMPT)
    terminal.type("\x04")
    assert terminal.ended() == 0
    again = Terminal(tmp_path)
    again.type("\x1b[A\n")  # the history of an earlier session
    again.until("[Shape: (3,)]")
    again.until(PROMPT)
    again.type("exit\n")
    assert again.ended() == 0


# --- pt, pk, cn


@pytest.mark.promise("R07")
def test_pt_prints_the_statistics_and_saves_the_text(tmp_path: Path) -> None:
    values = np.full((1, 16, 2, 2, 16), -3.809, "f2")
    values.flat[0], values.flat[1] = 452.0, -408.5
    mean = values.mean()
    saved(tmp_path, x=values, flag=np.array([True, False]), empty=np.zeros((0, 2)))
    shown, flags, empty, none, other = typed(
        tmp_path, "pt -n ./x.npy", "pt -n flag.npy", "pt -n empty.npy", "pt -n none.npy", "pt -n x.npy.txt"
    )
    assert f"[Shape: (1, 16, 2, 2, 16)] [Dtype: float16] [Max: 452.0] [Min: -408.5] [Mean: {mean!s}]" in shown
    assert shown.splitlines()[-2:] == ["Path: x.npy", "TextFile: x.npy.txt"]
    assert shown.count("\n│") == 16
    assert [float(word) for word in (tmp_path / "x.npy.txt").read_text().split()][:2] == [452.0, -408.5]
    assert len((tmp_path / "x.npy.txt").read_text().split()) == 1024
    assert "[Dtype: bool] [Max: True] [Min: False] [Mean: 0.5]" in flags
    assert "[Shape: (0, 2)]" in empty
    assert "fits 0 files" in none
    assert "is not a .npy file" in other


@pytest.mark.promise("R08")
def test_pk_prints_the_guides_page_and_the_stack(tmp_path: Path) -> None:
    file = guides_convolution(tmp_path)
    plain, none = typed(tmp_path, "pk -f ./api_stack_dump.pkl -n Functional_conv2d_0_forward", "pk -f none.pkl -n x")
    assert plain == GUIDES_PAGE
    assert none.startswith("[ERROR] 'none.pkl' cannot be read")
    with file.open("a") as stream:
        stream.write(json.dumps(["Functional_conv2d_0_forward_stack_info", [["net.py", "7", "forward", "y = self.c(x)"]]]) + "\n")
    (traced,) = typed(tmp_path, "pk --file api_stack_dump.pkl --name Functional_conv2d_0_forward")
    assert traced.endswith('Trace back(Functional_conv2d_0_forward_stack_info):\n  File "net.py", line 7, in forward\n    y = self.c(x)\n')


# The twenty rows that the guide prints for `cn`: index, left, right, difference.
ERROR_ROWS = """155 0.024600908 0.022271132 0.002329776|247 0.015752593 0.017937578 0.0021849852|282 -0.0101207765 -0.007852031 0.0022687456
292 0.019581757 0.02240482 0.0028230622|640 -0.06593232 -0.06874806 0.0028157383|1420 0.09293677 0.09586689 0.0029301196
1462 -0.085207745 -0.088047795 0.0028400496|1891 -0.03433288 -0.036525503 0.002192624|2033 0.06828873 0.07139922 0.0031104907
2246 -0.06376442 -0.06121233 0.002552092""".replace("\n", "|").split("|")
TOP_ROWS = """0 -0.9206961 -0.9222216 0.0015255213|1 -0.6416973 -0.64051837 0.0011789203|2 -0.35383835 -0.35433492 0.0004965663
3 -0.18851271 -0.18883198 0.00031927228|4 -0.43508735 -0.43534422 0.00025686622|5 1.4447614 1.4466647 0.0019032955
6 -0.3455438 -0.3444429 0.0011008978|7 -0.6560242 -0.6564579 0.0004336834|8 -2.6964858 -2.6975214 0.0010356903
9 -0.73746175 -0.73650354 0.00095820427""".replace("\n", "|").split("|")


@pytest.mark.promise("R09", "R10", "R11", "R12", "R13")
def test_cn_prints_the_rows_of_the_guides_page(tmp_path: Path) -> None:
    left, right = np.zeros((2, 3200), "f4"), np.zeros((2, 3200), "f4")
    for row in (*ERROR_ROWS, *TOP_ROWS):
        at, ours, theirs, _ = row.split()
        left.flat[int(at)], right.flat[int(at)] = np.float32(ours), np.float32(theirs)
    saved(tmp_path, mine=left, golden=right)
    (answer,) = typed(tmp_path, "cn -m mine.npy -g gold*.npy -p 10 -s -al 0.002 -rl 0.005")
    assert re.search(r"Error Item Table +Top Item Table", answer)
    assert answer.count("┃ Index ┃ Left") == 2
    for error, top in zip(ERROR_ROWS, TOP_ROWS, strict=True):
        cells = [re.escape(word) for word in (*error.split(), *top.split())]
        cells[3], cells[7] = r"0\.\d+", r"0\.\d+"  # the page took the difference in more digits than it prints
        pattern = r" *│ ".join(cells[:4]) + r" *│ +│ " + r" *│ ".join(cells[4:])
        found = re.search(pattern, answer)
        assert found, pattern
    panel = [line.strip("│ ") for line in answer.splitlines() if line.startswith("│ ") and "│" not in line[1:-1]]
    flat = left.ravel().astype("f8"), right.ravel().astype("f8")
    product, lengths = flat[0] @ flat[1], np.linalg.norm(flat[0]) * np.linalg.norm(flat[1])
    assert panel == [
        "Left:",
        "|- NpyFile: mine.npy",
        "|- TxtFile: mine.npy.txt",
        "|- NpySpec: [Shape: (2, 3200)] [Dtype: float32] [Max: 1.4447614] [Min: -2.6964858] [Mean: " + f"{left.mean()!s}]",
        "Right:",
        "|- NpyFile: golden.npy",
        "|- TxtFile: golden.npy.txt",
        "|- NpySpec: [Shape: (2, 3200)] [Dtype: float32] [Max: 1.4466647] [Min: -2.6975214] [Mean: " + f"{right.mean()!s}]",
        "NumCnt:   6400",
        "AllClose: False",
        f"CosSim:   {np.float32(product / lengths)!s}",
        f"ErrorPer: {10 / 6400}  (rl= 0.005, al= 0.002)",
    ]
    assert (tmp_path / "mine.npy.txt").is_file()
    assert (tmp_path / "golden.npy.txt").is_file()


@pytest.mark.promise("R09", "R13")
def test_cn_defaults_other_sizes_and_numbers_that_are_none(tmp_path: Path) -> None:
    x = np.linspace(1, 2, 30, dtype="f4")
    odd = np.array([np.nan, np.inf, 1.0, -np.inf], "f4")
    saved(tmp_path, x=x, near=x * np.float32(1.0005), far=x + 1, short=x[:10], odd=odd, odder=np.array([np.nan, np.inf, 1.0, np.inf], "f4"))
    near, far, short, odd_ones = typed(
        tmp_path, "cn -m near.npy -g x.npy", "cn -m far.npy -g x.npy", "cn -m short.npy -g x.npy -p 3", "cn -m odd.npy -g odder.npy"
    )
    assert "AllClose: True" in near
    assert "ErrorPer: 0.0  (rl= 0.001, al= 0.001)" in near
    assert len([line for line in far.splitlines() if line.count("│") == 10]) == 20
    assert "AllClose: False" in far
    assert "[WARNING] The sizes differ" in short
    assert "NumCnt:   30" in short
    assert "ErrorPer: 0.5 " in odd_ones  # NaN equals nothing, equal infinities are equal


# --- vc and dc, without CANN


def acl_dump(folder: Path, scale: float = 1.0) -> None:
    """Write an operator with plain tensors and one in blocked layouts, under a name as the runtime gives it."""
    folder.mkdir(parents=True)
    x = np.linspace(-1, 1, 12, dtype="f4").reshape(3, 4)
    inputs, outputs = [described(x), described(x + 1)], [described(np.float32(scale) * (2 * x + 1))]
    (folder / DUMP).write_bytes(dump_bytes(inputs, outputs, op_name="layer/add_1"))
    image, matrix = np.arange(2 * 3 * 2 * 2, dtype="f4").reshape(2, 3, 2, 2), np.arange(20 * 5, dtype="f2").reshape(20, 5)
    stored = nc1hwc0(image), fractal_nz(matrix)
    blocked = [
        described(stored[0], format="NC1HWC0", original_shape=image.shape, original_format="NCHW"),
        described(stored[1], format="FRACTAL_NZ", original_shape=matrix.shape, original_format="ND"),
    ]
    (folder / "TransData.layer_trans.31.5.1636595794731103").write_bytes(dump_bytes(blocked[:1], blocked[1:], op_name="layer/trans"))


@pytest.mark.promise("R03", "R04", "R04a")
def test_vc_compares_two_dumps_without_cann(tmp_path: Path) -> None:
    acl_dump(tmp_path / "mine", scale=1.5)
    acl_dump(tmp_path / "golden")
    (tmp_path / "out").mkdir()
    first, second, missing = typed(tmp_path, "vc -m ./mine -g ./golden", "vc -m mine -g golden -out out", "vc -m mine -g golden -out none")
    table = only(tmp_path / "parse_data" / "compare_result", "result_*.csv")
    assert re.fullmatch(r"result_\d{14}\.csv", table.name)
    assert f'[INFO] The comparison result have been written to "parse_data/compare_result/{table.name}".' in first
    assert re.search(r"\[INFO\] The command was completed and took \d+ seconds\.", first)
    assert first.endswith("[INFO] Compare finished!!\n")
    assert "ulpscope: " in first
    assert only(tmp_path / "out", "result_*.csv").name in second
    assert "'none' is not there" in missing
    with table.open(newline="") as stream:
        found = {(row["OpName"], row["TensorIndex"]): row for row in csv.DictReader(stream)}
    assert set(found) == {("layer/add_1", slot) for slot in ("input.0", "input.1", "output.0")} | {
        ("layer/trans", "input.0"),
        ("layer/trans", "output.0"),
    }
    output = found["layer/add_1", "output.0"]
    assert (output["OpType"], output["NPUDump"], output["GroundTruth"], output["Shape"]) == ("Add", DUMP, DUMP, "[3, 4]")
    assert float(output["MaxAbsoluteError"]) == pytest.approx(1.5)
    assert float(output["RelativeEuclideanDistance"]) == pytest.approx(0.5)
    assert float(output["CosineSimilarity"]) == pytest.approx(1.0)
    assert float(found["layer/add_1", "input.0"]["MaxAbsoluteError"]) == 0.0
    assert found["layer/trans", "input.0"]["Shape"] == "[2, 3, 2, 2]"


@pytest.mark.promise("R06")
def test_dc_converts_files_and_folders_without_cann(tmp_path: Path) -> None:
    acl_dump(tmp_path / "dump_data")
    (tmp_path / "dump_data" / "notes.txt").write_text("not a dump")
    (tmp_path / "out").mkdir()
    answers = typed(
        tmp_path, "dc -n ./dump_data/", f"dc -n dump_data/{DUMP} -out out", "dc -n dump_data -f NCHW -out out", "dc -n dump_data/notes.txt"
    )
    panel = [line.strip("│ ") for line in answers[0].splitlines() if line.startswith("│")]
    trans = "TransData.layer_trans.31.5.1636595794731103"
    assert panel == [
        "SrcFile: dump_data",
        *(f"- {DUMP}.{slot}.npy" for slot in ("input.0", "input.1", "output.0")),
        *(f"- {trans}.{slot}.npy" for slot in ("input.0", "output.0")),
    ]
    folder = tmp_path / "parse_data" / "dump_convert"
    np.testing.assert_array_equal(np.load(folder / f"{DUMP}.input.0.npy"), np.linspace(-1, 1, 12, dtype="f4").reshape(3, 4))
    assert np.load(folder / f"{trans}.input.0.npy").shape == (2, 1, 2, 2, 16)
    assert "The .npy files are in parse_data/dump_convert." in answers[0]
    assert sorted(file.name for file in (tmp_path / "out").glob(f"{DUMP}.*.npy"))[0] == f"{DUMP}.input.0.3x4.npy"
    converted = np.load(tmp_path / "out" / f"{trans}.input.0.2x3x2x2.npy")
    np.testing.assert_array_equal(converted, np.arange(24, dtype="f4").reshape(2, 3, 2, 2))
    assert "[ERROR]" in answers[3]


STUB = """
import json, sys
from pathlib import Path
with open("said.jsonl", "a") as stream:
    stream.write(json.dumps(sys.argv[1:]) + "\\n")
if "convert" in sys.argv:
    Path(sys.argv[sys.argv.index("-out") + 1], "%s.output.0.npy").touch()
sys.exit(3 if "broken" in sys.argv else 0)
"""


@pytest.mark.promise("R03", "R05", "R06")
def test_asc_hands_over_to_msaccucmp(tmp_path: Path) -> None:
    acl_dump(tmp_path / "mine")
    (tmp_path / "stub.py").write_text(STUB % DUMP)
    (tmp_path / "out").mkdir()
    compared, converted, _, usual, missing = typed(
        tmp_path,
        "vc -m mine -g mine -out out -asc stub.py",
        "dc -n mine -asc stub.py",
        "dc -n mine -f NCHW -out out -asc stub.py",
        "vc -m mine -g mine -asc",
        "dc -n mine -asc none.py",
    )
    assert [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()] == [
        ["--help"],
        ["compare", "-m", "mine", "-g", "mine", "-out", "out"],
        ["--help"],
        ["convert", "-d", "mine", "-out", "parse_data/dump_convert"],
        ["--help"],
        ["convert", "-d", "mine", "-out", "out", "-f", "NCHW"],
    ]
    assert "Compare finished!!" in compared
    assert f" - {DUMP}.output.0.npy" in converted
    assert "/usr/local/Ascend/ascend-toolkit/latest/tools/operator_cmp/compare/msaccucmp.py" in usual
    assert "no msaccucmp at 'none.py'" in missing
