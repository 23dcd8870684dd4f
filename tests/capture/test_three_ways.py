# SPDX-License-Identifier: Apache-2.0
"""Record hard programs three ways (Python; compiled; compiled with what `ulpscope build` makes): same records, nothing changed.

One process for each way runs every program without a capture and in several captures, and writes down the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ulpscope.model import CallRecord

PROGRAMS: dict[str, Callable[[], Any]] = {}
CASES = [
    ("api", "statistics"),
    ("module", "statistics"),
    ("op", "statistics"),
    ("both", "tensors"),
    ("api", "fingerprint"),
    ("op", "tensors"),
]
LATE = [("api", "statistics"), ("module", "statistics"), ("op", "statistics"), ("both", "statistics")]
LARGE = {"compiled_autograd": "api", "many_inputs": "both", "modules_in_modules": "both", "transforms": "op"}  # only recorded at one level


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


# ---- passes


@program
def several_passes() -> Any:
    x, w = leaf(3, 4), leaf(4, 4)
    y = F.linear(x, w).tanh()
    y.sum().backward(retain_graph=True)
    (y * y).sum().backward(retain_graph=True)
    some = torch.autograd.grad(y.sin().sum(), [w], retain_graph=True)
    unused = torch.autograd.grad(y.sum(), [x, leaf(2)], allow_unused=True)
    return x.grad, w.grad, some, unused[0]


@program
def gradients_of_gradients() -> Any:
    x, w = leaf(2, 3, 4), leaf(5, 4)
    y = F.linear(x, w).reshape(-1).exp()
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), w, create_graph=True)
    second.pow(2).sum().backward()
    return first, second, x.grad, w.grad


@program
def one_cast_for_all_calls() -> Any:
    """Autocast casts a weight once; its gradient comes from several calls, from some of them twice, and once past the cast."""
    x, w, b = leaf(2, 3, 4), leaf(4, 4), leaf(4)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(F.linear(x, w, b), w, b)
            y = torch.matmul(y @ w, w) + torch.einsum("ab,bc->ac", w, w).sum()
        z = y.float() * w.to(torch.bfloat16).float().sum()
        z.square().mean().backward()
    return x.grad, w.grad, b.grad


class _Several(torch.autograd.Function):
    """Two results, one of them not differentiable, and gradients that may be missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * w, signs, w * factor

    @staticmethod
    def backward(ctx: Any, first: Any, _: Any, last: Any) -> Any:
        x, w = ctx.saved_tensors
        of_w = None if last is None else last * ctx.factor
        if first is None:
            return None, of_w, None
        return first * w, first * x + (0 if of_w is None else of_w), None


class _Inner(torch.autograd.Function):
    """A backward pass inside a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            again.sin().backward(gradient)
        assert again.grad is not None
        return again.grad


@program
def functions_of_the_users() -> Any:
    x, w = leaf(3), leaf(3)
    found: list[Any] = []
    for used in ((0,), (2,), (0, 2), (0, 1, 2)):
        parts = _Several.apply(x, w, 3.0)  # type: ignore[no-untyped-call]
        sum(parts[number].sum() for number in used).backward()
        found += [x.grad, w.grad]
        x.grad = w.grad = None
    _Inner.apply(_Inner.apply(x) * w).sum().backward()  # type: ignore[no-untyped-call]
    return found, x.grad, w.grad


@program
def checkpoints() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    x = leaf(2, 3, 4)
    for reentrant in (True, False):
        checkpoint(model, x.sin(), use_reentrant=reentrant).sum().backward()
    return x.grad, [parameter.grad for parameter in model.parameters()]


@program
def compiled_autograd() -> Any:
    """With compiled autograd the hooks on the nodes are called from the compiled graph."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = leaf(2, 3, 4)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):  # type: ignore[attr-defined]
        for _ in range(2):
            model(x).sum().backward()
    torch._dynamo.reset()
    return x.grad, [parameter.grad for parameter in model.parameters()]


@program
def parts_of_a_sum() -> Any:
    x, w = leaf(4, 4), leaf(4, 4)
    y = torch.addmm(x, x, x.t()) + F.linear(x, w, w[0]) * torch.stack([x, x.t(), w.t()]).sum(0)
    torch.einsum("ij,ij,jk->ik", x, y, x).sum().backward()
    return x.grad, w.grad


@program
def some_results_only() -> Any:
    x = leaf(6, 4)
    parts = x.sin().chunk(3)
    (parts[0] * 2).sum().backward(retain_graph=True)
    (parts[2].exp() + parts[0].cos()).sum().backward()
    values, places = leaf(5).sort()
    torch.topk(values, 2)[0].sum().backward()
    high = leaf(3, 3).max(dim=1)
    high.values.sum().backward()
    return x.grad, places


# ---- writing in place


@program
def views_and_bases() -> Any:
    x = leaf(4, 6)
    y = x * 1
    y[0].mul_(2)
    first, second = y[1:3], y.t()
    first.add_(1)
    second.mul_(3)
    y.view(-1)[::3].exp_()
    y.sum().backward()
    linear = nn.Linear(4, 4)
    z = linear(leaf(2, 3, 4))
    z.add_(1)
    z.mul_(z.detach().sigmoid())
    z.sum().backward()
    return x.grad, [parameter.grad for parameter in linear.parameters()]


@program
def leaves_that_are_views() -> Any:
    whole = torch.randn(4, 4)
    part = whole[1:3].requires_grad_()
    (part * 2).sum().backward()
    with torch.no_grad():
        written = leaf(3)
        written[0] = 5.0
        inner = written.view(3, 1)
    loose = (written * 2).tanh()
    loose.detach_()
    other = (leaf(3).sin() + loose).squeeze()
    other.sum().backward()
    return part.grad, inner, loose


@program
def data_that_is_swapped() -> Any:
    x = torch.arange(4.0)
    y = x.sin()
    x.data = torch.ones(2)
    z = x.exp()
    weight = nn.Parameter(torch.randn(3, 3))
    out = F.linear(torch.randn(2, 3), weight)
    weight.data = torch.zeros(3, 3)
    out.sum().backward()
    weight.data.add_(1)
    weight.grad.data.mul_(2)  # type: ignore[union-attr]
    return y, z, weight, weight.grad, F.linear(torch.ones(1, 3), weight)


@program
def storages_that_are_resized() -> Any:
    x = torch.arange(8.0)
    y = x.cos()
    x.resize_(2)
    z = x.sin()
    x.resize_(8)
    w = torch.randn(5)
    u = w.exp()
    w.untyped_storage().resize_(0)
    v = torch.randn(3)
    t = v.tan()
    v.set_(torch.ones(4).untyped_storage(), 0, (2, 2))  # type: ignore[call-overload]
    return y, z, x.sum(), u, t, v * 2


# ---- kinds of tensors


@program
def rare_kinds() -> Any:
    found: list[Any] = []
    z = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    for seen in (z.conj(), z.imag, z.conj().imag, z.mT.conj(), torch._neg_view(z.real), z.resolve_conj(), torch.view_as_real(z).mT[0]):
        found.append((seen * 2).contiguous())
    sum(part.abs().sum() for part in found).backward()
    zero = torch._efficientzerotensor((2, 3))
    found += [z.grad, zero + torch.ones(2, 3), zero * torch.ones(2, 3) + torch.ones(3)]
    sparse = torch.eye(3).to_sparse()
    found += [(sparse @ torch.ones(3, 2)).add(1), torch.eye(3).to_sparse_csr() @ torch.ones(3, 2)]
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8)
    found += [quantized.dequantize(), torch.ones(2, device="meta").add(1).shape]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    found += [(nested * 2).to_padded_tensor(0.0), torch.ones(4).to_mkldnn().to_dense()]
    bits = torch.arange(4, dtype=torch.int32)
    found += [bits.view(torch.float32) + 0, bits.view(torch.int16)[1::2] + 0, bits.view(torch.uint8).bool().logical_not()]
    return found


@program
def shapes_at_the_limits() -> Any:
    deep = torch.arange(64.0).reshape((1,) * 20 + (2,) * 6).requires_grad_()
    limit = torch.arange(2.0).reshape((1,) * 24 + (2,)).requires_grad_()
    beyond = limit.unsqueeze(0)
    (deep.sin().sum() + deep.transpose(0, 25).exp().sum() + limit.cos().sum() + beyond.tan().sum()).backward()
    empty = leaf(0, 3)
    (F.linear(empty, leaf(4, 3)).reshape(2, 0).sum() + empty.t().exp().sum()).backward()
    point = torch.tensor(2.0, requires_grad=True)
    (point.sin() * point.unsqueeze(0).expand(3, 1)).sum().backward()
    return deep.grad, limit.grad, empty.grad, point.grad


@program
def inference() -> Any:
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    with torch.inference_mode():
        y = model(x)
        y.add_(1)
        seen = x.view(3, 2) * y.data.reshape(3, 2)
    return y.clone() * 2, seen.detach().sin(), x.view(-1).exp()


class _Marked(torch.Tensor):
    """Only has a type of its own."""


class _Wrapped(torch.Tensor):
    """Holds another tensor, and has no memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)  # type: ignore[attr-defined]
        made.inner = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


@program
def subclasses() -> Any:
    marked = torch.randn(3, 3).as_subclass(_Marked).requires_grad_()
    (F.linear(marked, marked).tanh() * 2).sum().backward()
    wrapped = _Wrapped(torch.randn(3, 3)).requires_grad_()
    weight = leaf(3, 3)
    F.linear(wrapped, weight).reshape(-1).sum().backward()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(2, 2)).requires_grad_()
        (fake @ fake).sum().backward()
    found = [tensor.grad for tensor in (marked, wrapped, weight, fake)]
    return found[0].as_subclass(torch.Tensor), found[1].inner, found[2].inner, found[3].shape  # type: ignore[union-attr]


@program
def transforms() -> Any:
    x, w = torch.randn(3, 4), torch.randn(4, 4)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).tanh().sum()

    found = [torch.func.grad(loss)(w, x), torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)]
    found += [torch.func.jvp(lambda v: F.linear(x, v), (w,), (w.cos(),))]
    found += [torch.func.vjp(loss, w, x)[1](torch.ones(())), torch.vmap(lambda row: row.sin().chunk(2)[0])(x)]
    found += [torch.func.hessian(loss)(w[:1], x[:1])]  # with tensors of zeros that have no memory
    outer = leaf(4)
    torch.func.grad(lambda v: (v * outer.sin()).sum())(torch.randn(4))
    torch.vmap(lambda row: row * outer.exp())(x).sum().backward()
    return found, outer.grad


@program
def forward_mode() -> Any:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf(3), torch.ones(3))
        out = forward_ad.unpack_dual(dual.sin().reshape(3, 1).t() * 2)
    return out.primal, out.tangent


# ---- many


@program
def many_inputs() -> Any:
    leaves = [leaf(2) for _ in range(1000)]
    nodes = [tensor.sin() for tensor in leaves[:200]]
    (torch.cat([*leaves, *nodes, *nodes]) ** 2).sum().backward()
    (torch.stack(torch._foreach_mul(leaves[:40], 2.0)).unbind()[3] * 2).sum().backward()
    return [tensor.grad for tensor in leaves]


class _Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Deep(depth - 1) for _ in range(3)) if depth else nn.ModuleList([nn.Linear(4, 4)])
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x).sin() * 1.5 + x.tanh() * self.shift
        return x


@program
def modules_in_modules() -> Any:
    model = _Deep(4)
    model(leaf(2, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


# ---- hooks of the user's


@program
def hooks() -> Any:
    seen: list[Any] = []
    x, w = leaf(2, 3, 4), leaf(4, 4)
    x.register_hook(lambda gradient: gradient * 2)
    w.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))  # type: ignore[union-attr]
    y = x.sin()
    y.retain_grad()
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda gradients: tuple(gradient + 1 for gradient in gradients))
    z = F.linear(y, w)
    assert z.grad_fn is not None
    z.grad_fn.register_hook(lambda left, entered: tuple(None if gradient is None else gradient * 3 for gradient in left))
    z.register_hook(lambda gradient: gradient.cos())
    layer = nn.Linear(4, 4)
    layer.register_full_backward_hook(lambda module, left, entered: (left[0] * 5,))
    layer.register_full_backward_pre_hook(lambda module, entered: (entered[0] * 7,))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 1, lambda tensor: tensor):
        layer(z).tanh().sum().backward()
    return seen, x.grad, y.grad, w.grad, layer.weight.grad


@program
def a_hook_that_raises() -> Any:
    x = leaf(3)
    y = x.sin()
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        y.exp().sum().backward()
        raise AssertionError("the hook did not raise")
    (x * 3).sum().backward()
    return x.grad


class _Seeing(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@program
def a_dispatch_mode() -> Any:
    """The mode sees none of our calls, not even where tensors that waited are read while it is on."""
    seen: list[str] = []
    x = leaf(3, 4)
    y = x.sin()
    with _Seeing(seen):
        y.mul_(2)
        (y.t() * 3).sum().backward()
        x.detach().add_(1)
    return seen, x.grad


# ---- all of them, one way


@contextlib.contextmanager
def _late(is_late: bool) -> Iterator[None]:
    from tests.capture.test_devices import LateSummaries, _defer

    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            _defer(patch, lambda *_, **__: LateSummaries())
        yield


def _run(function: Callable[[], Any]) -> str:
    """Return the bits of all results of a program."""
    torch.manual_seed(1)
    return repr(
        [(str(part.dtype), tuple(part.shape), part.tolist()) if isinstance(part, torch.Tensor) else part for part in _flat(function())]
    )


def _flat(result: Any) -> list[Any]:
    return [part.detach() if isinstance(part, torch.Tensor) else part for part in pytree.tree_leaves(result)]


def _recorded(function: Callable[[], Any], level: str, keep: str, *, is_late: bool) -> dict[str, Any]:
    from tests.capture.recording import recording

    with _late(is_late), recording(keep=keep, level=level) as found:
        result = _run(function)
    records = sorted(
        (
            _without_generators(record)
            for record in found.records
            if record.call.op != "state.rng" and (record.slots or record.phase != "end")
        ),
        key=lambda record: (record.step, str(record.call), record.level, record.phase),
    )
    return {"result": result, "records": [repr(dataclasses.replace(record, order=0)) for record in records], "ledger": sorted(found.ledger)}


def _without_generators(record: CallRecord) -> CallRecord:
    """Return the record of a step's end without its generators, which each process seeds otherwise."""
    return dataclasses.replace(record, arguments=None) if record.phase == "end" else record


def main(out: Path, how: str) -> None:
    if how == "python":
        sys.modules["ulpscope.capture.native._compiled"] = None  # type: ignore[assignment]
    from ulpscope.capture.native.compiled import COMPILED

    assert (COMPILED is not None, COMPILED is not None and COMPILED.HAS_NATIVE) == (how != "python", how == "native")
    warnings.simplefilter("ignore")
    found = {}
    for name, function in PROGRAMS.items():
        bare = _run(function)
        for is_late, cases in ((False, CASES), (True, LATE)):
            for level, keep in cases if name not in LARGE else [(LARGE[name], "statistics")]:
                taken = _recorded(function, level, keep, is_late=is_late)
                found[f"{name} {level} {keep}{' late' if is_late else ''}"] = {"bare": bare, **taken}
    out.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, native_part: Path) -> dict[str, dict[str, Any]]:
    """Return what each way recorded of each program."""
    folder = tmp_path_factory.mktemp("ways")
    homes = {"python": folder, "compiled": folder, "native": native_part.parents[1]}
    running = {
        how: subprocess.Popen(
            [sys.executable, __file__, str(folder / how), how],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "ULPSCOPE_NATIVE": str(home)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for how, home in homes.items()
    }
    errors = [process.communicate(timeout=300)[1] for process in running.values()]
    assert [process.returncode for process in running.values()] == [0, 0, 0], "\n".join(errors)
    return {how: json.loads((folder / how).read_text()) for how in homes}


@pytest.mark.compiled("part")
@pytest.mark.parametrize("name", PROGRAMS)
def test_hard_programs_are_recorded_alike(name: str, recorded: dict[str, dict[str, Any]]) -> None:
    cases = [case for case in recorded["native"] if case.split()[0] == name]
    assert len(cases) == (2 if name in LARGE else len(CASES) + len(LATE))
    for case in cases:
        ways = {how: recorded[how][case] for how in recorded}
        for how, taken in ways.items():
            assert taken["result"] == taken["bare"], (case, how)
            assert [text for text in taken["ledger"] if "compiled by torch.compile" not in text] == [], (case, how)
        for how in ("python", "compiled"):
            pairs = zip(ways[how]["records"], ways["native"]["records"], strict=True)
            assert [pair for pair in pairs if pair[0] != pair[1]][:1] == [], (case, how)
        assert any("phase='forward'" in record for record in ways["native"]["records"]) or " module " in case


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(Path(sys.argv[1]), sys.argv[2])
