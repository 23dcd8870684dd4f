# SPDX-License-Identifier: Apache-2.0
"""Watch a training: statistics of gradients, parameters, updates and optimizer moments at each optimizer step.

The session looks on through hooks that optimizers and modules offer, and computes on the device without waiting for it: the results of one
step are copied while the next one runs, and reach `on_step` when that one ends. It writes to no tensor, draws no random number and makes no
graph. A failure is reported to `on_failure`, and training goes on.

A step ends with `step()`, or by itself when something of the next one happens: an optimizer that has stepped steps again, or a scalar is
logged again.
"""

from __future__ import annotations

import fnmatch
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ulpscope._torch_private import scale_of
from ulpscope.capture.device.arrivals import Arrivals
from ulpscope.capture.health.cohorts import Cohort, Member, Merge, is_readable, local_part, member_of
from ulpscope.capture.health.readings import Batch, Pending, measure, measure_rows, traits
from ulpscope.capture.intercept.modules import ModuleStack, modules_in
from ulpscope.capture.torch_internals import (
    blind,
    graph_task,
    inside_transform,
    is_fake,
    is_jit_tracing,
    is_traced,
    not_compiled,
    without_class,
)
from ulpscope.model.health import STATISTICS, Granularity, HealthLayout, HealthStep, HealthTarget
from ulpscope.recording.safety import let_pass

__all__ = ["KINDS", "HealthSession"]

KINDS = ("gradient", "parameter", "update", "moment")
_MOST_COHORTS = 64
# These modules give up their fused kernels if they, or modules inside them, have a hook; then they compute other bits.
_FUSED = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)
_MOST_PLANS = 256
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_NOTHING: dict[str, Any] = {}


_Sought: TypeAlias = tuple[str, Member, torch.Tensor]
"""A tensor to measure: its kind, the parameter that it belongs to, and the tensor."""


class _Entry(NamedTuple):
    """Rows under way; `signs` holds a matrix of booleans, `scale` the divisor of the values."""

    targets: tuple[HealthTarget, ...]
    pending: Pending
    cohort: Cohort | None = None
    signs: torch.Tensor | None = None
    scale: torch.Tensor | None = None


class _Group(NamedTuple):
    """Tensors of one device, and the parameters that they belong to; `places` are their places among all tensors of the slot."""

    cohort: Cohort
    batch: Batch
    targets: tuple[HealthTarget, ...]
    places: list[int]


class _Found(NamedTuple):
    """The groups of some tensors, valid for as long as their owners and forms stay the same."""

    members: list[int]
    forms: tuple[list[Any], ...]
    addresses: list[int]
    groups: list[_Group]


class _Plan(NamedTuple):
    """How the rows of a step are arranged: their layout, and the merging of rows with one name, if there are such."""

    parts: tuple[tuple[HealthTarget, ...], ...]
    layout: HealthLayout
    merge: Merge | None


class _OpenStep:
    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: dict[Any, _Entry] = {}
        self.scalars: dict[str, list[float | torch.Tensor]] = {}
        self.stepped: set[int] = set()
        self.is_unscaled = False


class _Sent:
    """A step on its way to the host; `places` are the places of each device's arrays among all."""

    def __init__(self, step: _OpenStep, places: dict[torch.device, list[int]]) -> None:
        self.step = step
        self.places = places


class HealthSession:
    """Watches one process between `start` and `stop`."""

    def __init__(
        self,
        on_step: Callable[[HealthStep], None],
        *,
        models: Sequence[torch.nn.Module] = (),
        optimizers: Sequence[Any] | None = None,
        kinds: Sequence[str] = KINDS,
        every: int = 1,
        granularity: Granularity = "parameter",
        bounds: tuple[float, ...] = (),
        num_samples: int = 1024,
        exact_updates: bool = False,
        activations: Sequence[str] = (),
        scaler: Any = None,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self._on_step = on_step
        self._on_failure = on_failure
        self._models = list(models)
        self._modules = ModuleStack(self._models)
        self._optimizers = None if optimizers is None else list(optimizers)
        self._kinds = frozenset(kinds)
        self._every = every
        self._granularity: Granularity = granularity
        self._bounds = bounds
        self._num_samples = num_samples
        self._exact_updates = exact_updates
        self._globs = tuple(activations)
        self.scaler = scaler
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}
        self._members: dict[tuple[int, ...], list[tuple[Member, torch.Tensor]]] = {}
        self._cohorts: dict[Any, Cohort] = {}
        self._found: dict[Any, _Found] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._before: dict[int, Any] = {}
        self._arrivals: dict[torch.device, Arrivals[_Sent]] = {}
        self._on_the_way: _Sent | None = None
        self._open = _OpenStep(0)
        self._has_explicit_steps = False
        self._is_active = False
        self.num_optimizer_steps = 0

    # ---- life

    def start(self) -> None:
        """Attach the hooks."""
        self._is_active = True
        if self._optimizers is None:
            self._handles += [
                register_optimizer_step_pre_hook(not_compiled(self._before_optimizer)),
                register_optimizer_step_post_hook(not_compiled(self._after_optimizer)),
            ]
        for optimizer in self._optimizers or ():
            self._handles += [
                optimizer.register_step_pre_hook(not_compiled(self._before_optimizer)),
                optimizer.register_step_post_hook(not_compiled(self._after_optimizer)),
            ]
        for model in self._models:
            self._watch_activations(model)

    def stop(self) -> None:
        """Remove the hooks and hand over the results that are still on their way."""
        if not self._is_active:
            return
        self._is_active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._safely("finish the last step", self._finish)

    def step(self) -> None:
        """End the step under way."""
        self._has_explicit_steps = True
        if self._is_active:
            self._safely("end a step", self._end_step)

    def adopt(self, model: torch.nn.Module) -> None:
        """Name parameters after a model that has turned up meanwhile."""
        self._modules = ModuleStack([*self._models, model])
        self._models.append(model)
        self._members.clear()
        self._names.clear()
        self._watch_activations(model)

    def log(self, scalars: dict[str, Any]) -> None:
        """Take down numbers of this step; tensors are read later, with everything else. Several of a name give their mean."""
        self._safely("take down a scalar", self._log, scalars)

    def before_clip(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Measure the gradients as they are now."""
        self._safely("measure gradients before clipping", self._measure_unclipped, parameters)

    def skip(self, optimizer: Any) -> None:
        """Count a step that was left out, as a GradScaler does after an overflow."""
        self._safely("count a skipped step", self._skip, optimizer)

    def unscale_loss(self, scaler: Any) -> None:
        """Divide the loss of this step by a GradScaler's scale, since it was taken where backward began."""
        self._safely("unscale the loss", self._unscale_loss, scaler)

    def _skip(self, optimizer: Any) -> None:
        self._turn_to(("optimizer", id(optimizer)))
        self._open.stepped.add(id(optimizer))
        self._log({"skipped": 1.0})

    def _unscale_loss(self, scaler: Any) -> None:
        scale, losses = scale_of(scaler), self._open.scalars.get("loss")
        if losses and isinstance(scale, torch.Tensor) and not self._open.is_unscaled:
            factor = scale.to(torch.float32)
            self._open.scalars["loss"] = [loss / factor.to(loss.device) if isinstance(loss, torch.Tensor) else loss for loss in losses]
            self._open.is_unscaled = True

    # ---- what the hooks call

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_active:
            self._safely("measure gradients", self._measure_gradients, optimizer)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_active:
            self._safely("measure parameters", self._measure_results, optimizer)
            self._open.stepped.add(id(optimizer))
            self.num_optimizer_steps += 1

    def _watch_activations(self, model: torch.nn.Module) -> None:
        if not self._globs:
            return
        stack = ModuleStack([model])
        fused = {id(part) for _, module in modules_in(model) if isinstance(module, _FUSED) for _, part in modules_in(module)}
        for _, module in modules_in(model):
            path = stack.enter(module)
            stack.leave(module)
            if path and id(module) not in fused and any(fnmatch.fnmatchcase(path, glob) for glob in self._globs):
                self._handles.append(module.register_forward_hook(self._activation_hook(path)))

    def _activation_hook(self, path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            is_recompute = graph_task() != -1
            if torch.compiler.is_compiling() or inside_transform() or is_jit_tracing():
                return
            if self._is_active and torch.is_grad_enabled() and not is_recompute:
                self._safely("measure an activation", self._measure_activation, path, output)

        return hook

    # ---- measuring

    def _measure_gradients(self, optimizer: Any) -> None:
        self._turn_to(("optimizer", id(optimizer)))
        if not self._is_wanted():
            return
        self._log_settings(optimizer)
        watched = self._watched(optimizer)
        if "gradient" in self._kinds:
            scale = getattr(optimizer, "grad_scale", None)
            self._add_gradients("gradient", id(optimizer), watched, scale if isinstance(scale, torch.Tensor) else None)
        if "update" in self._kinds:
            self._before[id(optimizer)] = self._values_before(id(optimizer), watched)

    def _log_settings(self, optimizer: Any) -> None:
        for number, group in enumerate(optimizer.param_groups):
            name = "learning_rate" if len(optimizer.param_groups) == 1 else f"learning_rate.{group.get('name', number)}"
            if group.get("lr") is not None:
                self._open.scalars[name] = [_now(group["lr"])]
        scale = scale_of(self.scaler)  # get_scale() would wait for the device
        if isinstance(scale, torch.Tensor):
            self._open.scalars["scale"] = [_now(scale)]

    def _measure_unclipped(self, parameters: Iterable[torch.Tensor] | None) -> None:
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        self._turn_to(("unclipped", None))
        if not self._is_wanted():
            return
        watched = [pair for pair in self._all_watched() if chosen is None or id(pair[1]) in chosen]
        self._add_gradients("unclipped", None, watched)

    def _add_gradients(self, kind: str, key: Any, watched: list[tuple[Member, torch.Tensor]], scale: torch.Tensor | None = None) -> None:
        found = [(kind, member, gradient) for member, parameter in watched if (gradient := _gradient(parameter)) is not None]
        for number, (group, tensors) in enumerate(self._groups_of((kind, key), found)):
            self._open.entries[kind, key, number] = _Entry(
                group.targets,
                group.batch.measure(tensors, self._bounds),
                group.cohort,
                group.batch.sample(tensors) > 0 if group.cohort.sampler.width else None,
                None if scale is None else scale.clone(),
            )

    def _values_before(self, key: int, watched: list[tuple[Member, torch.Tensor]]) -> tuple[list[_Sought], list[Any]]:
        kind = "update.exact" if self._exact_updates else "update"
        sought = [(kind, member, parameter) for member, parameter in watched if parameter.requires_grad]
        groups = self._groups_of(("update", key), sought)
        if self._exact_updates:
            return sought, [[tensor.clone() for tensor in tensors] for _, tensors in groups]
        return sought, [group.batch.sample(tensors) for group, tensors in groups if group.cohort.sampler.width]

    def _measure_results(self, optimizer: Any) -> None:
        if not self._is_wanted():
            return
        watched = self._watched(optimizer)
        if "update" in self._kinds:
            self._add_updates(id(optimizer), *self._before.pop(id(optimizer), ([], [])))
        sought: list[_Sought] = []
        if "parameter" in self._kinds:
            sought += [("parameter", member, parameter) for member, parameter in watched]
        if "moment" in self._kinds:
            sought += _moments(optimizer, watched)
        for number, (group, tensors) in enumerate(self._groups_of(("state", id(optimizer)), sought)):
            self._open.entries["state", id(optimizer), number] = _Entry(group.targets, group.batch.measure(tensors, self._bounds))

    def _add_updates(self, key: int, sought: list[_Sought], before: list[Any]) -> None:
        if not before:
            return
        for number, ((group, tensors), values) in enumerate(zip(self._groups_of(("update", key), sought), before, strict=True)):
            if self._exact_updates:
                pending = measure([tensor - value for tensor, value in zip(tensors, values, strict=True)], self._bounds)
            else:
                pending = measure_rows(group.batch.sample(tensors) - values, group.cohort.sampler.counts, self._bounds)
            self._open.entries["update", key, number] = _Entry(group.targets, pending)

    def _measure_activation(self, path: str, output: Any) -> None:
        self._turn_to(("activation", path))
        if not self._is_wanted():
            return
        tensors = [local_part(tensor) for tensor in _tensors(output) if _has_values(tensor)]
        if tensors:
            targets = _activation_targets(path, tensors[0].dtype, len(tensors))
            self._open.entries["activation", path, len(self._open.entries)] = _Entry(targets, measure(tensors, self._bounds))

    # ---- who is watched

    def _watched(self, optimizer: Any) -> list[tuple[Member, torch.Tensor]]:
        """Return the parameters of an optimizer with their descriptions."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        key = (id(optimizer), *map(id, parameters))
        found = self._members.get(key)
        if found is None:
            for stale in [other for other in self._members if other[0] == id(optimizer)]:
                del self._members[stale]
            found = self._members[key] = self._described(optimizer)
        return found

    def _all_watched(self) -> list[tuple[Member, torch.Tensor]]:
        for optimizer in self._optimizers or ():
            self._watched(optimizer)
        return [pair for pairs in self._members.values() for pair in pairs]

    def _described(self, optimizer: Any) -> list[tuple[Member, torch.Tensor]]:
        if not self._names:
            self._names = {id(tensor): name for root in self._modules.roots() for name, tensor in self._modules.named_parameters(root)}
        named = [
            (self._names.get(id(parameter), f"group{number}.{place}"), str(group.get("name", f"group{number}")), parameter)
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
            if not is_lazy(parameter) and self._can_read(parameter)
        ]
        order = {name: place for place, name in enumerate(self._names.values())}
        named.sort(key=lambda each: order.get(each[0], len(order)))
        labels = [self._label(name, group) for name, group, _ in named]
        sizes: dict[str, int] = {}
        for label, (_, _, parameter) in zip(labels, named, strict=True):
            sizes[label] = sizes.get(label, 0) + int(without_class(parameter).numel())
        return [
            (member_of(name, label, plain, self._share_of_samples(plain, sizes[label])), parameter)
            for label, (name, _, parameter) in zip(labels, named, strict=True)
            for plain in (without_class(parameter),)
        ]

    def _can_read(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter can be read, and report one that cannot."""
        if is_readable(parameter):
            return True
        if self._on_failure is not None:
            kind = type(parameter).__name__
            why = TypeError(f"a tensor of the class {kind} has no memory of its own to look at, and the code of the class is not run")
            self._on_failure("watch a parameter", why)
        return False

    def _label(self, name: str, group: str) -> str:
        if self._granularity == "group":
            return group
        return name if self._granularity == "parameter" else name.rpartition(".")[0] or name

    def _share_of_samples(self, parameter: torch.Tensor, size: int) -> int:
        """Return a parameter's share of the one sample of its label, by size."""
        if not self._num_samples:
            return 0
        return max(1, round(self._num_samples * int(parameter.numel()) / max(size, 1)))

    def _groups_of(self, slot: Any, sought: list[_Sought]) -> list[tuple[_Group, list[torch.Tensor]]]:
        """Group the local parts of tensors by device. The groups in `slot` are used again if they still hold."""
        tensors = [
            tensor if type(tensor) in _PLAIN and tensor.layout is _STRIDED else local_part(tensor)  # most often, and without a call
            for _, _, tensor in sought
        ]
        members = [id(member) for _, member, _ in sought]
        addresses, forms = traits(tensors)
        found = self._found.get(slot)
        if found is None or found.forms != forms or found.members != members:
            found = self._found[slot] = _Found(members, forms, addresses, self._grouped(sought, tensors))
        elif found.addresses != addresses:
            found = self._found[slot] = found._replace(addresses=addresses)
            for group in found.groups:
                group.batch.move([addresses[place] for place in group.places])
        if len(found.groups) == 1:
            return [(found.groups[0], tensors)]
        return [(group, [tensors[place] for place in group.places]) for group in found.groups]

    def _grouped(self, sought: list[_Sought], tensors: list[torch.Tensor]) -> list[_Group]:
        places: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(place)
        groups = []
        for device, at in places.items():
            cohort, chosen = self._cohort(device, [sought[place][1] for place in at]), [tensors[place] for place in at]
            targets = cohort.targets([sought[place][0] for place in at], [tensor.dtype for tensor in chosen])
            groups.append(_Group(cohort, Batch(chosen, cohort.sampler), targets, at))
        return groups

    def _cohort(self, device: torch.device, members: list[Member]) -> Cohort:
        key = (device, *map(id, members))
        found = self._cohorts.get(key)
        if found is None:
            if len(self._cohorts) >= _MOST_COHORTS:
                self._cohorts.clear()
            found = self._cohorts[key] = Cohort(members)
        return found

    # ---- steps

    def _is_wanted(self) -> bool:
        return self._open.number % self._every == 0

    def _turn_to(self, key: Any) -> None:
        """Go to the next step if this one is over: an optimizer has stepped, and the event came before in this step already."""
        kind, which = key
        if self._open.stepped and not self._has_explicit_steps:
            is_repeated = which in self._open.stepped if kind == "optimizer" else self._has(kind, which)
            if is_repeated:
                self._end_step()
        if kind == "optimizer":
            for old in [each for each in self._open.entries if each[1] == which]:
                del self._open.entries[old]

    def _has(self, kind: str, which: Any) -> bool:
        if kind == "scalar":
            return which in self._open.scalars
        return any(entry[:2] == (kind, which) for entry in self._open.entries)

    def _log(self, scalars: dict[str, Any]) -> None:
        known = {name: value for name, value in scalars.items() if not isinstance(value, torch.Tensor) or is_readable(value)}
        values = {name: _now(value) for name, value in known.items()}
        for name in values:
            self._turn_to(("scalar", name))
        for name, value in values.items():
            self._open.scalars.setdefault(name, []).append(value)

    def _end_step(self) -> None:
        done, self._open = self._open, _OpenStep(self._open.number + 1)
        sent, self._on_the_way = self._on_the_way, None
        if done.number % self._every == 0 and (done.entries or done.scalars):
            self._on_the_way = self._send(done)
        if sent is not None:
            self._deliver(sent)
        if self._on_the_way is not None and all(device.type == "cpu" for device in self._on_the_way.places):
            sent, self._on_the_way = self._on_the_way, None
            self._deliver(sent)

    def _send(self, done: _OpenStep) -> _Sent:
        """Send the measurements of a step to the host, those of a device in one copy."""
        arrays = _arrays(done)
        places: dict[torch.device, list[int]] = {}
        for place, array in enumerate(arrays):
            places.setdefault(array.device, []).append(place)
        sent = _Sent(done, places)
        for device, at in places.items():
            arrivals = self._arrivals.setdefault(device, Arrivals(device, copies_ahead=True))
            arrivals.send([arrays[place] for place in at], sent)
        return sent

    def _arrived(self, sent: _Sent) -> list[Any]:
        """Wait until all results of a step are here; a step later they have come already."""
        found: dict[int, Any] = {}
        for device, places in sent.places.items():
            while (arrived := self._arrivals[device].pop(wait=True)) is not None:
                owner, arrays = arrived
                if owner is sent:  # and not of a step that failed to arrive
                    found.update(zip(places, [array.numpy() for array in arrays], strict=True))
                    break
        return [found[place] for place in range(len(found))]

    def _finish(self) -> None:
        if self._open.entries or self._open.scalars:
            self._end_step()
        if self._on_the_way is not None:
            sent, self._on_the_way = self._on_the_way, None
            self._deliver(sent)

    def _deliver(self, sent: _Sent) -> None:
        done, arrays = sent.step, iter(self._arrived(sent))
        rows: list[Any] = []
        signs: list[bytes] = []
        for entry in done.entries.values():
            values = entry.pending.finish([next(arrays) for _ in entry.pending.arrays])
            if entry.signs is not None and entry.cohort is not None:
                signs.append(entry.cohort.sign_bits(next(arrays)))
            if entry.scale is not None:
                values = values.copy()
                values[:, :4] /= float(next(arrays).item())
            rows.append(values)
        scalars = {name: float(np.mean([_number(value, arrays) for value in values])) for name, values in done.scalars.items()}
        self._on_step(self._step_of(done, rows, b"".join(signs), scalars))

    def _step_of(self, done: _OpenStep, rows: list[Any], signs: bytes, scalars: dict[str, float]) -> HealthStep:
        values = np.concatenate(rows) if rows else np.empty((0, len(STATISTICS)))
        plan = self._plan_of(tuple(entry.targets for entry in done.entries.values()))
        if plan.merge is not None:
            values, signs = plan.merge.rows(values), plan.merge.signs(signs)
        return HealthStep(
            step=done.number,
            time=time.time(),
            layout=plan.layout,
            statistics=np.ascontiguousarray(values[:, :6]),
            scalars=scalars,
            histograms=values[:, 6:].astype(np.int64) if self._bounds else None,
            signs=signs,
        )

    def _plan_of(self, parts: tuple[tuple[HealthTarget, ...], ...]) -> _Plan:
        """Plan the rows that come in these parts; the layout is the same object each time that its rows are the same."""
        key = tuple(map(id, parts))
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            targets = tuple(target for part in parts for target in part)
            merge = Merge(targets) if len({(target.kind, target.name) for target in targets}) < len(targets) else None
            layout = HealthLayout(targets if merge is None else merge.targets, self._bounds)
            same = next((plan.layout for plan in self._plans.values() if plan.layout == layout), layout)
            known = self._plans[key] = _Plan(parts, same, merge)
        return known

    def _safely(self, what: str, function: Callable[..., None], *args: Any) -> None:
        """Run our own work: no mode sees it, autograd does not track it, and its failure stays here."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return  # nothing may be added to a graph that the user records
        try:
            with blind():
                function(*args)
        except Exception as error:
            let_pass(error)
            if self._on_failure is not None:
                self._on_failure(what, error)


def _now(value: Any) -> float | torch.Tensor:
    """Return a number, or a tensor with its present value."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    with blind():
        found: torch.Tensor = local_part(value).to(torch.float32).mean().clone()
    return found


def _number(value: float | torch.Tensor, arrays: Any) -> float:
    return float(next(arrays).item()) if isinstance(value, torch.Tensor) else value


def _arrays(done: _OpenStep) -> list[torch.Tensor]:
    """Return all arrays that have to come to the host, in the order in which `_deliver` takes them."""
    found: list[torch.Tensor] = []
    for entry in done.entries.values():
        found += [*entry.pending.arrays, *(each for each in (entry.signs, entry.scale) if each is not None)]
    return found + [value for values in done.scalars.values() for value in values if isinstance(value, torch.Tensor)]


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that the optimizer uses; Megatron and its kin keep it in `main_grad`."""
    found = getattr(parameter, "main_grad", None)
    gradient = found if isinstance(found, torch.Tensor) else parameter.grad
    return gradient if gradient is not None and is_readable(gradient) else None


def _moments(optimizer: Any, watched: list[tuple[Member, torch.Tensor]]) -> list[_Sought]:
    """Return the tensors of an optimizer's state that have the size of their parameter, by kind."""
    state = optimizer.state
    if not isinstance(state, dict):
        return []
    found: defaultdict[str, list[tuple[Member, torch.Tensor]]] = defaultdict(list)
    for member, parameter in watched:
        for key, value in state.get(parameter, _NOTHING).items():
            is_known = key != "step" and isinstance(value, torch.Tensor) and is_readable(value)
            if is_known and without_class(value).numel() == member.global_numel:
                found[key].append((member, value))
    return [(kind, member, value) for key, pairs in found.items() for kind in (f"moment.{key}",) for member, value in pairs]


@lru_cache(maxsize=4096)
def _activation_targets(path: str, dtype: torch.dtype, number: int) -> tuple[HealthTarget, ...]:
    """Return the same object each time, so that a step with the same rows has the same layout."""
    name = str(dtype).removeprefix("torch.")
    return (HealthTarget(kind="activation", name=path, numel=1, global_numel=1, dtype=name, layer=path),) * number


def _has_values(tensor: torch.Tensor) -> bool:
    tensor = without_class(tensor)
    if not is_readable(tensor):
        return False
    if is_fake(tensor) or is_traced(tensor) or tensor.is_nested or tensor.device.type == "meta":
        return False
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's result, through tuples, lists and dicts."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]
