# SPDX-License-Identifier: Apache-2.0
"""Compare conversions of mindstudio-probe with ours, on the same files. Needs a Python with mindstudio-probe, named by
ULPSCOPE_PEER_PYTHON.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store import acl_writer as writer
from tests.store.acl_writer import Described, described
from ulpscope.store.acl.file import read_acl_file

PEER = os.environ.get("ULPSCOPE_PEER_PYTHON", "")
pytestmark = [pytest.mark.long, pytest.mark.skipif(not PEER, reason="ULPSCOPE_PEER_PYTHON names no Python with mindstudio-probe")]
SCRIPT = Path(__file__).with_name("acl_peer.py")


def numbered(*shape: int, dtype: str = "f4") -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape)) % 120 + 1).astype(dtype).reshape(shape)


def blocked(layout: Any, array: np.ndarray[Any, Any], format: str, **options: Any) -> Described:
    return described(layout(array), format=format, original_shape=array.shape, **options)


NCHW, NCDHW, MATRIX = numbered(2, 20, 5, 7), numbered(2, 20, 3, 5, 7), numbered(20, 33)
CASES: dict[str, tuple[str, list[Described]]] = {
    "dtypes": (
        "as stored",
        [described(numbered(3, 5, dtype=name)) for name in ("f4", "f2", "f8", "i1", "u1", "i2", "i4", "i8", "u4", "u8", "c8")],
    ),
    "bfloat16": ("as stored", [Described(writer.bfloat16_bits(numbered(3, 5)).tobytes(), dtype="bfloat16", shape=(3, 5))]),
    "matrices": ("ND", [blocked(writer.fractal_nz, array, "FRACTAL_NZ") for array in (MATRIX, MATRIX.astype("f2"), numbered(3, 20, 33))]),
    "images": ("NCHW", [blocked(writer.nc1hwc0, array, "NC1HWC0") for array in (NCHW, NCHW.astype("f2"), NCHW.astype("i4"))]),
    "weights": ("NCHW", [blocked(writer.fractal_z, numbered(20, 33, 3, 3), "FRACTAL_Z")]),
    "volumes": ("NCDHW", [blocked(writer.ndc1hwc0, NCDHW, "NDC1HWC0")]),
    "orders": ("NHWC", [described(NCHW, format="NCHW"), described(NCHW.transpose(2, 3, 1, 0), format="HWCN")]),
}


def converted(folder: Path, format: str, tensors: list[Described]) -> tuple[list[Any], list[Any]]:
    """Return each tensor as the peer converts it, and as we do."""
    file = folder / "Conv2D.conv.1.2.1675157077183551"
    file.write_bytes(writer.dump_bytes(outputs=tensors))
    out = folder / "out"
    out.mkdir()
    done = subprocess.run([PEER, str(SCRIPT), format, str(out), str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = [np.load(next(out.glob(f"*.output.{index}.*npy"))) for index in range(len(tensors))]
    return theirs, [tensor.array(None if format == "as stored" else format) for tensor in read_acl_file(file).tensors]


@pytest.mark.parametrize("case", CASES)
def test_conversions_agree(tmp_path: Path, case: str) -> None:
    theirs, ours = converted(tmp_path, *CASES[case])
    for their, our in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(our, their)
        assert our.shape == their.shape
