# SPDX-License-Identifier: Apache-2.0
"""compare, compare_distributed and parse of ptdbg_ascend, through their old names, on dumps written from the old format's description."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptdbg_ascend
from tests.legacy.ptdbg_dumps import line, named, only, param, rows, write_dump, write_lines

F4 = np.dtype("f4")
TENSOR_COLUMNS = """NPU Name|Bench Name|NPU Tensor Dtype|Bench Tensor Dtype|NPU Tensor Shape|Bench Tensor Shape|Cosine|MaxAbsErr
MaxRelativeErr|NPU max|NPU min|NPU mean|Bench max|Bench min|Bench mean|Accuracy Reached or Not|Err_message""".replace("\n", "|").split("|")
VERDICT = "Accuracy Reached or Not"


def values(seed: int = 0) -> dict[str, Any]:
    """Return a linear, an addition with a number, and the backward of the linear."""
    rng = np.random.default_rng(seed)
    x, w, b = (rng.normal(size=shape).astype(F4) for shape in ((3, 2), (4, 2), (4,)))
    y = x @ w.T + b
    return {
        **named("Functional_linear_0_forward", [x, w, b], y),
        **named("Tensor___add___0_forward", [y, 1], y + 1),
        **named("Functional_linear_0_backward", [np.ones_like(y)], [np.ones(4, F4) * 3, np.ones_like(y) @ w]),
    }


def compared(tmp_path: Path, npu: dict[str, Any], bench: dict[str, Any], **options: Any) -> list[dict[str, str]]:
    sides = [write_dump(tmp_path / side, found) for side, found in (("npu", npu), ("bench", bench))]
    return rows(ptdbg_ascend.compare(param(*sides), tmp_path / "output", **options))


def one_tensor(tmp_path: Path, npu: Any, bench: Any) -> dict[str, str]:
    """Return the row of the output of a call whose input agrees."""
    same = np.ones(2, F4)
    sides = (named("Torch_f_0_forward", [same], np.asarray(value)) for value in (npu, bench))
    return compared(tmp_path, *sides)[1]


# --- the guide's scripts, as they are printed, one after the other in one process

COMPARE_SCRIPT = """
from ptdbg_ascend import *
dump_result_param={
"npu_pkl_path": "./npu_dump/all_v2.0/rank0/api_stack_dump.pkl",
"bench_pkl_path": "./gpu_dump/all_v2.0/rank0/api_stack_dump.pkl",
"npu_dump_data_dir": "./npu_dump/all_v2.0/rank0/api_stack_dump",
"bench_dump_data_dir": "./gpu_dump/all_v2.0/rank0/api_stack_dump",
"is_print_compare_log": True
}
compare(dump_result_param, "./output")
"""
PARSE_SCRIPT = """
from ptdbg_ascend import *

# the statistics and the stack of the first call of an API
parse("./npu_dump/all_v2.0/rank0/api_stack_dump.pkl", "Functional_linear_0_forward")
"""
DISTRIBUTED_SCRIPT = """
from ptdbg_ascend import *
compare_distributed('./npu_dump/ptdbg_dump_v2.0', './gpu_dump/ptdbg_dump_v2.0', './output_all')
"""
SUSPECT = "Tensor___add___0_forward_output"


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Run the three scripts; return their folder, and the output of each."""
    folder = tmp_path_factory.mktemp("guide")
    bench = values()
    for side, found in (("npu_dump", bench | {SUSPECT: bench[SUSPECT] + 2}), ("gpu_dump", bench)):
        write_dump(folder / side / "all_v2.0" / "rank0", found, stem="api_stack_dump", stacks=True)
        for rank in (0, 1, 10):
            write_dump(folder / side / "ptdbg_dump_v2.0" / f"rank{rank}", values(rank))
    (folder / "output_all").mkdir()
    screen = run_script(folder, "print('---')".join([COMPARE_SCRIPT, PARSE_SCRIPT, DISTRIBUTED_SCRIPT]))
    return folder, screen.split("---\n")


def run_script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    finished = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.promise("P024", "P025", "P160", "P167", "P169")
def test_the_guides_script_names_the_suspect(guide: tuple[Path, list[str]]) -> None:
    folder, (screen, _, _) = guide
    table, advice = only(folder / "output", "compare_result_*.csv"), only(folder / "output", "advisor_*.txt")
    assert re.fullmatch(r"compare_result_\d{14}\.csv", table.name)
    assert advice.read_text().splitlines()[:2] == ["Line: 8", f"Suspect Nodes: {SUSPECT}"]
    assert table.read_text().splitlines()[7].startswith(f"{SUSPECT},")
    for text in (f"Suspect Nodes: {SUSPECT}", "Expert Advice: "):
        assert text in screen
        assert text in advice.read_text()
    assert screen.count("Compare start") == len(values())  # is_print_compare_log
    assert table.read_text().splitlines()[0].split(",") == TENSOR_COLUMNS


@pytest.mark.promise("P026", "P171")
def test_the_guides_parse_script_prints_statistics_and_stack(guide: tuple[Path, list[str]]) -> None:
    lines = guide[1][1].splitlines()
    assert lines[:2] == ["", "Statistic Info:"]
    slots = ("input.0", "input.1", "input.2", "output")
    assert [text.split("]")[0] for text in lines[2:6]] == [f"  [Functional_linear_0_forward_{slot}" for slot in slots]
    assert lines[6:] == [
        "",
        "Trace back(Functional_linear_0_forward_stack_info):",
        '  File "/project/train.py", line 3, in main',
        '  File "/project/net.py", line 12, in forward',
        "    y = self.fc(x)",
    ]


@pytest.mark.promise("P030", "P164", "P165")
def test_the_guides_multi_card_script_pairs_the_ranks(guide: tuple[Path, list[str]]) -> None:
    output = guide[0] / "output_all"
    for rank in (0, 1, 10):
        table = only(output, f"compare_result_rank{rank}-rank{rank}_*.csv")
        assert {row[VERDICT] for row in rows(table) if row["Cosine"] != "unsupported"} == {"Yes"}
    assert len(list(output.glob("advisor_*.txt"))) == 3


@pytest.mark.promise("P166", "P168")
def test_stack_mode_shows_the_stacks_and_works_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npu, bench = (write_dump(tmp_path / side, values(), stem="api_stack_dump", stacks=True) for side in ("npu", "bench"))
    table = ptdbg_ascend.compare(param(npu, bench), tmp_path / "output", stack_mode=True, auto_analyze=False, fuzzy_match=False)
    stacks = [row["NPU_Stack_Info"] for row in rows(table)]
    assert "/project/net.py" in stacks[0]
    assert [bool(stack) for stack in stacks] == [True, False, False, False, True, False, False, True, False, False]
    assert "NPU_Stack_Info" not in rows(ptdbg_ascend.compare(param(npu, bench), tmp_path / "output"))[0]
    plain = write_dump(tmp_path / "plain", values())
    table = ptdbg_ascend.compare(param(plain, bench), tmp_path / "output", stack_mode=True)
    assert {row["NPU_Stack_Info"] for row in rows(table)} == {""}
    assert "not both dumps hold stacks" in capsys.readouterr().out


TEMPLATE = """
from ptdbg_ascend import compare

pkl_path = "{npu}.pkl"
dump_data_dir = "{npu}"

dump_path_param = {{
    "npu_pkl_path": pkl_path,
    "bench_pkl_path": "{bench}.pkl",
    "npu_dump_data_dir": dump_data_dir,
    "bench_dump_data_dir": "{bench}",
    "is_print_compare_log": True
}}

compare(dump_path_param, output_path="", stack_mode="True")
"""


@pytest.mark.promise("P131")
def test_a_filled_template_runs(tmp_path: Path) -> None:
    """As the guide prints it, with the paths filled in, and stack_mode in the quotes that it prints."""
    npu, bench = (write_dump(tmp_path / side, values(), stem="api_stack_dump", stacks=True) for side in ("npu", "bench"))
    run_script(tmp_path, TEMPLATE.format(npu=npu.with_suffix(""), bench=bench.with_suffix("")))
    assert len(rows(only(tmp_path, "compare_result_*.csv"))) == len(values())


# --- rows and numbers


@pytest.mark.promise("P160", "P172")
def test_columns_and_numbers_of_a_plain_row(tmp_path: Path) -> None:
    bench = values()
    npu = bench | {"Functional_linear_0_forward_output": bench["Functional_linear_0_forward_output"] + np.float32(0.0005)}
    row = compared(tmp_path, npu, bench)[3]
    ours, theirs = (side["Functional_linear_0_forward_output"].astype("f8") for side in (npu, bench))
    assert list(row) == TENSOR_COLUMNS
    assert (row["NPU Name"], row["Bench Name"]) == ("Functional_linear_0_forward_output",) * 2
    assert (row["NPU Tensor Dtype"], row["NPU Tensor Shape"]) == ("torch.float32", "[3, 4]")
    assert row["MaxAbsErr"] == f"{np.abs(ours - theirs).max():.12f}"
    assert row["MaxRelativeErr"] == f"{np.abs((ours - theirs) / theirs).max():.12f}"
    assert (row["Cosine"], row[VERDICT], row["Err_message"]) == ("1.0", "Yes", "")
    assert float(row["NPU max"]) == ours.max()
    assert float(row["Bench min"]) == theirs.min()


def cosine(npu: list[float], bench: list[float]) -> str:
    n, b = (np.array(side, F4).astype("f8") for side in (npu, bench))
    return f"{n @ b / (np.linalg.norm(n) * np.linalg.norm(b)):.12f}"


CASES = {
    "both zero": ([0, 0, 0], [0, 0, 0], "1.0", "Yes", ""),
    "npu zero": ([0, 0, 0], [1.0, 0.5, 0.25], "Nan", "Nan", "NPU"),
    "bench zero": ([1.0, 0.5, 0.25], [0, 0, 0], "Nan", "Nan", "bench"),
    "bench zero, far off": ([1.0, 2.0, 3.0], [0, 0, 0], "Nan", "No", "bench"),
    "equal": ([1, 2, 3], [1, 2, 3], "1.0", "Yes", ""),
    "nan on one side": ([1, 2, np.nan], [1, 2, 3], "N/A", "No", "disagree"),
    "inf on one side": ([1, 2, np.inf], [1, 2, 3], "N/A", "No", "disagree"),
    "inf of the other sign": ([1, 2, np.inf], [1, 2, -np.inf], "N/A", "No", "disagree"),
    "nan on both": ([1, 2, np.nan], [1, 2, np.nan], "1.0", "Yes", ""),
    "one element": ([1.0], [1.0], "unsupported", "Nan", "single"),
    "a number": (1.0, 1.0, "unsupported", "Nan", "number"),
    "a number, far off": (1.0, 5.0, "unsupported", "No", "number"),
    "empty": (np.zeros((0, 3)), np.zeros((0, 3)), "unsupported", "Nan", "empty"),
    "below 0.9": ([1.0, 0.0], [0.3, 0.7], cosine([1.0, 0.0], [0.3, 0.7]), "No", ""),
    "below 0.99 and above 0.001": ([1.0, 0.0], [1.0, 0.2], cosine([1.0, 0.0], [1.0, 0.2]), "No", ""),
    "below 0.99 and near": ([1e-4, 0.0], [1e-4, 2e-5], cosine([1e-4, 0.0], [1e-4, 2e-5]), "Yes", ""),
    "just above 0.99999": ([1, 0.0044], [1, 0], "1.0", "Yes", ""),
    "just below 0.99999": ([1, 0.00448], [1, 0], cosine([1, 0.00448], [1, 0]), "Yes", ""),
    "above 1": ([1e6, 1e6], [1e6, 1e6 + 2], "1.0", "No", ""),
}  # fmt: skip


@pytest.mark.promise("P172", "P173")
@pytest.mark.parametrize(("npu", "bench", "direction", "verdict", "message"), CASES.values(), ids=CASES)
def test_verdicts_and_words(tmp_path: Path, npu: Any, bench: Any, direction: str, verdict: str, message: str) -> None:
    row = one_tensor(tmp_path, np.asarray(npu, F4), np.asarray(bench, F4))
    assert (row["Cosine"], row[VERDICT]) == (direction, verdict)
    assert message in row["Err_message"]
    assert bool(message) == bool(row["Err_message"])


@pytest.mark.promise("P172")
@pytest.mark.parametrize(
    ("npu", "bench", "expected"),
    [
        ([1, 2], [1, 4], "0.500000000000"),
        ([1, 2], [1, 2], "0.000000000000"),
        ([1, 0.5], [1, 0], f"{0.5 / np.finfo('f8').eps:.12f}"),
        ([1, 0], [1, 0], "0.000000000000"),
    ],
)
def test_the_largest_relative_error_has_a_value_where_the_bench_is_zero(tmp_path: Path, npu: Any, bench: Any, expected: str) -> None:
    assert one_tensor(tmp_path, np.asarray(npu, F4), np.asarray(bench, F4))["MaxRelativeErr"] == expected


def test_bfloat16_and_integers_and_bools_compare(tmp_path: Path) -> None:
    same = {"Torch_f_0_forward_input.0": np.arange(5), "Torch_f_0_forward_input.1": np.array([True, False, True])}
    found = compared(tmp_path, same, same)
    assert [(row["NPU Tensor Dtype"], row["Cosine"], row["NPU max"]) for row in found] == [
        ("torch.int64", "1.0", "4.0"),
        ("torch.bool", "1.0", "[]"),
    ]
    x = np.linspace(-1, 1, 7, dtype=F4)
    npu = write_dump(tmp_path / "b1", {"Torch_f_0_forward_output": x}, kind="torch.bfloat16")
    bench = write_dump(tmp_path / "b2", {"Torch_f_0_forward_output": x})
    row = rows(ptdbg_ascend.compare(param(npu, bench), tmp_path / "output"))[0]
    assert (row["NPU Tensor Dtype"], row["Bench Tensor Dtype"], row["Cosine"], row[VERDICT]) == (
        "torch.bfloat16",
        "torch.float32",
        "1.0",
        "Yes",
    )
    assert row["Err_message"] == "The types differ: torch.bfloat16 and torch.float32."


def test_a_missing_tensor_file_and_another_shape_are_said(tmp_path: Path) -> None:
    found = values()
    npu, bench = (write_dump(tmp_path / side, found) for side in ("npu", "bench"))
    (tmp_path / "npu" / "dump" / "Functional_linear_0_forward_input.1.npy").unlink()
    np.save(tmp_path / "bench" / "dump" / "Functional_linear_0_forward_output.npy", np.zeros(3, F4))
    result = rows(ptdbg_ascend.compare(param(npu, bench), tmp_path / "output"))
    assert (result[1]["Cosine"], result[1][VERDICT]) == ("Nan", "Nan")
    assert "Functional_linear_0_forward_input.1.npy of the NPU dump" in result[1]["Err_message"]
    assert (result[3]["Cosine"], result[3]["MaxAbsErr"], result[3][VERDICT]) == ("shape unmatched", "shape unmatched", "Unmatched")


# --- which operator goes with which


def single(name: str, shape: tuple[int, ...] = (2,), dtype: str = "f4") -> dict[str, Any]:
    """One call with an input and an output."""
    return named(f"{name}_forward", [np.ones(shape, dtype)], np.ones(shape, dtype))


def partners(tmp_path: Path, npu: list[str], bench: list[str], **options: Any) -> list[tuple[str, str]]:
    found = compared(tmp_path, *({k: v for name in side for k, v in single(name).items()} for side in (npu, bench)), **options)
    outputs = [row for row in found if "output" in row["NPU Name"]]
    return [(row["NPU Name"].partition("_forward")[0], row["Bench Name"].partition("_forward")[0]) for row in outputs]


@pytest.mark.promise("P162")
def test_an_api_of_the_npu_alone_is_not_compared_and_stays_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npu = ["Torch_a_0", "NPU_npu_iou_0", "Torch_b_0", "NPU_fast_gelu_0", "NPU_npu_mish_0"]
    assert partners(tmp_path, npu, ["Torch_a_0", "Torch_b_0"]) == [
        ("Torch_a_0", "Torch_a_0"),
        ("NPU_npu_iou_0", "Nan"),
        ("Torch_b_0", "Torch_b_0"),
        ("NPU_fast_gelu_0", "Nan"),
        ("NPU_npu_mish_0", "Nan"),
    ]
    assert "3 APIs of the NPU dump have no partner" in capsys.readouterr().out
    row = rows(only(tmp_path / "output", "*.csv"))[2]
    assert (row["Cosine"], row["MaxAbsErr"], row["Bench max"], row[VERDICT], row["Err_message"]) == (
        "Nan",
        "Nan",
        "Nan",
        "Nan",
        "No bench data matched.",
    )


@pytest.mark.promise("P163")
def test_other_call_counts_lose_an_api_and_nothing_else(tmp_path: Path) -> None:
    npu, bench = ["Torch_a_0", "Torch_x_0", "Torch_x_1", "Torch_b_0"], ["Torch_a_0", "Torch_x_1", "Torch_b_0", "Torch_c_0"]
    assert partners(tmp_path, npu, bench) == [
        ("Torch_a_0", "Torch_a_0"),
        ("Torch_x_0", "Nan"),
        ("Torch_x_1", "Torch_x_1"),
        ("Torch_b_0", "Torch_b_0"),
    ]


@pytest.mark.promise("P170")
def test_fuzzy_match_pairs_apis_that_differ_in_the_count(tmp_path: Path) -> None:
    npu, bench = ["Torch_a_3", "Functional_relu_7"], ["Torch_a_0", "Functional_relu_1"]
    assert partners(tmp_path / "1", npu, bench) == [("Torch_a_3", "Nan"), ("Functional_relu_7", "Nan")]
    assert partners(tmp_path / "2", npu, bench, fuzzy_match=True) == [
        ("Torch_a_3", "Torch_a_0"),
        ("Functional_relu_7", "Functional_relu_1"),
    ]
    assert "uzzy" in rows(only(tmp_path / "2" / "output", "*.csv"))[0]["Err_message"]


def test_shapes_and_types_have_to_fit(tmp_path: Path) -> None:
    npu, bench = single("Torch_a_0", (2,)), single("Torch_a_0", (3,))
    assert compared(tmp_path / "1", npu, bench)[0]["Bench Name"] == "Nan"
    assert compared(tmp_path / "2", single("Torch_a_0", dtype="f2"), single("Torch_a_0"))[0]["Bench Name"] == "Torch_a_0_forward_input.0"
    assert compared(tmp_path / "3", single("Torch_a_0", dtype="i4"), single("Torch_a_0"))[0]["Bench Name"] == "Nan"


@pytest.mark.parametrize(
    ("npu", "bench", "is_match"),
    [
        ("Aten_convolution.default_1", "Torch_conv2d_0", True),
        ("Torch_conv2d_0", "Aten_convolution_1", True),
        ("Aten_convolution.default_1", "Functional_batch_norm_0", False),
        ("Aten_foo_1", "Torch_foo_0", False),
        ("Aten__softmax.default_0", "Functional_softmax_0", True),
        ("Aten__native_batch_norm_legit_0", "Functional_batch_norm_0", True),
        ("Aten_add.Tensor_0", "Tensor___add___0", True),
        ("Tensor___iadd___0", "Aten_add_0", True),
        ("Aten_native_layer_norm_3", "Functional_layer_norm_1", True),
    ],
)
def test_aten_operators_go_with_the_functions_they_come_from(tmp_path: Path, npu: str, bench: str, is_match: bool) -> None:
    assert partners(tmp_path, [npu], [bench]) == [(npu, bench if is_match else "Nan")]


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ("Functional_relu__1_output", "relu"),
        ("Functional_norm_layer_1_output", "norm_layer"),
        ("Tensor_onnx::connect_1_input", ""),
        ("Tensor___add___0_forward", "add"),
    ],
)
def test_the_name_of_a_function_in_that_of_a_record(record: str, name: str) -> None:
    from ulpscope.compat.ptdbg.compare.aten_names import plain_name

    assert plain_name(record) == name


def test_a_dump_of_outputs_only_is_not_one_operator(tmp_path: Path) -> None:
    """The old tool made the whole file one operator, and lost every line after the first."""
    npu = {f"Torch_f_{at}_forward_output": np.ones(2, F4) for at in range(3)}
    bench = {name: value for name, value in npu.items() if "_1_" not in name}
    assert [row["Bench Name"] for row in compared(tmp_path, npu, bench)] == ["Torch_f_0_forward_output", "Nan", "Torch_f_2_forward_output"]


def naive_partners(npu: list[str], bench: list[str]) -> list[tuple[str, str]]:
    """Match by the queues that the format's description has, one comparison at a time."""
    left, right, result, at = [], [], [], 0
    while at < max(len(npu), len(bench)):
        left += npu[at : at + 1]
        right += bench[at : at + 1]
        at += 1
        if not left or not right:
            break
        found = next(((len(left) - 1, j) for j, name in enumerate(right) if name == left[-1]), None)
        found = found or next(((i, len(right) - 1) for i, name in enumerate(left) if name == right[-1]), None)
        if found:
            result += [(name, "Nan") for name in left[: found[0]]] + [(left[found[0]], right[found[1]])]
            del left[: found[0] + 1], right[: found[1] + 1]
    return result + [(name, "Nan") for name in [*left, *npu[at:]]]


@settings(max_examples=40)
@given(st.lists(st.sampled_from("abcdef"), unique=True), st.lists(st.sampled_from("abcdef"), unique=True))
def test_matching_follows_the_queues(npu: list[str], bench: list[str]) -> None:
    from ulpscope.compat.ptdbg.compare.partner_keys import match_operators
    from ulpscope.model.written import WrittenCall as Operator
    from ulpscope.model.written import WrittenValue as TensorLine

    def operators(names: list[str]) -> list[Operator]:
        return [
            Operator(f"Torch_{n}_0_forward", [TensorLine(f"Torch_{n}_0_forward_input.0", "torch.float32", "[2]", (), "")]) for n in names
        ]

    found = match_operators(operators(npu), operators(bench))
    short = [(match.npu.name[6], match.bench.name[6] if match.bench else "Nan") for match in found]
    assert short == naive_partners(npu, bench)


# --- the other layouts


@pytest.mark.parametrize("norm", [False, True])
def test_a_dump_without_tensors_is_compared_by_statistics(tmp_path: Path, norm: bool) -> None:
    bench = values()
    npu = bench | {
        "Functional_linear_0_forward_output": bench["Functional_linear_0_forward_output"] * 2,
        "Torch_extra_0_forward_output": np.ones(3, F4),
    }
    sides = [write_dump(tmp_path / side, found, data=False, norm=norm) for side, found in (("npu", npu), ("bench", bench))]
    table = ptdbg_ascend.compare({"npu_pkl_path": sides[0], "bench_pkl_path": sides[1]}, tmp_path / "output")
    header = table.read_text().splitlines()[0].split(",")
    assert header[
        6:
    ] == "Max diff,Min diff,Mean diff,L2norm diff,NPU max,NPU min,NPU mean,NPU l2norm,Bench max,Bench min,Bench mean,Bench l2norm".split(
        ","
    )
    row = rows(table)[3]
    assert float(row["Max diff"]) == pytest.approx(float(row["Bench max"]))
    assert (row["L2norm diff"] == "Nan") == (not norm)
    extra = rows(table)[-1]
    assert (extra["Max diff"], extra["NPU max"], extra["Bench max"]) == ("Nan", "1.0", "Nan")
    assert not list((tmp_path / "output").glob("advisor*"))


def test_checksums_are_compared_as_checksums(tmp_path: Path) -> None:
    x = np.ones(3, F4)
    sides = []
    for side, second in (("npu", x + 1), ("bench", x)):
        arrays = {"Torch_f_0_forward_input.0": x, "Torch_f_0_forward_output": second}
        sides.append(write_lines(tmp_path / side, [line(name, a, md5=f"{zlib.crc32(a.tobytes()):08x}") for name, a in arrays.items()]))
    table = ptdbg_ascend.compare({"npu_pkl_path": str(sides[0]), "bench_pkl_path": str(sides[1])}, tmp_path / "output")
    assert table.read_text().splitlines()[0].split(",")[6:] == ["NPU MD5", "BENCH MD5", "Result"]
    assert [row["Result"] for row in rows(table)] == ["Pass", "Different"]


# --- the advisor


@pytest.mark.promise("P025", "P169")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Torch_f_0_forward_input.0", ["in-place", "1.", "2.", "3."]),
        ("Torch_f_0_forward_output", ["forward computation is wrong"]),
        ("Torch_f_0_backward_input.0", ["forward"]),
        ("Torch_f_0_backward_output.0", ["backward computation is wrong"]),
        ("Functional_conv2d_0_forward_output", ["seed_all(mode=True)"]),
        ("Torch_matmul_0_backward_output.0", ["seed_all(mode=True)"]),
        ("Functional_batch_norm_0_forward_input.1", ["training=False", "affine=False", "seed_all(mode=True)"]),
    ],
)
def test_advice_by_the_kind_of_row(tmp_path: Path, name: str, words: list[str]) -> None:
    x = np.linspace(1, 2, 4, dtype=F4)
    compared(tmp_path, {name: -x}, {name: x})
    line_, node, advice = only(tmp_path / "output", "advisor_*.txt").read_text().splitlines()
    assert (line_, node) == ("Line: 2", f"Suspect Nodes: {name}")
    assert all(word in advice for word in words)


@pytest.mark.promise("P169")
def test_no_advice_needed_and_no_advice_wanted(tmp_path: Path) -> None:
    compared(tmp_path / "1", values(), values())
    assert only(tmp_path / "1" / "output", "advisor_*.txt").read_text().splitlines() == [
        "Line: NA",
        "Suspect Nodes: NA",
        "Expert Advice: All data in comparison result meets the accuracy requirements.",
    ]
    compared(tmp_path / "2", values(), values(), auto_analyze=False)
    assert not list((tmp_path / "2" / "output").glob("advisor_*"))


def test_the_advisor_names_the_rows_that_are_unmatched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npu = single("Torch_a_0") | named("Aten_mm_0_forward", [np.ones((2, 2), F4)], np.ones((2, 2), F4))
    bench = single("Torch_a_0") | named("Torch_matmul_0_forward", [np.ones((2, 3), F4)], np.ones((2, 2), F4))
    compared(tmp_path, npu, bench)
    warnings = [text for text in capsys.readouterr().out.splitlines() if "unmatched" in text]
    assert len(warnings) == 1
    assert "Aten_mm_0_forward_input.0" in warnings[0]


# --- our own finding beside it


def test_our_page_and_finding_are_beside_the_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = values()
    compared(tmp_path, bench | {"Functional_linear_0_forward_output": bench["Functional_linear_0_forward_output"] + 1}, bench)
    page = only(tmp_path / "output", "compare_result_*.html")
    assert "<html" in page.read_text()
    ours = [text for text in capsys.readouterr().out.splitlines() if text.startswith("ulpscope: ")]
    assert len(ours) == 1
    assert "linear" in ours[0]


def test_a_module_dumped_as_one_unit_is_a_call_like_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.linspace(1, 2, 8, dtype=F4)
    npu, bench = (named("My_Block_0_forward", [x], x * scale) for scale in (2, 1))
    assert [row[VERDICT] for row in compared(tmp_path, npu, bench)] == ["Yes", "No"]
    assert "My_Block" in next(text for text in capsys.readouterr().out.splitlines() if text.startswith("ulpscope: "))


def test_the_csv_is_there_even_where_our_own_comparison_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An impossible shape stops our reader; the old table does not need it."""
    name = "Torch_f_0_forward_output"
    sides = [write_dump(tmp_path / side, {name: np.ones(2, F4)}) for side in ("npu", "bench")]
    for side in sides:
        side.write_text(side.read_text().replace("[2]", "[-2]"))
    assert rows(ptdbg_ascend.compare(param(*sides), tmp_path / "output"))[0][VERDICT] == "Yes"
    assert "no finding of its own" in capsys.readouterr().out
    assert not list((tmp_path / "output").glob("*.html"))


# --- several cards, several steps


@pytest.mark.promise("P164", "P165")
@pytest.mark.parametrize("layout", ["{step}/tag_v4.0/{rank}", "tag_v4.0/{step}/{rank}"])
def test_steps_stand_at_either_level(tmp_path: Path, layout: str) -> None:
    for side in ("npu", "bench"):
        for step in (0, 2):
            for rank in (0, 1):
                write_dump(tmp_path / side / layout.format(step=f"step{step}", rank=f"rank{rank}"), values(step))
    (tmp_path / "output").mkdir()
    tables = ptdbg_ascend.compare_distributed(
        str(tmp_path / "npu"), str(tmp_path / "bench"), str(tmp_path / "output"), auto_analyze=False, fuzzy_match=True
    )
    names = [str(re.sub(r"_\d{14}", "", str(table.relative_to(tmp_path / "output")))) for table in tables]
    assert names == [f"step{step}/compare_result_rank{rank}-rank{rank}.csv" for step in (0, 2) for rank in (0, 1)]
    inner = layout.format(step="step2", rank="").rstrip("/")
    one = ptdbg_ascend.compare_distributed(str(tmp_path / "npu" / inner), str(tmp_path / "bench" / inner), str(tmp_path / "output"))
    assert [table.parent for table in one] == [tmp_path / "output"] * 2


def test_ranks_named_after_processes_pair_by_their_place(tmp_path: Path) -> None:
    write_dump(tmp_path / "npu" / "rank0", values())
    write_dump(tmp_path / "bench" / "rank16342", values())
    (tmp_path / "output").mkdir()
    ptdbg_ascend.compare_distributed(tmp_path / "npu", tmp_path / "bench", tmp_path / "output")
    assert only(tmp_path / "output", "compare_result_rank0-rank16342_*.csv")


def left_with(call: Any, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one sentence that a refused call leaves on the screen."""
    with pytest.raises(SystemExit) as left:
        call()
    assert left.value.code == code
    errors = [text for text in capsys.readouterr().out.splitlines() if "-[ERROR]" in text]
    assert len(errors) == 1
    return errors[0]


@pytest.mark.promise("P031")
@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (lambda root: write_dump(root / "npu" / "rank2", values()), 1, "same number of cards"),
        (lambda root: (root / "bench" / "notes.txt").write_text("x"), 1, "notes.txt"),
        (lambda root: (root / "npu" / "rank0" / "dump.pkl").unlink(), 9, "0 dump files"),
        (lambda root: write_dump(root / "npu" / "rank1", values(), stem="list_dump"), 9, "2 dump files"),
        (lambda root: (root / "npu" / "rank0" / "dump").rename(root / "elsewhere"), 6, "no folder of tensors"),
    ],
)
def test_unequal_cards_and_foreign_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any, code: int, words: str
) -> None:
    for side in ("npu", "bench"):
        for rank in (0, 1):
            write_dump(tmp_path / side / f"rank{rank}", values())
    (tmp_path / "output").mkdir()
    spoil(tmp_path)
    sentence = left_with(lambda: ptdbg_ascend.compare_distributed(tmp_path / "npu", tmp_path / "bench", tmp_path / "output"), code, capsys)
    assert words in sentence
    assert list((tmp_path / "output").iterdir()) == []


@pytest.mark.promise("P165")
def test_the_output_folder_has_to_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("npu", "bench"):
        write_dump(tmp_path / side / "rank0", values())
    sentence = left_with(lambda: ptdbg_ascend.compare_distributed(tmp_path / "npu", tmp_path / "bench", tmp_path / "none"), 1, capsys)
    assert "output_path" in sentence


@pytest.mark.promise("P167")
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"npu_pkl_path": None}, 11, "npu_pkl_path"),
        ({"npu_dump_data_dir": None}, 11, "give both"),
        ({"npu_pkl_path": 7}, 11, "path"),
        ({"is_print_compare_log": "yes"}, 11, "is_print_compare_log"),
        ({"npu_pkl_path": "none.pkl"}, 1, "none.pkl"),
        ({"bench_dump_data_dir": "none"}, 1, "none"),
    ],
)
def test_wrong_parameters_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], code: int, words: str
) -> None:
    sides = [write_dump(tmp_path / side, values()) for side in ("npu", "bench")]
    assert words in left_with(lambda: ptdbg_ascend.compare(param(*sides) | change, tmp_path / "output"), code, capsys)


def test_unknown_options_of_compare_distributed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "suffix" in left_with(lambda: ptdbg_ascend.compare_distributed(tmp_path, tmp_path, tmp_path, suffix="x"), 11, capsys)


# --- golden facts


def test_the_recorded_differences_of_a_device(tmp_path: Path) -> None:
    """Seed 1234, Linear(2, 3) and randn(3, 2): the old project's fixture has what a device recorded less what a CPU computes."""
    import torch

    torch.manual_seed(1234)
    layer = torch.nn.Linear(2, 3)
    x, weight, bias = (t.detach() for t in (torch.randn(3, 2), layer.weight, layer.bias))
    on_device = torch.nn.functional.linear(x.half().float(), weight.half().float(), bias).numpy()
    on_cpu = torch.nn.functional.linear(x, weight, bias).numpy()
    x, weight, bias = (t.numpy() for t in (x, weight, bias))
    sides = []
    for side, y in (("npu", on_device), ("bench", on_cpu)):
        found = named("Functional_linear_0_forward", [x, weight, bias], y)
        found |= named("Torch_relu_0_forward", [y], y.clip(0)) | named("Functional_relu_0_forward", [y], y.clip(0))
        sides.append(write_dump(tmp_path / side, found, data=False))
    table = rows(ptdbg_ascend.compare({"npu_pkl_path": sides[0], "bench_pkl_path": sides[1]}, tmp_path / "output"))
    differences = [[float(row[f"{what} diff"]) for what in ("Max", "Min", "Mean")] for row in table]
    assert differences[:3] == [[0.0, 0.0, 0.0]] * 3
    high, low = -1.3631582260131836e-4, -1.1712312698364258e-4
    assert [d[:2] for d in differences[3:]] == [[high, low], [high, low], [high, 0.0], [high, low], [high, 0.0]]
    assert [d[2] for d in differences[3:5]] == pytest.approx([-8.630752563476562e-5] * 2, abs=3e-8)
    assert [differences[at][2] for at in (5, 7)] == pytest.approx([-8.958578109741211e-5] * 2, abs=3e-8)
    assert float(table[3]["NPU max"]) == 0.8278868794441223


@pytest.mark.promise("P026", "P171")
def test_parse_prints_the_guides_page_to_the_last_digit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ptdbg_ascend.parse(str(guides_convolution(tmp_path)), "Functional_conv2d_0_forward")
    assert capsys.readouterr().out == GUIDES_PAGE


GUIDES_PAGE = """
Statistic Info:
  [Functional_conv2d_0_forward_input.0][dtype: torch.float32][shape: [2, 1, 2, 2]][max: 1.576936960220337][min: -0.9757485389709473][mean: 0.4961632490158081]
  [Functional_conv2d_0_forward_input.1][dtype: torch.float32][shape: [2, 1, 2, 2]][max: 0.20064473152160645][min: -0.47102075815200806][mean: -0.20796933770179749]
  [Functional_conv2d_0_forward_input.2][dtype: torch.float32][shape: [2]][max: 0.17380613088607788][min: -0.16853803396224976][mean: 0.0026340484619140625]
  [Functional_conv2d_0_forward_output][dtype: torch.float32][shape: [2, 2, 1, 1]][max: 0.02364911139011383][min: -1.762906551361084][mean: -0.6710853576660156]
"""  # noqa: E501  the page has these lines


def guides_convolution(folder: Path) -> Path:
    """Dump the example of the guide's page: seed 1234, Conv2d(1, 2, 2), and an input of shape [2, 1, 2, 2]."""
    import torch

    torch.manual_seed(1234)
    layer = torch.nn.Conv2d(1, 2, 2)
    x = torch.randn(2, 1, 2, 2)
    with torch.no_grad():
        y = (x.reshape(2, 4) @ layer.weight.reshape(2, 4).T + layer.bias).reshape(2, 2, 1, 1)
    found = named("Functional_conv2d_0_forward", [x, layer.weight.detach(), layer.bias.detach()], y)
    lines = [[name, 0, [], str(t.dtype), list(t.shape), [t.max().item(), t.min().item(), t.mean().item()]] for name, t in found.items()]
    return write_lines(folder, lines, "api_stack_dump")


def test_parse_says_when_nothing_fits_and_what_is_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_dump(tmp_path, values())
    ptdbg_ascend.parse(str(file), "Torch_none")
    assert "begins with Torch_none" in capsys.readouterr().out
    assert "begin" in left_with(lambda: ptdbg_ascend.parse(str(file), 3), 11, capsys)
    assert "cannot be read" in left_with(lambda: ptdbg_ascend.parse("none.pkl", "x"), 1, capsys)


# --- what was written is read back

NAMES = st.from_regex(r"(Torch|Tensor|Functional)_[a-z_]{1,8}_[0-9]{1,3}_(forward|backward)", fullmatch=True)
ARRAYS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=5).map(lambda found: np.array(found, F4))


@settings(max_examples=20)
@given(st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=4))
def test_the_csv_reads_back_to_the_records_that_were_compared(tmp_path_factory: pytest.TempPathFactory, calls: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("back")
    bench = {f"{name}_output": array for name, array in calls.items()}
    table = compared(folder, {name: array + np.float32(1) for name, array in bench.items()}, bench)
    assert [row["NPU Name"] for row in table] == list(bench)
    for row, array in zip(table, bench.values(), strict=True):
        assert json.loads(row["Bench Tensor Shape"]) == list(array.shape)
        assert [float(row[f"Bench {what}"]) for what in ("max", "min")] == [array.max(), array.min()]
        errors = np.abs((array + np.float32(1)).astype("f8") - array.astype("f8"))
        assert float(row["MaxAbsErr"]) == pytest.approx(errors.max(), abs=1e-12)
