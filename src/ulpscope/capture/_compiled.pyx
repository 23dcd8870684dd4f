# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, embedsignature=True, binding=False
"""The hot path of a recording, compiled: what happens thousands of times in a step.

It is optional and gives the same records as the files of Python that it stands for; each part names its twin, which says why things are done.
Whatever is rare is left to Python by both. Only the order in which backward passes are complete may differ.

- objects: `values`, `taking.Taken`, `device_summaries.Pending`, `observing.OpenCall`, `holding.Draft`
- `Reader`: `taking.Taking`
- `Counter`, `Queue`, `Aligned`, `unchanged`, `fill`, `settle_rows`: `devices`, `device_summaries`, `device_tables`, `values`
- `Draft.row`: `tensors.row_of`, and the MessagePack of the store format
- `BackwardOfCall`, `Hook`: `backward`
- `Observer`: `observing`, with `walk`, `stacks` and `state.mode_row`
- `Handler`, `Announcer`: `modes`, and `session.CaptureSession.open_call`

Objects that live until the end of a step stay outside of Python's garbage collector (`no_gc`); none is part of a circle.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.math cimport ldexp, sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

import math

import msgspec
import torch

from ulpscope.model import Summary, view_content

cdef object _tensor_type = torch.Tensor
cdef object _parameter_type = torch.nn.Parameter
cdef object _untyped_storage = torch._C.TensorBase.untyped_storage
cdef object _is_neg = torch._C.TensorBase.is_neg
cdef object _is_conj = torch._C.TensorBase.is_conj
cdef object _detach = torch._C.TensorBase.detach
cdef object _num_dispatch_modes = torch._C._len_torch_dispatch_stack
cdef object _transforms = torch._C._functorch.peek_interpreter_stack
cdef object _is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
cdef object _encode_value = msgspec.msgpack.Encoder().encode

NOT_KEPT = "values not kept: the size limit of this run is reached"  # as `values.NOT_KEPT`


# ---- what torch tells of a tensor in one go (DLPack's table of C functions, which torch hands out as a capsule)


cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef struct Exchange:
    uint32_t major
    uint32_t minor
    void* previous
    void* allocate
    void* managed_from_object
    void* managed_to_object
    int (*tensor_from_object)(void*, DLTensor*) except -1
    int (*current_stream)(int32_t, int32_t, void**) except -1

cdef enum:
    MOST_DIMS = 25

cdef Exchange* _exchange = NULL


cdef void _find_exchange() noexcept:
    global _exchange
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return
    cdef Exchange* found = <Exchange*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    if found.major == 1 and found.tensor_from_object != NULL and found.current_stream != NULL:
        _exchange = found


_find_exchange()
IS_USABLE = _exchange != NULL
VERSION = 2  # of `compiled._VERSION`


# ---- objects


@cython.final
@cython.no_gc
cdef class Form:
    cdef public str dtype
    cdef public object shape
    cdef public object strides
    cdef public str device
    cdef public bint is_on_host
    cdef public object type
    cdef public str note
    cdef public long long numel
    cdef public long long size
    cdef public long long extent
    cdef public bint is_contiguous
    cdef public bint is_complex
    cdef public dict layouts
    cdef public object take_aligned
    cdef bytes head

    def __init__(self, dtype, shape, strides, device, is_on_host, type, note="", numel=0, size=0, extent=0, is_contiguous=False,
                 is_complex=False, layouts=None, take_aligned=None):
        self.dtype, self.shape, self.strides, self.device = dtype, shape, strides, device
        self.is_on_host, self.type, self.note = is_on_host, type, note
        self.numel, self.size, self.extent = numel, size, extent
        self.is_contiguous, self.is_complex = is_contiguous, is_complex
        self.layouts = {} if layouts is None else layouts
        self.take_aligned = take_aligned

    @property
    def is_dense(self):
        """Whether the elements fill their memory, in whatever order."""
        return self.extent == math.prod(self.shape) * self.size and not any(
            [stride == 0 and size > 1 for stride, size in zip(self.strides or (), self.shape, strict=True)]
        )


@cython.final
@cython.no_gc
@cython.freelist(1024)
cdef class Values:
    cdef public str note
    cdef public bint waits
    cdef public object kept
    cdef public object view
    cdef public long long version
    cdef public unsigned long long address
    cdef public Form form
    cdef public int mirrors
    cdef public Values next
    cdef object given_summary
    cdef object given_fingerprint
    cdef bint measured  # whether what follows came from a device
    cdef bint has_summary, has_order, has_mean
    cdef uint64_t high, low
    cdef long long numel
    cdef double minimum, maximum, mean, rms
    cdef long long counts[5]

    def __init__(self, summary=None, fingerprint=None, note="", waits=False, kept=None, view=None, version=0, address=0, form=None,
                 mirrors=0, next=None):
        self.given_summary, self.given_fingerprint = summary, fingerprint
        self.note, self.waits, self.kept, self.view = note, waits, kept, view
        self.version, self.address, self.form, self.mirrors, self.next = version, address, form, mirrors, next

    @property
    def summary(self):
        if not self.has_summary:
            return self.given_summary
        return (
            self.numel,
            self.minimum if self.has_order else None,
            self.maximum if self.has_order else None,
            self.mean if self.has_mean else None,
            self.rms if self.has_mean else None,
            self.counts[0], self.counts[1], self.counts[2], self.counts[3], self.counts[4],
        )

    @summary.setter
    def summary(self, row):
        self.given_summary = row
        self.has_summary = False

    @property
    def fingerprint(self):
        return f"u1:{self.high:016x}{self.low:016x}" if self.measured else self.given_fingerprint

    @fingerprint.setter
    def fingerprint(self, text):
        self.given_fingerprint = text
        self.measured = False

    @property
    def is_complete(self):
        return not self.waits and (self.kept is None or not self.kept.is_under_way)

    @property
    def content(self):
        """The key of the kept values."""
        if self.kept is None or self.kept.key is None:
            return None
        return self.kept.key if self.view is None else view_content(self.kept.key, *self.view)

    @property
    def remark(self):
        """The note, or why the values are not kept."""
        if self.note or self.kept is None or self.kept.key is not None:
            return self.note
        return self.kept.note or NOT_KEPT

    def summary_object(self):
        row = self.summary
        return None if row is None else Summary(*row)


@cython.final
@cython.no_gc
@cython.freelist(1024)
cdef class Taken:
    cdef public object slot
    cdef public Form form
    cdef public Values values
    cdef public bint requires_grad

    def __init__(self, slot, Form form, Values values, bint requires_grad):
        self.slot, self.form, self.values, self.requires_grad = slot, form, values, requires_grad


cdef inline Taken _taken(object slot, Form form, Values values, bint requires_grad):
    cdef Taken taken = Taken.__new__(Taken)
    taken.slot, taken.form, taken.values, taken.requires_grad = slot, form, values, requires_grad
    return taken


@cython.final
@cython.no_gc
@cython.freelist(128)
cdef class Pending:
    cdef public Values values
    cdef public long long numel
    cdef public object layout
    cdef public unsigned long long address
    cdef public object alias
    cdef public long long version

    def __init__(self, Values values, long long numel, layout, unsigned long long address, alias, long long version):
        self.values, self.numel, self.layout, self.address, self.alias, self.version = values, numel, layout, address, alias, version


# ---- taking tensors down


cdef class Counter:
    """How many tensors were taken on every device that none has been told to read."""

    cdef public long long num_pending


cdef class Queue:
    """Tensors of one device that wait to be read."""

    cdef public list _pending
    cdef public long long _pending_bytes
    cdef public bint is_given_up
    cdef public long long most_rows
    cdef public long long most_bytes
    cdef public long long _stream
    cdef public bint has_streams

    def __cinit__(self, *args, **kwargs):
        self._pending = []
        self._stream = -1

    @property
    def num_pending(self):
        return len(self._pending)


@cython.final
@cython.no_gc
cdef class Aligned:
    """How a device takes a tensor of one form at an address that is a multiple of 8."""

    cdef Counter devices
    cdef Queue queue
    cdef object layout
    cdef long long numel
    cdef long long num_bytes
    cdef object flush

    def __init__(self, Counter devices, Queue queue, layout, Form form, flush):
        self.devices, self.queue, self.layout, self.numel = devices, queue, layout, form.numel
        self.num_bytes, self.flush = layout.num_bytes, flush

    cdef Values take(self, object tensor, DLTensor* told, unsigned long long address):
        cdef Queue queue = self.queue
        cdef void* stream = NULL
        if queue.is_given_up:
            return None
        if queue.has_streams:
            _exchange.current_stream(told.device.device_type, told.device.device_id, &stream)
            if <long long>stream != queue._stream or (stream != NULL and _is_capturing()):  # a graph never captures the default stream
                return None
        if _num_dispatch_modes() or _transforms() is not None:
            return None
        cdef Values values = Values.__new__(Values)
        values.note, values.waits = "", True
        cdef Pending entry = Pending.__new__(Pending)
        entry.values, entry.numel, entry.layout, entry.address = values, self.numel, self.layout, address
        entry.alias = _detach(tensor)
        entry.version = entry.alias._version
        self.devices.num_pending += 1
        queue._pending.append(entry)
        queue._pending_bytes += self.num_bytes
        if len(queue._pending) >= queue.most_rows or queue._pending_bytes >= queue.most_bytes:
            self.flush(tensor.device, queue)
        return values


cdef class Reader:
    """What a reader has seen in this step, and the common way to take a tensor down; the rest is `TensorReader`'s."""

    cdef public dict _seen
    cdef public list _references
    cdef public dict _forms
    cdef public bint _keeps_views
    cdef dict _told
    cdef long long most_storages

    def __cinit__(self, *args, **kwargs):
        self._seen, self._references, self._forms, self._told = {}, [], {}, {}
        self.most_storages = 50_000  # as `taking.MOST_STORAGES`

    cdef Form _form_of(self, object tensor, DLTensor* told):
        cdef char key[16 + 16 * MOST_DIMS]
        cdef Py_ssize_t bytes_of = 8 * told.ndim
        memcpy(key, &told.device, 8)
        memcpy(key + 8, &told.dtype, 4)
        memcpy(key + 12, &told.ndim, 4)
        memcpy(key + 16, told.shape, bytes_of)
        memcpy(key + 16 + bytes_of, told.strides, bytes_of)
        name = PyBytes_FromStringAndSize(key, 16 + 2 * bytes_of)
        form = self._told.get(name)
        if form is None:
            if len(self._told) >= self.most_storages:
                self._told.clear()
            form = self._told[name] = self._form(tensor)
        return <Form>form

    def take(self, slot, tensor, *, bint is_undefined=False):
        """Take down one tensor; its values may come later. Call it where no function mode is active."""
        return self._take(slot, tensor, is_undefined)

    cdef Taken _take(self, object slot, object tensor, bint is_undefined):
        cdef DLTensor told
        cdef Values known, values
        cdef Form form
        cdef unsigned long long address
        cdef long long version
        cdef int mirrors
        if is_undefined or (type(tensor) is not _tensor_type and type(tensor) is not _parameter_type):
            return self._look(slot, tensor, is_undefined)
        try:
            storage = _untyped_storage(tensor)
            version = tensor._version
            _exchange.tensor_from_object(<void*>tensor, &told)
        except (RuntimeError, BufferError):  # no memory, no version or no shape: a rare kind
            return self._look(slot, tensor, is_undefined)
        if told.ndim > MOST_DIMS:
            return self._look(slot, tensor, is_undefined)
        identity = storage._cdata
        address = <unsigned long long>told.data + told.byte_offset
        form = self._form_of(tensor, &told)
        mirrors = 1 if _is_neg(tensor) else 0
        if form.is_complex and _is_conj(tensor):
            mirrors += 2
        known = values = <Values>self._seen.get(identity)
        while values is not None:
            if values.form is form and values.address == address and values.version == version and values.mirrors == mirrors:
                return _taken(slot, form, values, tensor.requires_grad)
            values = values.next
        if not address or form.note:
            return self._look(slot, tensor, is_undefined)
        if not mirrors and not address & 7 and type(form.take_aligned) is Aligned:
            values = (<Aligned>form.take_aligned).take(tensor, &told, address)
        if values is None:
            base = self._base(known, version, address, form) if self._keeps_views and known is not None and not mirrors else None
            values = self._read(tensor, form, base)
        values.version, values.address, values.form, values.mirrors, values.next = version, address, form, mirrors, known
        if known is None:
            if len(self._seen) >= self.most_storages:
                self.forget()
            self._references.append(storage._weak_ref())
        self._seen[identity] = values
        return _taken(slot, form, values, tensor.requires_grad)


def unchanged(list pending, lose):
    """Those that nobody has written to since they were taken; of the others, `lose` is told."""
    cdef Pending entry
    entries = []
    for entry in pending:
        if entry.version == -1 or (entry.alias._version == entry.version and entry.alias.data_ptr() == entry.address):
            entries.append(entry)
        else:
            lose(entry.values)
    return entries


def unlink(chains):
    """Take chains of values apart, from the front: long ones would be freed by as deep a recursion."""
    cdef Values values, following
    for values in chains:
        while values is not None:
            following = values.next
            values.next = None
            values = following


def fill(long long[::1] upload, list layouts, list addresses, long long most_rows, long long fields, long long never):
    """Write the rows of a flush; the result is the first program of each row, and their number at the end."""
    cdef Py_ssize_t count = len(layouts), number
    cdef long long first = 0
    cdef bytes row
    firsts = [0]
    for number in range(count):
        layout = layouts[number]
        row = layout.row
        memcpy(&upload[most_rows + number * fields], PyBytes_AS_STRING(row), 8 * fields)
        upload[most_rows + number * fields] = <long long><unsigned long long>addresses[number]
        upload[most_rows + number * fields + 2] = upload[number] = first
        first += layout.num_programs
        firsts.append(first)
    for number in range(count, most_rows):
        upload[number] = never
    return firsts


def settle_rows(const long long[:, :] rows, list numels, list owners, bint statistics):
    """Hand rows of results, as they came from a device, to the values that wait for them."""
    cdef Values values
    cdef Py_ssize_t number
    cdef long long finite, exponent
    cdef long long raw
    cdef double total, squares
    cdef int field
    for number in range(len(owners)):
        values = owners[number]
        values.low, values.high = <uint64_t>rows[number, 0], <uint64_t>rows[number, 1]
        values.measured = True
        values.waits = False
        if not statistics:
            continue
        values.numel = numels[number]
        for field in range(5):
            values.counts[field] = rows[number, 7 + field]
        finite = values.numel - values.counts[0] - values.counts[1] - values.counts[2]
        raw = rows[number, 2]
        values.minimum = (<double*>&raw)[0] + 0.0
        raw = rows[number, 3]
        values.maximum = (<double*>&raw)[0] + 0.0
        raw = rows[number, 4]
        total = (<double*>&raw)[0]
        raw = rows[number, 5]
        squares = (<double*>&raw)[0]
        exponent = rows[number, 6]
        values.has_order = values.has_mean = values.has_summary = True
        if finite:
            values.mean = ldexp(total / finite, <int>exponent)
            values.rms = ldexp(sqrt(squares / finite), <int>exponent)
        else:
            values.has_order = values.counts[0] < values.numel
            values.has_mean = False


# ---- MessagePack


@cython.final
@cython.no_gc
cdef class _Buffer:
    cdef char* room
    cdef Py_ssize_t size, used

    def __cinit__(self):
        self.size = 4096
        self.room = <char*>malloc(self.size)
        if self.room == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.room)

    cdef char* more(self, Py_ssize_t count) except NULL:
        cdef Py_ssize_t size
        cdef char* room
        if self.used + count > self.size:
            size = 2 * (self.used + count)
            room = <char*>realloc(self.room, size)
            if room == NULL:
                raise MemoryError()
            self.room, self.size = room, size
        self.used += count
        return self.room + self.used - count

    cdef int byte(self, uint8_t value) except -1:
        self.more(1)[0] = <char>value
        return 0

    cdef int raw(self, const char* data, Py_ssize_t count) except -1:
        memcpy(self.more(count), data, count)
        return 0

    cdef int big(self, uint8_t mark, uint64_t value, int width) except -1:
        cdef char* place = self.more(1 + width)
        cdef int number
        place[0] = <char>mark
        for number in range(width):
            place[1 + number] = <char>(value >> (8 * (width - 1 - number)))
        return 0

    cdef int count(self, uint64_t value) except -1:
        if value < 128:
            return self.byte(<uint8_t>value)
        if value < (1 << 8):
            return self.big(0xCC, value, 1)
        if value < (1 << 16):
            return self.big(0xCD, value, 2)
        if value < (<uint64_t>1 << 32):
            return self.big(0xCE, value, 4)
        return self.big(0xCF, value, 8)

    cdef int number(self, double value) except -1:
        return self.big(0xCB, (<uint64_t*>&value)[0], 8)

    cdef int text(self, str value) except -1:
        cdef Py_ssize_t length = 0
        cdef const char* data = PyUnicode_AsUTF8AndSize(value, &length)
        if length < 32:
            self.byte(<uint8_t>(0xA0 | length))
        elif length < (1 << 8):
            self.big(0xD9, length, 1)
        elif length < (1 << 16):
            self.big(0xDA, length, 2)
        else:
            self.big(0xDB, length, 4)
        return self.raw(data, length)

    cdef int items(self, Py_ssize_t length) except -1:
        if length < 16:
            return self.byte(<uint8_t>(0x90 | length))
        if length < (1 << 16):
            return self.big(0xDC, length, 2)
        return self.big(0xDD, length, 4)

    cdef int hexadecimal(self, uint64_t value) except -1:
        cdef char* place = self.more(16)
        cdef int number, digit
        for number in range(16):
            digit = <int>(value >> (60 - 4 * number)) & 15
            place[number] = <char>(48 + digit if digit < 10 else 87 + digit)
        return 0


cdef dict _slot_names = {}


cdef bytes _slot_name(object slot):
    known = _slot_names.get(<size_t><void*>slot)
    if known is not None:
        return <bytes>(<tuple>known)[1]
    if len(_slot_names) >= 65536:
        _slot_names.clear()
    name = _encode_value((slot.role, slot.path))
    _slot_names[<size_t><void*>slot] = (slot, name)
    return name


cdef bytes _head(Form form):
    if form.head is None:
        form.head = _encode_value((form.dtype, form.shape, form.strides, form.device))[1:]
    return form.head


cdef int _put_slot(_Buffer out, Taken taken) except -1:
    cdef Values values = taken.values
    cdef bytes name = _slot_name(taken.slot), head = _head(taken.form)
    cdef int number
    out.byte(0x9A)
    out.raw(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
    out.raw(PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head))
    out.byte(0xC3 if taken.requires_grad else 0xC2)
    if values.has_summary:
        out.byte(0x9A)
        out.count(values.numel)
        if values.has_order:
            out.number(values.minimum)
            out.number(values.maximum)
        else:
            out.raw(b"\xc0\xc0", 2)
        if values.has_mean:
            out.number(values.mean)
            out.number(values.rms)
        else:
            out.raw(b"\xc0\xc0", 2)
        for number in range(5):
            out.count(values.counts[number])
    elif values.given_summary is None:
        out.byte(0xC0)
    else:
        encoded = <bytes>_encode_value(values.given_summary)
        out.raw(PyBytes_AS_STRING(encoded), PyBytes_GET_SIZE(encoded))
    if values.measured:
        out.raw(b"\xd9\x23u1:", 5)
        out.hexadecimal(values.high)
        out.hexadecimal(values.low)
    elif values.given_fingerprint is None:
        out.byte(0xC0)
    else:
        out.text(values.given_fingerprint)
    if values.kept is None:
        out.byte(0xC0)
        out.text(values.note)
        return 0
    content = values.content
    if content is None:
        out.byte(0xC0)
    else:
        out.text(content)
    out.text(values.remark)
    return 0


def are_complete(tuple slots):
    """Whether the values of every slot are there."""
    cdef Taken taken
    cdef Values values
    for taken in slots:
        values = taken.values
        if values.waits or (values.kept is not None and values.kept.is_under_way):
            return False
    return True


# ---- arguments and results


cdef inline bint _is_plain(object value):
    return type(value) is _tensor_type or type(value) is _parameter_type


cdef tuple _split(tuple args, dict kwargs, list found):
    """The arguments of a call as plain values; its tensors are added to `found`."""
    cdef list encoded = []
    cdef Py_ssize_t index
    for index in range(len(args)):
        value = args[index]
        kind = type(value)
        if (kind is _tensor_type or kind is _parameter_type) and index < NUM_READY:
            slot, mark = <tuple>_ready_inputs[index]
            found.append((slot, value))
            encoded.append(mark)
        elif value is None or kind is bool or kind is float:
            encoded.append(value)
        else:
            encoded.append(_encode_argument(value, (index,), "input", found))
    named = None
    if kwargs:
        named = {name: _encode_argument(value, (name,), "input", found) for name, value in kwargs.items()}
    return tuple(encoded), named


cdef list _results(object value):
    if _is_plain(value):
        return [(_first_output, value)]
    return <list>_tensors_in(value, "output")


# ---- the backward side of a call


cdef object _next_sequence_number = torch._C._autograd._get_sequence_nr
cdef object _graph_task = torch._C._current_graph_task_id
cdef object _current_node = torch._C._current_autograd_node
cdef unsigned long long ACCUMULATE_GRAD = 2**64 - 1


@cython.final
@cython.no_gc
cdef class Edges:
    cdef dict nodes
    cdef public dict leaves
    cdef set bases
    cdef list found
    cdef unsigned long long first


cdef Edges _edges_of(list found):
    cdef Edges edges = Edges.__new__(Edges)
    cdef list bases = None
    edges.nodes, edges.leaves, edges.found = {}, {}, found
    for slot, tensor in found:
        if not tensor.requires_grad:
            continue
        node = tensor.grad_fn
        if node is None:
            edges.leaves.setdefault(<size_t><void*>tensor, slot)
        else:
            edges.nodes.setdefault((node, tensor.output_nr), slot)
        base = tensor._base
        if base is not None and base.requires_grad:
            if bases is None:
                bases, edges.bases = [], set()
            bases.append((slot, base))
    if bases is not None:
        for slot, base in bases:
            edges.bases.add(<size_t><void*>base)
            if base.grad_fn is None:
                edges.leaves.setdefault(<size_t><void*>base, slot)
            else:
                edges.nodes.setdefault((base.grad_fn, base.output_nr), slot)
    edges.first = _next_sequence_number()
    return edges


@cython.final
@cython.no_gc
cdef class _Pass:
    cdef long long events_left
    cdef list parts_left  # of each slot that the call passes a gradient on to
    cdef list inputs
    cdef list outputs
    cdef dict sums


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class BackwardOfCall:
    """Collects the gradients of one call, pass by pass, and hands over each finished pass.

    `slots` are those to which gradients are passed on, `num_parts` in how many parts each comes. The first pass under way is `current`; only
    where there are more at a time is there a dict of the others.
    """

    cdef Observer writer
    cdef OpenCall call
    cdef long long num_events
    cdef tuple slots
    cdef tuple num_parts
    cdef _Pass current
    cdef long long task
    cdef dict others

    def flush(self):
        """Hand over what has come, at the end of a backward pass that did not run every node."""
        cdef _Pass unfinished
        with self.writer.lock:
            self.writer.begun.pop(self, None)
            while self.others:
                _, unfinished = self.others.popitem()
                self._hand_over(unfinished)
            unfinished, self.current = self.current, None
            if unfinished is not None:
                self._hand_over(unfinished)

    cdef _Pass _pass(self):
        cdef long long task = _graph_task()
        cdef _Pass current
        if self.current is not None and self.task == task:
            return self.current
        if self.others is not None and task in self.others:
            return <_Pass>self.others[task]
        self.writer.begun[self] = None
        current = _Pass.__new__(_Pass)
        current.events_left, current.parts_left, current.inputs, current.outputs = self.num_events, list(self.num_parts), [], []
        if self.current is None:
            self.current, self.task = current, task
        else:
            if self.others is None:
                self.others = {}
            self.others[task] = current
        return current

    cdef int _enter(self, _Pass current, tuple slots, tuple shape, tuple gradients) except -1:
        cdef Taken taken
        cdef Py_ssize_t number
        for item in slots:
            number, slot = <object>(<tuple>item)[0], <object>(<tuple>item)[1]
            gradient = gradients[number] if number < len(gradients) else None
            if gradient is None:
                continue
            for taken in current.inputs:
                if taken.slot is slot or taken.slot == slot:
                    break
            else:
                if shape is not None:
                    if gradient.numel() != math.prod(shape):
                        continue
                    gradient = _as_view(gradient, shape)
                current.inputs.append(self.writer._read_one(slot, gradient))
        return 0

    cdef int _leave(self, _Pass current, tuple leaving, tuple gradients) except -1:
        cdef long long left
        cdef Py_ssize_t number, place
        cdef bint looks_through = False
        for part in leaving:
            number, place, through = <object>(<tuple>part)[0], <object>(<tuple>part)[1], <object>(<tuple>part)[2]
            looks_through |= through is not None
            gradient = gradients[number] if number < len(gradients) else None
            if gradient is not None and through is not None:
                gradient = _as_view(gradient, through)
            left = <long long>current.parts_left[place] - 1
            current.parts_left[place] = left
            if left == 0 and (current.sums is None or place not in current.sums):
                if gradient is not None:
                    current.outputs.append(self.writer._read_one(self.slots[place], gradient))
            else:
                self._add_part(current, place, gradient, left)
        return looks_through

    cdef int _add_part(self, _Pass current, Py_ssize_t place, object gradient, long long left) except -1:
        if current.sums is None:
            current.sums = {}
        earlier = current.sums.pop(place, None)
        if gradient is not None:
            earlier = _sum(earlier, gradient)
        if earlier is None:
            return 0
        if left:
            current.sums[place] = earlier
        else:
            current.outputs.append(self.writer._read_one(self.slots[place], earlier))
        return 0

    cdef int _event(self, _Pass current) except -1:
        current.events_left -= 1
        if current.events_left:
            return 0
        if current is self.current:
            self.current = None
        else:
            self.others = {task: other for task, other in self.others.items() if other is not current}
        if self.current is None and not self.others:
            self.writer.begun.pop(self, None)
        self._hand_over(current)
        return 0

    cdef int _hand_over(self, _Pass current) except -1:
        if current.sums:
            for place, total in current.sums.items():
                current.outputs.append(self.writer._read_one(self.slots[place], total))
            current.sums.clear()
        if current.inputs or current.outputs:
            self.writer.finish_pass(self.call, current.inputs, current.outputs)
        return 0


cdef object _sum(object earlier, object gradient):
    """A gradient added to what came before, unseen and without a graph."""
    if _num_dispatch_modes() or _transforms() is not None:
        with _blind():
            return gradient.detach().clone() if earlier is None else earlier + gradient.detach()
    gradient = _detach(gradient)
    return _clone(gradient) if earlier is None else _add(earlier, gradient)


cdef object _as_view(object gradient, object through):
    """A gradient as the node behind, which does nothing else, would pass it on: transposed, or in another shape."""
    if _num_dispatch_modes() or _transforms() is not None:
        with _blind():
            return gradient.detach().t() if through is True else gradient.detach().reshape(through)
    gradient = _detach(gradient)
    return _transpose(gradient) if through is True else _reshape(gradient, through)


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Hook:
    """What a node calls: before it runs with the gradients that enter, or afterwards with those that leave and those that entered.

    `leaving` has the place among the gradients, the place among the slots of the call and the view that lies between; `entering` places
    and slots; `shape` is that of the result where another node, which only looks at it in that shape, comes between.
    """

    cdef BackwardOfCall backward
    cdef tuple leaving
    cdef tuple entering
    cdef tuple shape
    cdef long long not_in  # the pass in which it was added, where another hook took the gradient

    def __cinit__(self):
        self.not_in = -1

    def __call__(self, gradients, entered=None):
        cdef Observer writer = self.backward.writer
        session = writer.session()
        if session is None or not session._is_active or not session._is_recording:
            return
        try:
            with _without_function_modes():
                self._take(writer, gradients, gradients if entered is None else entered)
        except Exception as error:
            session.failed("record a backward call", error)

    cdef int _take(self, Observer writer, tuple gradients, tuple entered) except -1:
        cdef BackwardOfCall backward = self.backward
        cdef _Pass current
        if self.not_in != -1 and self.not_in == <long long>_graph_task():
            return 0
        with writer.lock:
            current = backward._pass()
            if self.entering is not None:
                backward._enter(current, self.entering, self.shape, entered)
            if self.leaving is not None and backward._leave(current, self.leaving, gradients) and _is_grad_enabled():
                self._look_no_more()
            backward._event(current)
        return 0

    cdef int _look_no_more(self) except -1:
        """This pass makes a graph of its own, and a pass through that graph may reach the nodes behind without this one: from the next
        pass on each is asked itself.
        """
        cdef Hook hook
        node = _current_node()
        if node is None:
            return 0
        following = <tuple>node.next_functions
        kept = []
        for part in self.leaving:
            number, place, through = part
            if through is None:
                kept.append(part)
                continue
            hook = Hook.__new__(Hook)
            hook.backward, hook.leaving, hook.not_in = self.backward, ((0, place, None),), _graph_task()
            following[number][0].register_hook(hook)
            self.backward.num_events += 1
        self.leaving = tuple(kept)
        return 0


cdef bint _is_owned(object node, unsigned long long first, unsigned long long last):
    cdef unsigned long long position = node._sequence_nr()
    return first <= position < last


cdef int _own(dict owned, object node, object number, object slot) except -1:
    entering = owned.get(node)
    if entering is None:
        owned[node] = _shared((number, slot))
    elif number not in [known for known, _ in entering]:
        owned[node] = (*entering, (number, slot))
    return 0


cdef dict _entering = {}


cdef tuple _shared(tuple item):
    """The same tuple of one item for every call that is like this one: Python's garbage collector is to see few of them."""
    key = (item[0], <size_t><void*>item[1])
    known = _entering.get(key)
    if known is None:
        if len(_entering) >= 4096:
            _entering.clear()
        known = _entering[key] = (item,)
    return <tuple>known


cdef dict _tuples_of_slots = {}


cdef tuple _shared_slots(list slots):
    key = tuple([<size_t><void*>slot for slot in slots])
    known = _tuples_of_slots.get(key)
    if known is None:
        if len(_tuples_of_slots) >= 4096:
            _tuples_of_slots.clear()
        known = _tuples_of_slots[key] = tuple(slots)
    return <tuple>known


cdef int _watch_backward(Observer writer, OpenCall call, Edges edges, list results) except -1:
    """Hook the nodes that a finished call owns."""
    cdef unsigned long long first = edges.first, last = _next_sequence_number()
    cdef dict owned
    if first == last:
        return 0
    owned = {}
    for slot, tensor in results:
        node = tensor.grad_fn
        if node is not None and _is_owned(node, first, last):
            _own(owned, node, tensor.output_nr, _renamed("input", slot))
        if edges.bases is not None:
            base = tensor._base
            if base is not None and <size_t><void*>base in edges.bases:
                node = base.grad_fn
                if node is not None and _is_owned(node, first, last):
                    _own(owned, node, base.output_nr, _slot_type("input", (*slot.path, "base")))
    if not owned:
        return 0
    # What lies inside a module the user can get hold of, and hook; not what lies inside a call of torch.
    watched = _watched(edges, last, owned, edges.bases is None and call.level == "api" and not call.op.startswith("Function."))
    if watched is None:
        watched = _watched(edges, last, owned, False)
    _hook_all(writer, call, <list>watched, owned, _behind_a_view(owned, results, first, last))
    return 0


cdef list _watched(Edges edges, unsigned long long last, dict owned, bint looks_through):
    """Nodes of the call with the gradients that they pass on to its inputs, as number, slot and view; None where one cannot look through
    a node because two others lead to it.
    """
    cdef list waiting = list(owned), watched = [], leaving
    cdef set seen = set(owned), through = set()
    cdef unsigned long long position
    cdef Py_ssize_t number
    while waiting:
        node = waiting.pop()
        leaving = None
        number = -1
        for edge in <tuple>node.next_functions:
            number += 1
            following = (<tuple>edge)[0]
            if following is None:
                continue
            if following in through:
                return None
            view = None
            position = following._sequence_nr()
            slot = _slot_behind(edges, edge, position)
            if slot is None and edges.first <= position < last and following not in seen:
                if looks_through:
                    slot, view = _look_through(edges, following)
                if slot is None:
                    seen.add(following)
                    waiting.append(following)
                else:
                    through.add(following)
            if slot is not None:
                if leaving is None:
                    leaving = []
                leaving.append((number, _renamed("gradient" if slot.role == "parameter" else "output", slot), view))
        watched.append((node, leaving))
    return watched


cdef object _slot_behind(Edges edges, object edge, unsigned long long position):
    if position != ACCUMULATE_GRAD:
        return edges.nodes.get(edge)
    variable = getattr((<tuple>edge)[0], "variable", None)
    return edges.leaves.get(<size_t><void*>variable)


cdef tuple _look_through(Edges edges, object node):
    """The slot behind a node that only looks at a gradient in another way, and how; None where it does more, or leads elsewhere."""
    name = node.name()
    if name != "ViewBackward0" and name != "TBackward0" and name != "UnsafeViewBackward0":
        return None, None
    following = <tuple>node.next_functions
    if len(following) != 1 or following[0][0] is None:
        return None, None
    slot = _slot_behind(edges, following[0], following[0][0]._sequence_nr())
    if slot is None:
        return None, None
    if name == "TBackward0":
        return slot, True
    for known, tensor in edges.found:
        if known is slot:
            return slot, tuple(tensor.shape)
    return None, None


cdef int _hook_all(Observer writer, OpenCall call, list watched, dict owned, tuple behind) except -1:
    cdef BackwardOfCall backward = BackwardOfCall.__new__(BackwardOfCall)
    cdef Hook hook
    cdef list slots = [], num_parts = [], leaving
    cdef Py_ssize_t place
    backward.writer, backward.call = writer, call
    for node, given in watched:
        entering = owned.get(node)
        if given is None and entering is None:
            continue
        hook = Hook.__new__(Hook)
        hook.backward, hook.entering = backward, entering
        backward.num_events += 1
        if given is None:
            node.register_prehook(hook)
            continue
        leaving = []
        for number, slot, view in given:
            for place in range(len(slots)):
                if slots[place] is slot or slots[place] == slot:
                    num_parts[place] += 1
                    break
            else:
                place = len(slots)
                slots.append(slot)
                num_parts.append(1)
            leaving.append((number, place, view))
        hook.leaving = tuple(leaving)
        if behind is not None and behind[0] is node:
            hook.entering, hook.shape, behind = behind[1], behind[2], None
        node.register_hook(hook)
    if behind is not None:
        hook = Hook.__new__(Hook)
        hook.backward, hook.entering, hook.shape = backward, behind[1], behind[2]
        backward.num_events += 1
        behind[0].register_prehook(hook)
    backward.slots, backward.num_parts = _shared_slots(slots), tuple(num_parts)
    return 0


cdef dict _renamed_slots = {}


cdef object _renamed(str role, object slot):
    key = (role, <size_t><void*>slot)
    known = _renamed_slots.get(key)
    if known is not None:
        return (<tuple>known)[1]
    if len(_renamed_slots) >= 65536:
        _renamed_slots.clear()
    renamed = _slot_named(role, slot)
    _renamed_slots[key] = (slot, renamed)
    return renamed


cdef tuple _behind_a_view(dict owned, list results, unsigned long long first, unsigned long long last):
    """The node behind where the one result is a view of an inner result: writing into it in place bypasses the view's node."""
    if len(results) != 1 or len(owned) != 1:
        return None
    tensor = (<tuple>results[0])[1]
    if tensor._base is None:
        return None
    ((node, entering),) = owned.items()
    following = node.next_functions
    if len(following) != 1:
        return None
    behind = following[0][0]
    if behind is None or not _is_owned(behind, first, last):
        return None
    return behind, _shared((0, (<tuple>(<tuple>entering)[0])[1])), tuple(tensor.shape)


# ---- calls


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class OpenCall:
    cdef public str op, level, phase, module, parent
    cdef public tuple stack
    cdef public bint recompute
    cdef public tuple modes
    cdef public object arguments
    cdef public long long index
    cdef public list found, inputs
    cdef list versions
    cdef public object edges
    cdef public object written

    def __init__(self, str op, str level, str phase, str module, str parent, tuple stack, bint recompute):
        self.op, self.level, self.phase, self.module, self.parent, self.stack = op, level, phase, module, parent, stack
        self.recompute = recompute
        self.index = -1
        self.found = self.versions = self.inputs = _nothing
        self.written = _nothing_written

    @property
    def name(self):
        return f"{self.op}.{self.index}" if self.index != -1 else None

    cdef void let_go(self) noexcept:
        self.found = self.inputs = self.versions = _nothing
        self.edges = self.arguments = None


cdef list _nothing = []
cdef object _nothing_written = frozenset()


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Draft:
    """A record whose tensors may lack their values."""

    cdef public long long step, order, index
    cdef public str op, phase, level, module, parent
    cdef public object arguments
    cdef public tuple modes, stack
    cdef public tuple slots
    cdef public bint recompute

    def is_complete(self):
        return are_complete(self.slots)

    def row(self):
        """The record as the store format lays it out, its fields up to the stack encoded; only what is odd is left to the store."""
        if self.arguments is None or type(self.arguments) is bytes:
            try:
                return _encoded_row_type(self._fields(), self.stack, self.recompute)
            except UnicodeEncodeError:
                pass
        return _plain_row(self)

    cdef bytes _fields(self):
        cdef _Buffer out = _Buffer.__new__(_Buffer)
        cdef Taken taken
        out.count(self.order)
        out.text(self.op)
        out.count(self.index)
        out.text(self.phase)
        out.text(self.level)
        out.text(self.module)
        out.text(self.parent)
        if self.arguments is None:
            out.byte(0xC0)
        else:
            _put_bytes(out, <bytes>self.arguments)
        _put_bytes(out, _encoded_modes(self.modes))
        out.items(len(self.slots))
        for taken in self.slots:
            _put_slot(out, taken)
        return PyBytes_FromStringAndSize(out.room, out.used)


cdef inline int _put_bytes(_Buffer out, bytes data) except -1:
    return out.raw(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


cdef dict _modes_encoded = {}


cdef bytes _encoded_modes(tuple modes):
    known = _modes_encoded.get(modes)
    if known is None:
        if len(_modes_encoded) >= 4096:
            _modes_encoded.clear()
        known = _modes_encoded[modes] = _encode_value(modes)
    return <bytes>known


cdef dict _readers = {}


cdef bint _is_reader(str op) except -1:
    """Whether no call of that name writes to memory that it is given, unless a keyword argument says so."""
    known = _readers.get(op)
    if known is None:
        if len(_readers) >= 8192:
            _readers.clear()
        known = _readers[op] = _never_writes(op)
    return <bint>known


cdef class Observer:
    """From a call to its record, the common way; the rest is `CallRecorder`'s."""

    cdef public object session
    cdef public Counter _devices
    cdef public Reader tensors
    cdef public object _selection
    cdef public object _modules
    cdef public object _stacks
    cdef public object lock
    cdef public dict begun
    cdef public object _outbox
    cdef public long long _order, _step, num_functions
    cdef public bint is_patient, has_written, _picks_calls, _picks_slots
    cdef public bint _wants_forward, _wants_backward, takes_rows
    cdef public object _counts, _indices, _recomputed
    cdef dict _mode_rows

    def __cinit__(self, *args, **kwargs):
        self._mode_rows = {}

    cdef Taken _read_one(self, object slot, object tensor):
        cdef Taken taken = self.tensors._take(slot, tensor, False)
        if not self.is_patient and self._devices.num_pending:
            self._devices.flush()
        return taken

    cpdef open(self, str op, tuple args, dict kwargs, str level, frame=None):
        """Take down what is known before a call; None where it is not recorded. `frame` is where the call stands, if that is known."""
        opened = self._open(op, args, kwargs, level, frame)
        if self._devices.num_pending and level != "module" and (kwargs or not _is_reader(op)) and _may_write(op, args, kwargs):
            self.read_all()  # of a module each call inside is announced
        return opened

    cdef OpenCall _open(self, str op, tuple args, dict kwargs, str level, object frame):
        cdef bint in_backward = _graph_task() != -1
        cdef bint recompute = in_backward and _is_recompute()
        cdef OpenCall opened
        cdef list found
        cdef str phase = "forward"
        if in_backward and not recompute and level != "op":
            return None
        if not self.has_written:
            self.begin_writing()
        running = self._modules.all_running()
        module = None
        path = ""
        if running:
            innermost = running[len(running) - 1]
            module, path = innermost.module, innermost.path
        if level == "op":
            path, stack, phase = self._where(level, in_backward and not recompute, frame)
        else:
            stack = _read_stack(self._stacks, _current_frame() if frame is None else frame, running, len(running) - 1).frames
        opened = OpenCall(op, level, phase, path, self._parent(), stack, recompute)
        found = []
        opened.arguments = _split(args, kwargs, found)
        opened.found = found
        opened.modes = self._modes(found, module)
        if found:
            opened.index = self._index(op, path, recompute)
            if self._picks_calls and not self._wants_call(path, op, opened.index):
                return None
            opened.versions = [None if _is_inference(tensor) else tensor._version for _, tensor in found]
            if self._wants_forward if phase == "forward" else self._wants_backward:
                opened.inputs = self._take_all(found, False)
        if level != "op" and _is_grad_enabled() and _transforms() is None:
            opened.edges = _edges_of(found)
        return opened

    cdef tuple _modes(self, list found, object module):
        if _is_any_autocast_enabled():
            return _mode_row(found, module)
        key = (_is_grad_enabled(), _is_inference_mode_enabled(), module.training if module is not None else None, _is_deterministic())
        row = self._mode_rows.get(key)
        if row is None:
            row = self._mode_rows[key] = (None, *key)
        return <tuple>row

    cdef list _take_all(self, list found, bint is_undefined):
        cdef Reader reader = self.tensors
        cdef list taken = []
        if self._picks_slots:
            found = [(slot, tensor) for slot, tensor in found if self._selection.wants_slot(slot)]
        with self.lock:
            for slot, tensor in found:
                taken.append(reader._take(slot, tensor, is_undefined))
            if not self.is_patient and self._devices.num_pending:
                self._devices.flush()
        return taken

    def take(self, list found, *, bint is_undefined=False):
        """Take down tensors; their values may come later."""
        return self._take_all(found, is_undefined)

    cpdef close(self, OpenCall opened, result):
        """Take down what a call returned."""
        cdef list results = _results(result), mutated, slots
        cdef bint is_undefined
        cdef Edges edges
        if opened.index == -1 and not self._name_late(opened, results):
            return
        mutated = self._mutated(opened, results)
        is_undefined = _makes_no_values(opened.op)
        if is_undefined:
            for _, tensor in results:
                self.tensors.mark_undefined(tensor)
        if self._wants_forward if opened.phase == "forward" else self._wants_backward:
            slots = opened.inputs + self._take_all(results, is_undefined)
            if mutated is not None:
                slots += self._take_all(mutated, False)
            self._write(opened, opened.phase, slots, opened.arguments)
        edges = opened.edges
        opened.let_go()
        if edges is not None and self._wants_backward:
            _watch_backward(self, opened, edges, results if mutated is None else results + mutated)
        if self.num_functions and self._devices.num_pending and not _is_reader(opened.op):
            self.read_all()  # where the Function says that it wrote to a tensor, the version rises again after the write

    cdef list _mutated(self, OpenCall opened, list results):
        """The arguments that the call wrote to and did not return, as results of their own; None where there are none."""
        cdef list mutated = None
        cdef Py_ssize_t number
        returned = None
        for number in range(len(opened.found)):
            slot, tensor = <tuple>opened.found[number]
            version = opened.versions[number]
            if (opened.written and slot.path[0] in opened.written) or (version is not None and tensor._version != version):
                self.tensors.forget_storage(tensor)
                if returned is None:
                    returned = {<size_t><void*>kept for _, kept in results}
                if <size_t><void*>tensor not in returned:
                    returned.add(<size_t><void*>tensor)
                    if mutated is None:
                        mutated = []
                    mutated.append((_slot_type("mutated", slot.path), tensor))
        return mutated

    def finish_pass(self, OpenCall call, list inputs, list outputs):
        if not self.has_written:
            self.begin_writing()
        if len(inputs) > 1:
            inputs = sorted(inputs, key=_text)
        if len(outputs) > 1:
            outputs = sorted(outputs, key=_text)
        slots = inputs + outputs
        if self._picks_slots:
            slots = [taken for taken in slots if self._selection.wants_slot(taken.slot)]
        self._write(call, "backward", slots, None)

    cpdef _write(self, OpenCall call, str phase, list slots, arguments):
        cdef Draft draft = Draft.__new__(Draft)
        draft.op, draft.index, draft.phase, draft.level = call.op, call.index, phase, call.level
        draft.module, draft.parent, draft.arguments, draft.modes = call.module, call.parent, self._encoded(arguments), call.modes
        draft.slots, draft.stack, draft.recompute, draft.step = tuple(slots), call.stack, call.recompute, self._step
        with self.lock:
            draft.order = self._order
            self._order += 1
            self._outbox.write(draft)


    cdef object _encoded(self, object arguments):
        """Arguments as the sink will write them, if it takes rows: bytes are nothing for Python's garbage collector."""
        if arguments is None or not self.takes_rows:
            return arguments
        try:
            return _encode_value(arguments)
        except Exception:  # what MessagePack has no word for; the store has
            return arguments


cdef dict _slot_texts = {}


def _text(Taken taken):
    known = _slot_texts.get(<size_t><void*>taken.slot)
    if known is not None:
        return (<tuple>known)[1]
    if len(_slot_texts) >= 65536:
        _slot_texts.clear()
    text = str(taken.slot)
    _slot_texts[<size_t><void*>taken.slot] = (taken.slot, text)
    return text


# ---- where a call stands


cdef extern from "Python.h":
    void* PyEval_GetFrame()
    unsigned long PyThread_get_thread_ident()


cdef object _current_frame():
    """The frame of Python that is running: compiled code has none."""
    cdef void* frame = PyEval_GetFrame()
    return <object>frame if frame != NULL else None


cdef dict _businesses = {}


cdef bint _is_own_business(object frame) except -1:
    """Whether the call comes from inside an optimizer, a wrapper for parallel training and the like."""
    while frame is not None:
        code = frame.f_code
        known = _businesses.get(<size_t><void*>code)
        if known is None:
            if len(_businesses) >= 65536:
                _businesses.clear()
            known = _businesses[<size_t><void*>code] = (code, _business_of(frame))
        business = (<tuple>known)[1]
        if business is not None:
            return <bint>business
        frame = frame.f_back
    return False


cdef object _read_stack(object reader, object frame, list running, Py_ssize_t innermost):
    """`StackReader._read`"""
    cdef list key = [], codes = []
    cdef dict kinds = reader._kinds
    cdef size_t last = 0, inside = 0
    cdef Py_ssize_t depth = reader._depth
    cdef int kind
    module = running[innermost] if innermost >= 0 else None
    if module is not None and module.stack is not None:
        inside = module.inside
    while frame is not None and len(codes) < depth:
        code = frame.f_code
        if inside and <size_t><void*>frame == inside:
            key.append(<size_t><void*>code)
            key.append(frame.f_lasti)
            codes.append(code)
            return _joined(reader, key, codes, module.stack)
        known = kinds.get(<size_t><void*>code)
        kind = (<tuple>known)[0] if known is not None else reader._classify(code)
        if kind == USERS:
            key.append(<size_t><void*>code)
            key.append(frame.f_lasti)
            codes.append(code)
            last = <size_t><void*>frame
        elif kind == BOUNDARY and module is not None:
            module.inside = last if codes and module.runs(codes[len(codes) - 1]) else 0
            return _joined(reader, key, codes, _above_module(reader, frame.f_back, running, innermost))
        elif kind == END:
            break
        frame = frame.f_back
    return _joined(reader, key, codes, _no_stack)


cdef object _above_module(object reader, object caller, list running, Py_ssize_t number):
    """`StackReader._above_module`"""
    module = running[number]
    called_from = None if caller is None else (<size_t><void*>caller.f_code, caller.f_lasti)
    stack = module.stack
    if stack is None or module.called_from != called_from:
        stack = module.stack = _read_stack(reader, caller, running, number - 1)
        module.called_from = called_from
    return stack


cdef object _joined(object reader, list key, list codes, object above):
    if not codes:
        return above
    stack = (<dict>reader._known).get((*key, above))
    return stack if stack is not None else reader._joined(key, codes, above)


# ---- the calls that a mode sees


cdef dict _op_names = {}
cdef dict _silent_writers = {}


cdef str _name_of(object func):
    try:
        return _op_names[func]
    except KeyError:
        if len(_op_names) >= 8192:
            _op_names.clear()
        op = _op_names[func] = _op_name(func)
        return op
    except TypeError:  # somebody's object that cannot be told from others
        return None


cdef class Announcer:
    """What a function mode does that only has writers announced: `modes.WriteGuard`."""

    cdef object announce
    cdef Counter devices

    def __init__(self, announce, Counter devices):
        self.announce, self.devices = announce, devices

    def call(self, func, args, kwargs):
        if self.devices.num_pending:
            op = _name_of(func)
            if op is not None and (kwargs or not _is_reader(op)):
                self.announce(op, args, kwargs)
        return func(*args, **kwargs)


cdef class Handler:
    """What a function mode does with a call of torch: `modes.ApiMode` and `session.CaptureSession.open_call`."""

    cdef object session

    def __init__(self, session):
        self.session = session

    def call(self, func, args, kwargs):
        """Run a call of torch and record it; the frame that is running is the mode's, the one before stands above the call."""
        cdef OpenCall opened = None
        op = _name_of(func)
        if op is not None and type(args) is tuple and type(kwargs) is dict:
            opened = self._open(op, args, kwargs)
        result = func(*args, **kwargs)
        if opened is not None:
            self._close(opened, result)
        return result

    cdef OpenCall _open(self, str op, tuple args, dict kwargs):
        cdef Observer observer
        cdef OpenCall opened
        session = self.session
        if not session._is_recording or _tracing_state() is not None or (
            session._thread != PyThread_get_thread_ident() and <long long>_graph_task() == -1
        ):
            return None
        silent = _silent_writers.get(op)
        if silent is None:
            if len(_silent_writers) >= 8192:
                _silent_writers.clear()
            silent = _silent_writers[op] = _writes_silently(op)
        if silent or session._names_operators:
            return session.open_call(op, args, kwargs, frame=_current_frame().f_back)
        try:
            with _without_function_modes():
                frame = _current_frame().f_back
                observer = session._recorder
                if not _is_own_business(frame):
                    return observer.open(op, args, kwargs, "api", frame)
                if observer._devices.num_pending and (kwargs or not _is_reader(op)):
                    observer.before(op, args, kwargs)
        except Exception as error:
            session.failed(f"record the inputs of {op}", error)
        return None

    cdef int _close(self, OpenCall opened, object result) except -1:
        cdef Observer observer
        session = self.session
        try:
            with _without_function_modes():
                observer = session._recorder
                observer.close(opened, result)
        except Exception as error:
            session.failed(f"record the outputs of {opened.op}", error)
        return 0


# ---- what is taken over from the files of Python; at the end, since some of them look for what is above

cdef object _is_inference = torch._C.TensorBase.is_inference
cdef object _transpose = torch._C.TensorBase.t
cdef object _reshape = torch._C.TensorBase.reshape
cdef object _clone = torch._C.TensorBase.clone
cdef object _add = torch._C.TensorBase.add
cdef object _is_grad_enabled = torch._C.is_grad_enabled
cdef object _is_inference_mode_enabled = torch._C.is_inference_mode_enabled
cdef object _is_deterministic = torch._C._get_deterministic_algorithms
cdef object _is_any_autocast_enabled = torch._C._is_any_autocast_enabled
cdef object _without_function_modes = torch._C.DisableTorchFunction

from ulpscope.capture import calls as _calls
from ulpscope.capture import stacks as _stacks
from ulpscope.capture import state as _state
from ulpscope.capture import torch_internals as _torch_internals
from ulpscope.capture import walk as _walk
from ulpscope.model import EncodedRow as _EncodedRow
from ulpscope.model import Slot as _Slot

cdef object _slot_type = _Slot
cdef object _encoded_row_type = _EncodedRow


def _plain_row(draft):
    from ulpscope.capture.holding import plain_row

    return plain_row(draft)


cdef object _encode_argument = _walk.encode_value
cdef object _tensors_in = _walk.tensors_in
cdef list _ready_inputs = _walk.READY_INPUTS
cdef Py_ssize_t NUM_READY = len(_ready_inputs)
cdef object _first_output = _walk.slot_and_mark("output", (0,))[0]
cdef object _may_write = _calls.may_write
cdef object _never_writes = _calls.never_writes
cdef object _makes_no_values = _calls.makes_no_values
cdef object _writes_silently = _calls.writes_silently
cdef object _business_of = _calls.business_of
cdef object _op_name = _calls.op_name
cdef object _tracing_state = torch._C._get_tracing_state
cdef object _no_stack = _stacks.EMPTY
cdef int USERS = _stacks.USERS
cdef int BOUNDARY = _stacks.BOUNDARY
cdef int END = _stacks.END
cdef object _is_recompute = _stacks.is_recompute
cdef object _mode_row = _state.mode_row
cdef object _blind = _torch_internals.blind
cdef object _slot_named = _walk.renamed
