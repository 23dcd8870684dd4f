# SPDX-License-Identifier: Apache-2.0
"""Test which calls are dumped: modes, scopes and filters of ptdbg_ascend, in the function style and through the debugger; and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ptdbg_ascend
from tests.legacy.ptdbg_programs import apis, dump, files, lines, names, rank_folder, step
from ulpscope.compat.ptdbg.files.modes import check_mode
from ulpscope.errors import MissingDependencyError

EVERYTHING = [
    "Functional_linear_0_forward", "Torch_relu_0_forward", "Functional_dropout_0_forward", "Tensor___add___0_forward",
    "Tensor_permute_0_forward", "Tensor_transpose_0_forward", "Tensor_abs_0_forward", "Functional_linear_1_forward",
    "Tensor_square_0_forward", "Tensor_sum_0_forward", "Tensor_sum_0_backward", "Tensor_square_0_backward",
    "Functional_linear_1_backward", "Tensor_abs_0_backward", "Tensor_transpose_0_backward", "Tensor_permute_0_backward",
    "Tensor___add___0_backward", "Torch_relu_0_backward", "Functional_linear_0_backward",
]  # fmt: skip


def between(first: str, last: str) -> list[str]:
    return EVERYTHING[EVERYTHING.index(first) : EVERYTHING.index(last) + 1]


def debug(folder: Path, **options: Any) -> Path:
    """Dump the same through the debugger."""
    debugger = ptdbg_ascend.PrecisionDebugger(dump_path=str(folder), hook_name="dump")
    debugger.configure_hook(**options)
    debugger.start()
    step()
    debugger.stop()
    debugger.step()
    return rank_folder(folder)


def by_functions(folder: Path, **options: Any) -> Path:
    if "input_output_mode" in options:
        options["dump_mode"] = options.pop("input_output_mode")
    return dump(folder, **options)


STYLES = pytest.mark.parametrize("style", [by_functions, debug])
LIST = ["Tensor_permute_0_forward", "Tensor_transpose_0_forward", "Torch_relu_0_backward"]
RANGE = ["Tensor_abs_0_forward", "Functional_linear_1_backward"]


@STYLES
@pytest.mark.parametrize(
    ("options", "stem", "expected", "stacks"),
    [
        pytest.param({"mode": "all"}, "dump", EVERYTHING, False, marks=pytest.mark.promise("P083", "P127")),
        pytest.param({"mode": "list", "scope": LIST}, "list_dump", LIST, True, marks=pytest.mark.promise("P084", "P092", "P129")),
        pytest.param({"mode": "range", "scope": RANGE}, "range_dump", between(*RANGE), True, marks=pytest.mark.promise("P093", "P129")),
        pytest.param(
            {"mode": "range", "scope": ["Torch_relu_0_forward", "Tensor_abs_0_forward"]},
            "range_dump",
            between("Torch_relu_0_forward", "Tensor_abs_0_forward"),
            True,
            marks=pytest.mark.promise("P093"),
        ),
        pytest.param(
            {"mode": "range", "scope": ["Tensor_sum_0_backward", "Tensor_abs_0_backward"]},
            "range_dump",
            between("Tensor_sum_0_backward", "Tensor_abs_0_backward"),
            True,
            marks=pytest.mark.promise("P093"),
        ),
        pytest.param(
            {"mode": "api_list", "api_list": ["RELU", "abs"]},
            "api_list_dump",
            [name for name in EVERYTHING if "relu" in name or "abs" in name],
            False,
            marks=pytest.mark.promise("P084", "P096", "P129"),
        ),
        pytest.param({"mode": "api_stack"}, "api_stack_dump", EVERYTHING, True, marks=pytest.mark.promise("P097", "P129")),
        pytest.param({"mode": "stack"}, "stack_dump", EVERYTHING, True, marks=pytest.mark.promise("P094")),
        pytest.param(
            {"mode": "stack", "scope": ["Functional_linear_1"]},
            "stack_dump",
            ["Functional_linear_1_forward", "Functional_linear_1_backward"],
            True,
            marks=pytest.mark.promise("P094"),
        ),
        pytest.param({"mode": "stack", "scope": RANGE}, "stack_dump", between(*RANGE), True, marks=pytest.mark.promise("P094", "P129")),
    ],
)
def test_modes(tmp_path: Path, style: Any, options: dict[str, Any], stem: str, expected: list[str], stacks: bool) -> None:
    folder = style(tmp_path, **options)
    found = names(folder / f"{stem}.pkl")
    assert apis(folder / f"{stem}.pkl") == expected
    assert [name.removesuffix("_stack_info") for name in found if name.endswith("_stack_info")] == (expected if stacks else [])
    if options["mode"] == "stack":
        assert all(name.endswith("_stack_info") for name in found)
        assert not (folder / stem).exists()
    else:
        assert files(folder / stem) == sorted(f"{name}.npy" for name in found if not name.endswith("_stack_info"))


def test_a_range_dump_names_gradients_as_a_whole_dump_does(tmp_path: Path) -> None:
    whole = {line[0]: line for line in lines(dump(tmp_path / "whole") / "dump.pkl")}
    ptdbg_ascend.PrecisionDebugger.forget()
    part = dump(tmp_path / "part", mode="range", scope=["Tensor_sum_0_backward", "Functional_linear_0_backward"])
    found = [line for line in lines(part / "range_dump.pkl") if not line[0].endswith("stack_info")]
    assert len(found) > 15
    assert all(line == whole[line[0]] for line in found)


def test_a_scope_item_is_the_beginning_of_a_name(tmp_path: Path) -> None:
    x = torch.ones(2)
    folder = dump(tmp_path, lambda: [x + 1 for _ in range(12)], mode="list", scope=["Tensor___add___1"])
    assert apis(folder / "list_dump.pkl") == ["Tensor___add___1_forward", "Tensor___add___10_forward", "Tensor___add___11_forward"]


def test_mode_list_tells_how_many_were_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(tmp_path, mode="list", scope=LIST)
    assert "3 APIs were in the scope" in capsys.readouterr().out


@STYLES
@pytest.mark.promise("P085", "P098")
def test_the_filter_leaves_out_what_is_not_a_float_tensor(tmp_path: Path, style: Any) -> None:
    def kinds(folder: Path) -> set[str]:
        return {line[3] for line in lines(folder / "api_list_dump.pkl")}

    chosen = {"mode": "api_list", "api_list": ["permute", "sum"]}
    assert kinds(style(tmp_path / "off", **chosen, filter_switch="OFF")) == {"torch.float32", "<class 'int'>"}
    filtered = style(tmp_path / "on", **chosen, filter_switch="ON")
    assert kinds(filtered) == {"torch.float32"}
    assert all(line[4] for line in lines(filtered / "api_list_dump.pkl"))


@STYLES
@pytest.mark.promise("P088", "P099", "P129")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["backward"], {"backward_input", "backward_output"}),
        (["forward", "backward"], {"forward_input", "forward_output", "backward_input", "backward_output"}),
        (["forward", "output"], {"forward_output"}),
        (["input"], {"forward_input", "backward_input"}),
        (["all"], {"forward_input", "forward_output", "backward_input", "backward_output"}),
    ],
)
def test_only_files_whose_names_have_the_words(tmp_path: Path, style: Any, words: list[str], expected: set[str]) -> None:
    folder = style(tmp_path, mode="all", input_output_mode=words)
    found = names(folder / "dump.pkl")
    assert {"_".join(name.partition(".")[0].split("_")[-2:]) for name in found} == expected
    assert files(folder / "dump") == sorted(f"{name}.npy" for name in found)


def test_all_stands_alone_and_a_word_is_taken_for_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = dump(tmp_path / "1", dump_mode=["all", "forward"])
    assert apis(both / "dump.pkl") == EVERYTHING
    ptdbg_ascend.PrecisionDebugger.forget()
    word = dump(tmp_path / "2", dump_mode="forward")
    assert all("forward" in name for name in names(word / "dump.pkl"))
    printed = capsys.readouterr().out
    assert printed.count("[WARNING]") == 2
    with pytest.raises(ValueError, match="knows all, forward"):
        ptdbg_ascend.set_dump_switch("ON", dump_mode=["sideways"])


@STYLES
@pytest.mark.promise("P089", "P099")
def test_summaries_alone(tmp_path: Path, style: Any) -> None:
    whole = lines(style(tmp_path / "whole", mode="all") / "dump.pkl")
    ptdbg_ascend.PrecisionDebugger.forget()
    folder = style(tmp_path / "only", mode="all", summary_only=True)
    assert lines(folder / "dump.pkl") == whole
    assert not (folder / "dump").exists()


@pytest.mark.promise("P083")
@pytest.mark.parametrize(
    ("mode", "scope", "api_list"),
    [
        ("all", [], []), ("range", ["a", "b"], []), ("list", ["a"], []), ("stack", [], []), ("stack", ["a"], []), ("stack", ["a", "b"], []),
        ("acl", ["a"], []), ("api_list", [], ["relu"]), ("api_stack", [], []),
    ],
)  # fmt: skip
def test_modes_that_are_valid(mode: str, scope: list[str], api_list: list[str]) -> None:
    check_mode(mode, scope, api_list)


@pytest.mark.promise("P083", "P127")
@pytest.mark.parametrize(
    ("mode", "scope", "api_list"),
    [("range", ["a"], []), ("list", [], []), ("stack", ["a", "b", "c"], []), ("acl", ["a", "b"], []), ("api_list", [], [])],
)
def test_scopes_that_do_not_fit(tmp_path: Path, mode: str, scope: list[str], api_list: list[str]) -> None:
    ptdbg_ascend.set_dump_path(str(tmp_path))
    with pytest.raises(ValueError, match=f"mode='{mode}'"):
        ptdbg_ascend.set_dump_switch("ON", mode=mode, scope=scope, api_list=api_list)


@pytest.mark.promise("P123", "P124")
def test_codes_of_wrong_parameters(tmp_path: Path) -> None:
    with pytest.raises(ptdbg_ascend.CompareException) as unknown:
        check_mode("api_stack_123", [], [])
    assert unknown.value.code == 15
    debugger = ptdbg_ascend.PrecisionDebugger(str(tmp_path), hook_name="dump")
    for wrong in (
        lambda: ptdbg_ascend.set_dump_switch("ON", mode="api_stack_123"),
        lambda: ptdbg_ascend.set_dump_switch("on"),
        lambda: ptdbg_ascend.set_dump_switch("ON", filter_switch="maybe"),
        lambda: ptdbg_ascend.set_dump_switch("ON", mode="list", scope="Tensor_add_0_forward"),
        lambda: ptdbg_ascend.set_dump_switch("ON", summary_only="yes"),
        lambda: debugger.configure_hook(mode="api_stack_123"),
        lambda: debugger.configure_hook(mode="list", scope=[3]),
        lambda: ptdbg_ascend.register_hook(None, print),
        lambda: ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, colour="red"),
        lambda: ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, dump_mode="kernel"),
        lambda: ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, rank=-1),
        lambda: ptdbg_ascend.set_overflow_check_switch("ON"),
    ):
        with pytest.raises(ptdbg_ascend.CompareException) as caught:
            wrong()
        assert caught.value.code == 11


@pytest.mark.promise("P123", "P124", "P128")
def test_a_dump_needs_the_hook_and_the_switch_in_either_order(tmp_path: Path) -> None:
    ptdbg_ascend.set_dump_path(str(tmp_path))
    step()
    ptdbg_ascend.set_dump_switch("ON")
    step()
    assert not (rank_folder(tmp_path) / "dump.pkl").exists()
    ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump)
    step()
    ptdbg_ascend.set_dump_switch("OFF")
    size = (rank_folder(tmp_path) / "dump.pkl").stat().st_size
    step()
    assert (rank_folder(tmp_path) / "dump.pkl").stat().st_size == size > 0


@pytest.mark.promise("P110")
def test_by_default_everything_at_api_level(tmp_path: Path) -> None:
    assert apis(dump(tmp_path) / "dump.pkl") == EVERYTHING


@pytest.mark.parametrize(
    "choice",
    [
        {"mode": "range", "scope": ["Tensor_nothing_0_forward", "Tensor_nothing_1_forward"]},
        {"mode": "stack", "scope": ["Tensor_nothing_0_forward"]},
        {"mode": "list", "scope": ["Tensor_nothing_0_forward"]},
        {"mode": "api_list", "api_list": ["nothing"]},
    ],
)
def test_a_scope_that_matches_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], choice: dict[str, Any]) -> None:
    dump(tmp_path, **choice)
    printed = capsys.readouterr().out
    assert f"mode '{choice['mode']}' with" in printed
    assert "matched no API, so nothing was dumped" in printed


def test_a_scope_that_matches_is_not_complained_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(tmp_path, mode="stack", scope=RANGE)
    assert "matched" not in capsys.readouterr().out


# ---- ACL level


@pytest.fixture
def acl_settings(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    settings = {"dump": {"dump_list": [], "dump_path": str(tmp_path / "out"), "dump_mode": "all", "dump_op_switch": "on"}}
    (tmp_path / "dump.json").write_text(json.dumps(settings))
    return tmp_path / "dump.json"


@pytest.mark.refused("P027")
def test_a_forward_dump_at_acl_level_is_checked_and_refused(tmp_path: Path, acl_settings: Path) -> None:
    ptdbg_ascend.set_dump_path(str(tmp_path / "dump_path"), dump_tag="forward")
    ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, dump_mode="acl", dump_config=str(acl_settings))
    with pytest.raises(MissingDependencyError, match=r"needs Ascend's CANN .* python -m ptdbg_ascend.parse"):
        ptdbg_ascend.set_dump_switch("ON", mode="acl", scope=["Tensor_permute_1_forward"], filter_switch="OFF")
    assert not (tmp_path / "dump_path").exists()


@pytest.mark.refused("P028", "P055")
def test_a_backward_dump_at_acl_level_is_checked_and_refused(tmp_path: Path, acl_settings: Path) -> None:
    np.save(tmp_path / "Functional_conv2d_1_backward_input.0.npy", np.ones(2))
    ptdbg_ascend.set_dump_path(str(tmp_path / "dump_path"))
    ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, dump_mode="acl", dump_config=str(acl_settings))
    ptdbg_ascend.set_backward_input([str(tmp_path / "Functional_conv2d_1_backward_input.0.npy")])
    with pytest.raises(MissingDependencyError, match="Functional_conv2d_1_forward at ACL level"):
        ptdbg_ascend.set_dump_switch("ON", mode="acl", scope=["Functional_conv2d_1_backward"])


@pytest.mark.promise("P087", "P134")
def test_gradients_of_an_earlier_dump_are_named_by_a_list_of_files(tmp_path: Path, acl_settings: Path) -> None:
    np.save(tmp_path / "Functional_conv2d_1_backward_input.0.npy", np.ones(2))
    ptdbg_ascend.set_backward_input([str(tmp_path / "Functional_conv2d_1_backward_input.0.npy")])
    for wrong, code in (("file.npy", 11), ([str(tmp_path / "missing.npy")], 1), ([str(acl_settings)], 1)):
        with pytest.raises(ptdbg_ascend.CompareException) as caught:
            ptdbg_ascend.set_backward_input(wrong)
        assert caught.value.code == code


@pytest.mark.promise("P086")
def test_acl_level_needs_its_settings(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(str(tmp_path / "dump_path"), hook_name="dump")
    with pytest.raises(ptdbg_ascend.CompareException, match="needs acl_config") as caught:
        debugger.configure_hook(mode="acl", scope=["Tensor_permute_1_forward"])
    assert caught.value.code == 11


@pytest.mark.refused("P095")
def test_the_debugger_checks_and_refuses_acl_level(tmp_path: Path, acl_settings: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(str(tmp_path / "dump_path"), hook_name="dump")
    np.save(tmp_path / "Functional_conv2d_1_backward_input.0.npy", np.ones(2))
    gradients = [str(tmp_path / "Functional_conv2d_1_backward_input.0.npy")]
    for scope, files_ in (["Tensor_permute_1_forward"], []), (["Functional_conv2d_1_backward"], gradients):
        debugger.configure_hook(mode="acl", scope=scope, acl_config=str(acl_settings), backward_input=files_)
        with pytest.raises(MissingDependencyError, match="CANN"):
            debugger.start()
    with pytest.raises(ptdbg_ascend.CompareException, match="not an existing"):
        debugger.configure_hook(mode="acl", scope=scope, acl_config=str(acl_settings), backward_input=["nowhere.npy"])


@pytest.mark.promise("P135")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dump_mode": "some"}, "dump_mode is 'some'"), ({"dump_op_switch": "maybe"}, "dump_op_switch is 'maybe'"),
        ({"dump_path": "/nowhere/at/all"}, "not an existing folder"), ({"dump_list": ["conv"]}, "dump_list is not empty"),
    ],
)  # fmt: skip
def test_settings_for_acl_are_checked(acl_settings: Path, change: dict[str, Any], message: str) -> None:
    settings = json.loads(acl_settings.read_text())
    ptdbg_ascend.set_dump_path(str(acl_settings.parent))
    acl_settings.write_text(json.dumps({"dump": settings["dump"] | change}))
    with pytest.raises(ptdbg_ascend.CompareException, match=message) as caught:
        ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, dump_mode="acl", dump_config=str(acl_settings))
    assert caught.value.code == 6


@pytest.mark.promise("P125", "P135")
@pytest.mark.parametrize("content", ["", "[]", "{", '{"dump": []}', "[" * 100_000])
def test_what_is_no_settings_file_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    ptdbg_ascend.set_dump_path(str(tmp_path))
    (tmp_path / "dump.json").write_text(content)
    with pytest.raises(ptdbg_ascend.CompareException, match=r"is no dump\.json"):
        ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, dump_mode="acl", dump_config=str(tmp_path / "dump.json"))
    with pytest.raises(ptdbg_ascend.CompareException, match="needs dump_config"):
        ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, dump_mode="acl")
    with pytest.raises(ptdbg_ascend.CompareException, match="not an existing"):
        ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, dump_mode="acl", dump_config="nowhere.json")


def test_the_defaults_of_settings_are_the_guides(acl_settings: Path) -> None:
    acl_settings.write_text(json.dumps({"dump": {"dump_path": str(acl_settings.parent)}}))
    ptdbg_ascend.set_dump_path(str(acl_settings.parent))
    ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump, dump_mode="acl", dump_config=str(acl_settings))
