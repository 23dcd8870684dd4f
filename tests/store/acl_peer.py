# SPDX-License-Identifier: Apache-2.0
"""Run under a Python that has mindstudio-probe: convert dump files with its code, without CANN.

    python acl_peer.py FORMAT OUT FILE ...

The tool leaves the header to a library of CANN. Here the protobuf package decodes it, from the numbers of the fields alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

FIELDS = {
    "DumpData": "1 version str, 2 dump_time u64, 3 output *OpOutput, 4 input *OpInput, 5 buffer *OpBuffer, 6 op_name str, 7 attr *OpAttr",
    "OpOutput": "1 data_type u32, 2 format u32, 3 shape Shape, 4 original_op OriginalOp, 5 data bytes, 6 size u64, 7 original_shape Shape, "
    "8 sub_format i32, 9 address u64, 11 offset u64",
    "OpInput": "1 data_type u32, 2 format u32, 3 shape Shape, 4 data bytes, 5 size u64, 6 original_shape Shape, 7 sub_format i32, "
    "8 address u64, 9 offset u64",
    "OriginalOp": "1 name str, 2 output_index u32, 3 data_type u32, 4 format u32",
    "OpBuffer": "1 buffer_type u32, 2 data bytes, 3 size u64",
    "OpAttr": "1 name str, 2 value str",
    "Shape": "1 dim *u64",
}


def message_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = {"str": 9, "bytes": 12, "u64": 4, "u32": 13, "i32": 5}
    file = descriptor_pb2.FileDescriptorProto(name="dump.proto", package="dump", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, word, kind = field.split()
            plain = kind.removeprefix("*")
            added = message.field.add(name=word, number=int(number), label=3 if kind.startswith("*") else 1, type=kinds.get(plain, 11))
            if plain not in kinds:
                added.type_name = f".dump.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("dump.DumpData"))


def use_protobuf() -> None:
    """Let the tool decode headers without its library."""
    from dump_parse.big_dump_data import BigDumpDataParser
    from google.protobuf.json_format import MessageToDict

    parse = message_class().FromString

    def decode(self: Any) -> None:
        content = Path(self.dump_file_path).read_bytes()
        message = parse(content[8 : 8 + int.from_bytes(content[:8], "little")])
        self.dump_json_data = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    BigDumpDataParser._parse_dump_to_json = decode


def main(format: str, out: str, *files: str) -> None:
    found = importlib.util.find_spec("msprobe")
    assert found is not None
    assert found.origin is not None
    sys.path.insert(0, str(Path(found.origin).parent / "msaccucmp"))
    use_protobuf()
    from conversion.shape_format_conversion import FormatConversionMain
    from dump_parse.dump_data_parser import DumpDataParser

    for file in files:
        common = {"dump_path": file, "output_path": out, "dump_version": 2, "output_file_type": "npy"}
        if format == "as stored":
            DumpDataParser(argparse.Namespace(**common)).parse_dump_data()
            continue
        asked = {"custom_script_path": "", "input": None, "output": None, "shape": None, "format": format}
        FormatConversionMain(argparse.Namespace(**common, **asked)).convert_format()


if __name__ == "__main__":
    main(*sys.argv[1:])
