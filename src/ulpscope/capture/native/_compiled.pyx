# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, embedsignature=True, binding=False
"""Run the hot path of a recording, compiled: the steps that happen thousands of times in a training step.

It is optional and gives the same records as the files of Python that it stands for; each part names its twin, which says why things are
done. Both leave the rare cases to Python. Only the order in which backward passes are complete may differ.

- objects: `values`, `taking.Taken`, `summaries.Pending`, `observing.OpenCall`, `holding.Draft`, `modules.RunningModule`
- `Reader`: `taking.Taking`; `HostKernel`: `tensor_reader.TensorReader._read`, with `numerics.summary.summary_kernel`
- `Counter`, `Queue`, `Aligned`, `unchanged`, `fill`, `hand_over`, `settle_rows`: `queue`, `summaries`, `address_tables`, `values`
- `Frames`, `complete_of`: `holding`, with the frames of the store format (docs/store-format.md; change all together)
- `BackwardOfCall`, `Hook`: `backward`; `Registrar`: torch's own `autograd.Function._register_hook`
- `Observer`: `observing`, with `walk`, `stacks`, `state.mode_row` and `recorder.CallRecorder._index`
- `Handler`, `Announcer`: `torch_modes`, and `session.CaptureSession.open_call`; `ModuleCaller`: `session.CaptureSession._around_module`

Objects that live until the end of a step stay outside of Python's garbage collector (`no_gc`); none is part of a circle.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_DECREF
from cpython.tuple cimport PyTuple_GET_ITEM
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.math cimport ldexp, sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

import collections
import math
import zlib

import msgspec
import torch

from ulpscope import _torch_private
from ulpscope.model import Summary, view_content

cdef object _tensor_type = torch.Tensor
cdef object _parameter_type = torch.nn.Parameter
cdef object _is_conj = _torch_private.TensorBase.is_conj
cdef object _tls_includes = _torch_private.tls_includes
cdef object _TRANSFORMS = _torch_private.TRANSFORMS
cdef object _is_capturing = _torch_private.is_stream_capturing
cdef object _encode_value = msgspec.msgpack.Encoder().encode
cdef object _crc32 = zlib.crc32
cdef object _ordered_dict = collections.OrderedDict

cdef extern from "unistd.h" nogil:
    int usleep(unsigned int)


cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1
    ctypedef struct PyThreadState:
        pass
    PyThreadState* PyThreadState_Get()
    uint64_t PyThreadState_GetID(PyThreadState*)


cdef extern from *:
    """
    /* What an attribute or a method without arguments comes to in the end, past Python's look-up. Where torch has made it otherwise, call is
       NULL, and it is asked for in the plain way. */
    typedef struct { getter call; void* closure; PyTypeObject* type; PyObject* name; } Getter;
    typedef struct { PyCFunction call; PyTypeObject* type; PyObject* self; PyObject* callable; } Direct;

    static void find_getter(Getter* found, PyObject* type, PyObject* name) {
        PyObject* descriptor = PyObject_GetAttr(type, name);
        found->call = NULL;
        Py_INCREF(name);
        found->name = name;
        if (descriptor == NULL) { PyErr_Clear(); return; }
        if (Py_TYPE(descriptor) == &PyGetSetDescr_Type) {
            found->call = ((PyGetSetDescrObject*)descriptor)->d_getset->get;
            found->closure = ((PyGetSetDescrObject*)descriptor)->d_getset->closure;
            found->type = PyDescr_TYPE(descriptor);
        }
        Py_DECREF(descriptor);
    }
    static PyObject* ask(Getter* getter, PyObject* object) {
        if (getter->call && PyObject_TypeCheck(object, getter->type)) return getter->call(object, getter->closure);
        return PyObject_GetAttr(object, getter->name);
    }
    static void find_direct(Direct* found, PyObject* callable) {
        Py_INCREF(callable);
        found->callable = callable;
        found->call = NULL;
        found->self = NULL;
        if (PyCFunction_CheckExact(callable) && PyCFunction_GET_FLAGS(callable) == METH_NOARGS) {
            found->call = PyCFunction_GET_FUNCTION(callable);
            found->self = PyCFunction_GET_SELF(callable);
        } else if (Py_TYPE(callable) == &PyMethodDescr_Type && ((PyMethodDescrObject*)callable)->d_method->ml_flags == METH_NOARGS) {
            found->call = ((PyMethodDescrObject*)callable)->d_method->ml_meth;
            found->type = PyDescr_TYPE(callable);
        }
    }
    static PyObject* call_function(Direct* function) {
        return function->call ? function->call(function->self, NULL) : PyObject_CallNoArgs(function->callable);
    }
    static PyObject* call_method(Direct* method, PyObject* object) {
        if (method->call && PyObject_TypeCheck(object, method->type)) return method->call(object, NULL);
        return PyObject_CallOneArg(method->callable, object);
    }
    """
    ctypedef struct Getter:
        pass
    ctypedef struct Direct:
        pass
    void find_getter(Getter*, object, object)
    object ask(Getter*, object)
    void find_direct(Direct*, object)
    object call_function(Direct*)
    object call_method(Direct*, object)


cdef Getter _version_of, _requires_grad_of, _node_of, _place_of, _base_of, _storage_address
cdef Direct _storage_of, _neg_of, _detached, _modes_of_dispatch, _grad_now, _inference_now, _deterministic_now, _task_now, _any_autocast_now
cdef Direct _address_of

find_getter(&_version_of, torch.Tensor, "_version")
find_getter(&_requires_grad_of, torch.Tensor, "requires_grad")
find_getter(&_node_of, torch.Tensor, "grad_fn")
find_getter(&_place_of, torch.Tensor, "output_nr")
find_getter(&_base_of, torch.Tensor, "_base")
find_getter(&_storage_address, torch.UntypedStorage, "_cdata")
find_direct(&_storage_of, _torch_private.TensorBase.untyped_storage)
find_direct(&_neg_of, _torch_private.TensorBase.is_neg)
find_direct(&_detached, _torch_private.TensorBase.detach)
find_direct(&_modes_of_dispatch, _torch_private.num_dispatch_modes)
find_direct(&_grad_now, torch.is_grad_enabled)
find_direct(&_inference_now, torch.is_inference_mode_enabled)
find_direct(&_deterministic_now, _torch_private.deterministic_algorithms)
find_direct(&_address_of, _torch_private.TensorBase.data_ptr)
find_direct(&_task_now, _torch_private.current_graph_task)
find_direct(&_any_autocast_now, _torch_private.any_autocast)

NOT_KEPT = "values not kept: the size limit of this run is reached"  # as `values.NOT_KEPT`


# ---- the facts of a tensor in one call (DLPack's table of C functions, which torch hands out as a capsule)


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

# begin of recorder: tools/layouts.py writes it
VERSION = 6

cdef enum:
    MOST_DIMS = 25

cdef struct TensorFacts:
    DLTensor told
    void* storage
    int64_t version
    int requires_grad
    int mirrors

cdef struct Entering:
    int32_t place
    int32_t result
    int32_t is_base

cdef struct Leaving:
    int32_t place
    int32_t input
    int32_t view

cdef struct Watched:
    void* node
    int32_t entering
    int32_t num_entering
    int32_t leaving
    int32_t num_leaving

cdef struct Plan:
    const Watched* watched
    const Entering* entering
    const Leaving* leaving
    void* behind
    void* planner
    int32_t count
# end of recorder: tools/layouts.py writes it

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
    COMPLEX = 5  # DLPack's code of complex numbers

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


# ---- facts from torch past Python (`_native.cpp`, which was compiled for the very torch that is installed, or is missing)


cdef enum:  # of `state`
    GRAD = 1
    INFERENCE = 2
    DETERMINISTIC = 4
    AUTOCAST = 8
    TRACING = 16

# begin of table: tools/layouts.py writes it
cdef struct Native:
    const void* (*tensor_of)(void*) noexcept
    PyObject* (*object_of)(const void*) except NULL
    int (*look)(const void*, TensorFacts*) noexcept
    int64_t (*version_of)(const void*) noexcept
    void* (*hold)(const void*) noexcept
    int (*is_as_taken)(const void*, int64_t, uint64_t) noexcept
    PyObject* (*object_of_held)(const void*, int32_t, const int64_t*, const int64_t*) except NULL
    void (*let_go)(void*) noexcept
    void* (*weak_reference)(void*) noexcept
    int (*state)() noexcept
    int (*is_seen)() noexcept
    int (*graph_task)() noexcept
    int (*shut_eyes)() noexcept
    void (*open_eyes)(int) noexcept
    void* (*new_edges)() noexcept
    void (*free_edges)(void*) noexcept
    int (*add_edge)(void*, const void*, int32_t) except -1
    int (*add_leaf)(void*, const void*, int32_t) except -1
    int (*begin_call)(void*) except -1
    int (*plan_call)(void*, const void**, int32_t, int32_t, Plan*) except -1
    void (*free_plan)(Plan*) noexcept
    const void* (*gradient_at)(const void*, int64_t) noexcept
    int (*hook_before)(void*, void*) except -1
    int (*hook_after)(void*, void*) except -1
    void (*set_callback)(int (*)(void*, const void*, const void*) except -1) noexcept
# end of table: tools/layouts.py writes it

cdef Native* _native = NULL


cdef int _find_native() except -1:
    global _native
    from ulpscope.capture.native.building import TABLE

    if TABLE is not None:
        _native = <Native*>PyCapsule_GetPointer(TABLE, "ulpscope.native")
        _native.set_callback(&_hook_called)
    return 0


cdef inline const void* _of(object tensor) noexcept:
    return _native.tensor_of(<void*>tensor)


cdef object _object_of(const void* tensor):
    return _owned(_native.object_of(tensor))


cdef object _object_of_held(const void* held, Form form):
    cdef int64_t sizes[2 * MOST_DIMS]
    cdef int32_t number, ndim = <int32_t>len(form.shape)
    for number in range(ndim):
        sizes[number], sizes[ndim + number] = form.shape[number], form.strides[number]
    return _owned(_native.object_of_held(held, ndim, sizes, sizes + ndim))


cdef object _owned(PyObject* made):
    found = <object>made
    Py_DECREF(found)
    return found


_find_native()
HAS_NATIVE = _native != NULL


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
    cdef public long long order
    cdef public object take_aligned
    cdef bytes head, key
    cdef int kind  # the arguments of the kernel on the host, once they are known
    cdef double* table
    cdef double tiny
    cdef bint has_arguments

    def __init__(self, dtype, shape, strides, device, is_on_host, type, note="", numel=0, size=0, extent=0, is_contiguous=False,
                 is_complex=False, layouts=None, order=0, take_aligned=None):
        self.dtype, self.shape, self.strides, self.device = dtype, shape, strides, device
        self.is_on_host, self.type, self.note = is_on_host, type, note
        self.numel, self.size, self.extent = numel, size, extent
        self.is_contiguous, self.is_complex = is_contiguous, is_complex
        self.layouts, self.order = {} if layouts is None else layouts, order
        self.take_aligned = take_aligned

    @property
    def is_dense(self):
        """Tell whether the elements fill their memory, in any order."""
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
        self.given_summary, self.given_fingerprint = _row_of(summary), fingerprint
        self.note, self.waits, self.kept, self.view = note, waits, kept, view
        self.version, self.address, self.form, self.mirrors, self.next = version, address, form, mirrors, next

    @property
    def summary(self):
        if not self.has_summary:
            return None if self.given_summary is None else Summary(*self.given_summary)
        return Summary(
            self.numel,
            self.minimum if self.has_order else None,
            self.maximum if self.has_order else None,
            self.mean if self.has_mean else None,
            self.rms if self.has_mean else None,
            self.counts[0], self.counts[1], self.counts[2], self.counts[3], self.counts[4],
        )

    @summary.setter
    def summary(self, summary):
        self.given_summary = _row_of(summary)
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
        """Return the key of the kept values."""
        if self.kept is None or self.kept.key is None:
            return None
        return self.kept.key if self.view is None else view_content(self.kept.key, *self.view)

    @property
    def remark(self):
        """Return the note, or why the values are not kept."""
        if self.note or self.kept is None or self.kept.key is not None:
            return self.note
        return self.kept.note or NOT_KEPT

    def summary_object(self):
        return self.summary


cdef tuple _row_of(object summary):
    """A summary as the store writes it."""
    if summary is None:
        return None
    return (
        summary.numel, summary.min, summary.max, summary.mean, summary.rms,
        summary.num_nan, summary.num_posinf, summary.num_neginf, summary.num_zero, summary.num_subnormal,
    )


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

    @property
    def dtype(self):
        return self.form.dtype

    @property
    def shape(self):
        return self.form.shape

    @property
    def strides(self):
        return self.form.strides

    @property
    def device(self):
        return self.form.device

    @property
    def summary(self):
        return self.values.summary

    @property
    def fingerprint(self):
        return self.values.fingerprint

    @property
    def content(self):
        return self.values.content

    @property
    def note(self):
        return self.values.remark


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
    cdef object given_alias
    cdef void* held  # the same past Python
    cdef public long long version

    def __init__(self, Values values, long long numel, layout, unsigned long long address, alias, long long version):
        self.values, self.numel, self.layout, self.address, self.alias, self.version = values, numel, layout, address, alias, version

    def __dealloc__(self):
        if self.held != NULL:
            _native.let_go(self.held)

    @property
    def alias(self):
        return self.given_alias if self.held == NULL else _object_of_held(self.held, self.values.form)

    @alias.setter
    def alias(self, alias):
        if self.held != NULL:
            _native.let_go(self.held)
            self.held = NULL
        self.given_alias = alias

    cdef bint is_unchanged(self) except -1:
        """Tell whether its version and address are still those at which it was taken."""
        if self.version == -1:
            return True
        if self.held != NULL:
            return _native.is_as_taken(self.held, self.version, self.address)
        try:
            return ask(&_version_of, self.given_alias) == self.version and call_method(&_address_of, self.given_alias) == self.address
        except RuntimeError:  # as `summaries._is_unchanged`
            return False


# ---- unseen by modes of the user's and by ours


cdef Direct _enter_guard
find_direct(&_enter_guard, _torch_private.without_function_modes.__enter__)
cdef object _guard_type = _torch_private.without_function_modes
cdef object _leave_guard = _torch_private.without_function_modes.__exit__


cdef object _shut_eyes():
    """Keep every __torch_function__, the user's or ours, from seeing the calls up to `_open_eyes`."""
    if _native != NULL:
        return _native.shut_eyes()
    guard = _guard_type()
    call_method(&_enter_guard, guard)
    return guard


cdef int _open_eyes(object guard) except -1:
    if _native != NULL:
        _native.open_eyes(guard)
    else:
        _leave_guard(guard)
    return 0


# ---- taking tensors down


cdef class Counter:
    """Counts the tensors that were taken, on every device, and that no device has been told to read."""

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
    """Takes tensors of one form at an address that is a multiple of 8."""

    cdef Counter devices
    cdef Queue queue
    cdef object layout
    cdef long long numel
    cdef long long num_bytes
    cdef object flush

    def __init__(self, Counter devices, Queue queue, layout, Form form, flush):
        self.devices, self.queue, self.layout, self.numel = devices, queue, layout, form.numel
        self.num_bytes, self.flush = layout.num_bytes, flush

    cdef Values take(self, object tensor, const void* native, TensorFacts* facts, Form form, unsigned long long address):
        """Take a tensor; call it where no mode sees operations (`_is_clear`)."""
        cdef Queue queue = self.queue
        cdef void* stream = NULL
        if queue.is_given_up:
            return None
        if queue.has_streams:
            _exchange.current_stream(facts.told.device.device_type, facts.told.device.device_id, &stream)
            if <long long>stream != queue._stream or (stream != NULL and _is_capturing()):  # a graph never captures the default stream
                return None
        cdef Values values = Values.__new__(Values)
        values.note, values.waits, values.form = "", True, form
        cdef Pending entry = Pending.__new__(Pending)
        entry.values, entry.numel, entry.layout, entry.address = values, self.numel, self.layout, address
        if native != NULL:
            entry.version, entry.held = facts.version, _native.hold(native)
        elif type(tensor) is _parameter_type:  # its module holds it, and no gradient is one
            entry.given_alias, entry.version = tensor, facts.version
        else:
            entry.given_alias = call_method(&_detached, tensor)
            entry.version = ask(&_version_of, entry.given_alias)  # below autograd it has a version of its own
        self.devices.num_pending += 1
        queue._pending.append(entry)
        queue._pending_bytes += self.num_bytes
        if len(queue._pending) >= queue.most_rows or queue._pending_bytes >= queue.most_bytes:
            self.flush()
        return values


ctypedef int (*Summarize)(
    int, const void*, size_t, size_t, size_t, const size_t*, const size_t*, const double*, double, void*, int, void*, unsigned int
) noexcept nogil
ctypedef void (*Fingerprint)(const void*, size_t, uint64_t*, int) noexcept nogil

# begin of kernel: tools/layouts.py writes it
cdef struct HostSummary:  # `struct summary` of numerics/_kernel.c
    uint64_t s0
    uint64_t s1
    double min
    double max
    double sum
    double sum_squares
    uint64_t nan
    uint64_t posinf
    uint64_t neginf
    uint64_t zero
    uint64_t subnormal
# end of kernel: tools/layouts.py writes it


cdef class HostKernel:
    """The kernel over memory of the host, called without Python: `TensorReader._read` for a tensor in one piece whose numbers are
    finite.
    """

    cdef Summarize summarize
    cdef Fingerprint fingerprint
    cdef int target
    cdef bint statistics
    cdef object arguments, threads
    cdef double smallest, largest  # sums of squares between them are exact enough
    cdef size_t large

    def __init__(self, size_t summarize, size_t fingerprint, int target, arguments, threads, double smallest, double largest, size_t large,
                 bint statistics):
        self.summarize, self.fingerprint, self.target = <Summarize>summarize, <Fingerprint>fingerprint, target
        self.arguments, self.threads, self.large, self.statistics = arguments, threads, large, statistics
        self.smallest, self.largest = smallest, largest

    cdef Values read(self, Form form, unsigned long long address):
        cdef size_t size = <size_t>(form.numel * form.size)
        cdef HostSummary found
        cdef void* parallel = NULL
        cdef unsigned int many = 0
        cdef int failed = 0, number
        cdef Values values
        if self.statistics and not form.has_arguments:
            kind, _, table, tiny = self.arguments(form.dtype)
            form.kind, form.table, form.tiny = kind, <double*><size_t>(table or 0), tiny
            form.has_arguments = True
        if self.statistics and size >= self.large:
            function, many = self.threads()
            parallel = <void*><size_t>(function or 0)
        with nogil:
            if self.statistics:
                failed = self.summarize(form.kind, <void*>address, size, 0, 0, NULL, NULL, form.table, form.tiny, &found, self.target,
                                        parallel, many)
            else:
                self.fingerprint(<void*>address, size, &found.s0, self.target)
        if failed or (self.statistics and not (self.smallest < found.sum_squares < self.largest)):
            return None
        if self.statistics and (found.nan or found.posinf or found.neginf):
            return None
        values = Values.__new__(Values)
        values.note, values.measured, values.high, values.low = "", True, found.s1, found.s0
        if self.statistics:
            values.has_summary = values.has_order = values.has_mean = True
            values.numel = form.numel
            values.minimum, values.maximum = found.min + 0.0, found.max + 0.0
            values.mean, values.rms = found.sum / form.numel, sqrt(found.sum_squares / form.numel)
            for number in range(5):
                values.counts[number] = <long long>(&found.nan)[number]
        return values


cdef bint _is_clear() except -1:
    """Tell whether no dispatch mode and no transform sees or changes our work on tensors."""
    if _native != NULL:
        return not _native.is_seen()
    return call_function(&_modes_of_dispatch) == 0 and not _is_transforming()


cdef inline bint _is_transforming() except -1:
    """`torch_internals.inside_transform`"""
    return _tls_includes(_TRANSFORMS)


cdef enum:
    NUM_FORMS = 1024


cdef class Reader:
    """The values that a reader has seen in this step, and the common way to take a tensor down; `TensorReader` does the rest."""

    cdef public dict _seen
    cdef public list _references
    cdef public dict _forms
    cdef public bint _keeps_views
    cdef public HostKernel _host_kernel
    cdef public dict _in_flight
    cdef public long long _next_sweep
    cdef public dict unwritten
    cdef dict _told
    cdef void* _recent[NUM_FORMS]  # of `_told`, by a quick hash
    cdef long long most_storages

    def __cinit__(self, *args, **kwargs):
        self._seen, self._references, self._forms, self._told, self._in_flight, self.unwritten = {}, [], {}, {}, {}, {}
        self.most_storages, self._next_sweep = 50_000, 512  # as `taking.MOST_STORAGES` and `FIRST_SWEEP`

    cdef Form _form_of(self, object tensor, DLTensor* told):
        """Return the form of a tensor; None where it is unknown and there is no object to ask."""
        cdef char key[16 + 16 * MOST_DIMS]
        cdef Py_ssize_t size = 16 + 16 * told.ndim, number
        cdef uint64_t mixed = <uint64_t>told.ndim
        cdef void* recent
        cdef Form form
        memcpy(key, &told.device, 8)
        memcpy(key + 8, &told.dtype, 4)
        memcpy(key + 12, &told.ndim, 4)
        memcpy(key + 16, told.shape, 8 * told.ndim)
        memcpy(key + 16 + 8 * told.ndim, told.strides, 8 * told.ndim)
        for number in range(size >> 3):
            mixed = (mixed ^ (<uint64_t*>key)[number]) * <uint64_t>0x9E3779B97F4A7C15
        mixed >>= 54
        recent = self._recent[mixed]
        if recent != NULL:
            form = <Form>recent
            if PyBytes_GET_SIZE(form.key) == size and memcmp(PyBytes_AS_STRING(form.key), key, size) == 0:
                return form
        name = PyBytes_FromStringAndSize(key, size)
        known = self._told.get(name)
        if known is None:
            if tensor is None:
                return None
            if len(self._told) >= self.most_storages:
                memset(self._recent, 0, sizeof(self._recent))
                self._told.clear()
            known = self._told[name] = self._form(tensor)
        form = <Form>known
        if form.key is None:
            form.key = name
        if form.key == name:
            self._recent[mixed] = <void*>form
        return form

    def take(self, slot, tensor, *, bint is_undefined=False):
        """Take down one tensor; its values may come later. Call it where no function mode is active."""
        return self._take(slot, tensor, is_undefined, _is_clear(), -1)

    cdef Taken _take(self, object slot, object tensor, bint is_undefined, bint is_clear, long long version):
        """Take down one tensor; `version` is -1 if it has to be asked for."""
        cdef TensorFacts facts
        cdef Taken taken
        if is_undefined or not _is_plain(tensor):
            return self._look(slot, tensor, is_undefined)
        if self._in_flight:
            taken = self._take_in_flight(slot, tensor)
            if taken is not None:
                return taken
        if _native != NULL:
            if not _native.look(_of(tensor), &facts):
                return self._look(slot, tensor, False)
            return self._take_known(slot, tensor, _of(tensor), None, &facts, is_clear)
        try:
            storage = call_method(&_storage_of, tensor)
            facts.version = ask(&_version_of, tensor) if version < 0 else version
            _exchange.tensor_from_object(<void*>tensor, &facts.told)
        except (RuntimeError, BufferError):  # no memory, no version or no shape: a rare kind
            return self._look(slot, tensor, False)
        if facts.told.ndim > MOST_DIMS:
            return self._look(slot, tensor, False)
        facts.storage = <void*><size_t>ask(&_storage_address, storage)
        facts.requires_grad = ask(&_requires_grad_of, tensor) is True
        facts.mirrors = 1 if call_method(&_neg_of, tensor) is True else 0
        if facts.told.dtype.code == COMPLEX and _is_conj(tensor):
            facts.mirrors += 2
        return self._take_known(slot, tensor, NULL, storage, &facts, is_clear)

    cdef Taken _take_gradient(self, object slot, const void* native, object through, bint is_clear):
        """Take down a gradient that is no object yet, as a view if one lies between; None if it has another number of elements."""
        cdef TensorFacts facts
        cdef int64_t sizes[2 * MOST_DIMS]
        cdef Taken taken = None
        if self._in_flight:
            return self._take_through(slot, _object_of(native), through, is_clear)
        if _native.look(native, &facts) and (through is None or _see_through(&facts, through, sizes)):
            taken = self._take_known(slot, None, native, None, &facts, is_clear)
        if taken is not None:
            return taken
        return self._take_through(slot, _object_of(native), through, is_clear)

    cdef Taken _take_through(self, object slot, object gradient, object through, bint is_clear):
        cdef Taken taken
        if through is None:
            return self._take(slot, gradient, False, is_clear, -1)
        if not _is_plain(gradient) and _is_foreign(_without_class(gradient)):
            return self._take(slot, gradient, False, is_clear, -1)
        if through is not True and through is not _float32 and _without_class(gradient).numel() != math.prod(through):
            return None
        taken = self._take(slot, _as_view(gradient, through), False, is_clear, -1)
        taken.requires_grad = ask(&_requires_grad_of, gradient) is True
        return taken

    cdef Taken _take_known(self, object slot, object tensor, const void* native, object storage, TensorFacts* facts, bint is_clear):
        """Take down a tensor whose facts are known; None where an object is needed and `tensor` is None."""
        cdef unsigned long long address = <unsigned long long>facts.told.data + facts.told.byte_offset
        cdef Form form = self._form_of(tensor, &facts.told)
        cdef Values known, values
        if form is None:
            return None
        identity = <size_t>facts.storage
        known = values = <Values>self._seen.get(identity)
        while values is not None:
            if values.form.order == form.order and values.address == address and values.version == facts.version and values.mirrors == facts.mirrors:
                return _taken(slot, form, values, facts.requires_grad)
            values = values.next
        if not address or form.note:
            return None if tensor is None else self._look(slot, tensor, False)
        if is_clear and not facts.mirrors and not address & 7 and type(form.take_aligned) is Aligned:
            values = (<Aligned>form.take_aligned).take(tensor, native, facts, form, address)
        elif self._host_kernel is not None and form.is_on_host and form.is_contiguous and form.numel and not (facts.mirrors or form.is_complex):
            values = self._host_kernel.read(form, address)
        if values is None:
            if tensor is None:
                return None
            base = None
            if self._keeps_views and known is not None and not facts.mirrors:
                base = self._base(known, facts.version, address, form)
            values = self._read(tensor, form, base)
        values.version, values.address, values.form, values.mirrors, values.next = facts.version, address, form, facts.mirrors, known
        if known is None:
            if len(self._seen) >= self.most_storages:
                self.forget()
            elif len(self._references) >= self._next_sweep:
                self.sweep()
            self._references.append(storage._weak_ref() if storage is not None else <size_t>_native.weak_reference(facts.storage))
        self._seen[identity] = values
        return _taken(slot, form, values, facts.requires_grad)


cdef bint _see_through(TensorFacts* facts, object through, int64_t* sizes) except -1:
    """Turn the facts of a gradient into those of a view of it (`_as_view`), in room for twice as many sizes as there may be; False where
    torch has to be asked.
    """
    cdef DLTensor* told = &facts.told
    cdef Py_ssize_t number
    cdef int64_t stride = 1
    if facts.mirrors or through is _float32:
        return False
    if through is True:
        if told.ndim != 2:
            return False
        sizes[0], sizes[1], sizes[2], sizes[3] = told.shape[1], told.shape[0], told.strides[1], told.strides[0]
        told.shape, told.strides = sizes, sizes + 2
        return True
    for number in range(told.ndim - 1, -1, -1):
        if told.strides[number] != stride:
            return False
        stride *= told.shape[number]
    if len(<tuple>through) > MOST_DIMS or math.prod(through) != stride:
        return False
    told.ndim = <int32_t>len(<tuple>through)
    told.shape, told.strides = sizes, sizes + told.ndim
    stride = 1
    for number in range(told.ndim - 1, -1, -1):
        sizes[number] = (<tuple>through)[number]
        told.strides[number] = stride
        stride *= sizes[number]
    return True


cdef enum:  # the places in a `word_layouts.Layout`
    GROUP = 1
    NUM_PROGRAMS = 5
    ROW = 6


def unchanged(list pending, lose):
    """Return the tensors that nobody has written to since they were taken, those of one group together; call `lose` for the others."""
    cdef Pending entry
    cdef dict groups = {}
    for entry in pending:
        if not entry.is_unchanged():
            lose(entry.values)
            continue
        group = <object>PyTuple_GET_ITEM(entry.layout, GROUP)
        members = groups.get(group)
        if members is None:
            members = groups[group] = []
        (<list>members).append(entry)
    entries = []
    for group in sorted(groups):
        entries += <list>groups[group]
    return entries


def unlink(chains):
    """Take chains of values apart, from the front: freeing a long chain would recurse as deep as it is long."""
    cdef Values values, following
    for values in chains:
        while values is not None:
            following = values.next
            values.next = None
            values = following


def fill(long long[::1] upload, list entries, long long most_rows, long long fields, long long never):
    """Write the rows of a flush. Return for each group of layouts its first layout, its first program and its number of programs; then the
    number of all programs.
    """
    cdef Py_ssize_t count = len(entries), number
    cdef long long first = 0, begin = 0
    cdef Pending entry
    cdef long long* row
    groups = []
    layout = None
    for number in range(count):
        entry = <Pending>entries[number]
        if layout is None or PyTuple_GET_ITEM(layout, GROUP) != PyTuple_GET_ITEM(entry.layout, GROUP) and (
            <object>PyTuple_GET_ITEM(layout, GROUP) != <object>PyTuple_GET_ITEM(entry.layout, GROUP)
        ):
            if layout is not None:
                groups.append((layout, begin, first - begin))
            layout, begin = entry.layout, first
        row = &upload[most_rows + number * fields]
        memcpy(row, PyBytes_AS_STRING(<bytes>PyTuple_GET_ITEM(entry.layout, ROW)), 8 * fields)
        row[0] = <long long>entry.address
        row[2] = upload[number] = first
        first += <long long><object>PyTuple_GET_ITEM(entry.layout, NUM_PROGRAMS)
    if layout is not None:
        groups.append((layout, begin, first - begin))
    for number in range(count, most_rows):
        upload[number] = never
    return groups, first


def hand_over(list entries, list owners, list numels):
    """Append the values that wait for the rows of a flush, and their numbers of elements; let the tensors go."""
    cdef Pending entry
    for entry in entries:
        owners.append(entry.values)
        numels.append(entry.numel)
        entry.alias = None


def settle_rows(const long long[:, :] rows, list numels, list owners, bint statistics):
    """Hand rows of results from a device to the values that wait for them."""
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


# ---- what belongs to a slot, a frame's code or a type, found by address


cdef enum:
    NUM_PLACES = 1024


@cython.final
cdef class _Known:
    """A table of values by the address of an object: at most half of its places are taken, and it holds its keys and values."""

    cdef void* places[2 * NUM_PLACES]  # key, value, key, value
    cdef list held

    def __cinit__(self):
        self.held = []

    cdef void* get(self, object key) noexcept:
        cdef size_t place = _place_for(key)
        while self.places[place] != NULL:
            if self.places[place] == <void*>key:
                return self.places[place + 1]
            place = (place + 2) & (2 * NUM_PLACES - 1)
        return NULL

    cdef object put(self, object key, object value):
        cdef size_t place
        if 2 * len(self.held) >= NUM_PLACES:
            memset(self.places, 0, sizeof(self.places))
            self.held = []
        self.held.append((key, value))
        place = _place_for(key)
        while self.places[place] != NULL and self.places[place] != <void*>key:
            place = (place + 2) & (2 * NUM_PLACES - 1)
        self.places[place], self.places[place + 1] = <void*>key, <void*>value
        return value


cdef inline size_t _place_for(object key) noexcept:
    return ((<size_t><void*>key >> 4) * <size_t>0x9E3779B97F4A7C15 >> 54) << 1


cdef object _remembered(dict known, object key, object value):
    """Put a value into a dict and return it; a full dict is emptied first, rather than grow without end."""
    if len(known) >= 8192:
        known.clear()
    known[key] = value
    return value


# ---- MessagePack


cdef extern from *:
    """
    /* The bytes of a number, the highest first. */
    static uint64_t swapped(uint64_t value) {
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        return value;
    #else
        value = (value & 0x00FF00FF00FF00FFu) << 8 | (value >> 8 & 0x00FF00FF00FF00FFu);
        value = (value & 0x0000FFFF0000FFFFu) << 16 | (value >> 16 & 0x0000FFFF0000FFFFu);
        return value << 32 | value >> 32;
    #endif
    }
    /* Its sixteen hexadecimal digits, eight at a time. */
    static uint64_t digits(uint64_t value) {
        uint64_t above;
        value = (value & 0xFFFF) | (value & 0xFFFF0000u) << 16;
        value = (value & 0x000000FF000000FFu) | (value & 0x0000FF000000FF00u) << 8;
        value = (value & 0x000F000F000F000Fu) | (value & 0x00F000F000F000F0u) << 4;
        above = (value + 0x0606060606060606u) >> 4 & 0x0101010101010101u;
        return value + 0x3030303030303030u + above * 39;
    }
    static void spread(uint64_t value, char* place) {
        uint64_t high = swapped(digits(value >> 32)), low = swapped(digits(value & 0xFFFFFFFFu));
        memcpy(place, &high, 8);
        memcpy(place + 8, &low, 8);
    }
    /* A number in so many bytes behind a mark, where there is room for nine. */
    static char* put_wide(char* place, uint8_t mark, uint64_t value, int width) {
        value = swapped(value << (64 - 8 * width));
        *place = (char)mark;
        memcpy(place + 1, &value, 8);
        return place + 1 + width;
    }
    static char* put_count(char* place, uint64_t value) {
        if (value < 128) {
            *place = (char)value;
            return place + 1;
        }
        if (value < 1u << 8) return put_wide(place, 0xCC, value, 1);
        if (value < 1u << 16) return put_wide(place, 0xCD, value, 2);
        if (value >> 32 == 0) return put_wide(place, 0xCE, value, 4);
        return put_wide(place, 0xCF, value, 8);
    }
    static char* put_number(char* place, double value) {
        uint64_t word;
        memcpy(&word, &value, 8);
        return put_wide(place, 0xCB, word, 8);
    }
    """
    void spread(uint64_t, char*)
    char* put_wide(char*, uint8_t, uint64_t, int)
    char* put_count(char*, uint64_t)
    char* put_number(char*, double)


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

    cdef inline char* more(self, Py_ssize_t count) except NULL:
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

    cdef inline int byte(self, uint8_t value) except -1:
        self.more(1)[0] = <char>value
        return 0

    cdef inline int raw(self, const char* data, Py_ssize_t count) except -1:
        memcpy(self.more(count), data, count)
        return 0

    cdef inline int big(self, uint8_t mark, uint64_t value, int width) except -1:
        self.end(put_wide(self.more(9), mark, value, width))
        return 0

    cdef inline int count(self, uint64_t value) except -1:
        self.end(put_count(self.more(9), value))
        return 0

    cdef inline int number(self, double value) except -1:
        self.end(put_number(self.more(9), value))
        return 0

    cdef inline void end(self, const char* place) noexcept:
        """End the used part of the room before this place."""
        self.used = place - self.room

    cdef inline int text(self, str value) except -1:
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

    cdef inline int items(self, Py_ssize_t length) except -1:
        if length < 16:
            return self.byte(<uint8_t>(0x90 | length))
        if length < (1 << 16):
            return self.big(0xDC, length, 2)
        return self.big(0xDD, length, 4)

    cdef int entries(self, Py_ssize_t length) except -1:
        if length < 16:
            return self.byte(<uint8_t>(0x80 | length))
        if length < (1 << 16):
            return self.big(0xDE, length, 2)
        return self.big(0xDF, length, 4)


cdef _Known _slot_names = _Known()


cdef bytes _slot_name(object slot):
    cdef void* known = _slot_names.get(slot)
    if known != NULL:
        return <bytes>known
    return <bytes>_slot_names.put(slot, _encode_value((slot.role, slot.path)))


cdef bytes _head(Form form):
    if form.head is None:
        form.head = _encode_value((form.dtype, form.shape, form.strides, form.device))[1:]
    return form.head


cdef char* _put_summary(char* place, Values values) noexcept:
    cdef int number
    place[0] = <char>0x9A
    place = put_count(place + 1, values.numel)
    if values.has_order:
        place = put_number(put_number(place, values.minimum), values.maximum)
    else:
        place[0] = place[1] = <char>0xC0
        place += 2
    if values.has_mean:
        place = put_number(put_number(place, values.mean), values.rms)
    else:
        place[0] = place[1] = <char>0xC0
        place += 2
    for number in range(5):
        place = put_count(place, values.counts[number])
    return place


cdef int _put_encoded(_Buffer out, object value) except -1:
    if value is None:
        out.byte(0xC0)
    else:
        _put_bytes(out, <bytes>_encode_value(value))
    return 0


cdef int _put_slot(_Buffer out, Taken taken) except -1:
    cdef Values values = taken.values
    cdef bytes name = _slot_name(taken.slot), head = _head(taken.form)
    cdef Py_ssize_t of_name = PyBytes_GET_SIZE(name), of_head = PyBytes_GET_SIZE(head)
    cdef char* place = out.more(of_name + of_head + 160)  # a summary takes 100 at most, a fingerprint 37
    place[0] = <char>0x9A
    memcpy(place + 1, PyBytes_AS_STRING(name), of_name)
    memcpy(place + 1 + of_name, PyBytes_AS_STRING(head), of_head)
    place += 1 + of_name + of_head
    place[0] = <char>(0xC3 if taken.requires_grad else 0xC2)
    place += 1
    if values.has_summary:
        out.end(_put_summary(place, values))
    else:
        out.end(place)
        _put_encoded(out, values.given_summary)
    if values.measured:
        place = out.more(37)
        memcpy(place, b"\xd9\x23u1:", 5)
        spread(values.high, place + 5)
        spread(values.low, place + 21)
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
    """Tell whether the values of every slot are there."""
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
    """Split the arguments of a call: return plain values, and add the tensors to `found`."""
    cdef list encoded = []
    cdef Py_ssize_t index
    for index in range(len(args)):
        value = args[index]
        if _is_plain(value) and index < NUM_READY:
            slot, mark = <tuple>_ready_inputs[index]
            found.append((slot, value))
            encoded.append(mark)
        else:
            encoded.append(_encode_argument(value, (index,), "input", found))
    named = None
    if kwargs:
        named = {name: _encode_argument(value, (name,), "input", found) for name, value in kwargs.items()}
    return tuple(encoded), named


cdef object _packed(tuple args, dict kwargs, list found):
    """Pack the same as the store writes it; return plain values if MessagePack cannot hold one of them, since the store can write it."""
    global _spare
    cdef Py_ssize_t index, before = len(found)
    cdef _Buffer out = _spare
    cdef bytes packed
    if out is None:
        out = _Buffer.__new__(_Buffer)
    _spare = None
    out.used = 0
    try:
        out.byte(0x92)
        out.items(len(args))
        for index in range(len(args)):
            value = args[index]
            if index < NUM_READY and _is_plain(value):
                found.append((<object>PyTuple_GET_ITEM(_ready_inputs[index], 0), value))
                _put_bytes(out, <bytes>_ready_marks[index])
            elif not _put_plain(out, value):
                _put_bytes(out, <bytes>_encode_value(_encode_argument(value, (index,), "input", found)))
        if not kwargs:
            out.byte(0xC0)
        else:
            out.entries(len(kwargs))
            for name, value in kwargs.items():
                out.text(name)
                if _is_plain(value):
                    slot, mark = _named_input(name)
                    found.append((slot, value))
                    _put_bytes(out, <bytes>mark)
                elif not _put_plain(out, value):
                    _put_bytes(out, <bytes>_encode_value(_encode_argument(value, (name,), "input", found)))
        packed = PyBytes_FromStringAndSize(out.room, out.used)
    except Exception as error:
        _let_pass(error)
        del found[before:]
        return _split(args, kwargs, found)
    _spare = out
    return packed


cdef dict _named_inputs = {}


cdef tuple _named_input(str name):
    known = _named_inputs.get(name)
    if known is None:
        slot, mark = _slot_and_mark("input", (name,))
        known = _remembered(_named_inputs, name, (slot, _encode_value(mark)))
    return <tuple>known


cdef _Buffer _spare = None
cdef object _size_type = torch.Size


cdef bint _put_plain(_Buffer out, object value) except -1:
    """Write a value of a common kind; return False for any other."""
    if value is None:
        out.byte(0xC0)
    elif value is True:
        out.byte(0xC3)
    elif value is False:
        out.byte(0xC2)
    elif type(value) is int:
        return _put_whole(out, value)
    elif type(value) is float:
        out.number(<double>value)
    elif type(value) is str:
        if len(<str>value) > 200:  # as `walk._LONGEST_TEXT`
            return False
        out.text(<str>value)
    elif type(value) is tuple or type(value) is _size_type:
        return _put_numbers(out, <tuple>value, type(value) is tuple)
    else:
        return False
    return True


cdef bint _put_whole(_Buffer out, object value) except -1:
    cdef int overflow = 0
    cdef long long number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow:
        return False
    if number >= 0:
        out.count(<uint64_t>number)
    elif number >= -32:
        out.byte(<uint8_t>(0x100 + number))
    elif number >= -(1 << 7):
        out.big(0xD0, <uint64_t>number, 1)
    elif number >= -(1 << 15):
        out.big(0xD1, <uint64_t>number, 2)
    elif number >= -(<long long>1 << 31):
        out.big(0xD2, <uint64_t>number, 4)
    else:
        out.big(0xD3, <uint64_t>number, 8)
    return True


cdef bint _put_numbers(_Buffer out, tuple values, bint is_tuple) except -1:
    """Write a short tuple of whole numbers, or a size."""
    cdef Py_ssize_t begin = out.used
    if len(values) > 64:
        return False
    out.raw(b"\x81\xa6$tuple" if is_tuple else b"\x81\xa5$size", 8 if is_tuple else 7)
    out.items(len(values))
    for value in values:
        if type(value) is not int or not _put_whole(out, value):
            out.used = begin
            return False
    return True


cdef list _results(object value):
    cdef Py_ssize_t index
    if _is_plain(value):
        return [(_first_output, value)]
    if type(value) is tuple and len(<tuple>value) <= NUM_READY:
        found = []
        for index in range(len(<tuple>value)):
            item = (<tuple>value)[index]
            if not _is_plain(item):
                break
            found.append((_ready_outputs[index], item))
        else:
            return found
    return <list>_tensors_in(value, "output")


# ---- the backward side of a call


cdef object _next_sequence_number = _torch_private.sequence_number
cdef object _current_node = _torch_private.current_node
cdef unsigned long long ACCUMULATE_GRAD = 2**64 - 1
cdef object _float32 = torch.float32


cdef inline long long _task() except? -2:
    """Return the running backward pass, or -1."""
    return _native.graph_task() if _native != NULL else call_function(&_task_now)


cdef inline bint _is_grad_on() except -1:
    return _native.state() & GRAD if _native != NULL else call_function(&_grad_now) is True


@cython.final
@cython.no_gc
cdef class Edges:
    cdef dict nodes
    cdef dict leaves
    cdef set bases
    cdef list found
    cdef unsigned long long first
    cdef void* native  # the same past Python, where inputs are numbered as they are found
    cdef list others  # the slots of the numbers after those

    def __dealloc__(self):
        if self.native != NULL:
            _native.free_edges(self.native)

    cpdef add_leaf(self, tensor, slot):
        """Add a leaf that is no argument of the call."""
        if self.native == NULL:
            self.leaves.setdefault(<size_t><void*>tensor, slot)
            return
        if self.others is None:
            self.others = []
        _native.add_leaf(self.native, _of(tensor), len(self.found) + len(self.others))
        self.others.append(slot)

    cdef object slot_of(self, Py_ssize_t number):
        cdef Py_ssize_t count = len(self.found)
        return <object>PyTuple_GET_ITEM(self.found[number], 0) if number < count else self.others[number - count]


cdef Edges _native_edges_of(list found):
    cdef Edges edges = Edges.__new__(Edges)
    cdef Py_ssize_t number
    edges.found = found
    edges.native = _native.new_edges()
    if edges.native == NULL:
        raise MemoryError()
    for number in range(len(found)):
        _native.add_edge(edges.native, _of(<object>PyTuple_GET_ITEM(found[number], 1)), <int32_t>number)
    _native.begin_call(edges.native)
    return edges


cdef inline Edges _edges_of(list found):
    return _native_edges_of(found) if _native != NULL else _python_edges_of(found)


cdef Edges _python_edges_of(list found):
    cdef Edges edges = Edges.__new__(Edges)
    cdef list bases = None
    cdef dict leaves = {}, nodes = {}
    for slot, tensor in found:
        if ask(&_requires_grad_of, tensor) is not True:
            continue
        node = ask(&_node_of, tensor)
        if node is None:
            leaves.setdefault(<size_t><void*>tensor, slot)
        else:
            nodes.setdefault((node, ask(&_place_of, tensor)), slot)
        base = ask(&_base_of, tensor)
        if base is not None and ask(&_requires_grad_of, base) is True:
            if bases is None:
                bases, edges.bases = [], set()
            bases.append((slot, base))
    if bases is not None:
        for slot, base in bases:
            edges.bases.add(<size_t><void*>base)
            node = ask(&_node_of, base)
            if node is None:
                leaves.setdefault(<size_t><void*>base, slot)
            else:
                nodes.setdefault((node, ask(&_place_of, base)), slot)
    edges.nodes, edges.leaves, edges.found = nodes, leaves, found
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

    `slots` are those to which gradients are passed on, `num_parts` the number of parts of each. The first pass under way is `current`; a
    dict of the others exists only where there are several at a time.
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
        """Hand over the gradients that have come, at the end of a backward pass that did not run every node."""
        cdef _Pass unfinished
        with self.writer._lock:
            self.writer.begun.pop(self, None)
            while self.others:
                _, unfinished = self.others.popitem()
                self._hand_over(unfinished)
            unfinished, self.current = self.current, None
            if unfinished is not None:
                self._hand_over(unfinished)

    cdef _Pass _pass(self):
        cdef long long task = _task()
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

    cdef int _enter(self, _Pass current, tuple slots, tuple shape, tuple gradients, const void* native, bint is_clear) except -1:
        cdef Taken taken
        cdef Py_ssize_t number
        for item in slots:
            number, slot = <object>(<tuple>item)[0], <object>(<tuple>item)[1]
            if not _is_there(gradients, native, number):
                continue
            for taken in current.inputs:
                if _are_equal(taken.slot, slot):
                    break
            else:
                taken = self._read(slot, gradients, native, number, shape, is_clear)
                if taken is not None:
                    if shape is not None:
                        taken.requires_grad = False
                    current.inputs.append(taken)
        return 0

    cdef int _leave(self, _Pass current, tuple leaving, tuple gradients, const void* native, bint is_clear) except -1:
        cdef long long left
        cdef Py_ssize_t number, place
        cdef bint looks_through = False
        for part in leaving:
            number, place, through = <object>(<tuple>part)[0], <object>(<tuple>part)[1], <object>(<tuple>part)[2]
            looks_through |= through is not None and through is not _float32
            left = <long long>current.parts_left[place] - 1
            current.parts_left[place] = left
            if left == 0 and (current.sums is None or place not in current.sums):
                if _is_there(gradients, native, number):
                    current.outputs.append(self._read(self.slots[place], gradients, native, number, through, is_clear))
                continue
            gradient = None
            if _is_there(gradients, native, number):
                gradient = gradients[number] if native == NULL else _object_of(_native.gradient_at(native, number))
                if through is not None:
                    gradient = _as_view(gradient, through)
            self._add_part(current, place, gradient, left, is_clear)
        return looks_through

    cdef Taken _read(self, object slot, tuple gradients, const void* native, Py_ssize_t number, object through, bint is_clear):
        """Read a gradient, as a view if one lies between; None if it has another number of elements."""
        if native != NULL:
            return self.writer._read_gradient(slot, _native.gradient_at(native, number), through, is_clear)
        return self.writer._read_through(slot, gradients[number], through, is_clear)

    cdef int _add_part(self, _Pass current, Py_ssize_t place, object gradient, long long left, bint is_clear) except -1:
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
            current.outputs.append(self.writer._read_through(self.slots[place], earlier, None, is_clear))
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
                current.outputs.append(self.writer._read_through(self.slots[place], total, None, _is_clear()))
            current.sums.clear()
        if current.inputs or current.outputs:
            self.writer.finish_pass(self.call, current.inputs, current.outputs)
        return 0


cdef inline bint _is_there(tuple gradients, const void* native, Py_ssize_t number) except -1:
    if native != NULL:
        return _native.gradient_at(native, number) != NULL
    return number < len(gradients) and gradients[number] is not None


cdef object _sum(object earlier, object gradient):
    """Add a gradient to the earlier sum, unseen and without a graph; one whose class would run its own code is not added."""
    if not _is_plain(gradient):
        gradient = _without_class(gradient)
        if _is_foreign(gradient):
            return gradient
    if earlier is not None and not _is_plain(earlier) and _is_foreign(earlier):
        return earlier
    if not _is_clear():
        with _blind():
            return gradient.detach().clone() if earlier is None else earlier + gradient.detach()
    gradient = call_method(&_detached, gradient)
    return _clone(gradient) if earlier is None else _add(earlier, gradient)


cdef object _as_view(object gradient, object through):
    """Change a gradient as the node behind would, which does nothing else: transpose it, reshape it, or cast it back to float32."""
    if not _is_plain(gradient):
        gradient = _without_class(gradient)
        if _is_foreign(gradient):
            return gradient
    if not _is_clear():
        with _blind():
            if through is _float32:
                return gradient.detach().to(_float32)
            return gradient.detach().t() if through is True else gradient.detach().reshape(through)
    gradient = call_method(&_detached, gradient)
    if through is _float32:
        return _to(gradient, _float32)
    return _transpose(gradient) if through is True else _reshape(gradient, through)


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Hook:
    """The hook of a node: called before the node runs with the gradients that enter, or afterwards with those that leave and those that
    entered.

    `leaving` has the place among the gradients, the place among the slots of the call and the view that lies between; `entering` places and
    slots. `shape` is that of the result, if another node comes between that only views the gradient in that shape.
    """

    cdef BackwardOfCall backward
    cdef tuple leaving
    cdef tuple entering
    cdef tuple shape
    cdef long long not_in  # the pass in which it was added: there another hook took the gradient

    def __cinit__(self):
        self.not_in = -1

    def __call__(self, gradients, entered=None):
        gradients = tuple(gradients)  # a compiled backward pass has lists
        self._call(gradients, gradients if entered is None else tuple(entered), NULL, NULL)

    cdef int _call(self, tuple gradients, tuple entered, const void* native, const void* native_entered) except -1:
        cdef Observer writer = self.backward.writer
        session = writer.session()
        if session is None or not session._is_active or not session._is_recording:
            return 0
        try:
            guard = _shut_eyes()
            try:
                self._take(writer, gradients, entered, native, native_entered)
            finally:
                _open_eyes(guard)
        except Exception as error:
            session.failed("record a backward call", error)
        return 0

    cdef int _take(self, Observer writer, tuple gradients, tuple entered, const void* native, const void* native_entered) except -1:
        cdef BackwardOfCall backward = self.backward
        cdef _Pass current
        if self.not_in != -1 and self.not_in == _task():
            return 0
        is_clear = _is_clear()
        writer._lock.take()
        try:
            current = backward._pass()
            if self.entering is not None:
                backward._enter(current, self.entering, self.shape, entered, native_entered, is_clear)
            if self.leaving is not None and backward._leave(current, self.leaving, gradients, native, is_clear) and _is_grad_on():
                self._look_no_more()
            backward._event(current)
        finally:
            writer._lock.leave()
        return 0

    cdef int _look_no_more(self) except -1:
        """Stop looking through views at this node: the pass makes a graph of its own, and a pass through that graph may reach the nodes
        behind without this one. From the next pass on each of them has a hook.
        """
        cdef Hook hook
        node = _current_node()
        if node is None:
            return 0
        following = <tuple>node.next_functions
        kept = []
        for part in self.leaving:
            number, place, through = part
            if through is None or through is _float32:
                kept.append(part)
                continue
            hook = Hook.__new__(Hook)
            hook.backward, hook.leaving, hook.not_in = self.backward, ((0, place, None),), _task()
            following[number][0].register_hook(hook)
            self.backward.num_events += 1
        self.leaving = tuple(kept)
        return 0


cdef int _hook_called(void* hook, const void* left, const void* entered) except -1:
    """Run a hook that a node calls past Python."""
    return (<Hook>hook)._call(None, None, left, entered)


cdef bint _is_owned(object node, unsigned long long first, unsigned long long last) except -1:
    cdef unsigned long long position = node._sequence_nr()
    return first <= position < last


@cython.final
@cython.no_gc
cdef class Owned:
    """The nodes that a call's results come from, and for each the places and slots of the gradients that enter there."""

    cdef list nodes, entering
    cdef dict places  # of the nodes, where there are many

    cdef Py_ssize_t find(self, object node) except -2:
        cdef Py_ssize_t place
        if self.places is not None:
            return <Py_ssize_t>self.places.get(node, -1)
        for place in range(len(self.nodes)):
            if self.nodes[place] is node:
                return place
        return -1

    cdef int add(self, object node, object number, object slot) except -1:
        cdef Py_ssize_t place = self.find(node)
        if place == -1:
            self.nodes.append(node)
            self.entering.append(_shared(number, slot))
            if self.places is not None:
                self.places[node] = len(self.nodes) - 1
            elif len(self.nodes) > 8:
                self.places = {known: index for index, known in enumerate(self.nodes)}
            return 0
        entering = <tuple>self.entering[place]
        for known, _ in entering:
            if known == number:
                return 0
        self.entering[place] = (*entering, (number, slot))
        return 0


cdef _Known _first_entering = _Known()
cdef dict _entering = {}


cdef tuple _shared(object number, object slot):
    """Share one tuple of one item among all calls that are like this one, so that Python's garbage collector sees few of them."""
    cdef void* first
    if number == 0:
        first = _first_entering.get(slot)
        return <tuple>first if first != NULL else _first_entering.put(slot, ((number, slot),))
    key = (number, <size_t><void*>slot)
    known = _entering.get(key)
    return <tuple>(known if known is not None else _remembered(_entering, key, ((number, slot),)))


cdef _Known _tuples_of_slots = _Known()
cdef tuple _nothing_passed = ()


cdef tuple _shared_slots(list slots):
    """Share one tuple of the slots that gradients are passed on to."""
    cdef void* found
    cdef Py_ssize_t number
    if not slots:
        return _nothing_passed
    found = _tuples_of_slots.get(slots[0])
    known = <list>found if found != NULL else <list>_tuples_of_slots.put(slots[0], [])
    for like in known:
        if len(<tuple>like) == len(slots):
            for number in range(len(slots)):
                if (<tuple>like)[number] is not slots[number]:
                    break
            else:
                return <tuple>like
    like = tuple(slots)
    if len(known) < 64:
        known.append(like)
    return <tuple>like


cdef int _watch_backward(Observer writer, OpenCall call, Edges edges, list results) except -1:
    """Hook the nodes that a finished call owns."""
    cdef tuple planned
    # The user can get hold of what lies inside a module, and hook it; not of what lies inside a call of torch.
    cdef bint looks_through = edges.bases is None and call.level == "api" and not call.op.startswith("Function.")
    if edges.native != NULL:
        return _watch_natively(writer, call, edges, results, looks_through)
    planned = _plan_call(edges, results, looks_through)
    if planned is not None:
        _hook_all(writer, call, <list>planned[0], <Owned>planned[1], <tuple>planned[2])
    return 0


cdef tuple _plan_call(Edges edges, list results, bint looks_through):
    """Plan a call as `backward.plan_call` does: its nodes with the gradients that each passes on, those that its results come from, and the
    node behind a view. None if it has no node.
    """
    cdef unsigned long long first = edges.first, last = _next_sequence_number()
    cdef Owned owned
    if first == last:
        return None
    owned = Owned.__new__(Owned)
    owned.nodes, owned.entering = [], []
    for slot, tensor in results:
        node = ask(&_node_of, tensor)
        if node is not None and _is_owned(node, first, last):
            owned.add(node, ask(&_place_of, tensor), _renamed(_inputs_of, "input", slot))
        if edges.bases is not None:
            base = ask(&_base_of, tensor)
            if base is not None and <size_t><void*>base in edges.bases:
                node = ask(&_node_of, base)
                if node is not None and _is_owned(node, first, last):
                    owned.add(node, ask(&_place_of, base), _one(_slot_type("input", (*slot.path, "base"))))
    if not owned.nodes:
        return None
    watched = _watched(edges, last, owned, looks_through and edges.bases is None)
    if watched is None:
        watched = _watched(edges, last, owned, False)
    return watched, owned, _behind_a_view(owned, results, first, last)


cdef int _watch_natively(Observer writer, OpenCall call, Edges edges, list results, bint looks_through) except -1:
    cdef const void* few[16]
    cdef const void** tensors = few
    cdef Py_ssize_t number, count = len(results)
    cdef Plan plan
    if count > 16:
        tensors = <const void**>malloc(count * sizeof(void*))
        if tensors == NULL:
            raise MemoryError()
    try:
        for number in range(count):
            tensors[number] = _of(<object>PyTuple_GET_ITEM(results[number], 1))
        _native.plan_call(edges.native, tensors, <int32_t>count, looks_through, &plan)
    finally:
        if tensors != few:
            free(tensors)
    try:
        if plan.count:
            _hook_planned(writer, call, edges, results, &plan)
    finally:
        _native.free_plan(&plan)
    return 0


def edges_by(str planner, list found):
    """Find the edges of a call that is about to be made, for `plan_by`: by this file ("cython") or past Python ("native")."""
    return _native_edges_of(found) if planner == "native" else _python_edges_of(found)


def plan_by(Edges edges, list results, bint looks_through):
    """Return the plan of a finished call as plain values, so that a test can see that all planners give the same plan.

    It has for each node the places and slots that enter, and places, slots and views that leave; and the slot and shape behind a view.
    """
    cdef Plan plan
    cdef const void** tensors
    cdef Py_ssize_t number
    cdef list nodes = [], slots = [], num_parts = []
    cdef Owned owned
    behind = None
    if edges.native == NULL:
        planned = _plan_call(edges, results, looks_through)
        if planned is None:
            return [], None
        owned = planned[1]
        for node, leaving in planned[0]:
            number = owned.find(node)
            nodes.append((owned.entering[number] if number >= 0 else (), tuple(leaving or ())))
        return nodes, None if planned[2] is None else (planned[2][1][0][1], planned[2][2])
    tensors = <const void**>malloc((len(results) + 1) * sizeof(void*))
    for number in range(len(results)):
        tensors[number] = _of(results[number][1])
    _native.plan_call(edges.native, tensors, <int32_t>len(results), looks_through, &plan)
    free(tensors)
    for number in range(plan.count):
        entering, leaving = (), ()
        if plan.watched[number].entering != -1:
            entering = _planned_entering(&plan, &plan.watched[number], results)
        if plan.watched[number].num_leaving:
            parts = _planned_leaving(&plan, &plan.watched[number], edges, slots, num_parts)
            leaving = tuple([(place, slots[among], view) for place, among, view in parts])
        nodes.append((entering, leaving))
    if plan.behind != NULL:
        entering, shape = _behind(results)
        behind = entering[0][1], shape
    _native.free_plan(&plan)
    return nodes, behind


cdef int _hook_planned(Observer writer, OpenCall call, Edges edges, list results, Plan* plan) except -1:
    cdef BackwardOfCall backward = BackwardOfCall.__new__(BackwardOfCall)
    cdef Hook hook
    cdef list slots = [], num_parts = []
    cdef const Watched* watched
    cdef int32_t number
    backward.writer, backward.call = writer, call
    for number in range(plan.count):
        watched = &plan.watched[number]
        if watched.entering == -1 and not watched.num_leaving:
            continue
        hook = Hook.__new__(Hook)
        hook.backward = backward
        backward.num_events += 1
        if watched.entering != -1:
            hook.entering = _planned_entering(plan, watched, results)
        if not watched.num_leaving:
            _native.hook_before(watched.node, <void*>hook)
            continue
        hook.leaving = _planned_leaving(plan, watched, edges, slots, num_parts)
        if plan.behind == watched.node:
            hook.entering, hook.shape = _behind(results)
            plan.behind = NULL
        _native.hook_after(watched.node, <void*>hook)
    if plan.behind != NULL:
        hook = Hook.__new__(Hook)
        hook.backward = backward
        hook.entering, hook.shape = _behind(results)
        backward.num_events += 1
        _native.hook_before(plan.behind, <void*>hook)
    backward.slots, backward.num_parts = _shared_slots(slots), tuple(num_parts)
    return 0


cdef tuple _behind(list results):
    """Return where the gradient of the one result enters behind its view, and in which shape."""
    slot, tensor = <tuple>results[0]
    return _shared(0, _renamed(_inputs_of, "input", slot)), tuple(tensor.shape)


cdef tuple _planned_entering(Plan* plan, const Watched* watched, list results):
    cdef const Entering* entering = &plan.entering[watched.entering]
    cdef int32_t number
    if watched.num_entering == 1:
        return _shared(entering.place, _slot_entering(entering, results))
    return tuple([(plan.entering[number].place, _slot_entering(&plan.entering[number], results))
                  for number in range(watched.entering, watched.entering + watched.num_entering)])


cdef object _slot_entering(const Entering* entering, list results):
    slot = <object>PyTuple_GET_ITEM(results[entering.result], 0)
    return _one(_slot_type("input", (*slot.path, "base"))) if entering.is_base else _renamed(_inputs_of, "input", slot)


cdef tuple _planned_leaving(Plan* plan, const Watched* watched, Edges edges, list slots, list num_parts):
    cdef const Leaving* leaving
    cdef int32_t number
    cdef list parts = []
    for number in range(watched.leaving, watched.leaving + watched.num_leaving):
        leaving = &plan.leaving[number]
        view = None
        if leaving.view == TRANSPOSED:
            view = True
        elif leaving.view == RESHAPED:
            view = tuple((<object>PyTuple_GET_ITEM(edges.found[leaving.input], 1)).shape)
        elif leaving.view == CAST:
            view = _float32
        parts.append((leaving.place, _place_among(slots, num_parts, _passed_on(edges.slot_of(leaving.input))), view))
    return tuple(parts)


cdef enum:  # of `Leaving.view`
    RESHAPED = 1
    TRANSPOSED = 2
    CAST = 3


cdef Py_ssize_t _place_among(list slots, list num_parts, object slot) except -1:
    """Return the place of a slot, and count one more part of its gradient."""
    cdef Py_ssize_t place
    for place in range(len(slots)):
        if _are_equal(slots[place], slot):
            num_parts[place] += 1
            return place
    slots.append(slot)
    num_parts.append(1)
    return len(slots) - 1


cdef list _watched(Edges edges, unsigned long long last, Owned owned, bint looks_through):
    """Return the nodes of a call with the gradients that each passes on to inputs, as number, slot and view; None if a node cannot be
    looked through because two others lead to it.
    """
    cdef list waiting = owned.nodes[:], watched = [], leaving
    cdef set seen = None, through = None
    cdef unsigned long long position
    cdef Py_ssize_t number
    while waiting:
        node = waiting.pop()
        leaving = None
        number = -1
        for edge in <tuple>node.next_functions:
            number += 1
            following = <object>PyTuple_GET_ITEM(edge, 0)
            if following is None:
                continue
            if through is not None and following in through:
                return None
            view = None
            slot = edges.nodes.get(edge)
            if slot is None:
                if type(following) is _leaf_type:
                    slot = _slot_of_leaf(edges, following)
                else:
                    position = following._sequence_nr()
                    if position == ACCUMULATE_GRAD:
                        _meet_leaf(following)
                        slot = _slot_of_leaf(edges, following)
                    elif (seen is None or following not in seen) and owned.find(following) == -1 and _kind_of(following) == CAST:
                        slot = _slot_behind_cast(edges, following)
                        view = None if slot is None else _float32
                    if slot is None and edges.first <= position < last:
                        if seen is None:
                            seen = set(owned.nodes)
                        if following not in seen:
                            if looks_through:
                                slot, view = _look_through(edges, following)
                            if slot is None:
                                seen.add(following)
                                waiting.append(following)
                            else:
                                if through is None:
                                    through = set()
                                through.add(following)
            if slot is not None:
                if leaving is None:
                    leaving = []
                leaving.append((number, _passed_on(slot), view))
        watched.append((node, leaving))
    return watched


cdef object _leaf_type = None


cdef int _meet_leaf(object node) except -1:
    """Remember the type of the nodes that add into a leaf: it identifies them from then on."""
    global _leaf_type
    if node.name() == "torch::autograd::AccumulateGrad":
        _leaf_type = type(node)
    return 0


cdef object _slot_of_leaf(Edges edges, object node):
    variable = getattr(node, "variable", None)
    return edges.leaves.get(<size_t><void*>variable)


cdef object _slot_behind(Edges edges, object edge):
    slot = edges.nodes.get(edge)
    if slot is not None:
        return slot
    node = <object>PyTuple_GET_ITEM(edge, 0)
    if type(node) is _leaf_type or <unsigned long long>node._sequence_nr() == ACCUMULATE_GRAD:
        return _slot_of_leaf(edges, node)
    return None


cdef object _slot_behind_cast(Edges edges, object node):
    """Return the slot of the float32 leaf that a node casts: autocast hands the cast to later calls too, and the gradient that leaves it is
    the sum of all.
    """
    leaf = (<tuple>node.next_functions)[0][0]
    if leaf is None or type(leaf) is not _leaf_type and <unsigned long long>leaf._sequence_nr() != ACCUMULATE_GRAD:
        return None
    return _slot_of_leaf(edges, leaf) if leaf.variable.dtype is _float32 else None


cdef dict _views = {}
cdef dict _kinds = {"ViewBackward0": RESHAPED, "UnsafeViewBackward0": RESHAPED, "TBackward0": TRANSPOSED, "ToCopyBackward0": CAST}


cdef long _kind_of(object node) except -1:
    """Return the kind of change that a node makes to a gradient, by its type; 0 for any other node."""
    kind = _views.get(type(node))
    if kind is None:
        kind = _remembered(_views, type(node), _kinds.get(node.name(), 0))
    return kind


cdef tuple _look_through(Edges edges, object node):
    """Return the slot behind a node that only views a gradient in another way, and how; None where it does more, or leads elsewhere."""
    cdef long kind = _kind_of(node)
    if kind == 0 or kind == CAST:
        return None, None
    following = <tuple>node.next_functions
    if len(following) != 1 or following[0][0] is None:
        return None, None
    slot = _slot_behind(edges, following[0])
    if slot is None:
        return None, None
    if kind == TRANSPOSED:
        return slot, True
    for known, tensor in edges.found:
        if known is slot:
            return slot, tuple(tensor.shape)
    return None, None


cdef int _hook_all(Observer writer, OpenCall call, list watched, Owned owned, tuple behind) except -1:
    cdef BackwardOfCall backward = BackwardOfCall.__new__(BackwardOfCall)
    cdef Hook hook
    cdef list slots = [], num_parts = [], leaving
    cdef Py_ssize_t place
    backward.writer, backward.call = writer, call
    for node, given in watched:
        place = owned.find(node)
        entering = owned.entering[place] if place >= 0 else None
        if given is None and entering is None:
            continue
        hook = Hook.__new__(Hook)
        hook.backward, hook.entering = backward, entering
        backward.num_events += 1
        if given is None:
            node.register_prehook(hook)
            continue
        leaving = []
        for number, slot, view in <list>given:
            leaving.append((number, _place_among(slots, num_parts, slot), view))
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


cdef _Known _inputs_of = _Known(), _outputs_of = _Known(), _gradients_of = _Known()
cdef dict _one_of = {}
cdef bint _are_one = True  # whether equal slots of gradients are the same object


cdef object _one(object slot):
    global _are_one
    known = _one_of.get(slot)
    if known is None:
        if len(_one_of) >= 65536:
            _are_one = False
            return slot
        known = _one_of[slot] = slot
    return known


cdef inline bint _are_equal(object slot, object other) except -1:
    return slot is other or (not _are_one and slot == other)


cdef object _renamed(_Known known, str role, object slot):
    cdef void* found = known.get(slot)
    return <object>found if found != NULL else known.put(slot, _one(_slot_named(role, slot)))


cdef object _passed_on(object slot):
    """Return the slot of the gradient of the tensor in that slot."""
    cdef void* found = _outputs_of.get(slot)
    if found != NULL:
        return <object>found
    if slot.role == "parameter":
        return _renamed(_gradients_of, "gradient", slot)
    return _renamed(_outputs_of, "output", slot)


cdef tuple _behind_a_view(Owned owned, list results, unsigned long long first, unsigned long long last):
    """Find the node behind a view that is the one result: writing into such a result in place bypasses the view's node."""
    if len(results) != 1 or len(owned.nodes) != 1:
        return None
    tensor = (<tuple>results[0])[1]
    if ask(&_base_of, tensor) is None:
        return None
    following = <tuple>owned.nodes[0].next_functions
    if len(following) != 1:
        return None
    behind = <object>PyTuple_GET_ITEM(following[0], 0)
    if behind is None or not _is_owned(behind, first, last):
        return None
    return behind, _shared(0, (<tuple>(<tuple>owned.entering[0])[0])[1]), tuple(tensor.shape)


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
    cdef public list found, inputs, versions
    cdef public object edges
    cdef public object written
    cdef public object given
    cdef _Facts facts

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
        self.edges = self.arguments = self.given = None


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

    cdef int put(self, _Buffer out) except -1:
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
        return 0


def complete_of(held):
    """Take the records at the front whose values are all there."""
    ready = []
    while held:
        first = held[0]
        if type(first) is not Draft or not are_complete((<Draft>first).slots):
            break
        ready.append(held.popleft())
    return ready


cdef enum:
    MOST_FRAME = 64 << 20  # as `frames.MAX_BODY`
    MOST_KEPT = 32 << 20


cdef class Frames:
    """The memory in which records become the frames that the store writes."""

    cdef _Buffer room

    def of(self, list drafts, number):
        """Encode these records as frames, one after the other; None where one has something odd, which is left to the store.

        `number` returns the number of a stack. The result is good until the next call.
        """
        if self.room is None or self.room.size > MOST_KEPT:
            self.room = _Buffer.__new__(_Buffer)
        if not self._put(self.room, drafts, number):
            return None
        return PyMemoryView_FromMemory(self.room.room, self.room.used, 0x100)

    cdef bint _put(self, _Buffer out, list drafts, object number) except -1:
        cdef Draft draft
        cdef Py_ssize_t begin
        cdef dict numbers = {}
        out.used = 0
        for draft in drafts:
            if draft.arguments is not None and type(draft.arguments) is not bytes:
                return False
            begin = out.used
            out.more(8)
            out.raw(b"\x9d\x02", 2)  # an array of thirteen, the first of which is the kind of a call
            try:
                draft.put(out)
            except UnicodeEncodeError:
                return False
            if not draft.stack:
                out.byte(0xC0)
            else:
                known = numbers.get(<size_t><void*>draft.stack)
                if known is None:
                    known = numbers[<size_t><void*>draft.stack] = number(draft.stack)
                out.count(known)
            out.byte(0xC3 if draft.recompute else 0xC2)
            if out.used - begin - 8 > MOST_FRAME:
                return False
            self._put_head(out, begin)
        return True

    cdef int _put_head(self, _Buffer out, Py_ssize_t begin) except -1:
        cdef Py_ssize_t size = out.used - begin - 8
        cdef uint32_t checksum = _crc32(PyMemoryView_FromMemory(out.room + begin + 8, size, 0x100))
        cdef int place
        for place in range(4):
            out.room[begin + place] = <char>(size >> (8 * place))
            out.room[begin + 4 + place] = <char>(checksum >> (8 * place))
        return 0


cdef inline int _put_bytes(_Buffer out, bytes data) except -1:
    return out.raw(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


cdef dict _modes_encoded = {}


cdef bytes _encoded_modes(tuple modes):
    known = _modes_encoded.get(modes)
    return <bytes>(known if known is not None else _remembered(_modes_encoded, modes, _encode_value(modes)))


@cython.final
@cython.no_gc
cdef class _Facts:
    """The facts about calls of one name; None stands for calls that are not recorded."""

    cdef str op
    cdef bint is_silent  # writes to its arguments and does not always raise their version
    cdef bint is_reader  # writes to none of its arguments, unless a keyword argument says so
    cdef bint makes_nothing
    cdef bint communicates
    cdef bint leaves_unwritten
    cdef bint is_lender  # hands out the memory of a tensor, and is not recorded


cdef dict _facts = {}


cdef _Facts _facts_of(str op):
    cdef _Facts facts = <_Facts>_facts.get(op)
    if facts is None:
        facts = _Facts.__new__(_Facts)
        facts.op, facts.is_silent, facts.is_reader, facts.makes_nothing = op, _writes_silently(op), _never_writes(op), _makes_no_values(op)
        facts.communicates = _communicates(op)
        facts.leaves_unwritten = _leaves_unwritten(op)
        _remembered(_facts, op, facts)
    return facts


cdef bint _may_write_here(_Facts facts, tuple args, dict kwargs) except -1:
    """Decide as `naming.may_write`."""
    return _writes_by_name(kwargs) if facts.is_reader else <bint>_may_write(facts.op, args, kwargs)


cdef bint _writes_by_name(dict kwargs) except -1:
    return bool(kwargs) and ("out" in kwargs or bool(kwargs.get("inplace")) or kwargs.get("max_norm") is not None)


cdef inline bint _is_tracing() except -1:
    return _native.state() & TRACING if _native != NULL else _tracing_state() is not None


cdef int _state_now() except -1:
    """Return `state` of the table, without TRACING."""
    if _native != NULL:
        return _native.state()
    if call_function(&_any_autocast_now) is True:
        return AUTOCAST
    return (
        (GRAD if call_function(&_grad_now) is True else 0)
        + (INFERENCE if call_function(&_inference_now) is True else 0)
        + (DETERMINISTIC if call_function(&_deterministic_now) is True else 0)
    )


cdef object _version_now(object tensor):
    """Return the version of a tensor; None for an inference tensor, which has none."""
    cdef int64_t version
    if _native != NULL:
        version = _native.version_of(_of(tensor))
        return version if version != -1 else None
    try:
        return ask(&_version_of, tensor)
    except RuntimeError:
        return None


@cython.final
cdef class Lock:
    """A lock that its holder may take again. It is only looked at with the GIL held, so that a free one is taken at no cost."""

    cdef unsigned long owner
    cdef long long depth

    cdef int take(self) except -1:
        cdef unsigned long thread = PyThread_get_thread_ident()
        while self.depth and self.owner != thread:
            with nogil:
                usleep(50)
            PyErr_CheckSignals()
        self.owner = thread
        self.depth += 1
        return 0

    cdef void leave(self) noexcept:
        self.depth -= 1

    def __enter__(self):
        self.take()

    def __exit__(self, *error):
        self.leave()


cdef class Observer:
    """Turns a call into its record, the common way; `CallRecorder` does the rest."""

    cdef public object session
    cdef public Counter _devices
    cdef public Reader tensors
    cdef public object _selection
    cdef public object _modules
    cdef public object _stacks
    cdef Lock _lock
    cdef public dict begun
    cdef public object _outbox
    cdef public long long _order, _step, num_functions
    cdef public bint is_patient, has_written, _picks_calls, _picks_slots
    cdef public bint _wants_forward, _wants_backward, takes_rows
    cdef public object _counts, _indices, _recomputed
    cdef list _mode_rows
    cdef uint64_t _thread  # the thread of the next two
    cdef list _running, _parents_here

    def __cinit__(self, *args, **kwargs):
        self._mode_rows = [None] * 24

    @property
    def lock(self):
        return self._lock

    @lock.setter
    def lock(self, lock):
        self._lock = lock

    cdef int _look_around(self) except -1:
        """Find the modules that run on this thread, and the calls that stand around: the same lists as long as the thread lives."""
        cdef uint64_t thread = PyThreadState_GetID(PyThreadState_Get())
        if thread != self._thread or self._running is None:
            running, parents = self._modules.all_running(), self._parents()
            self._thread, self._running, self._parents_here = thread, running, parents
        return 0

    cdef Taken _read_through(self, object slot, object gradient, object through, bint is_clear):
        cdef Taken taken = self.tensors._take_through(slot, gradient, through, is_clear)
        if not self.is_patient and self._devices.num_pending:
            self._devices.flush()
        return taken

    cdef Taken _read_gradient(self, object slot, const void* native, object through, bint is_clear):
        cdef Taken taken = self.tensors._take_gradient(slot, native, through, is_clear)
        if not self.is_patient and self._devices.num_pending:
            self._devices.flush()
        return taken

    cpdef open(self, str op, tuple args, dict kwargs, str level, frame=None):
        """Take down the facts before a call; None if the call is not recorded. `frame` is the frame of the caller, if known."""
        return self.open_known(_facts_of(op), args, kwargs, level, frame)

    cdef OpenCall open_known(self, _Facts facts, tuple args, dict kwargs, str level, object frame):
        cdef OpenCall opened = self._open(facts, args, kwargs, level, frame)
        if self._devices.num_pending and level != "module" and _may_write_here(facts, args, kwargs):
            self.read_all()  # each call inside a module is announced by itself
        return opened

    cdef OpenCall _open(self, _Facts facts, tuple args, dict kwargs, str level, object frame):
        cdef str op = facts.op
        cdef bint in_backward = _task() != -1
        cdef bint recompute = in_backward and _is_recompute()
        cdef bint is_operation = level == "op"
        cdef OpenCall opened
        cdef RunningModule innermost
        cdef list found = [], running
        cdef str phase = "forward", path = ""
        if in_backward and not recompute and not is_operation:
            return None
        if not self.has_written:
            self.begin_writing()
        self._look_around()
        running = self._running
        module = None
        if running:
            innermost = running[len(running) - 1]
            module, path = innermost.module, innermost.path
        if is_operation:
            path, stack, phase = self._where(level, in_backward and not recompute, frame)
        else:
            stack = _read_stack(self._stacks, _current_frame() if frame is None else frame, running, len(running) - 1).frames
        opened = OpenCall.__new__(OpenCall)
        opened.op, opened.level, opened.phase, opened.module, opened.stack, opened.recompute = op, level, phase, path, stack, recompute
        opened.parent = self._parents_here[len(self._parents_here) - 1] if self._parents_here else ""
        opened.index = -1
        opened.versions = opened.inputs = _nothing
        opened.written = _nothing_written
        opened.facts = facts
        if self.tensors.unwritten:
            opened.given = args, kwargs
        opened.arguments = _packed(args, kwargs, found) if self.takes_rows else _split(args, kwargs, found)
        opened.found = found
        opened.modes = self._modes(found, module)
        is_clear = _is_clear()
        if found:
            opened.index = self._next_index(op, path, recompute)
            if self._picks_calls and not self._wants_call(path, op, opened.index):
                return None
            opened.versions = [_version_now(tensor) for _, tensor in found]
            if self._wants_forward if phase == "forward" else self._wants_backward:
                opened.inputs = self._take_all(found, opened.versions, False, is_clear)
        if not is_operation and _is_grad_on() and (is_clear or not _is_transforming()):
            opened.edges = _edges_of(found)
        return opened

    cdef long long _next_index(self, str op, str path, bint recompute) except -1:
        """`CallRecorder._index`"""
        cdef long long index
        if recompute:
            return self._index(op, path, True)
        counted = (<dict>self._counts).get(op)
        index = 0 if counted is None else counted
        (<dict>self._counts)[op] = index + 1
        key = (path, op)
        known = (<dict>self._indices).get(key)
        if known is None:
            (<dict>self._indices)[key] = index
        elif type(known) is list:
            (<list>known).append(index)
        else:
            (<dict>self._indices)[key] = [known, index]
        return index

    cdef tuple _modes(self, list found, object module):
        cdef int number, now = _state_now()
        if now & AUTOCAST:
            return _mode_row(found, module)
        training = module.training if module is not None else None
        number = 2 if training is None else training is True
        if training is not None and training is not True and training is not False:
            return _mode_row(found, module)
        number = 8 * number + (now & (GRAD | INFERENCE | DETERMINISTIC))
        row = self._mode_rows[number]
        if row is None:
            row = self._mode_rows[number] = _mode_row(found, module)
        return <tuple>row

    cdef list _take_all(self, list found, list versions, bint is_undefined, bint is_clear):
        """Take down tensors, whose versions may be known."""
        cdef Reader reader = self.tensors
        cdef list taken = []
        cdef Py_ssize_t number
        cdef long long version = -1
        if self._picks_slots:
            found, versions = [(slot, tensor) for slot, tensor in found if self._selection.wants_slot(slot)], None
        self._lock.take()
        try:
            if reader.unwritten:
                reader.prepare(found)
            for number in range(len(found)):
                item = found[number]
                if versions is not None:
                    known = versions[number]
                    version = -1 if known is None else known
                taken.append(reader._take(
                    <object>PyTuple_GET_ITEM(item, 0), <object>PyTuple_GET_ITEM(item, 1), is_undefined, is_clear, version))
            if not self.is_patient and self._devices.num_pending:
                self._devices.flush()
        finally:
            self._lock.leave()
        return taken

    def take(self, list found, *, bint is_undefined=False):
        """Take down tensors; their values may come later."""
        return self._take_all(found, None, is_undefined, _is_clear())

    cpdef close(self, OpenCall opened, result):
        """Take down the results of a call."""
        cdef list results = _results(result), mutated, slots
        cdef bint is_undefined, is_clear = _is_clear()  # a module may have entered a mode and stay in it
        cdef Edges edges
        if opened.index == -1 and not self._name_late(opened, results):
            return
        mutated = self._mutated(opened, results)
        is_undefined = opened.facts is not None and opened.facts.makes_nothing
        if opened.facts is not None and opened.facts.communicates:
            self._communicated(opened, results)
        if self.tensors.unwritten or (opened.facts is not None and opened.facts.leaves_unwritten):
            self.tensors.follow(opened, results)
        if self._wants_forward if opened.phase == "forward" else self._wants_backward:
            slots = opened.inputs + self._take_all(results, None, is_undefined, is_clear)
            if mutated is not None:
                slots += self._take_all(mutated, None, False, is_clear)
            self._write(opened, opened.phase, slots, opened.arguments)
        edges = opened.edges
        opened.let_go()
        if edges is not None and self._wants_backward:
            _watch_backward(self, opened, edges, results if mutated is None else results + mutated)
        if self.num_functions and self._devices.num_pending and not _facts_of(opened.op).is_reader:
            self.read_all()  # where the Function says that it wrote to a tensor, the version rises again after the write

    cdef list _mutated(self, OpenCall opened, list results):
        """Return the arguments that the call wrote to and did not return, as results of their own; None if there are none."""
        cdef list mutated = None
        cdef Py_ssize_t number
        returned = None
        for number in range(len(opened.found)):
            slot, tensor = <tuple>opened.found[number]
            version = opened.versions[number]
            if (opened.written and slot.path[0] in opened.written) or (version is not None and _version_now(tensor) != version):
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
        self._lock.take()
        try:
            draft.order = self._order
            self._order += 1
            held = self._outbox._held
            if held and len(held) < <Py_ssize_t>self._outbox.most_held:
                held.append(draft)
            else:
                self._outbox.write(draft)
        finally:
            self._lock.leave()

    cdef object _encoded(self, object arguments):
        """Encode arguments as the sink will write them, if it takes rows: bytes cost Python's garbage collector nothing."""
        if arguments is None or type(arguments) is bytes or not self.takes_rows:
            return arguments
        try:
            return _encode_value(arguments)
        except Exception as error:  # MessagePack cannot hold it; the store can write it
            _let_pass(error)
            return arguments


cdef _Known _slot_texts = _Known()


def _text(Taken taken):
    cdef void* known = _slot_texts.get(taken.slot)
    return <str>known if known != NULL else _slot_texts.put(taken.slot, str(taken.slot))


# ---- where a call stands


@cython.final
cdef class RunningModule:
    """`modules.RunningModule`"""

    cdef public object module
    cdef public str path
    cdef public object stack
    cdef public object called_from
    cdef public size_t inside

    def __init__(self, module, str path):
        self.module, self.path = module, path

    def runs(self, code):
        """Tell whether this is the code of its forward."""
        return getattr(type(self.module).forward, "__code__", None) is code



cdef extern from *:
    """
    #if PY_VERSION_HEX < 0x030B0000
    static int PyFrame_GetLasti(PyFrameObject* frame) {
        PyObject* given = PyObject_GetAttrString((PyObject*)frame, "f_lasti");
        int position = given ? (int)PyLong_AsLong(given) : -1;
        Py_XDECREF(given);
        return position;
    }
    #endif
    """
    void* PyEval_GetFrame()
    unsigned long PyThread_get_thread_ident()
    ctypedef struct PyFrameObject:
        pass
    object PyFrame_GetCode(PyFrameObject*)
    PyObject* PyFrame_GetBack(PyFrameObject*)
    int PyFrame_GetLasti(PyFrameObject*) except? -2


cdef inline object _code_of(object frame):
    return PyFrame_GetCode(<PyFrameObject*>frame)


cdef inline object _position_in(object frame):
    return PyFrame_GetLasti(<PyFrameObject*>frame)


cdef object _frame_above(object frame):
    cdef PyObject* above = PyFrame_GetBack(<PyFrameObject*>frame)
    if above == NULL:
        return None
    found = <object>above
    Py_DECREF(found)
    return found


cdef object _current_frame():
    """Return the running frame of Python: compiled code has none."""
    cdef void* frame = PyEval_GetFrame()
    return <object>frame if frame != NULL else None


cdef _Known _businesses = _Known()


cdef bint _is_own_business(object frame) except -1:
    """Tell whether the call comes from inside an optimizer, a wrapper for parallel training and the like."""
    cdef void* known
    while frame is not None:
        code = _code_of(frame)
        known = _businesses.get(code)
        business = <object>known if known != NULL else _businesses.put(code, _business_of(frame))
        if business is not None:
            return <bint>business
        frame = _frame_above(frame)
    return False


cdef object _read_stack(object reader, object frame, list running, Py_ssize_t innermost):
    """Read a stack as `StackReader._read` does."""
    cdef list key = [], codes = []
    cdef dict kinds = reader._kinds
    cdef size_t last = 0, inside = 0
    cdef Py_ssize_t depth = reader._depth
    cdef int kind
    cdef RunningModule module = None
    if innermost >= 0:
        module = running[innermost]
        if module.stack is not None:
            inside = module.inside
    while frame is not None and len(codes) < depth:
        code = _code_of(frame)
        if inside and <size_t><void*>frame == inside:
            key.append(<size_t><void*>code)
            key.append(_position_in(frame))
            codes.append(code)
            return _joined(reader, key, codes, module.stack)
        known = kinds.get(<size_t><void*>code)
        kind = <object>PyTuple_GET_ITEM(known, 0) if known is not None else reader._classify(code)
        if kind == USERS:
            key.append(<size_t><void*>code)
            key.append(_position_in(frame))
            codes.append(code)
            last = <size_t><void*>frame
        elif kind == BOUNDARY and module is not None:
            module.inside = last if codes and module.runs(codes[len(codes) - 1]) else 0
            return _joined(reader, key, codes, _above_module(reader, _frame_above(frame), running, innermost))
        elif kind == END:
            break
        frame = _frame_above(frame)
    return _joined(reader, key, codes, _no_stack)


cdef object _above_module(object reader, object caller, list running, Py_ssize_t number):
    """Return the stack above a module, read once for all calls inside it: a part of `StackReader._read`."""
    cdef RunningModule module = running[number]
    called_from = None
    if caller is not None:
        code = _code_of(caller)
        called_from = (<size_t><void*>code, _position_in(caller))
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


cdef dict _functions = {}
cdef _Facts _lender = _Facts.__new__(_Facts)
_lender.op, _lender.is_lender, _lender.is_reader = "", True, True


cdef _Facts _called(object func):
    """Return the facts about calls of a function; None if they are not recorded."""
    try:
        return <_Facts>_functions[func]
    except KeyError:
        op = _op_name(func)
        if op is not None:
            return <_Facts>_remembered(_functions, func, _facts_of(op))
        return <_Facts>_remembered(_functions, func, _lender if _lends_memory(func) else None)
    except TypeError:  # an object of somebody's that cannot be hashed
        return None


cdef object _OUR_NUMBER = -1  # those of torch's handles begin at 0


cdef class Registrar:
    """Registers a hook on a node in place of `autograd.Function._register_hook`: quicker for our hooks, which nobody removes."""

    cdef object original

    def __init__(self, original):
        self.original = original

    def __call__(self, hooks, hook):
        if hooks is not None or type(hook) is not Hook:
            return self.original(hooks, hook)
        hooks = _ordered_dict()
        hooks[_OUR_NUMBER] = hook
        return hooks, None


cdef class Announcer:
    """Does the work of a function mode that only announces calls that write: `torch_modes.WriteGuard`."""

    cdef object announce
    cdef Counter devices
    cdef public long long depth

    def __init__(self, announce, Counter devices):
        self.announce, self.devices = announce, devices

    def call(self, func, args, kwargs):
        self.depth += 1
        try:
            if self.devices.num_pending:
                facts = _called(func)
                if facts is not None and not facts.is_lender and (not facts.is_reader or _writes_by_name(kwargs)):
                    self.announce(facts.op, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.depth -= 1


cdef class ModuleCaller:
    """Stands around the call of a module without special traits: `session.CaptureSession._around_module`."""

    cdef object session
    cdef bint records

    def __init__(self, session):
        self.session, self.records = session, session._level in ("module", "both")

    def call(self, original, module, tuple args, dict kwargs):
        cdef Observer observer
        session = self.session
        if not session._is_recording:
            return original(module, *args, **kwargs)
        observer = session._recorder
        observer._look_around()
        if not observer._running or not self._is_plain(session, module):
            return session._around_module(original, module, args, kwargs)
        session._modules.enter(module)
        return self._record(observer, original, module, args, kwargs) if self.records else self._run(observer, original, module, args, kwargs)

    cdef bint _is_plain(self, object session, object module) except -1:
        """Tell whether the module is neither compiled nor fused nor taken whole, runs on values, and calls of this thread are seen."""
        if session._has_units or (session._thread != PyThread_get_thread_ident() and _task() == -1):
            return False
        if _is_tracing() or "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            return False
        if isinstance(module, _ScriptModule) or (self.records and _is_tracing_graph()):
            return False
        return module.training is True or not isinstance(module, _fused_modules)

    cdef object _run(self, Observer observer, object original, object module, tuple args, dict kwargs):
        try:
            return original(module, *args, **kwargs)
        finally:
            _leave_module(observer, module)

    cdef object _record(self, Observer observer, object original, object module, tuple args, dict kwargs):
        cdef OpenCall opened = None
        cdef list parents = observer._parents_here
        cdef bint is_parent = False
        try:
            opened = self._open(observer, module, args, kwargs)
            if opened is not None and opened.index != -1:
                parents.append(f"{opened.op}.{opened.index}")
                is_parent = True
            result = original(module, *args, **kwargs)
        finally:
            if is_parent:
                parents.pop()
            _leave_module(observer, module)
        if opened is not None:
            _close_call(self.session, opened, result)
        return result

    cdef OpenCall _open(self, Observer observer, object module, tuple args, dict kwargs):
        cdef OpenCall opened = None
        op = "module." + type(module).__name__
        try:
            guard = _shut_eyes()
            try:
                opened = observer.open(op, args, kwargs, "module", None)
                if opened is not None and opened.edges is not None:
                    self._add_parameters(opened, <Edges>opened.edges, module)
            finally:
                _open_eyes(guard)
        except Exception as error:
            self.session.failed(f"record the inputs of {op}", error)
        return opened

    cdef int _add_parameters(self, OpenCall opened, Edges edges, object module) except -1:
        if type(module).named_parameters is not _named_parameters:
            self.session._add_parameters(opened, module)
            return 0
        for name, parameter in (<dict>module._parameters).items():
            if parameter is not None and ask(&_requires_grad_of, parameter) is True:
                edges.add_leaf(parameter, _parameter_slot(name))
        return 0


cdef int _close_call(object session, OpenCall opened, object result) except -1:
    """`session.CaptureSession.close_call`"""
    cdef Observer observer
    try:
        guard = _shut_eyes()
        try:
            observer = session._recorder
            observer.close(opened, result)
        finally:
            _open_eyes(guard)
    except Exception as error:
        session.failed(f"record the outputs of {opened.op}", error)
    return 0


cdef int _leave_module(Observer observer, object module) except -1:
    """`modules.ModuleStack.leave`"""
    cdef list running
    observer._look_around()
    running = observer._running
    while running:
        if (<RunningModule>running.pop()).module is module:
            break
    return 0


cdef dict _parameter_slots = {}


cdef object _parameter_slot(object name):
    known = _parameter_slots.get(name)
    return known if known is not None else _remembered(_parameter_slots, name, _slot_type("parameter", (name,)))


cdef class Handler:
    """Does the work of a function mode for a call of torch: `torch_modes.ApiMode` and `session.CaptureSession.open_call`."""

    cdef object session
    cdef public long long depth

    def __init__(self, session):
        self.session = session

    def call(self, func, args, kwargs):
        """Run a call of torch and record it; the running frame is the mode's, the frame before it is the caller's."""
        cdef OpenCall opened = None
        cdef _Facts facts
        self.depth += 1
        try:
            facts = _called(func)
            if facts is not None and type(args) is tuple and type(kwargs) is dict:
                opened = self._open(facts, args, kwargs)
            result = func(*args, **kwargs)
            if opened is not None:
                _close_call(self.session, opened, result)
            return result
        finally:
            self.depth -= 1

    cdef OpenCall _open(self, _Facts facts, tuple args, dict kwargs):
        cdef Observer observer
        cdef str op = facts.op
        session = self.session
        if not session._is_recording or _is_tracing() or (
            session._thread != PyThread_get_thread_ident() and _task() == -1
        ):
            return None
        if facts.is_lender:
            observer = session._recorder
            if observer.tensors.unwritten:
                session.lend_memory(args)
            return None
        if facts.is_silent or session._names_operators:
            return session.open_call(op, args, kwargs, frame=_frame_above(_current_frame()))
        try:
            guard = _shut_eyes()
            try:
                frame = _frame_above(_current_frame())
                observer = session._recorder
                if not _is_own_business(frame):
                    return observer.open_known(facts, args, kwargs, "api", frame)
                if observer._devices.num_pending and (not facts.is_reader or _writes_by_name(kwargs)):
                    observer.before(op, args, kwargs)
            finally:
                _open_eyes(guard)
        except Exception as error:
            session.failed(f"record the inputs of {op}", error)
        return None


# ---- names from the files of Python; at the end, since some of those files import the names above

cdef object _transpose = _torch_private.TensorBase.t
cdef object _reshape = _torch_private.TensorBase.reshape
cdef object _clone = _torch_private.TensorBase.clone
cdef object _add = _torch_private.TensorBase.add
cdef object _to = _torch_private.TensorBase.to

from ulpscope.capture.intercept import naming as _calls
from ulpscope.capture.record.stacks import is_recompute as _is_recompute
from ulpscope.recording import stacks as _stacks
from ulpscope.capture.record import state as _state
from ulpscope.capture import torch_internals as _torch_internals
from ulpscope.capture import walk as _walk
from ulpscope.recording.safety import let_pass as _let_pass
from ulpscope.model import Slot as _Slot

cdef object _slot_type = _Slot


cdef object _encode_argument = _walk.encode_value
cdef object _tensors_in = _walk.tensors_in
cdef object _slot_and_mark = _walk.slot_and_mark
cdef list _ready_inputs = _walk.READY_INPUTS
cdef Py_ssize_t NUM_READY = len(_ready_inputs)
cdef list _ready_marks = [_encode_value(mark) for _, mark in _ready_inputs]
cdef list _ready_outputs = [_walk.slot_and_mark("output", (index,))[0] for index in range(NUM_READY)]
cdef object _first_output = _ready_outputs[0]
cdef object _may_write = _calls.may_write
cdef object _never_writes = _calls.never_writes
cdef object _makes_no_values = _calls.makes_no_values
cdef object _communicates = _calls.communicates
cdef object _leaves_unwritten = _calls.leaves_unwritten
cdef object _lends_memory = _calls.lends_memory
cdef object _writes_silently = _calls.writes_silently
cdef object _business_of = _calls.business_of
cdef object _op_name = _calls.op_name
cdef object _tracing_state = _torch_private.jit_tracing_state
cdef object _no_stack = _stacks.EMPTY
cdef int USERS = _stacks.USERS
cdef int BOUNDARY = _stacks.BOUNDARY
cdef int END = _stacks.END
cdef object _mode_row = _state.mode_row
cdef object _blind = _torch_internals.blind
cdef object _is_foreign = _torch_internals.is_foreign
cdef object _without_class = _torch_internals.without_class
cdef object _slot_named = _walk.renamed
cdef object _named_parameters = torch.nn.Module.named_parameters
cdef object _is_tracing_graph = _torch_internals.is_tracing_graph
cdef object _ScriptModule = torch.jit.ScriptModule
cdef tuple _fused_modules = _torch_internals.FUSED_MODULES
