# SPDX-License-Identifier: Apache-2.0
"""Dump files of Ascend: the three forms, every dtype, and headers that lie. All files are synthetic, written by acl_writer."""

from __future__ import annotations

import math
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store import acl_writer as writer
from tests.store.acl_writer import Described, described
from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.model import DTYPES
from ulpscope.numerics.casting import as_array, widen
from ulpscope.store.acl.acl_dtypes import GE_DTYPES, PROTO_DTYPES
from ulpscope.store.acl.file import AclDump, is_acl_file, read_acl_file

NAME = "MatMul.MatMul_1.45.0.1675157077183551"
X = np.arange(6, dtype="f4").reshape(2, 3)
Y = np.array([[1, -2], [3, -4]], dtype="f2")


def read(folder: Path, content: bytes, name: str = NAME) -> AclDump:
    file = folder / name
    file.write_bytes(content)
    return read_acl_file(file)


FORMS = {"protobuf": writer.dump_bytes, "old": writer.old_bytes, "nano": writer.nano_bytes}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_same_tensors(tmp_path: Path, form: str) -> None:
    content = FORMS[form](inputs=[described(X), described(np.int32(7) * np.ones((3,), "i4"))], outputs=[described(Y)])
    dump = read(tmp_path, content)
    assert dump.form == form
    assert [(tensor.role, tensor.index, tensor.dtype, tensor.shape, tensor.format) for tensor in dump.tensors] == [
        ("input", 0, "float32", (2, 3), "ND"),
        ("input", 1, "int32", (3,), "ND"),
        ("output", 0, "float16", (2, 2), "ND"),
    ]
    np.testing.assert_array_equal(dump.tensors[0].array(), X)
    np.testing.assert_array_equal(dump.tensors[1].array(), [7, 7, 7])
    np.testing.assert_array_equal(dump.of("output")[0].array(), Y)
    assert is_acl_file(tmp_path / NAME)


def test_what_the_header_says_of_the_operator(tmp_path: Path) -> None:
    dump = read(tmp_path, writer.dump_bytes(outputs=[described(Y)], op_name="a/b.c", attributes={"k": "v"}))
    assert (dump.op_name, dump.version, dump.time, dump.attributes) == ("a/b.c", "2.0", 1675157077183551, {"k": "v"})


def test_scratch_memory_comes_behind_the_tensors(tmp_path: Path) -> None:
    dump = read(tmp_path, writer.dump_bytes(inputs=[described(X)], outputs=[described(Y)], buffers=[b"12345"], spaces=[b"log", b""]))
    assert [(tensor.role, tensor.array().tobytes()) for tensor in dump.tensors[2:]] == [
        ("buffer", b"12345"),
        ("workspace", b"log"),
        ("workspace", b""),
    ]


def test_the_arguments_of_a_failed_kernel_are_inputs_in_the_header_and_last_in_the_file(tmp_path: Path) -> None:
    inputs = [described(X, input_type=2), Described(b"args", dtype="undefined", input_type=1), described(X + 1, input_type=2)]
    content = writer.dump_bytes(inputs, [described(Y)], spaces=[b"log"])
    dump = read(tmp_path, content, "exception_info.3.45.1675157077183551")
    assert [(tensor.role, tensor.index) for tensor in dump.tensors] == [
        ("input", 0),
        ("input", 2),
        ("output", 0),
        ("workspace", 0),
        ("argument", 1),
    ]
    np.testing.assert_array_equal(dump.tensors[1].array(), X + 1)
    np.testing.assert_array_equal(dump.tensors[2].array(), Y)
    assert dump.tensors[4].array().tobytes() == b"args"


def test_a_tensor_without_memory_on_the_device_has_no_bytes_in_the_file(tmp_path: Path) -> None:
    gone = described(X, address=0, left_out=True)
    dump = read(tmp_path, writer.dump_bytes(inputs=[gone, described(X + 1)], outputs=[described(Y)]))
    assert [tensor.is_kept for tensor in dump.tensors] == [False, True, True]
    np.testing.assert_array_equal(dump.tensors[1].array(), X + 1)
    np.testing.assert_array_equal(dump.tensors[2].array(), Y)
    with pytest.raises(InputError, match=r"input 0 of .* has no values in the file"):
        dump.tensors[0].array()


def test_files_that_set_no_address_at_all_are_read_whole(tmp_path: Path) -> None:
    dump = read(tmp_path, writer.dump_bytes(inputs=[described(X, address=0)], outputs=[described(Y, address=0)]))
    np.testing.assert_array_equal(dump.tensors[0].array(), X)
    np.testing.assert_array_equal(dump.tensors[1].array(), Y)


def test_values_are_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    tensor = read(tmp_path, writer.dump_bytes(outputs=[described(X)])).tensors[0]
    assert np.shares_memory(tensor.array(), tensor.array("ND"))
    assert not tensor.array().flags.writeable


def test_bytes_beyond_the_shape_are_alignment(tmp_path: Path) -> None:
    padded = Described(X.tobytes() + bytes(40), shape=X.shape)
    dump = read(tmp_path, writer.dump_bytes(inputs=[padded], outputs=[described(Y)]))
    np.testing.assert_array_equal(dump.tensors[0].array(), X)
    np.testing.assert_array_equal(dump.tensors[1].array(), Y)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_tensors_keep_dtype_and_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.full(shape, 3, "f2")
    back = read(tmp_path, writer.dump_bytes(outputs=[described(array)])).tensors[0].array("ND")
    assert (back.shape, back.dtype) == (shape, np.float16)
    np.testing.assert_array_equal(back, array)


def test_bytes_without_a_shape_are_a_row(tmp_path: Path) -> None:
    back = read(tmp_path, writer.dump_bytes(outputs=[Described(X.tobytes())])).tensors[0].array()
    np.testing.assert_array_equal(back, X.reshape(-1))


@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"]
)
def test_dtypes_of_numpy(tmp_path: Path, name: str) -> None:
    array = np.array([[0, 1, 100], [3, 5, 7]], name)
    tensor = read(tmp_path, writer.dump_bytes(outputs=[described(array)])).tensors[0]
    back = tensor.array("ND")
    assert (tensor.dtype, back.dtype.name) == (name, name)
    np.testing.assert_array_equal(back, array)
    assert bytes(tensor.data("ND").buffer) == array.tobytes()


def stored(folder: Path, dtype: str, data: bytes, *shape: int) -> Any:
    return read(folder, writer.dump_bytes(outputs=[Described(data, dtype=dtype, shape=shape)])).tensors[0]


def test_bool_and_complex(tmp_path: Path) -> None:
    assert stored(tmp_path, "bool", b"\0\1\2", 3).array().tolist() == [False, True, True]
    numbers = np.array([1 + 2j, -3.5j], "c8")
    np.testing.assert_array_equal(stored(tmp_path, "complex64", numbers.tobytes(), 2).array(), numbers)
    halves = np.array([1, 2, 0, -3.5], "f2")
    back = stored(tmp_path, "complex32", halves.tobytes(), 2)
    np.testing.assert_array_equal(back.array(), numbers)
    assert back.data().dtype == "complex32"


def test_bfloat16(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.0e38, math.inf], "f4")
    values[2] = np.float32(2.0**127)
    tensor = stored(tmp_path, "bfloat16", writer.bfloat16_bits(values).tobytes(), 2, 2)
    assert tensor.array().dtype == np.float32
    np.testing.assert_array_equal(tensor.array().reshape(-1), values)
    assert bytes(tensor.data().buffer) == writer.bfloat16_bits(values).tobytes()


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("float8_e4m3fn", {0x38: 1.0, 0x7E: 448.0, 0x01: 2.0**-9, 0xFF: math.nan, 0x80: -0.0}),
        ("float8_e5m2", {0x3C: 1.0, 0x7B: 57344.0, 0x7C: math.inf, 0xFC: -math.inf, 0x7D: math.nan}),
        ("float8_e8m0fnu", {0x7F: 1.0, 0x80: 2.0, 0xFF: math.nan}),
        (
            "hifloat8",
            {
                0x00: 0.0, 0x80: math.nan, 0x6F: math.inf, 0xEF: -math.inf, 0x6E: 2.0**15, 0x08: 1.0, 0x0F: 1.875, 0x18: 0.5, 0x10: 2.0,
                0x17: 3.75, 0x20: 4.0, 0x28: 8.0, 0x30: 0.25, 0x40: 16.0, 0x43: 28.0, 0x60: 256.0, 0x61: 384.0, 0x7E: 2.0**-15,
                0x01: 2.0**-22, 0x07: 2.0**-16, 0x87: -(2.0**-16),
            },
        ),
    ],
)  # fmt: skip
def test_eight_bit_floats(tmp_path: Path, name: str, samples: dict[int, float]) -> None:
    tensor = stored(tmp_path, name, bytes(samples), len(samples))
    assert tensor.dtype == name
    np.testing.assert_array_equal(tensor.array(), np.array(list(samples.values()), "f4"))
    data = tensor.data()
    np.testing.assert_array_equal(widen(data.dtype, as_array(data)), np.array(list(samples.values())))


def test_every_code_of_hifloat8_is_a_different_number(tmp_path: Path) -> None:
    values = stored(tmp_path, "hifloat8", bytes(range(256)), 256).array()
    assert len(set(values[~np.isnan(values)].tolist())) == 255
    positive = np.sort(values[:128][np.isfinite(values[:128])])
    assert (positive[1], positive[-1]) == (2.0**-22, 2.0**15)
    steps = np.diff(np.log2(positive[1:]))
    assert (steps > 0).all()
    assert steps.max() == 1.0


@pytest.mark.parametrize(
    ("name", "bits", "values"),
    [
        ("int4", 4, [-8, 7, 0, -1, 3]),
        ("int2", 2, [-2, 1, 0, -1, 1, 1, 0]),
        ("uint2", 2, [3, 1, 0, 2, 1]),
    ],
)
def test_packed_integers(tmp_path: Path, name: str, bits: int, values: list[int]) -> None:
    tensor = stored(tmp_path, name, writer.packed(values, bits), len(values))
    assert tensor.array().tolist() == values
    assert as_array(tensor.data()).tolist() == values
    assert tensor.array().dtype.itemsize == 1


def test_single_bits_begin_with_the_highest(tmp_path: Path) -> None:
    assert stored(tmp_path, "uint1", bytes([0b10110000, 0b01000000]), 10).array().tolist() == [1, 0, 1, 1, 0, 0, 0, 0, 0, 1]


def test_alignment_is_no_sign_of_unpacked_values(tmp_path: Path) -> None:
    values = [1, -2] * 16
    assert stored(tmp_path, "int4", writer.packed(values, 4) + bytes(16), 32).array().tolist() == values


def test_four_bit_floats(tmp_path: Path) -> None:
    every = writer.packed(range(16), 4)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    e1m2 = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    assert stored(tmp_path, "float4_e2m1fn", every, 16).array().tolist() == e2m1 + [-value for value in e2m1]
    assert stored(tmp_path, "float4_e1m2", every, 16).array().tolist() == e1m2 + [-value for value in e1m2]


def test_what_is_no_number_stays_bytes(tmp_path: Path) -> None:
    assert stored(tmp_path, "string", b"text", 4).array().tobytes() == b"text"
    assert stored(tmp_path, "undefined", b"\1\2\3").array().tolist() == [1, 2, 3]


def test_six_bit_floats_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="how float6_e3m2fn values are packed"):
        stored(tmp_path, "float6_e3m2fn", bytes(3), 4).array()


def test_both_numberings_name_the_same_dtypes() -> None:
    assert {name: PROTO_DTYPES.index(name) for name in writer.DTYPE} == writer.DTYPE
    assert {name: GE_DTYPES.index(name) for name in writer.GE_DTYPE} == writer.GE_DTYPE
    assert set(PROTO_DTYPES) == set(GE_DTYPES)
    assert set(DTYPES) - set(PROTO_DTYPES) == {"float8_e4m3fnuz", "float8_e5m2fnuz"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5),
    num_inputs=st.integers(0, 5),
    form=st.sampled_from(sorted(FORMS)),
    dtype=st.sampled_from(sorted(set(writer.GE_DTYPE) - {"int4", "bfloat16"})),
)
def test_whatever_is_written_comes_back(tmp_path: Path, shapes: list[list[int]], num_inputs: int, form: str, dtype: str) -> None:
    arrays = [(np.arange(math.prod(shape)) * 7 + number).astype(dtype).reshape(shape) for number, shape in enumerate(shapes)]
    tensors = [described(array) for array in arrays]
    dump = read(tmp_path, FORMS[form](tensors[:num_inputs], tensors[num_inputs:]))
    assert [tensor.role for tensor in dump.tensors] == ["input"] * len(arrays[:num_inputs]) + ["output"] * len(arrays[num_inputs:])
    for tensor, array in zip(dump.tensors, arrays, strict=True):
        np.testing.assert_array_equal(tensor.array("ND"), array)


# Headers that lie.

HUGE = 1 << 32


def lying(**options: Any) -> bytes:
    return writer.dump_bytes(outputs=[described(X, **options)])


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is an empty file"),
    "one byte": (b"\x07", "no dump file of Ascend"),
    "text": (b"hello world, this is no dump at all\n" * 3, "no dump file of Ascend"),
    "a header of 4 GB": (struct.pack("<Q", HUGE) + bytes(1000), "claims a header of 4294967296 bytes in a file of 1008"),
    "a header of all bits": (b"\xff" * 64, "claims a header of 18446744073709551615 bytes"),
    "a tensor of 4 GB": (lying(claimed=HUGE), "claims tensors of 4294967296 bytes, but 24 follow"),
    "a tensor of 2**63 bytes": (lying(claimed=1 << 63), "claims tensors of 9223372036854775808 bytes"),
    "cut off": (writer.dump_bytes(outputs=[described(X)])[:-1], "claims tensors of 24 bytes, but 23 follow"),
    "a number without end": (struct.pack("<Q", 30) + b"\x10" + b"\xff" * 29, "a number in it has no end"),
    "a number that the header cuts": (struct.pack("<Q", 2) + b"\x10\xff" + bytes(8), "a number in it has no end"),
    "a field that is longer than the header": (struct.pack("<Q", 6) + b"\x1a\xff\xff\x03ab", "claims 65535 bytes where 2 are left"),
    "an unknown wire type": (struct.pack("<Q", 2) + b"\x0b\x0c", "unknown wire type 3"),
    "a field without a number": (struct.pack("<Q", 2) + b"\x02\x00", "field without a number"),
    "a number for a message": (struct.pack("<Q", 2) + b"\x18\x01", "a number stands where"),
    "a text for a number": (struct.pack("<Q", 3) + b"\x12\x01a", "a text stands where"),
    "a million tensors": (struct.pack("<Q", 2_000_000) + b"\x22\x00" * 1_000_000, "more than 16384 tensors"),
    "a million axes": (
        (lambda part: struct.pack("<Q", len(part)) + part)(writer.message(4, writer.message(3, writer.text(1, b"\x01" * 1_000_000)))),
        "more than 64 dimensions",
    ),
    "nano, cut": (struct.pack("<Q", 12) + struct.pack("<III", 0x5A5A5A5A, 1, 4), "ends in the middle of a part"),
    "nano, four billion inputs": (
        struct.pack("<Q", 20) + struct.pack("<IIIII", 0x5A5A5A5A, 1, 4, 4, 0xFFFFFFFF),
        "claims 4294967295 inputs",
    ),
    "nano, a part of 4 GB": (struct.pack("<Q", 16) + struct.pack("<IIII", 0x5A5A5A5A, 1, 4, 0xFFFFFFFF), "claims 4294967295 bytes"),
    "nano, sizes": (writer.nano_bytes(outputs=[described(X, claimed=HUGE)]), "claims tensors of 4294967296 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_lies_is_one_sentence_and_takes_no_memory(tmp_path: Path, case: str) -> None:
    content, sentence = HOSTILE[case]
    file = tmp_path / NAME
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises((NotARunError, DamagedRunError), match=sentence) as caught:
            read_acl_file(file)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert not is_acl_file(file)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((1 << 40,), "but has 24"),
        ((1 << 62, 1 << 62), "but has 24"),
        ((-1, 3), r"\[-1, 3\], which no tensor has"),
        ((7,), "28 bytes, but has 24"),
    ],
)
def test_a_shape_that_lies_is_one_sentence(tmp_path: Path, shape: tuple[int, ...], sentence: str) -> None:
    tensor = read(tmp_path, lying(shape=shape)).tensors[0]
    for format in (None, "ND"):
        with pytest.raises(DamagedRunError, match=sentence):
            tensor.array(format)


def test_deep_nesting_is_skipped_not_followed(tmp_path: Path) -> None:
    nested = b""
    for _ in range(5000):
        nested = writer.message(15, nested)
    head = writer.header(outputs=[described(X)]) + nested
    dump = read(tmp_path, struct.pack("<Q", len(head)) + head + X.tobytes())
    np.testing.assert_array_equal(dump.tensors[0].array(), X)


def test_deep_attributes_are_not_followed(tmp_path: Path) -> None:
    name = f"{NAME}.4.0.0.0"
    dump = read(tmp_path, writer.dump_bytes(outputs=[described(X)], attributes={"a": '{"threadMode":' + "[" * 100_000}), name)
    np.testing.assert_array_equal(dump.tensors[0].array(), X)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), form=st.sampled_from(sorted(FORMS)))
def test_a_damaged_file_never_gives_anything_but_our_errors(tmp_path: Path, data: st.DataObject, form: str) -> None:
    content = bytearray(FORMS[form](inputs=[described(X, format="FRACTAL_NZ")], outputs=[described(Y, format="NC1HWC0")]))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / NAME
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(InputError):
        for tensor in read_acl_file(file).tensors:
            tensor.data("ND")


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="cannot be opened"):
        read_acl_file(tmp_path / "none")
    with pytest.raises(NotARunError, match="cannot be opened"):
        read_acl_file(tmp_path)


SLICES = '{"threadMode": 1, "slice_instance_num": 2, "input_tensor_slice": [], "output_tensor_slice": [%s, %s]}'


def test_one_thread_of_a_sliced_operator_has_its_own_shape(tmp_path: Path) -> None:
    halves = [[{"lower": low, "higher": high}, {"lower": 0, "higher": 3}] for low, high in ((0, 3), (3, 4))]
    attribute = SLICES % tuple(f"[{half}]".replace("'", '"') for half in halves)
    content = writer.dump_bytes(outputs=[described(np.ones((3, 3), "f4"), shape=(4, 3))], attributes={"slice": attribute})
    assert read(tmp_path, content, f"{NAME}.4.487.0.0").tensors[0].array("ND").shape == (3, 3)
    assert read(tmp_path, content, f"{NAME}.4.487.1.0").tensors[0].array("ND").shape == (1, 3)
    with pytest.raises(DamagedRunError, match="48 bytes, but has 36"):
        read(tmp_path, content, f"{NAME}.4.487.2.0").tensors[0].array("ND")
