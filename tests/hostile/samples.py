# SPDX-License-Identifier: Apache-2.0
"""Make a folder with a small valid file, run or dump of every kind that is read, most of it with our own writers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch

from tests.cli.conftest import write_run
from tests.health.test_store import write as write_series
from tests.legacy.ptdbg_dumps import named
from tests.legacy.ptdbg_dumps import write_dump as write_ptdbg
from tests.report.sample import sample_run_info
from tests.store.acl_writer import STATISTICS_HEADINGS, described, dump_bytes, nano_bytes, old_bytes, overflow_bytes, overflow_output
from tests.store.test_checker_json import call, plain, tensor
from tests.store.test_checker_json import write as write_checker
from ulpscope.compat.checker.checker_tables import DETAIL_COLUMNS
from ulpscope.compat.pt_files import save_pt
from ulpscope.store import DirectorySink, create_run
from ulpscope.testing.stores import example_record
from ulpscope.workflows.compare.baselines import update_baseline

GOLDEN = Path("tests/golden").resolve()
X = np.arange(12, dtype="f4").reshape(3, 4) / 7 - 1
RESULT = "NPU Name,Bench Name,Cosine,Max diff\nTensor.add.0.forward.input.0,Tensor.add.0.forward.input.0,1.0,0.5\nb.0,b.0,N/A,unsupported\n"
OWN_TABLE = (
    "rank,step,call,phase,module,slot,dtype,shape,slot_status,status,reason,device_error,cosine,max_abs\n"
    "0,0,functional.gelu.0,forward,mlp,output.0,float32,16x32,passed,passed,,0.5,1.0,0.0\n"
)
CONFIG = {
    "task": "statistics", "dump_path": "./dump", "rank": [0], "step": ["0-3", 5], "level": "mix", "enable_dataloader": False,
    "statistics": {"scope": ["a", "b"], "list": ["relu"], "data_mode": ["all"], "summary_mode": "md5"},
    "tensor": {"scope": [], "list": [], "data_mode": ["forward"], "file_format": "npy"},
    "acc_check": {"white_list": ["relu"], "black_list": [], "error_data_path": "./"},
}  # fmt: skip


def write_samples(folder: Path) -> None:
    """Make all of them in an empty folder."""
    for name, scale in (("good", 1.0), ("bad", 1.01)):
        write_run(folder / name, scale=scale, steps=(0,))
    _write_mixed(folder / "mixed")
    write_series(folder / "health", range(6))
    write_series(folder / "health2", range(1, 5))
    for name, source in (("msprobe", "msprobe-26/tensor-mix"), ("msprobe1", "msprobe-1.3/tensor-mix"), ("md5", "msprobe-26/md5-L1")):
        shutil.copytree(GOLDEN / source, folder / name)
    values = named("Torch_relu_0_forward", [X, 3], [np.abs(X), X]) | named("Functional_gelu_1_forward", [X.astype("f8")], X)
    write_ptdbg(folder / "ptdbg", values, stacks=True, norm=True)
    write_ptdbg(folder / "ptdbg2", {name: value * 2 for name, value in values.items()}, stacks=True, norm=True)
    lines = (
        ["Module_Linear_forward_input.0", [0.5, -1.25], "torch.float32", [1, 2]],
        ["Module_Linear_forward_output", [1.0], "torch.float32", [1]],
    )
    (folder / "hooks.pkl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_checker(
        folder / "checker",
        {
            "Functional*linear*0": call(tensor(4, 8, needs=True), tensor(3, 8), bias=plain(None)),
            "Tensor*__add__*1": call(tensor(2), plain(1)),
        },
        {"Functional*linear*0": [tensor(4, 3)]},
        {"Functional*linear*0": ["File /home/u/net.py, line 7, in forward, \n y = F.linear(x, w)"]},
    )
    _write_acl(folder / "acl")
    _write_tensors(folder / "tensors")
    _write_tables(folder)
    (folder / "out").mkdir()


def _write_mixed(path: Path) -> None:
    """Write a run with every kind of field that a record has."""
    path = create_run(path, sample_run_info("cpu"))
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    for order in range(3):
        sink.write(example_record(order))
    sink.close()


def _write_acl(folder: Path) -> None:
    folder.mkdir()
    inputs, outputs = (
        [described(X), described(X.astype("f2"), format="NCHW", original_shape=(3, 4, 1, 1))],
        [described(X, original_format="NHWC")],
    )
    attributes = {"threadMode": "1", "slice": '{"threadMode": true, "input_tensor_slice": [[[{"lower": 0, "higher": 3}]]]}'}
    (folder / "Mul.mul.1.2.1675157077183551").write_bytes(dump_bytes(inputs, outputs, attributes=attributes, buffers=[b"abc"]))
    (folder / "Add.add.2.2.1675157077183552").write_bytes(old_bytes(inputs, outputs))
    (folder / "Sub.sub.3.2.1675157077183553").write_bytes(nano_bytes(inputs[:1], outputs))
    (folder / "Opdebug.Node_OpDebug.4.2.1675157077183554").write_bytes(overflow_bytes(overflow_output(0, [1] * 9)))
    (folder / "Relu.relu.5.2.1675157077183555.csv").write_text(STATISTICS_HEADINGS + "Input,0,48,DT_FLOAT,ND,3x4,1.5,-1,0.25,12,0,0,0\n")
    (folder / "mapping.csv").write_text("123,Mul.mul.6.2.1675157077183556\n")
    (folder / "123").write_bytes(dump_bytes(inputs[:1], outputs))


def _write_tensors(folder: Path) -> None:
    folder.mkdir()
    save_pt(folder / "x.pt", "float32", X.shape, X)
    torch.save(torch.nn.Parameter(torch.from_numpy(X).to(torch.bfloat16).t()), folder / "y.pt")
    torch.save(torch.from_numpy(X).to(torch.float8_e5m2), folder / "old.pt", _use_new_zipfile_serialization=False)
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", np.asfortranarray(X.astype(">c8")))


def _write_tables(folder: Path) -> None:
    (folder / "mapping.txt").write_text("# blocks\nmlp.* -> net.*\n*/npu.npu_gelu.* -> */functional.gelu.*\n")
    update_baseline(folder / "good", folder / "baseline.jsonl")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sides = {
        f"{side}_path": f"msprobe{number}/step0/{rank}/dump.json"
        for side, number, rank in (("npu", "", "proc4711"), ("bench", "1", "rank"))
    }
    (folder / "compare.json").write_text(
        json.dumps({**sides, "stack_path": "msprobe/step0/proc4711/stack.json", "is_print_compare_log": True})
    )
    (folder / "names.yaml").write_text("Functional.gelu.0.forward: Functional.gelu.0.forward\n'a b': \"c\"\n")
    (folder / "merge.yaml").write_text("api: [Tensor.add, b]\ncompare_index:\n  - Max diff\n  - Cosine\n")
    (folder / "results").mkdir()
    (folder / "results" / "compare_result_rank0_20260101000000.csv").write_text(RESULT)
    (folder / "results" / "compare_result_rank1_20260101000000.csv").write_text(RESULT)
    _write_workbook(folder / "results" / "compare_result_rank2_20260101000000.xlsx")
    (folder / "own.csv").write_text(OWN_TABLE)
    cells = [
        "Functional.relu.0.forward.output.0",
        "torch.float32",
        "torch.float32",
        "(2, 3)",
        *["1.0", ""] * 5,
        "N/A",
        "",
        "True",
        "1",
        "0",
        "pass",
        "",
    ]
    (folder / "details.csv").write_text(",".join(DETAIL_COLUMNS) + "\n" + ",".join(f'"{cell}"' for cell in cells) + "\n")
    (folder / "calls.txt").write_text("functional.gelu*  # the one\nmodule:mlp\n")
    (folder / "train.py").write_text("import torch\nx = torch.ones(3, requires_grad=True)\n(x * 2).sum().backward()\n")
    for side in ("probe", "probe2"):
        (folder / side / "rank0" / "step0").mkdir(parents=True)
        (folder / side / "rank0" / "grad_summary_0.csv").write_text("param_name,mean\nw,1\n")
        np.save(folder / side / "rank0" / "step0" / "w.npy", X > 0)


def _write_workbook(path: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    for line in RESULT.splitlines():
        book.active.append(line.split(","))
    book.save(path)
