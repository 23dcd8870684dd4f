# SPDX-License-Identifier: Apache-2.0
"""The only file that reads private names of torch: what each gives, and what is done without it.

torch may drop such a name in any release, so each is looked for once. Where one is gone, something of ours takes its place, and `LACKING`
says what is lost; the ledger of every run has these lines. For some names nothing can stand (`_needed`): a stage that imports one says so
in one line and does nothing, and the other stages go on.

`ATTRIBUTES` lists what is read from an object in many places (`tensor._version`); this file only looks whether it is there.
`tests/test_torch_private.py` fails where another file reads a private name, and takes each of these away.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ulpscope._torch_versions import range_tried
from ulpscope.errors import UlpscopeError

LACKING: dict[str, str] = {}
"""What torch does not have, and what is not done for that."""

_GONE: dict[str, str] = {}
_NOTHING = object()


class _Nobody:
    """Stands for a class of torch's that is gone: nothing is an instance of it."""


def _found(path: str) -> Any:
    """What torch has under a dotted path, or `_NOTHING`."""
    found: Any = torch
    done = "torch"
    for part in path.split(".")[1:]:
        done = f"{done}.{part}"
        if not hasattr(found, part) and isinstance(found, ModuleType):
            with contextlib.suppress(ImportError):
                importlib.import_module(done)
        found = getattr(found, part, _NOTHING)
        if found is _NOTHING:
            break
    return found


def _or(path: str, instead: Any, lost: str = "") -> Any:
    """What torch has under `path`, or else `instead`; `lost` is what cannot be done then."""
    found = _found(path)
    if found is not _NOTHING:
        return found
    if lost:
        LACKING[path] = lost
    return instead


class _Needed:
    """Stands for a name that is gone until the end of this file; see `__getattr__`."""

    def __init__(self, path: str, purpose: str) -> None:
        self.sentence = (
            f"torch {torch.__version__} has no '{path}', and {purpose} is not possible without it; ulpscope is tried with {range_tried()}"
        )


def _needed(path: str, purpose: str) -> Any:
    found = _found(path)
    return _Needed(path, purpose) if found is _NOTHING else found


_RECORDING, _CHECKING, _EMULATING = "recording", "replaying calls", "the emulated npu"

# ---- classes of torch's that have no public name

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    without_function_modes = torch._C.DisableTorchFunction
else:
    TorchDispatchMode = _needed("torch.utils._python_dispatch.TorchDispatchMode", "seeing operations")
    OpOverload = _needed("torch._ops.OpOverload", "telling operations apart")
    OpOverloadPacket = _needed("torch._ops.OpOverloadPacket", "telling operations apart")
    HigherOrderOperator = _needed("torch._ops.HigherOrderOperator", "telling operations apart")
    without_function_modes = _needed("torch._C.DisableTorchFunction", _RECORDING)

FakeTensor: type = _or("torch._subclasses.fake_tensor.FakeTensor", _Nobody, "tell the compiler's stand-ins from tensors with values")
FunctionalTensor: type = _or(
    "torch._subclasses.functional_tensor.FunctionalTensor", _Nobody, "tell a tracer's tensors from those with values"
)

TensorBase: Any = torch.Tensor.__base__
"""The class below `torch.Tensor`, whose methods are written in C++: they never ask a subclass."""

# ---- modes: who sees a call, and how our own work goes unseen

without_function_subclasses: Any = _or(
    "torch._C.DisableTorchFunctionSubclass",
    contextlib.nullcontext,
    "keep a tensor subclass with a __torch_function__ from seeing an operation twice at level op",
)
disable_current_modes: Any = _needed("torch.utils._python_dispatch._disable_current_modes", _RECORDING)
current_dispatch_modes: Any = _needed("torch.utils._python_dispatch._get_current_dispatch_mode_stack", _RECORDING)
current_function_modes: Any = _needed("torch.overrides._get_current_function_mode_stack", _RECORDING)
pop_function_mode: Any = _needed("torch.overrides._pop_mode", _RECORDING)
push_function_mode: Any = _needed("torch.overrides._push_mode", _RECORDING)
num_dispatch_modes: Any = _or("torch._C._len_torch_dispatch_stack", lambda: 1)  # as if somebody stood there: slower, and as unseen
DisableFuncTorch: Any = _needed("torch._C._DisableFuncTorch", _RECORDING)
DisableAutocast: Any = _needed("torch._C._DisableAutocast", _RECORDING)
any_autocast: Any = _or("torch._C._is_any_autocast_enabled", lambda: True)  # and then each kind is asked
set_grad_enabled: Any = _or("torch._C._set_grad_enabled", torch.set_grad_enabled)
deterministic_algorithms: Any = _or("torch._C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
"""The same as torch's public functions of these names without making an object: half a microsecond of a hot path."""

# ---- autograd

sequence_number: Any = _or("torch._C._autograd._get_sequence_nr", int, "tie backward calls to the calls that they belong to")
current_graph_task: Any = _or(
    "torch._C._current_graph_task_id", lambda: -1, "tell what a backward pass computes from what the model computes"
)
current_node: Any = _or("torch._C._current_autograd_node", lambda: None, "tell which backward call is running")
register_hook: Any = _or("torch.autograd.Function._register_hook", None)  # then hooks are registered as everybody does it
engine_run_backward: Any = _or(
    "torch.autograd._engine_run_backward", None, "see where a backward pass begins, so what it recomputes stands as new calls"
)

# ---- what a tensor is

tls_includes: Any = _needed("torch._C._dispatch_tls_is_dispatch_key_included", _RECORDING)
TRANSFORMS: Any = _needed("torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode", _RECORDING)
is_functorch_wrapped: Any = _needed("torch._C._functorch.is_functorch_wrapped_tensor", _RECORDING)
"""Inside vmap and its kin a tensor has no memory to look at, and looking ends the process."""

is_functional_tensor: Any = _or("torch._is_functional_tensor", lambda tensor: False, "tell a tracer's tensors from those with values")
foreach_norm: Any = _or("torch._foreach_norm", lambda tensors, order: [torch.linalg.vector_norm(tensor, order) for tensor in tensors])
rebuild_tensor: Any = _needed("torch._utils._rebuild_tensor_v2", "writing what torch.load reads")
spare_device: Any = _or("torch._C._get_privateuse1_backend_name", lambda: "privateuseone", "see the random generators of a vendor's device")
dispatch_keys: Any = _or("torch._C._dispatch_keys", None)
key_of_spare_device: Any = _or("torch._C.DispatchKey.PrivateUse1", None)
"""Without these two, tensors of a device that is written in Python are tensors of somebody's class."""

tls_excludes: Any = _or("torch._C._dispatch_tls_is_dispatch_key_excluded", lambda key: True, "look past the class of a tensor subclass")
key_of_python: Any = _or("torch._C.DispatchKey.Python", None)
push_dispatch_mode: Any = _needed("torch._C._push_on_torch_dispatch_stack", _RECORDING)
pop_dispatch_mode: Any = _needed("torch._C._pop_torch_dispatch_stack", _RECORDING)

# ---- streams of CUDA

current_stream: Any = _or("torch._C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
is_stream_capturing: Any = _or("torch._C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)

# ---- compilers and tracers

jit_tracing_state: Any = _or("torch._C._get_tracing_state", lambda: _or("torch.jit.is_tracing", bool)() or None)
set_compiler: Any = _or(
    "torch._C._dynamo.eval_frame.set_eval_frame", lambda compiler: compiler, "keep torch.compile from looking at a recording's own work"
)
_mark_code: Any = _or("torch._C._dynamo.eval_frame.set_code_exec_strategy", None)
_mark: Any = _or("torch._C._dynamo.eval_frame._FrameExecStrategy", None)
_action: Any = _or("torch._C._dynamo.eval_frame._FrameAction", None)
_skip_code: Any = _or("torch._C._dynamo.eval_frame.skip_code", None)  # torch before 2.7
if _skip_code is None and None in (_mark_code, _mark, _action):
    LACKING["torch._C._dynamo.eval_frame.skip_code"] = "keep torch.compile from compiling a recording's own code"


def skip_in_compiler(code: CodeType) -> None:
    """Tell torch's compiler to leave this code as it is, and to look at what it calls."""
    if None not in (_mark_code, _mark, _action):
        _mark_code(code, _mark(_action.SKIP, _action.DEFAULT))
    elif _skip_code is not None:
        _skip_code(code)


dispatch_mode_of: Any = _or("torch._C._get_dispatch_mode", lambda tracer: None, "leave out what runs while a graph is being made")
TRACERS: tuple[Any, ...] = tuple(
    _or("torch._C._TorchDispatchModeKey.__members__", {}, "leave out what runs while a graph is being made").values()
)
fx_tracing: Mapping[str, Any] = vars(_or("torch.fx._symbolic_trace", _Nobody, "leave out what torch.fx runs with proxies"))
disable_dynamo: Any = _or("torch._disable_dynamo", None)  # see `replay/calls/compiler.py`

# ---- torch.distributed, where this build has it


def num_collectives_under_way() -> int:
    """How many functional collectives nobody has waited for; 1 where torch does not tell."""
    return int(_or("torch._C._distributed_c10d._get_work_registry_size", lambda: 1)())


def collected_by_group() -> Mapping[Any, Any]:
    """The groups whose collectives are being collected, and none of them sent off yet."""
    world = _or("torch.distributed.distributed_c10d._world", None)
    return getattr(world, "pg_coalesce_state", {})


def coalescing_manager() -> type | None:
    """The class of what a program waits for after collecting collectives."""
    found: type | None = _or("torch.distributed.distributed_c10d._CoalescingManager", None)
    return found


def local_shape_and_offset() -> Any:
    """What tells where the local part of a DTensor lies in the whole."""
    return _found("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")


PIPELINE_STAGES = ("_PipelineStage", "PipelineStage")
PIPELINE_PREPARATIONS = ("_prepare_forward_infra", "_prepare_backward_infra")
SHARDED_PARAMETERS = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""Looked for where the user's program has imported them; where they are gone, what they prepare is recorded as any other call."""

# ---- data

batch_iterator: Any = _or(
    "torch.utils.data.dataloader._BaseDataLoaderIter", None, "take each batch of a DataLoader for the beginning of a step"
)

# ---- replaying calls

schemas_of_operator: Any = _needed("torch._C._jit_get_schemas_for_operator", _CHECKING)
has_kernel: Any = _needed("torch._C._dispatch_has_kernel", _CHECKING)
functional_of_c: Any = _or("torch._C._nn", None)  # then what it holds is not replayed, and that is said of each call


def decomposition_table() -> Mapping[Any, Callable[..., Any]]:
    """torch's own formulas of operations by others; empty where they are gone, and what they would explain is then not checked."""
    for name in ("torch._decomp", "torch._refs"):  # loads all of them
        _found(name)
    found: Mapping[Any, Callable[..., Any]] = _or("torch._decomp.decomposition_table", {})
    return found


def is_made_of_others(name: str) -> bool:
    """Whether torch itself defines an operation by others."""
    key = _or("torch._C.DispatchKey.CompositeImplicitAutograd", None)
    return bool(_or("torch._C._dispatch_has_kernel_for_dispatch_key", lambda name, key: False)(name, key))


tree_flatten: Any = _needed("torch.utils._pytree.tree_flatten", _CHECKING)
tree_leaves: Any = _needed("torch.utils._pytree.tree_leaves", _CHECKING)
tree_map: Any = _needed("torch.utils._pytree.tree_map", _CHECKING)
tree_map_only: Any = _needed("torch.utils._pytree.tree_map_only", _CHECKING)

# ---- the emulated npu

_EMULATION = (
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    "torch.utils._python_dispatch.return_and_correct_aliasing",
    "torch.library.fallthrough_kernel",
    "torch.Tensor._make_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._C._disabled_torch_function_impl",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._current_graph_task_id",
    "torch._C._get_privateuse1_backend_name",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey.AutocastPrivateUse1",
)


def missing_for_emulation() -> list[str]:
    """What the emulated npu would need and this torch does not have; `install` refuses then."""
    return [path for path in _EMULATION if _found(path) is _NOTHING]


set_up_spare_device, correct_aliasing, _, make_wrapper, rebuild_on_device, no_torch_function, ExcludeKeys = (
    _or(path, None) for path in _EMULATION[:7]
)


def key_of_autocast() -> Any:
    return _found("torch._C.DispatchKeySet")(_found("torch._C.DispatchKey.AutocastPrivateUse1"))


# ---- what objects of torch's have


def is_zero_by_definition(tensor: torch.Tensor) -> bool:
    """Tell torch's zero tensors, which have no memory; some formulas return one as a gradient."""
    return bool(getattr(tensor, "_is_zerotensor", bool)())


def local_part(tensor: Any) -> Any:
    """The part of a DTensor that lies here; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def scale_of(scaler: Any) -> Any:
    """The scale of a GradScaler, where it has one yet."""
    return getattr(scaler, "_scale", None)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def has_step_hooks(optimizer: Any) -> bool:
    """Whether a step of an optimizer calls hooks of its own; yes where it cannot be told."""
    own = vars(optimizer)
    return bool(own.get("_optimizer_step_pre_hooks", True) or own.get("_optimizer_step_post_hooks", True))


ATTRIBUTES = (
    *("torch.Tensor._version", "torch.Tensor._base", "torch.Tensor._neg_view", "torch.Tensor._indices", "torch.Tensor._values"),
    *("torch.UntypedStorage._cdata", "torch.UntypedStorage._weak_ref", "torch.UntypedStorage._free_weak_ref"),
    *("torch.UntypedStorage._expired", "torch.autograd.Function._sequence_nr"),
    *("torch.ops.aten.add.Tensor._schema", "torch.ops.aten.add.Tensor._name", "torch.ops.aten.add.Tensor._overloadname"),
)
"""Read where they are needed, since a call of ours around each would cost more than the reading; without any of them nothing works."""


def _without_the_gone() -> None:
    """Take away what is gone, so that whoever imports it is told why."""
    for name, value in list(globals().items()):
        if isinstance(value, _Needed):
            _GONE[name] = value.sentence
            del globals()[name]


_without_the_gone()
for _path in ATTRIBUTES:
    if _found(_path) is _NOTHING:
        raise UlpscopeError(_Needed(_path, "what ulpscope does with tensors").sentence)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _GONE:
            raise UlpscopeError(_GONE[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
