# SPDX-License-Identifier: Apache-2.0
"""A small decoder in the style of Llama, with one line of it wrong on the subject.

The model is built alike on both sides and the fault is switched on afterwards, so that both draw the same weights. Most of these are wrong
arguments, wrong weights or wrong wiring: all kernels are right. Some run on a backend that rounds everything else otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from bench.bugs.case import Case, Expected, Program, Side, minimised
from bench.bugs.machines import Kernels, Machine, accelerator, machine_of, other_order, rounded_operands, split_k
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, LAYERS, VOCABULARY, LENGTH, BATCH = 32, 4, 2, 3, 48, 12, 4
SIZE = WIDTH // HEADS


class Norm(nn.Module):
    """Root mean square norm with weights stored as their difference from one."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps, self.is_offset_twice = nn.Parameter(torch.randn(WIDTH) * 0.1), eps, False

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + self.weight
        if self.is_offset_twice:
            scale = 1.0 + scale
        return F.rms_norm(x, (WIDTH,), scale, self.eps)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.set_base(10000.0)
        self.is_interleaved = False

    def set_base(self, base: float) -> None:
        self.register_buffer("frequencies", base ** (-torch.arange(0, SIZE, 2) / SIZE), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None].float() * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.is_interleaved:
            first, second = x[..., ::2], x[..., 1::2]
        else:
            first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
        turned = first * cos - second * sin, first * sin + second * cos
        return torch.stack(turned, dim=-1).flatten(-2) if self.is_interleaved else torch.cat(turned, dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * GROUPS * SIZE, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rotary = Rotary()
        self.scale: float | None = None
        self.window: int | None = None
        self.is_tiled = self.is_swapped = self.is_mask_inverted = False
        self.dropout, self.is_dropout_stuck = 0.0, False

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).split((WIDTH, GROUPS * SIZE, GROUPS * SIZE), dim=-1)
        if self.is_swapped:
            k, v = v, k
        q, k, v = (part.view(batch, length, -1, SIZE).transpose(1, 2) for part in (q, k, v))
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        k, v = self._for_all_heads(k), self._for_all_heads(v)
        p = self.dropout if self.training or self.is_dropout_stuck else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(length), dropout_p=p, scale=self.scale)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))

    def _for_all_heads(self, x: Tensor) -> Tensor:
        if self.is_tiled:
            return x.repeat(1, HEADS // GROUPS, 1, 1)
        return x.repeat_interleave(HEADS // GROUPS, dim=1)

    def _mask(self, length: int) -> Tensor:
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.window is not None:
            hidden = hidden | torch.ones(length, length, dtype=torch.bool).tril(-self.window)
        return hidden if self.is_mask_inverted else ~hidden


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.approximate = "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate=self.approximate) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(), Attention(), Norm(), MLP()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), positions)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.offset, self.is_offset_kept = 0, False

    def forward(self, tokens: Tensor, is_continued: bool = False) -> Tensor:
        """Run the model; `is_continued`: these tokens follow those of the last call."""
        if not is_continued and not self.is_offset_kept:
            self.offset = 0
        positions = torch.arange(self.offset, self.offset + tokens.shape[1])
        self.offset += tokens.shape[1]
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))


def trained(model: nn.Module, *, steps: int = 2, machine: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext) -> Program:
    """Train with AdamW on the next token, on a batch of its own for each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randint(0, VOCABULARY, (steps, BATCH, LENGTH + 1))

    def loss(index: int) -> Tensor:
        logits = model(batches[index, :, :-1])
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), batches[index, :, 1:].reshape(-1))

    return minimised(model, optimizer, loss, steps=steps, machine=machine)


def decoder_case(
    name: str,
    source: str,
    what: str,
    fault: Callable[[Decoder], object],
    expected: Expected,
    *,
    kernels: Kernels | None = None,
    machine: str = "",
    prepared: Callable[[Decoder], object] = lambda model: None,
) -> Case:
    """Make a case: `prepared` changes the model on both sides, `fault` on the subject only, whose machine has these `kernels`."""

    def program(side: Side) -> Program:
        model = Decoder()
        prepared(model)
        if side == "reference":
            return trained(model)
        fault(model)
        return trained(model, machine=Machine(kernels) if kernels else contextlib.nullcontext)

    return Case(name=name, source=source, what=what, program=program, expected=expected, machine=machine)


def _with_windows(*windows: int | None) -> Callable[[Decoder], None]:
    def change(model: Decoder) -> None:
        for layer, window in zip(model.layers, windows, strict=True):
            layer.attention.window = window

    return change


def _set(path: str, name: str, value: object) -> Callable[[Decoder], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def _weights_with_offset(model: Decoder) -> None:
    with torch.no_grad():
        model.layers[1].norm2.weight += 1.0


def _evaluated(side: Side) -> Program:
    """A training step, then a validation pass in eval mode."""
    model = Decoder()
    for layer in model.layers:
        layer.attention.dropout, layer.attention.is_dropout_stuck = 0.1, side == "subject"
    train = trained(model)
    batch = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def step(index: int) -> None:
        model.train()
        train.step(index)
        model.eval()
        with torch.no_grad():
            model(batch).logsumexp(-1).mean()

    return Program(step=step, model=model, machine=machine_of(side, split_k(2)))


def _continued(side: Side) -> Program:
    """Two calls in each step, of which the second goes on where the first ended."""
    model = Decoder()
    model.is_offset_kept = side == "subject"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randint(0, VOCABULARY, (3, BATCH, 2 * LENGTH))

    def loss(index: int) -> Tensor:
        first, second = batches[index].split(LENGTH, dim=1)
        logits = torch.cat([model(first), model(second, is_continued=True)], dim=1)
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batches[index, :, 1:].reshape(-1))

    return minimised(model, optimizer, loss, steps=3)


class CachedRotary(Rotary):
    """Keeps its angles; on the subject under a key that forgets where the positions begin."""

    def __init__(self, is_offset_in_key: bool) -> None:
        super().__init__()
        self._kept: dict[object, tuple[Tensor, Tensor]] = {}
        self._is_offset_in_key = is_offset_in_key

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        key = (len(positions), int(positions[0])) if self._is_offset_in_key else len(positions)
        if key not in self._kept:
            angles = positions[..., None].float() * self.frequencies
            self._kept[key] = angles.cos(), angles.sin()
        cos, sin = self._kept[key]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _cached_angles(side: Side) -> Program:
    program = _continued("reference")
    model = program.model
    for layer in model.layers:
        layer.attention.rotary = CachedRotary(is_offset_in_key=side == "reference")
    return Program(step=program.step, model=model, steps=2, machine=machine_of(side, rounded_operands("tf32")))


class LeftPadded(nn.Module):
    """A decoder over left-padded sequences; positions have to begin at the first real token."""

    def __init__(self, is_counting_padding: bool) -> None:
        super().__init__()
        self.positions, self.tokens = nn.Embedding(LENGTH, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self._is_counting_padding = is_counting_padding

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]).expand_as(tokens) if self._is_counting_padding else (mask.long().cumsum(-1) - 1).clamp(min=0)
        x = self.tokens(tokens) + self.positions(places)
        return self.head(self.encoder(x, src_key_padding_mask=~mask))


def _left_padded(side: Side) -> Program:
    model = LeftPadded(is_counting_padding=side == "subject")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH))
    mask = torch.arange(LENGTH) >= torch.tensor([0, 2, 5, 7])[:, None]

    def loss(index: int) -> Tensor:
        logits = model(tokens[index], mask)
        labels = tokens[index].roll(-1, 1).masked_fill(~mask, -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return minimised(model, optimizer, loss, machine=machine_of(side, other_order()))


class NarrowRotary(Rotary):
    """The angles of far positions, in the precision that a whole model was cast to."""

    def __init__(self, is_narrow: bool) -> None:
        super().__init__()
        self._dtype = torch.bfloat16 if is_narrow else torch.float32

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = (positions[..., None].to(self._dtype) * self.frequencies.to(self._dtype)).float()
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _narrow_angles(side: Side) -> Program:
    model = Decoder()
    for layer in model.layers:
        layer.attention.rotary = NarrowRotary(is_narrow=side == "subject")
    model.is_offset_kept, model.offset = True, 1000
    return trained(model)


_SDPA = "functional.scaled_dot_product_attention"
_IN_ATTENTION_1 = Expected(module="layers.1.attention*", phase="forward", step=0)

CASES = [
    decoder_case(
        "rotary_layout",
        "https://github.com/sgl-project/sglang/issues/13495",
        "one layer pairs neighbouring elements for the rotary embedding where the model pairs halves",
        _set("layers.1.attention.rotary", "is_interleaved", True),
        Expected(module="layers.1.attention.rotary", phase="forward", step=0),
        kernels=rounded_operands("float16"),
        machine="operands in float16",
    ),
    decoder_case(
        "norm_offset_in_code",
        "https://github.com/Blaizzy/mlx-vlm/issues/2041",
        "one is added to the weights of one norm a second time",
        _set("layers.1.norm2", "is_offset_twice", True),
        Expected(module="layers.1.norm2", phase="forward", step=0),
        kernels=split_k(4),
        machine="split-K products",
    ),
    decoder_case(
        "norm_offset_in_weights",
        "https://github.com/Blaizzy/mlx-vlm/issues/2041",
        "the converter added one to the weights of a norm that adds one itself",
        _weights_with_offset,
        Expected(kind="parameters", slot="parameter.layers.1.norm2.weight", step=0),
        kernels=rounded_operands("bfloat16"),
        machine="operands in bfloat16",
    ),
    decoder_case(
        "sliding_window_layers",
        "https://github.com/vllm-project/vllm/issues/17689",
        "the layers with and without a sliding window are counted from the wrong end",
        _with_windows(4, None, 4),
        Expected(module="layers.0.attention", phase="forward", step=0),
        prepared=_with_windows(None, 4, None),
    ),
    decoder_case(
        "sliding_window_one_layer",
        "https://github.com/vllm-project/vllm/issues/17689",
        "the last layer has no sliding window although the model gives it one",
        _with_windows(None, 4, None),
        Expected(module="layers.2.attention", phase="forward", step=0),
        prepared=_with_windows(None, 4, 4),
        kernels=accelerator("tf32"),
        machine="operands in tf32, other norms and functions",
    ),
    decoder_case(
        "rope_base",
        "https://github.com/lyogavin/airllm/pull/369",
        "the base of the rotary embedding in the configuration is ignored in one layer",
        lambda model: model.layers[1].attention.rotary.set_base(500000.0),
        Expected(kind="parameters", slot="buffer.layers.1.attention.rotary.frequencies", step=0),
    ),
    decoder_case(
        "rms_norm_eps",
        "https://github.com/huggingface/transformers/issues/38025",
        "eps is not passed on and one norm uses the default",
        _set("layers.0.norm1", "eps", 1e-6),
        Expected(call="functional.rms_norm", module="layers.0.norm1", phase="forward", step=0),
        kernels=rounded_operands("float16"),
        machine="operands in float16",
    ),
    decoder_case(
        "attention_scale",
        "https://github.com/mlc-ai/mlc-llm/pull/3426",
        "attention scores are not divided by the root of the head size in one layer",
        _set("layers.1.attention", "scale", 1.0),
        Expected(call=_SDPA, module="layers.1.attention", phase="forward", step=0),
        kernels=accelerator("float16"),
        machine="operands in float16, other norms and functions",
    ),
    decoder_case(
        "kv_heads_tiled",
        "https://github.com/apple/axlearn/pull/842",
        "keys and values of grouped attention are tiled instead of repeated one by one",
        _set("layers.1.attention", "is_tiled", True),
        Expected(module="layers.1.attention", phase="forward", step=0),
        kernels=other_order(),
        machine="products and sums in another order",
    ),
    decoder_case(
        "mask_inverted",
        "https://github.com/rasbt/LLMs-from-scratch/issues/1061",
        "a boolean mask that says what to hide goes to a function that wants what to see",
        _set("layers.1.attention", "is_mask_inverted", True),
        _IN_ATTENTION_1,
        kernels=rounded_operands("tf32"),
        machine="operands in tf32",
    ),
    decoder_case(
        "key_and_value_swapped",
        "https://github.com/awslabs/slapo/pull/46",
        "the parts of a fused projection are taken in the wrong order in one layer",
        _set("layers.1.attention", "is_swapped", True),
        _IN_ATTENTION_1,
    ),
    decoder_case(
        "gelu_exact",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4661",
        "one layer computes the exact gelu where the weights were trained with the tanh form",
        _set("layers.2.mlp", "approximate", "none"),
        Expected(call="functional.gelu", module="layers.2.mlp", phase="forward", step=0),
        kernels=rounded_operands("tf32"),
        machine="operands in tf32",
    ),
    Case(
        name="dropout_in_eval",
        source="https://github.com/pytorch/pytorch/issues/124464",
        what="attention drops out in eval mode, since the function does not know of it",
        program=_evaluated,
        expected=Expected(call=_SDPA, module="layers.0.attention", phase="forward", step=0),
        machine="split-K products",
    ),
    Case(
        name="offset_carried_over",
        source="https://github.com/huggingface/transformers/pull/36013",
        what="positions of a new sequence go on where the last sequence ended",
        program=_continued,
        expected=Expected(call="torch.arange", phase="forward", step=1),
    ),
    Case(
        name="rotary_cache_key",
        source="https://github.com/lucidrains/rotary-embedding-torch/issues/11",
        what="cached angles are found again for other positions of the same number",
        program=_cached_angles,
        expected=Expected(module="layers.0.attention.rotary", phase="forward", step=0),
        machine="operands in tf32",
    ),
    Case(
        name="left_padding_positions",
        source="https://github.com/unslothai/unsloth/pull/3795",
        what="positions of left-padded sequences count the padding",
        program=_left_padded,
        expected=Expected(
            any_of=(Expected(kind="calls", phase="forward", step=0, module=""), Expected(module="positions", phase="forward", step=0))
        ),
        machine="products and sums in another order",
    ),
    Case(
        name="rotary_angles_in_bfloat16",
        source="https://github.com/huggingface/transformers/pull/29285",
        what="the angles of positions beyond 1000 are computed in bfloat16 and are off by whole radians",
        program=_narrow_angles,
        expected=Expected(module="layers.0.attention.rotary", phase="forward", step=0),
    ),
]
