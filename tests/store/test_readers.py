# SPDX-License-Identifier: Apache-2.0
"""Hold every store to its contract, with an example of each foreign format that `open_run` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.legacy.test_npu_hooks import write as write_hooks
from tests.store.test_acl_run import PLACE, write_net
from tests.store.test_checker_json import call, real
from tests.store.test_checker_json import write as write_checker
from tests.store.test_pkl import tensor_line
from tests.store.test_pkl import write_dump as write_pkl
from ulpscope.model import Run
from ulpscope.store import open_run
from ulpscope.testing.stores import RunContract

GOLDEN = Path(__file__).parents[1] / "golden"


class TestMsprobe(RunContract):
    def open_example(self, folder: Path) -> Run:
        return open_run(GOLDEN / "msprobe-26/tensor-mix")


class TestPtdbg(RunContract):
    def open_example(self, folder: Path) -> Run:
        array = np.ones((3, 2), "f4")
        line = tensor_line("Functional_relu_0_forward_output", array)
        return open_run(write_pkl(folder / "dump", [line], {line[0]: array}))


class TestTorchNpuHooks(RunContract):
    def open_example(self, folder: Path) -> Run:
        write_hooks(folder / "dump.pkl", ("relu", [[0.0, 1.5]]))
        return open_run(folder / "dump.pkl")


class TestChecker(RunContract):
    def open_example(self, folder: Path) -> Run:
        np.save(folder / "input.npy", np.ones((2, 3), "f4"))
        return open_run(write_checker(folder / "dump", {"Functional*relu*0": call(real(folder / "input.npy"))}))


class TestAscend(RunContract):
    def open_example(self, folder: Path) -> Run:
        write_net(folder / "dump" / PLACE)
        return open_run(folder / "dump")
