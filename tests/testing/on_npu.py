# SPDX-License-Identifier: Apache-2.0
"""Check the emulated device in a process of its own: registering it cannot be undone.

Prints a JSON object on its last line: for each check the traceback of its failure, or nothing.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import threading
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.harmless import programs
from ulpscope import _torch_private
from ulpscope.errors import InputError, UlpscopeError
from ulpscope.testing import npu

# These differ from the CPU for reasons other than values: attribute reads, version counts, an optimizer of another kind, a case left out.
UNEQUAL = {
    "versions_and_identity",
    "users_function_mode",
    "users_function_mode_outside",
    "foreach_fused_and_scheduler",
    "exception_in_mid_step",
}


def equal_to_cpu(name):
    here = programs.run(name, programs.Nothing, "cpu")
    there = programs.run(name, programs.Nothing, "npu")
    assert not (found := programs.differences(here, there)), found


def check_tensors():
    x = torch.arange(6.0).npu()
    assert (x.is_npu, x.device.type, x.device.index, x.tolist()) == (True, "npu", 0, [0, 1, 2, 3, 4, 5])
    assert "device='npu:0'" in repr(x)
    assert torch.equal(x.to("cpu"), torch.arange(6.0))
    assert not x.to("cpu").is_npu
    assert x.to("npu") is x
    assert torch.tensor([1, 2], device="npu").sum().item() == 3
    assert torch.ones(2, 3, device="npu:0").float().half().dtype is torch.float16
    assert torch.equal(torch.load(_saved(x), weights_only=True).cpu(), x.cpu())
    assert (x.numpy(force=True) == x.cpu().numpy()).all()


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def check_views_alias():
    x = torch.zeros(4, 6, device="npu")
    view = x.t()[2:4, ::2]
    view.add_(1)
    x.view(-1)[0] = 5
    plain = torch.zeros(4, 6)
    plain.t()[2:4, ::2].add_(1)
    plain.view(-1)[0] = 5
    assert torch.equal(x.cpu(), plain)
    assert view.stride() == plain.t()[2:4, ::2].stride()
    assert view._version == x._version
    assert x.unsqueeze_(0).shape == (1, 4, 6)


def check_mixed_devices():
    for refused in (lambda: torch.ones(2, device="npu") + torch.ones(2), lambda: torch.ones(2, 2) @ torch.ones(2, 2, device="npu")):
        with pytest.raises(RuntimeError, match="same device"):
            refused()
    assert (torch.ones(2, device="npu") * torch.tensor(3.0)).tolist() == [3, 3]
    assert torch.arange(4, device="npu")[torch.tensor([1, 3])].tolist() == [1, 3]


def check_numpy_refuses():
    with pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
        torch.ones(2, device="npu").numpy()


def check_modules_move_and_convert():
    model = nn.Linear(3, 2)
    state = copy.deepcopy(model.state_dict())
    model.npu()
    assert all(type(p) is npu.NpuTensor and isinstance(p, nn.Parameter) for p in model.parameters())
    twin = copy.deepcopy(model)
    twin.half()
    assert twin.weight.dtype is torch.float16
    assert twin(torch.ones(1, 3, device="npu").half()).dtype is torch.float16
    model.weight.data = torch.ones(2, 3, device="npu")
    assert model.weight.sum().item() == 6
    model.load_state_dict(state)
    assert torch.equal(model.weight.cpu(), state["weight"])
    assert all(p.device.type == "cpu" for p in model.cpu().parameters())


def check_device_module():
    assert torch.npu.is_available()
    assert (torch.npu.device_count(), torch.npu.current_device()) == (1, 0)
    torch.npu.synchronize()
    with torch.npu.stream(torch.npu.Stream()), torch.npu.device(0):
        torch.npu.current_stream().record_event().wait()
    torch.npu.manual_seed(3)
    state = torch.npu.get_rng_state()
    first = torch.rand(2, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(first.cpu(), torch.rand(2, device="npu").cpu())
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(2))
    with pytest.raises(RuntimeError, match="one device"):
        torch.npu.set_device(1)
    assert torch.accelerator.current_accelerator().type == "npu"


def check_backward_runs_in_another_thread():
    seen = []
    x = torch.ones(2, device="npu", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(threading.get_ident()))
    y.sum().backward()
    assert seen
    assert seen[0] != threading.get_ident()


def check_inference_mode():
    layer, x = nn.Linear(4, 4), torch.randn(2, 3, 4)
    with torch.inference_mode():
        here = F.scaled_dot_product_attention(*[layer(x)] * 3)
        layer.npu()
        there = F.scaled_dot_product_attention(*[layer(x.npu())] * 3)
        assert there.is_inference()
        assert torch.equal(there.to("cpu"), here)
        assert torch.equal(there.cpu().npu().double().cpu(), here.double())
    weight = torch.ones(2, 2, device="npu", requires_grad=True)
    with torch.inference_mode():
        assert not weight.detach().is_inference()
        assert not weight.t()[0].is_inference()


def check_factories():
    makers = {
        "arange": lambda d: torch.arange(5, device=d),
        "arange of floats": lambda d: torch.arange(1, 2, 0.25, device=d),
        "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
        "logspace": lambda d: torch.logspace(0, 1, 5, device=d),
        "eye": lambda d: torch.eye(3, device=d),
        "wide eye": lambda d: torch.eye(3, 2, device=d),
        "randperm": lambda d: torch.randperm(7, device=d),
        "randint": lambda d: torch.randint(0, 9, (2, 3), device=d),
        "randn": lambda d: torch.randn(2, 3, device=d),
        "full": lambda d: torch.full((2,), 3.0, device=d),
        "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 3), device=d),
        "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
        "new_full": lambda d: torch.ones(1, device=d).new_full((2,), 4.0),
        "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(1),
        "scalar": lambda d: torch.scalar_tensor(2.0, device=d),
        "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    }
    for name, make in makers.items():
        torch.manual_seed(0)
        here = make("cpu")
        torch.manual_seed(0)
        there = make("npu")
        assert (there.shape, there.stride(), there.dtype, there.device.type) == (here.shape, here.stride(), here.dtype, "npu"), name
        assert torch.equal(there.cpu(), here), name
    with pytest.raises(RuntimeError, match="cannot resize"):
        torch.add(torch.ones(3, device="npu"), 1, out=torch.empty(0, device="npu"))


def check_vendor_module():
    import importlib.util

    import torch_npu

    assert importlib.util.find_spec("torch_npu") is not None
    x = torch.randn(2, 8, device="npu")
    assert torch.allclose(torch_npu.npu_swiglu(x).cpu(), F.silu(x.cpu()[:, :4]) * x.cpu()[:, 4:])
    y, rstd = torch_npu.npu_rms_norm(x, torch.ones(8, device="npu"), epsilon=1e-6)
    assert torch.allclose(y.cpu(), F.rms_norm(x.cpu(), (8,), eps=1e-6), atol=1e-6)
    assert rstd.shape == (2, 1)
    assert torch_npu.npu.device_count() == 1


def check_reduced_precision_golden():
    """Reproduce a published record of a linear call on an accelerator; the seed and the largest and smallest values are its own."""
    torch.manual_seed(1234)
    layer = nn.Linear(2, 3)
    x = torch.randn(3, 2)
    plain = layer(x)
    assert (plain.max().item(), plain.min().item()) == (0.8280231952667236, -0.8727998733520508)
    assert torch.equal(layer.npu()(x.npu()).cpu(), plain)
    with npu.reduced_precision():
        y = layer(x.npu())
    assert (y.max().item(), y.min().item()) == (0.8278868794441223, -0.8729169964790344)
    assert torch.equal(layer(x.npu()).cpu(), plain)


def check_reduced_precision_of_the_family():
    a, b, image, kernel, bias = torch.randn(4, 5), torch.randn(5, 6), torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4)

    def rounded(tensor):
        return tensor.half().float()

    pairs = [
        (lambda a, b, *_: a @ b, rounded(a) @ rounded(b)),
        (lambda a, b, *_: a.expand(2, 4, 5) @ b, rounded(a).expand(2, 4, 5) @ rounded(b)),
        (lambda a, b, *_: a @ b[:, 0], rounded(a) @ rounded(b)[:, 0]),
        (lambda a, b, i, k, c: F.conv2d(i, k, c), F.conv2d(rounded(image), rounded(kernel)) + bias[:, None, None]),
        (lambda a, b, i, k, c: i + 1, image + 1),
        (lambda a, b, *_: a.double() @ b.double(), a.double() @ b.double()),
    ]
    inputs = [tensor.npu() for tensor in (a, b, image, kernel, bias)]
    with npu.reduced_precision():
        for compute, expected in pairs:
            assert torch.equal(compute(*inputs).cpu(), expected)
        weight = inputs[3].clone().requires_grad_()
        F.conv2d(inputs[2], weight, inputs[4].requires_grad_()).sum().backward()
    assert weight.grad.shape == kernel.shape
    assert inputs[4].grad.tolist() == [18.0] * 4


def _gelu(x):
    return F.gelu(x.npu()).cpu()


def check_faults():
    x = torch.randn(4, 8)
    right = F.gelu(x)
    broken = {}
    for name in ("scale", "zero_row", "flip_bit", "nan", "inf", "tanh_gelu"):
        with npu.inject("aten.gelu.default", name) as injection:
            broken[name] = _gelu(x)
        assert injection.num_hits == 1
        assert torch.equal(_gelu(x), right)
    assert torch.allclose(broken["scale"], right * 1.001, rtol=1e-6)
    assert torch.equal(broken["zero_row"][0], torch.zeros(8))
    assert torch.equal(broken["zero_row"][1:], right[1:])
    assert (broken["flip_bit"] != right).sum() == 1
    assert (broken["flip_bit"] != right).flatten().nonzero().item() == right.abs().argmax()
    assert broken["nan"].isnan().sum() == 1
    assert broken["inf"].isinf().sum() == 1
    assert torch.equal(broken["tanh_gelu"], F.gelu(x, approximate="tanh"))


def check_fault_values_and_functions():
    x = torch.randn(4, 8)
    with npu.inject("aten.gelu", "scale", value=1.0):
        assert torch.equal(_gelu(x), F.gelu(x) * 2)
    with npu.inject("aten.sub.Tensor", "swap_arguments"):
        assert torch.equal((x.npu() - (2 * x).npu()).cpu(), x)
    with npu.inject("aten.gelu.default", lambda op, args, kwargs: op(args[0].abs(), **kwargs)):
        assert torch.equal(_gelu(x), F.gelu(x.abs()))


def check_faults_by_call_and_phase():
    x = torch.randn(3, 8)

    def gradient():
        leaf = x.npu().requires_grad_()
        y = F.gelu(F.gelu(leaf))
        y.sum().backward()
        return y.detach().cpu(), leaf.grad.cpu()

    y, grad = gradient()
    with npu.inject("aten.gelu.default", "nan", call=1) as second:
        wrong, _ = gradient()
    assert (second.num_calls, second.num_hits) == (2, 1)
    assert wrong.isnan().sum() == 1
    with npu.inject("aten.gelu_backward.default", "scale", phase="backward", call=0) as backward:
        same, wrong = gradient()
    assert backward.num_hits == 1
    assert torch.equal(same, y)
    assert not torch.equal(wrong, grad)
    with npu.inject("aten.mul.Tensor", "nan", phase="backward") as never:
        _ = x.npu() * x.npu()
    assert never.num_calls == 0


def check_faults_of_in_place_operations():
    x, y = torch.ones(3, device="npu"), torch.full((3,), 5.0, device="npu")
    with npu.inject("aten.sub_.Tensor", "scale", value=1.0):
        same = x.sub_(y)
    assert same is x
    assert (x.tolist(), y.tolist()) == ([-8, -8, -8], [5, 5, 5])
    with npu.inject("aten.sub_.Tensor", "swap_arguments"):
        x.sub_(y)
    assert (x.tolist(), y.tolist()) == ([13, 13, 13], [5, 5, 5])
    out = torch.zeros(3, device="npu")
    with npu.inject("aten.add.out", "nan"):
        torch.add(x, y, out=out)
    assert out.isnan().tolist() == [True, False, False]
    with npu.inject("aten._foreach_mul_.Scalar", "scale", value=1.0):
        torch._foreach_mul_([x, y], 2.0)
    assert (x.tolist(), y.tolist()) == ([52, 52, 52], [20, 20, 20])


def check_unknown_names_are_refused():
    for op, fault, word in (("aten.gelo.default", "nan", "aten.gelo"), ("aten.gelu.default", "melt", "zero_row")):
        with pytest.raises(InputError, match=word), npu.inject(op, fault):
            pass


def check_installing_again_changes_nothing():
    module = torch.npu
    npu.install(stand_in_torch_npu=True)
    assert torch.npu is module


def check_a_missing_function_is_named():
    kept = _torch_private._EMULATION
    _torch_private._EMULATION = (*kept, "torch._C._not_there_yet", "torch.nowhere.nothing")
    try:
        with pytest.raises(UlpscopeError, match=r"torch\._C\._not_there_yet, torch\.nowhere\.nothing, which torch 2"):
            npu._check_torch()
    finally:
        _torch_private._EMULATION = kept


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
CHECKS |= {f"equal to cpu: {name}": (lambda name=name: equal_to_cpu(name)) for name in programs.PROGRAMS if name not in UNEQUAL}


def main() -> None:
    warnings.simplefilter("error")
    for category in (DeprecationWarning, FutureWarning):  # the second from torch 2.14 on
        warnings.filterwarnings("ignore", "`torch.jit.*is deprecated", category)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    npu.install(stand_in_torch_npu=True)
    failures = {}
    for name, check in CHECKS.items():
        try:
            check()
            failures[name] = None
        except Exception:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
