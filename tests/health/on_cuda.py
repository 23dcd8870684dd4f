# SPDX-License-Identifier: Apache-2.0
"""Test what only a machine with CUDA and Triton can show: `python tests/health/on_cuda.py`, by hand; it ends with a line or a traceback.

The rows that the kernels give are those of the CPU for the same values: counts, minimum and maximum exactly, the mean within 3e-6 of the
rms, the rms within 3e-6 of itself. A health recording waits for nothing, changes no bit, and adds nothing to a graph that is being
recorded.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.health.training import Net, train
from ulpscope.capture.health import readings_triton as statistics_triton
from ulpscope.capture.health.readings import Batch, Sampler, measure
from ulpscope.numerics.summary.composing import sample_positions
from ulpscope.store.series import open_health
from ulpscope.workflows.health_recording import compare_health, watch

BOUNDS = (-1.0, 0.0, 1.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main() -> None:
    checks: list[Callable[[Path], None]] = [
        rows_agree,
        mixed_tensors_agree,
        samples_agree,
        a_watched_training_agrees,
        watching_waits_for_nothing_and_changes_nothing,
        addresses_that_move_are_followed,
        memory_that_was_given_back_is_not_read,
        a_recorded_graph_stays_what_it_was,
        a_fault_is_found,
    ]
    for check in checks:
        with tempfile.TemporaryDirectory(prefix="ulpscope-") as folder:
            check(Path(folder))
        assert not statistics_triton.failure, statistics_triton.failure
        print(f"{check.__name__}: as it should be")
    print(f"{len(checks)} checks on {torch.cuda.get_device_name()}")


def finished(tensors: list[torch.Tensor]) -> Any:
    pending = measure(tensors, BOUNDS)
    return pending.finish([array.cpu().numpy() for array in pending.arrays])


def assert_close(rows: Any, expected: Any) -> None:
    """Compare within the bounds that are stated above."""
    np.testing.assert_array_equal(rows[:, [0, 1, *range(4, rows.shape[1])]], expected[:, [0, 1, *range(4, rows.shape[1])]])
    np.testing.assert_allclose(rows[:, 3], expected[:, 3], rtol=3e-6)
    np.testing.assert_array_equal(np.isnan(rows[:, 2]), np.isnan(expected[:, 2]))
    assert (np.nan_to_num(np.abs(rows[:, 2] - expected[:, 2])) <= 3e-6 * np.nan_to_num(expected[:, 3])).all()


def odd_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return sizes around a row, tiny and huge values, non-finite ones, other memory formats, an address that is not aligned."""
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    largest = torch.finfo(dtype).max
    tensors = [values[:numel] for numel in (0, 1, 15, 8191, 8192, 8193, 16384, 3_000_000)]
    tensors += [values[:20_000] * scale for scale in (torch.finfo(dtype).tiny * 64, 1e-3, largest / 8, 0.0)]
    tensors += [values[:1200].view(40, 30).t(), values[:4800].view(2, 10, 12, 20).contiguous(memory_format=torch.channels_last)]
    tensors = [tensor.to(dtype) for tensor in tensors]
    for place, odd in ((17, "inf"), (9000, "-inf"), (123, "nan")):
        tensors.append(values[:10_000].to(dtype))
        tensors[-1][place] = float(odd)
    return [*tensors, torch.full((9000,), float("nan"), dtype=dtype), torch.full((20_000,), largest, dtype=dtype)]


def rows_agree(folder: Path) -> None:
    for dtype in DTYPES:
        tensors = odd_tensors(dtype)
        there = [tensor.cuda() for tensor in tensors]
        shifted = torch.cat([there[7].new_zeros(1), there[7]])[1:]
        assert all(statistics_triton.can_read(tensor) for tensor in [*there, shifted])
        assert_close(finished([*there, shifted]), finished([*tensors, tensors[7]]))
        np.testing.assert_array_equal(finished(there), finished(there))


def mixed_tensors_agree(folder: Path) -> None:
    """Several dtypes together, with some that the kernels leave to others."""
    tensors = [tensor for dtype in (*DTYPES, torch.float64) for tensor in odd_tensors(dtype)[1:6]]
    tensors.append(torch.randn(50, 60)[:, ::2])
    assert_close(finished([tensor.cuda() for tensor in tensors]), finished(tensors))


def samples_agree(folder: Path) -> None:
    tensors = [tensor for dtype in DTYPES for tensor in odd_tensors(dtype) if tensor.numel()]
    sampler = Sampler([sample_positions(str(place), tensor.numel(), 1000) for place, tensor in enumerate(tensors)])
    there = [tensor.cuda() for tensor in tensors]
    taken = Batch(there, sampler).sample(there).cpu()
    np.testing.assert_array_equal(taken.numpy(), sampler.take(tensors).numpy())


class Training:
    """A small model with parameters of two dtypes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net(dropout=0.0).cuda()
        self.net.layers[1].to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)
        self.batches = torch.randint(0, 40, (16, 8, 10), generator=torch.Generator().manual_seed(7)).cuda()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.net.tokens(tokens)
        for layer in self.net.layers:
            x = layer(x.to(layer.up.weight.dtype)).float()
        return F.cross_entropy(self.net.head(x).flatten(0, 1), (tokens * 3 % 40).flatten())

    def step(self, number: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.forward(self.batches[number % 16])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in self.net.state_dict().values()]


def a_watched_training_agrees(folder: Path) -> None:
    """The written statistics are those that the CPU finds in copies of the same tensors."""
    training = Training()
    named = dict(training.net.named_parameters())
    copies: list[dict[str, list[torch.Tensor]]] = []
    with watch(training.net, training.optimizer, into=folder / "run", quiet=True, num_samples=1 << 20) as health:
        for number in range(6):
            before = [parameter.detach().float().cpu() for parameter in named.values()]
            health.log(loss=training.step(number))
            states = [training.optimizer.state[parameter] for parameter in named.values()]
            seen = {"gradient": [p.grad for p in named.values()], "parameter": list(named.values())}
            seen |= {f"moment.{key}": [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")}
            copies.append({kind: [each.detach().cpu() for each in tensors] for kind, tensors in seen.items()})
            copies[-1]["update"] = [p.detach().float().cpu() - old for p, old in zip(named.values(), before, strict=True)]
    found = open_health(health.path).series(0)
    assert found.steps.tolist() == list(range(6))
    places = {(target.kind, target.name): place for place, target in enumerate(found.targets)}
    for step, kinds in enumerate(copies):
        for kind, tensors in kinds.items():
            rows = found.values[step, [places[kind, name] for name in named]]
            assert_close(rows, finished(tensors)[:, :6])
        for name, gradient in zip(named, kinds["gradient"], strict=True):
            signs = np.unpackbits(found.signs[step, places["gradient", name]])[: gradient.numel()]
            np.testing.assert_array_equal(signs.astype(bool), (gradient.flatten() > 0).numpy())


def watching_waits_for_nothing_and_changes_nothing(folder: Path) -> None:
    alone, watched = Training(), Training()
    for number in range(8):
        alone.step(number)
    with watch(watched.net, watched.optimizer, into=folder / "run", quiet=True, bounds=BOUNDS) as health:
        for number in range(8):
            torch.cuda.set_sync_debug_mode("error" if number >= 2 else "default")  # the first steps make tables
            health.log(loss=watched.step(number))
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(alone.state(), watched.state(), strict=True))
    assert not list(folder.glob("run/rank*/ledger.jsonl")), next(folder.glob("run/rank*/ledger.jsonl")).read_text()
    assert len(open_health(health.path).series(0).steps) == 8


def addresses_that_move_are_followed(folder: Path) -> None:
    """Gradients lie elsewhere in each step, and once all parameters move."""
    training, expected, kept = Training(), [], []
    weight = training.net.layers[0].up.weight
    with watch(training.net, training.optimizer, into=folder / "run", quiet=True) as health:
        for number in range(6):
            if number == 3:
                for parameter in training.net.parameters():
                    parameter.data = parameter.data.clone()
            training.optimizer.zero_grad()
            training.forward(training.batches[number]).backward()
            kept.append([parameter.grad for parameter in training.net.parameters()])
            training.optimizer.step()
            expected.append([finished([each.detach().cpu()])[0, 3] for each in (weight.grad, weight)])
    found = open_health(health.path).series(0)
    for column, kind in enumerate(("gradient", "parameter")):
        place = next(at for at, target in enumerate(found.targets) if (target.kind, target.name) == (kind, "layers.0.up.weight"))
        np.testing.assert_allclose(found.values[:, place, 3], [each[column] for each in expected], rtol=3e-6)


def memory_that_was_given_back_is_not_read(folder: Path) -> None:
    gone, there = torch.ones(50_000, device="cuda"), torch.ones(50_000, device="cuda")
    gone.untyped_storage().resize_(0)
    sampler = Sampler([np.arange(10), np.arange(10)])
    assert finished([gone, there])[1, :4].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert Batch([gone, there], sampler).sample([gone, there]).tolist() == [[0.0] * 10, [1.0] * 10]


def a_recorded_graph_stays_what_it_was(folder: Path) -> None:
    """A step is captured as a CUDA graph under a health recording; the graph holds nothing of the recording, and the capture succeeds."""

    def trained(into: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, capturable=True)
        handle = None if into is None else watch(net, optimizer, into=into, quiet=True)
        data, graph, side = torch.ones(4, 8, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            net(data).square().mean().backward()
            optimizer.step()

        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        if handle is not None:
            handle.close()
        return [parameter.detach().clone() for parameter in net.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(trained(None), trained(folder / "run"), strict=True))
    assert not list(folder.glob("run/rank*/ledger.jsonl"))


def a_fault_is_found(folder: Path) -> None:
    healthy = train(folder / "healthy", steps=40, device="cuda")
    assert compare_health(train(folder / "other", steps=40, device="cuda", seed=2), healthy).verdict != "diverges"
    broken = train(folder / "broken", steps=40, at=25, fault="corrupted", device="cuda", seed=2)
    finding = compare_health(broken, healthy).findings[0]
    assert finding.step in (25, 26), finding
    assert finding.module == "layers.1.up", finding


if __name__ == "__main__":
    main()
