# SPDX-License-Identifier: Apache-2.0
"""Undo every layout and compare with the writer of the tests, which writes them element by element."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store import acl_writer as writer
from ulpscope.errors import DamagedRunError, InputError
from ulpscope.store.acl.blocked_formats import FORMATS, PLAIN, convert, format_name
from ulpscope.store.acl.file import AclTensor, read_acl_file

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.integers(1, 4)
channels = st.integers(1, 40)
blocks = st.sampled_from([8, 16, 32])


def numbered(*shape: int, dtype: str = "int32") -> np.ndarray[Any, Any]:
    """Make values that are all different and never equal to the padding."""
    return (np.arange(math.prod(shape)) + 1).astype(dtype).reshape(shape)


def stored(folder: Path, array: np.ndarray[Any, Any], format: str, original: tuple[int, ...], **options: Any) -> AclTensor:
    """Return the tensor as it comes back from a file."""
    file = folder / "Conv2D.conv.1.2.1675157077183551"
    file.write_bytes(writer.dump_bytes(outputs=[writer.described(array, format=format, original_shape=original, **options)]))
    return read_acl_file(file).tensors[0]


@quick
@given(lead=st.lists(sizes, max_size=3), height=st.integers(1, 40), width=st.integers(1, 40), w0=blocks)
def test_fractal_nz(tmp_path: Path, lead: list[int], height: int, width: int, w0: int) -> None:
    array = numbered(*lead, height, width)
    tensor = stored(tmp_path, writer.fractal_nz(array, w0), "FRACTAL_NZ", array.shape)
    np.testing.assert_array_equal(tensor.array("ND"), array)
    assert tensor.array().shape == tensor.shape == (*lead, -(-width // w0), -(-height // 16), 16, w0)


@quick
@given(length=st.integers(1, 70), w0=blocks)
def test_fractal_nz_of_a_row(tmp_path: Path, length: int, w0: int) -> None:
    tensor = stored(tmp_path, writer.fractal_nz(numbered(length), w0), "FRACTAL_NZ", (length,))
    np.testing.assert_array_equal(tensor.array("ND"), numbered(length))


@pytest.mark.parametrize("padding", [0, 15, 16, 31])
def test_fractal_nz_of_int8(tmp_path: Path, padding: int) -> None:
    array = numbered(3, 64 - padding, dtype="int8")
    tensor = stored(tmp_path, writer.fractal_nz(array, 32), "FRACTAL_NZ", array.shape)
    np.testing.assert_array_equal(tensor.array("ND"), array)


def test_fractal_nz_whose_leading_axes_were_merged(tmp_path: Path) -> None:
    array = numbered(2, 3, 20, 33)
    merged = writer.fractal_nz(array.reshape(6, 20, 33))
    np.testing.assert_array_equal(stored(tmp_path, merged, "FRACTAL_NZ", array.shape).array("ND"), array)


@quick
@given(lead=st.lists(sizes, max_size=2), height=st.integers(1, 40), width=st.integers(1, 40))
def test_fractal_zz(tmp_path: Path, lead: list[int], height: int, width: int) -> None:
    array = numbered(*lead, height, width)
    np.testing.assert_array_equal(stored(tmp_path, writer.fractal_zz(array), "FRACTAL_ZZ", array.shape).array("ND"), array)


SPLIT = {
    "NC1HWC0": writer.nc1hwc0,
    "NHWC1C0": writer.nhwc1c0,
    "C1HWNC0": writer.c1hwnc0,
    "C1HWNCoC0": writer.c1hwncoc0,
    "FRACTAL_Z": writer.fractal_z,
}


@quick
@pytest.mark.parametrize("format", SPLIT)
@given(n=st.integers(1, 20), c=channels, h=sizes, w=sizes, c0=blocks)
def test_a_cut_channel_axis(tmp_path: Path, format: str, n: int, c: int, h: int, w: int, c0: int) -> None:
    nchw = numbered(n if format == "FRACTAL_Z" else 1 + n % 3, c if format != "C1HWNCoC0" else 1 + c % 20, h, w)
    tensor = stored(tmp_path, SPLIT[format](nchw, c0), format, nchw.shape, original_format="NCHW")
    np.testing.assert_array_equal(tensor.array("NCHW"), nchw)
    np.testing.assert_array_equal(tensor.array("ND"), nchw)
    np.testing.assert_array_equal(tensor.array("NHWC"), nchw.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(tensor.array("HWCN"), nchw.transpose(2, 3, 1, 0))


@quick
@given(n=st.integers(1, 40), c=st.integers(1, 4), h=sizes, w=sizes, c0=blocks)
def test_fractal_z_c04(tmp_path: Path, n: int, c: int, h: int, w: int, c0: int) -> None:
    nchw = numbered(n, c, h, w)
    tensor = stored(tmp_path, writer.fractal_z_c04(nchw, c0), "FRACTAL_Z_C04", nchw.shape, original_format="NCHW")
    np.testing.assert_array_equal(tensor.array("NCHW"), nchw)


def test_nc1hwc0_c04(tmp_path: Path) -> None:
    nchw = numbered(2, 3, 5, 7)
    np.testing.assert_array_equal(stored(tmp_path, writer.nc1hwc0(nchw, 4), "NC1HWC0_C04", nchw.shape).array("NCHW"), nchw)


@quick
@given(n=st.integers(1, 20), c=channels, d=sizes, h=sizes, w=sizes, c0=blocks)
@pytest.mark.parametrize("format", ["NDC1HWC0", "FRACTAL_Z_3D"])
def test_three_dimensional_forms(tmp_path: Path, format: str, n: int, c: int, d: int, h: int, w: int, c0: int) -> None:
    ncdhw = numbered(n, c, d, h, w)
    laid = writer.ndc1hwc0(ncdhw, c0) if format == "NDC1HWC0" else writer.fractal_z_3d(ncdhw, c0)
    tensor = stored(tmp_path, laid, format, ncdhw.shape, original_format="NCDHW")
    np.testing.assert_array_equal(tensor.array("ND"), ncdhw)
    np.testing.assert_array_equal(tensor.array("NDHWC"), ncdhw.transpose(0, 2, 3, 4, 1))


def test_fractal_z_3d_transpose_has_inputs_and_outputs_in_each_others_place(tmp_path: Path) -> None:
    dhwnc = numbered(2, 3, 2, 20, 5)
    as_if_dhwcn = dhwnc.transpose(4, 3, 0, 1, 2)  # its C in the place of N
    laid = writer.fractal_z_3d(np.ascontiguousarray(as_if_dhwcn))
    tensor = stored(tmp_path, laid, "FRACTAL_Z_3D_TRANSPOSE", dhwnc.shape, original_format="DHWNC")
    np.testing.assert_array_equal(tensor.array("ND"), dhwnc)


@quick
@given(groups=st.integers(2, 9), outputs=st.integers(1, 20), c=st.integers(1, 20), d=sizes, h=sizes, w=sizes, c0=blocks, flat=st.booleans())
def test_groups_share_blocks(tmp_path: Path, groups: int, outputs: int, c: int, d: int, h: int, w: int, c0: int, flat: bool) -> None:
    if flat:
        nchw = numbered(groups * outputs, c, h, w)
        tensor = stored(
            tmp_path, writer.grouped_fractal_z(nchw, groups, c0), "FRACTAL_Z", nchw.shape, groups=groups, original_format="NCHW"
        )
        np.testing.assert_array_equal(tensor.array("NCHW"), nchw)
    else:
        ncdhw = numbered(groups * outputs, c, d, h, w)
        laid = writer.grouped_fractal_z_3d(ncdhw, groups, c0)
        tensor = stored(tmp_path, laid, "FRACTAL_Z_3D", ncdhw.shape, groups=groups, original_format="NCDHW")
        np.testing.assert_array_equal(tensor.array("ND"), ncdhw)


@pytest.mark.parametrize(("order", "axes"), [("NHWC", (0, 2, 3, 1)), ("HWCN", (2, 3, 1, 0)), ("NCHW", (0, 1, 2, 3))])
@pytest.mark.parametrize("format", ["NC1HWC0", "FRACTAL_Z"])
def test_the_order_of_the_original_axes_is_found_from_the_sizes(tmp_path: Path, format: str, order: str, axes: tuple[int, ...]) -> None:
    nchw = numbered(20, 33, 5, 7)
    original = tuple(nchw.transpose(axes).shape)
    tensor = stored(tmp_path, SPLIT[format](nchw), format, original)
    assert tensor.original_format == ""
    np.testing.assert_array_equal(tensor.array("NCHW"), nchw)
    np.testing.assert_array_equal(tensor.array("ND"), nchw.transpose(axes))


def test_where_several_orders_fit_the_header_decides_then_the_question(tmp_path: Path) -> None:
    nchw = numbered(3, 3, 3, 3)
    laid = writer.fractal_z(nchw)
    named = stored(tmp_path, laid, "FRACTAL_Z", nchw.shape, original_format="HWCN")
    np.testing.assert_array_equal(named.array("ND"), nchw.transpose(2, 3, 1, 0))
    open_question = stored(tmp_path, laid, "FRACTAL_Z", nchw.shape)
    np.testing.assert_array_equal(open_question.array("HWCN"), nchw.transpose(2, 3, 1, 0))
    np.testing.assert_array_equal(open_question.array("ND"), nchw)


def test_a_row_that_was_given_axes(tmp_path: Path) -> None:
    laid = writer.nc1hwc0(numbered(1, 33, 1, 1))
    np.testing.assert_array_equal(stored(tmp_path, laid, "NC1HWC0", (33,)).array("ND"), numbered(33))


def test_without_an_original_shape_the_padding_stays(tmp_path: Path) -> None:
    nchw = numbered(2, 20, 3, 4)
    whole = stored(tmp_path, writer.nc1hwc0(nchw), "NC1HWC0", ()).array("NCHW")
    assert whole.shape == (2, 32, 3, 4)
    np.testing.assert_array_equal(whole[:, :20], nchw)
    assert not whole[:, 20:].any()
    assert stored(tmp_path, writer.fractal_nz(numbered(5, 20)), "FRACTAL_NZ", ()).array("ND").shape == (16, 32)


@pytest.mark.parametrize(("source", "target"), [(a, b) for a in PLAIN for b in PLAIN if set(a) == set(b)])
def test_formats_that_only_order_the_axes(source: str, target: str) -> None:
    sizes = dict(zip("NCDHWL", (2, 3, 4, 5, 6, 7), strict=True))
    array = numbered(*(sizes[axis] for axis in source))
    turned = convert(array, source, target, original=())
    assert turned.shape == tuple(sizes[axis] for axis in target)
    np.testing.assert_array_equal(convert(turned, target, source, original=()), array)


@pytest.mark.parametrize(("source", "target", "shape"), [("NCHW", "NHWC", (2, 3)), ("HWCN", "NCHW", (5,)), ("NCHW", "NCL", (1, 2, 3, 4))])
def test_a_format_with_another_number_of_axes_says_nothing(source: str, target: str, shape: tuple[int, ...]) -> None:
    array = numbered(*shape)
    assert convert(array, source, target, original=()) is array


def test_as_stored_when_nothing_is_asked(tmp_path: Path) -> None:
    laid = writer.nc1hwc0(numbered(1, 3, 2, 2))
    tensor = stored(tmp_path, laid, "NC1HWC0", (1, 3, 2, 2))
    np.testing.assert_array_equal(tensor.array(), laid)
    np.testing.assert_array_equal(tensor.array("NC1HWC0"), laid)


@pytest.mark.parametrize(
    ("shape", "format", "original", "groups"),
    [
        ((1, 2, 16, 16), "FRACTAL_NZ", (1000, 1000), 0),
        ((1, 2, 16, 16), "FRACTAL_NZ", (2**40, 2**40), 0),
        ((1, 2, 0, 0), "FRACTAL_NZ", (1, 1), 0),
        ((4, 4), "FRACTAL_NZ", (4, 4), 0),
        ((1, 2, 16, 16), "FRACTAL_ZZ", (-1, 20), 0),
        ((1, 1, 2, 2, 16), "NC1HWC0", (1, 17, 2, 2), 0),
        ((1, 1, 2, 2, 16), "NC1HWC0", (1, -5, 2, 2), 0),
        ((1, 1, 2, 2, 0), "NC1HWC0", (1, 0, 2, 2), 0),
        ((9, 1, 16, 16), "FRACTAL_Z", (16, 16, 3, 3, 3), 0),
        ((9, 1, 16, 16), "FRACTAL_Z", (16, 16, 3, 3), 2**30),
        ((9, 1, 16, 16), "FRACTAL_Z", (0, 0, 3, 3), 3),
        ((9, 1, 16, 16), "FRACTAL_Z", (), 0),
        ((9, 1, 16, 16), "FRACTAL_Z_C04", (16, 5, 3, 3), 0),
        ((2, 3), "C1HWNCoC0", (1, 2, 3, 4), 0),
    ],
)
def test_a_shape_that_does_not_fit_is_one_sentence(
    tmp_path: Path, shape: tuple[int, ...], format: str, original: tuple[int, ...], groups: int
) -> None:
    tensor = stored(tmp_path, numbered(*shape), format, original, groups=groups)
    with pytest.raises(DamagedRunError, match="as it is stored"):
        tensor.array("ND")
    assert tensor.array().shape == shape


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        ("FRACTAL_ZN_LSTM", "ND", "has the format FRACTAL_ZN_LSTM, which cannot be undone"),
        ("ND", "FRACTAL_NZ", "cannot be converted to 'FRACTAL_NZ'; choose ND or one of"),
        ("NCHW", "../../x", "choose ND"),
        ("NCHW", "NCLX", "choose ND"),
    ],
)
def test_what_cannot_be_asked(source: str, target: str, sentence: str) -> None:
    array = numbered(1, 2, 3, 4)
    with pytest.raises(InputError, match=sentence):
        convert(array, source, target, original=())


def test_a_number_without_a_name() -> None:
    assert format_name(29) == format_name(29 | 4 << 8) == "FRACTAL_NZ"
    assert format_name(200) == "FORMAT_200"
    assert {name: FORMATS.index(name) for name in writer.FORMAT} == writer.FORMAT
