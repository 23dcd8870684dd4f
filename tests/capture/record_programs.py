# SPDX-License-Identifier: Apache-2.0
"""Record the programs of `tests/harmless`: `record_programs.py FOLDER compiled|python` does it with or without the compiled hot path.

Each program is recorded at one level with its values or statistics, and once more as on a device that reads late.
"""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

CASES = [("api", "statistics"), ("module", "statistics"), ("both", "tensors"), ("op", "statistics"), ("api", "fingerprint")]
LEFT_OUT = {"threads", "data_loader_workers", "awkward_arguments"}  # which thread comes first, and addresses, are not ours to say


def main(folder: Path, how: str) -> None:
    if how == "python":
        sys.modules["ulpscope.capture.native._compiled"] = None  # type: ignore[assignment]
    from tests.capture.test_devices import LateSummaries
    from tests.harmless import programs
    from tests.harmless.test_harmless import recording
    from ulpscope.capture.device.queue import Devices
    from ulpscope.capture.native.compiled import COMPILED
    from ulpscope.capture.record import recorder
    from ulpscope.capture.record.tensor_reader import TensorReader

    assert (COMPILED is not None) == (how == "compiled")
    warnings.simplefilter("ignore")
    names = [name for name in programs.PROGRAMS if name not in LEFT_OUT]
    for number, name in enumerate(names):
        level, keep = CASES[number % len(CASES)]
        programs.run(name, recording(folder / f"{name}-{level}-{keep}", level, keep))

    real: Any = TensorReader._new_form

    def form(self: Any, tensor: Any, strides: Any) -> Any:
        found = real(self, tensor, strides)
        found.is_on_host = False
        return found

    TensorReader._new_form = form  # type: ignore[method-assign]
    recorder.Devices = functools.partial(Devices, make=lambda *_, **__: LateSummaries())  # type: ignore[assignment,misc]
    for number, name in enumerate(names):
        level = ("api", "module", "both")[number % 3]
        programs.run(name, recording(folder / f"{name}-late-{level}", level, "statistics"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
