# SPDX-License-Identifier: Apache-2.0
"""Write down, for C, C++, Cython and Python, the structs and tables that they share.

    python tools/layouts.py            # after a change here: writes what is marked in the files below
    python tools/layouts.py --check    # says which file holds something else, and changes nothing

Each struct stands here once. In C and C++ its size and the offset of each field are asserted when it is compiled.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["main", "written"]

ROOT = Path(__file__).resolve().parent.parent / "src" / "ulpscope"

KERNEL_VERSION = 7  # goes up with every change of a result or a signature, so that a library left over from an older source is not used
RECORDER_VERSION = 6  # of `_compiled.pyx`; goes up with every change of the table below and of the frames that it writes
PART_VERSION = 1  # of what `ulpscope build` makes of `_native.cpp`
KINDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "uint64", "uint32", "uint16")
BUCKETS = 496  # buckets of a histogram of distances
CHUNK = 1 << 18  # bytes of a file that are compared at a time
STRIPE = 64  # bytes before a chunk that the hash needs
MOST_DIMS_OF_VIEWS = 16  # dimensions that the kernel reads in place
MOST_DIMS_OF_TENSORS = 25  # dimensions whose sizes the recorder has room for; it leaves tensors of more to Python


class Field(NamedTuple):
    """A field: its type in C, and how many of it there are, 0 for one that is no array."""

    name: str
    type: str
    many: int = 0

    def c(self, struct: str = "struct ") -> str:
        named = self.type.rstrip("* ").removeprefix("const ")
        kind = self.type.replace(named, f"{struct}{named}") if named in STRUCTS else self.type
        return f"{kind}{'' if kind.endswith('*') else ' '}{self.name}{f'[{self.many}]' if self.many else ''}"


class Struct(NamedTuple):
    what: str
    fields: list[Field]


def fields(**names: str) -> list[Field]:
    return [Field(name, kind) for kind, text in names.items() for name in text.split()]


DOUBLES = "max_abs max_rel sum_abs sum_squares sum_squares_subject sum_squares_reference sum_products"
COUNTS = "within_1e4 within_1e3 within_5e3 different sign_flips nan_disagree inf_disagree nonfinite"
STRUCTS: dict[str, Struct] = {
    "summary": Struct(
        "Fingerprint and statistics of a tensor.",
        [
            *(Field(name, "uint64_t") for name in ("s0", "s1")),
            *(Field(name, "double") for name in ("min", "max", "sum", "sum_squares")),
            *(Field(name, "uint64_t") for name in ("nan", "posinf", "neginf", "zero", "subnormal")),
        ],
    ),
    "difference": Struct(
        "What a pass over two tensors adds up; `worst` and `first_disagree` are -1 where there is none.",
        [
            *(Field(name, "double") for name in DOUBLES.split()),
            *(Field(name, "uint64_t") for name in COUNTS.split()),
            *(Field(name, "int64_t") for name in ("worst", "first_disagree")),
            Field("ulp_max", "uint64_t"),
            Field("ulp_counts", "uint64_t", BUCKETS),
        ],
    ),
    "kept": Struct("Bytes in a file, and their hash.", [Field("fd", "int64_t"), *fields(uint64_t="offset length high low")]),
    "unit": Struct(
        "Two of them, and the pairs of tensors that lie in them.",
        [Field("sides", "kept", 2), *fields(uint64_t="first_view num_views is_in_parts state")],
    ),
    "layout": Struct(
        "Where elements lie: pieces of so many bytes. Without dimensions there is one; else extents and strides are among the numbers, "
        "from these places on.",
        fields(uint64_t="first piece dims extents strides"),
    ),
    "view": Struct(
        "A pair of tensors; `values` and `order` are tables of one-byte dtypes.",
        [
            *fields(uint64_t="kind numel"),
            Field("values", "const double *"),
            Field("order", "const int64_t *"),
            Field("sides", "layout", 2),
        ],
    ),
    "result": Struct(
        "The fields of `struct difference` but its counts, two quantiles of these, and the bits of both elements at the worst place.",
        [Field("fields", "uint8_t", 18 * 8), *fields(uint64_t="middle high"), Field("bits", "uint64_t", 2)],
    ),
    "units": Struct(
        "Work that several threads share.",
        [
            Field("units", "unit *"),
            Field("views", "const view *"),
            Field("numbers", "const size_t *"),
            Field("results", "result *"),
            *fields(uint64_t="count next"),
        ],
    ),
    # structs that the recorder shares with the part that `ulpscope build` compiles
    "TensorFacts": Struct(
        "A tensor. It begins as DLPack's DLTensor does. `mirrors`: 1 where values are negated, 2 where they are conjugated.",
        [
            Field("data", "const void *"),
            *fields(int32_t="device_type device_id ndim"),
            *fields(uint8_t="code bits"),
            Field("lanes", "uint16_t"),
            *(Field(name, "const int64_t *") for name in ("shape", "strides")),
            Field("byte_offset", "uint64_t"),
            Field("storage", "void *"),
            Field("version", "int64_t"),
            *fields(int="requires_grad mirrors"),
        ],
    ),
    "Entering": Struct("Where a gradient enters a node that a call owns.", fields(int32_t="place result is_base")),
    "Leaving": Struct(
        "Where it leaves; no view, one in another shape (1), a transposed one (2), or a cast of a float32 leaf (3).",
        fields(int32_t="place input view"),
    ),
    "Watched": Struct(
        "A node, and ranges of the above; `entering` is -1 where no result comes from here.",
        [Field("node", "Node *"), *fields(int32_t="entering num_entering leaving num_leaving")],
    ),
    "Plan": Struct(
        "The nodes that a finished call owns; `behind` is where the one result is a view of an inner one.",
        [
            Field("watched", "const Watched *"),
            Field("entering", "const Entering *"),
            Field("leaving", "const Leaving *"),
            Field("behind", "Node *"),
            Field("planner", "void *"),
            Field("count", "int32_t"),
        ],
    ),
}
KERNEL = ["summary", "difference", "kept", "unit", "layout", "view", "result", "units"]
RECORDER = ["TensorFacts", "Entering", "Leaving", "Watched", "Plan"]

# Name, result, parameters, and how Cython learns of errors.
TABLE = [
    ("tensor_of", "const void*", "PyObject*", "noexcept"),
    ("object_of", "PyObject*", "const void*", "except NULL"),
    ("look", "int", "const void*, TensorFacts*", "noexcept"),
    ("version_of", "int64_t", "const void*", "noexcept"),
    ("hold", "void*", "const void*", "noexcept"),
    ("is_as_taken", "int", "const void*, int64_t, uint64_t", "noexcept"),
    ("object_of_held", "PyObject*", "const void*, int32_t, const int64_t*, const int64_t*", "except NULL"),
    ("let_go", "void", "void*", "noexcept"),
    ("weak_reference", "void*", "void*", "noexcept"),
    ("state", "int", "", "noexcept"),
    ("is_seen", "int", "", "noexcept"),
    ("graph_task", "int", "", "noexcept"),
    ("shut_eyes", "int", "", "noexcept"),
    ("open_eyes", "void", "int", "noexcept"),
    ("new_edges", "void*", "", "noexcept"),
    ("free_edges", "void", "void*", "noexcept"),
    ("add_edge", "int", "void*, const void*, int32_t", "except -1"),
    ("add_leaf", "int", "void*, const void*, int32_t", "except -1"),
    ("begin_call", "int", "void*", "except -1"),
    ("plan_call", "int", "void*, const void* const*, int32_t, int32_t, Plan*", "except -1"),
    ("free_plan", "void", "Plan*", "noexcept"),
    ("gradient_at", "const void*", "const void*, int64_t", "noexcept"),
    ("hook_before", "int", "void*, PyObject*", "except -1"),
    ("hook_after", "int", "void*, PyObject*", "except -1"),
    ("set_callback", "void", "Callback", "noexcept"),
]

SIZES = {"uint8_t": 1, "uint16_t": 2, "int32_t": 4, "int": 4, "int64_t": 8, "uint64_t": 8, "double": 8}


def size_of(kind: str) -> tuple[int, int]:
    """Return size and alignment where pointers have eight bytes."""
    if kind.endswith("*"):
        return 8, 8
    if kind in SIZES:
        return SIZES[kind], SIZES[kind]
    places = offsets(STRUCTS[kind].fields)
    align = max(size_of(field.type)[1] for field in STRUCTS[kind].fields)
    return places[-1] + -places[-1] % align, align


def offsets(members: list[Field]) -> list[int]:
    """Return where each field begins, and where the last one ends."""
    found, at = [], 0
    for field in members:
        size, align = size_of(field.type)
        at += -at % align
        found.append(at)
        at += size * (field.many or 1)
    return [*found, at]


def asserts(name: str, word: str, struct: str) -> Iterator[str]:
    members = STRUCTS[name].fields
    wanted = [f"sizeof({struct}{name}) == {size_of(name)[0]}"]
    wanted += [f"offsetof({struct}{name}, {field.name}) == {at}" for field, at in zip(members, offsets(members), strict=False)]
    text = f'{word}(sizeof(void *) != 8 || ({" && ".join(wanted)}), "tools/layouts.py");'
    yield from textwrap.wrap(text, 136, subsequent_indent="    ", break_long_words=False)


def in_c() -> Iterator[str]:
    yield f"enum {{ KERNEL_VERSION = {KERNEL_VERSION}, BUCKETS = {BUCKETS}, CHUNK = {CHUNK}, STRIPE = {STRIPE} }};"
    yield f"enum {{ MOST_DIMS = {MOST_DIMS_OF_VIEWS} }}; /* of a view that is read as it lies */"
    yield "/* CODES: one byte for each element, its value looked up in a table. */"
    yield f"enum kind {{ {', '.join(map(str.upper, KINDS))}, CODES }};"
    for name in KERNEL:
        yield f"/* {STRUCTS[name].what} */"
        yield f"struct {name} {{"
        yield from (f"    {field.c()};" for field in STRUCTS[name].fields)
        yield "};"
        yield from asserts(name, "_Static_assert", "struct ")


def in_cpp() -> Iterator[str]:
    yield f"constexpr int kVersion = {PART_VERSION};"
    yield f"constexpr int64_t kMostDims = {MOST_DIMS_OF_TENSORS};"
    yield "typedef int (*Callback)(PyObject* hook, const void* left, const void* entered);"
    for name in RECORDER:
        yield f"// {STRUCTS[name].what}"
        yield f"struct {name} {{"
        yield from (f"  {field.c('')};" for field in STRUCTS[name].fields)
        yield "};"
        yield from asserts(name, "static_assert", "")
    yield "struct Native {"
    for name, result, parameters, _ in TABLE:
        yield f"  {result} (*{name})({parameters});"
    yield "};"


_CTYPES = {"uint64_t": "c_uint64", "int64_t": "c_int64", "double": "c_double", "uint8_t": "c_uint8"}
_CODES = {"uint64_t": "Q", "int64_t": "q", "double": "d"}


def in_python() -> Iterator[str]:
    yield f"VERSION = {KERNEL_VERSION}"
    yield "KINDS = {"
    yield from (f'    "{name}": {number},' for number, name in enumerate(KINDS))
    yield "}"
    yield f"CODES = {len(KINDS)}"
    yield f"BUCKETS = {BUCKETS}"
    yield f"MOST_DIMS = {MOST_DIMS_OF_VIEWS}  # of a view that is read as it lies"
    yield f"BYTES_OF_PARTS = {2 * (CHUNK + STRIPE)}  # room for a chunk of both sides"
    yield f"UNIT_WORDS = {size_of('unit')[0] // 8}  # of `struct unit`, the last of which is its state"
    yield f"RESULT_BYTES = {size_of('result')[0]}"
    told = "".join(_CODES[field.type] for field in STRUCTS["difference"].fields[:-1])
    yield f'RESULT_FORMAT = "={told}QQ8s8s"  # of `struct result`'
    for name, called in (("summary", "SummaryOut"), ("difference", "DifferenceOut"), ("units", "Units")):
        yield ""
        yield ""
        yield f"class {called}(ctypes.Structure):"
        yield f'    """`struct {name}` of _kernel.c."""'
        yield ""
        yield "    _fields_ = ["
        for field in STRUCTS[name].fields:
            kind = "c_void_p" if field.type.endswith("*") else _CTYPES[field.type]
            yield f'        ("{field.name}", ctypes.{kind}{f" * {field.many}" if field.many else ""}),'
        yield "    ]"
    yield ""
    yield ""


def in_cython_kernel() -> Iterator[str]:
    yield "cdef struct HostSummary:  # `struct summary` of numerics/_kernel.c"
    yield from (f"    {field.type} {field.name}" for field in STRUCTS["summary"].fields)


def in_versions() -> Iterator[str]:
    yield f"RECORDER_VERSION = {RECORDER_VERSION}"
    yield f"PART_VERSION = {PART_VERSION}"


def in_cython() -> Iterator[str]:
    yield f"VERSION = {RECORDER_VERSION}"
    yield ""
    yield "cdef enum:"
    yield f"    MOST_DIMS = {MOST_DIMS_OF_TENSORS}"
    yield ""
    yield "cdef struct TensorFacts:"
    yield "    DLTensor told"
    told = [field.name for field in STRUCTS["TensorFacts"].fields].index("storage")
    yield from (f"    {field.c('').replace(' *', '* ')}" for field in STRUCTS["TensorFacts"].fields[told:])
    for name in RECORDER[1:]:
        yield ""
        yield f"cdef struct {name}:"
        for field in STRUCTS[name].fields:
            yield f"    {field.c('').replace('Node *', 'void *').replace(' *', '* ')}"


def in_cython_table() -> Iterator[str]:
    yield "cdef struct Native:"
    for name, result, parameters, errors in TABLE:
        given = "int (*)(void*, const void*, const void*) except -1" if parameters == "Callback" else parameters
        yield f"    {result} (*{name})({given.replace('PyObject*', 'void*').replace('void* const*', 'void**')}) {errors}"


WRITTEN: list[tuple[str, str, str, Callable[[], Iterator[str]]]] = [
    ("numerics/_kernel.c", "layouts", "/* {} */", in_c),
    ("numerics/layouts.py", "layouts", "# {}", in_python),
    ("capture/native/versions.py", "versions", "# {}", in_versions),
    ("capture/native/_native.cpp", "layouts", "// {}", in_cpp),
    ("capture/native/_compiled.pyx", "kernel", "# {}", in_cython_kernel),
    ("capture/native/_compiled.pyx", "recorder", "# {}", in_cython),
    ("capture/native/_compiled.pyx", "table", "# {}", in_cython_table),
]


def written(text: str, name: str, comment: str, lines: Iterator[str]) -> str:
    """Put the lines between the two marks in the text."""
    begin, end = (comment.format(f"{word} of {name}: tools/layouts.py writes it") for word in ("begin", "end"))
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"tools/layouts.py: a file has no marks for {name!r}")
    return "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])


def main(words: list[str]) -> int:
    stale = []
    for file, name, comment, lines in WRITTEN:
        path = ROOT / file
        before = path.read_text()
        after = written(before, name, comment, lines())
        if after != before:
            stale.append(f"{file} ({name})")
            if "--check" not in words:
                path.write_text(after)
    if stale and "--check" in words:
        print(f"not what tools/layouts.py writes: {', '.join(stale)}; run it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
