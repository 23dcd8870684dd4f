# SPDX-License-Identifier: Apache-2.0
"""Train tiny models of 36 architectures of `transformers`, with random weights, for two steps of AdamW each.

>>> from bench.architectures import ARCHITECTURES, train
>>> result = train("llama", autocast="bfloat16")
>>> result["loss 0"]

Nothing is downloaded. Weights and batches are drawn on the CPU from one seed, so that every device begins with the same; what a model
draws while it trains (dropout) is drawn where it runs. `train(..., record=...)` takes what stands around the steps: a capture, or nothing.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ARCHITECTURES", "Architecture", "Nothing", "train"]

Batch = dict[str, Any]

_VOCABULARY = 97
_ROWS, _LENGTH, _TARGETS = 2, 12, 7
_FIRST_WORD = 3  # word 0 pads, 1 begins a text, 2 ends it


def _words(length: int = _LENGTH) -> torch.Tensor:
    return torch.randint(_FIRST_WORD, _VOCABULARY, (_ROWS, length))


def _padded() -> Batch:
    """Draw words with a mask; the first row ends early."""
    words = _words()
    mask = torch.ones_like(words)
    mask[0, -3:] = 0
    return {"input_ids": words, "attention_mask": mask}


def _next_word() -> Batch:
    batch = _padded()
    return {**batch, "labels": batch["input_ids"].clone(), "use_cache": False}


def _hidden_words() -> Batch:
    batch = _padded()
    labels = batch["input_ids"].clone()
    labels[:, ::2] = -100
    return {**batch, "labels": labels}


def _other_words() -> Batch:
    return {**_padded(), "labels": _words(_TARGETS)}


def _pictures() -> Batch:
    return {"pixel_values": torch.randn(_ROWS, 3, 32, 32), "labels": torch.randint(0, 5, (_ROWS,))}


def _captions() -> Batch:
    words = _words()
    pictures = torch.randn(_ROWS, 3, 32, 32)
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": pictures, "return_loss": True}


def _spectra() -> Batch:
    return {"input_features": torch.randn(_ROWS, 16, 40), "labels": _words(_TARGETS)}


def _sounds() -> Batch:
    return {"input_values": torch.randn(_ROWS, 400), "labels": torch.randint(1, 20, (_ROWS, 6))}


@dataclass(frozen=True)
class Architecture:
    """A configuration and a model of `transformers`, by name, and the batch it is trained on."""

    name: str
    model: str
    sizes: dict[str, Any]
    batch: Callable[[], Batch]
    config: str = ""

    def build(self, attention: str | None = None) -> Any:
        """Build the model with random weights; `attention` is one of transformers' implementations (eager, sdpa ...)."""
        import transformers

        configuration = getattr(transformers, self.config or f"{self.name}Config")(**self.sizes)
        chosen = {} if attention is None else {"attn_implementation": attention}
        return getattr(transformers, f"{self.name}{self.model}")._from_config(configuration, **chosen)


_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WORDS = {"vocab_size": _VOCABULARY, **_ENDS}
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_SMALL, **_WORDS, "max_position_embeddings": 64}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_HEADS_OF_8 = {**_GROUPED, "head_dim": 8}
_ENCODER = {**_SMALL, "vocab_size": _VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 64}
_STATE_SPACE = {**_WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": 4}
_TWO_STACKS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_SEQUENCES = {**_WORDS, **_TWO_STACKS, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
_LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_PATCHES = {"image_size": 32, "patch_size": 8}
_STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "patch_size": 2}
_FILTERS = {"conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (4, 2), "num_feat_extract_layers": 2}
_POSITIONS = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
_LISTENING = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16, "decoder_start_token_id": 1}


def _speaks(name: str, sizes: dict[str, Any], *, model: str = "ForCausalLM", config: str = "", **more: Any) -> Architecture:
    return Architecture(name, model, {**sizes, **more}, _next_word, config)


def _reads(name: str, sizes: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(name, "ForMaskedLM", {**sizes, **more}, _hidden_words)


def _sees(name: str, sizes: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(name, "ForImageClassification", {**sizes, **more, "num_labels": 5}, _pictures)


def _translates(name: str, sizes: dict[str, Any], batch: Callable[[], Batch], **more: Any) -> Architecture:
    return Architecture(name, "ForConditionalGeneration", {**sizes, **more}, batch)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _speaks("Llama", _GROUPED),
    "qwen2": _speaks("Qwen2", _GROUPED),
    "qwen3": _speaks("Qwen3", _HEADS_OF_8),
    "qwen3_moe": _speaks("Qwen3Moe", _HEADS_OF_8, **_EXPERTS, output_router_logits=True),
    "mixtral": _speaks("Mixtral", _GROUPED, **_LOCAL_EXPERTS),
    "deepseek_v3": _speaks("DeepseekV3", _TEXT, num_key_value_heads=4, **_LATENT, **_ROUTED, first_k_dense_replace=1),
    "gemma2": _speaks("Gemma2", _HEADS_OF_8, **_WINDOW, query_pre_attn_scalar=8),
    "gemma3": _speaks("Gemma3", _HEADS_OF_8, config="Gemma3TextConfig", **_WINDOW, query_pre_attn_scalar=8),
    "phi3": _speaks("Phi3", _GROUPED),
    "gpt2": _speaks("GPT2", _WORDS, model="LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": _speaks("GPTNeoX", _TEXT),
    "opt": _speaks("OPT", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": _speaks("Bloom", _WORDS, hidden_size=32, n_layer=2, n_head=4),
    "falcon": _speaks("Falcon", _TEXT),
    "olmo2": _speaks("Olmo2", _GROUPED),
    "cohere": _speaks("Cohere", _GROUPED),
    "granite_moe": _speaks("GraniteMoe", _GROUPED, **_LOCAL_EXPERTS),
    "gpt_oss": _speaks("GptOss", _HEADS_OF_8, **_LOCAL_EXPERTS, **_WINDOW),
    "mamba": _speaks("Mamba", _STATE_SPACE),
    "mamba2": _speaks("Mamba2", _STATE_SPACE, num_heads=8, head_dim=8, expand=2, n_groups=2, chunk_size=4),
    "rwkv": _speaks("Rwkv", {**_WORDS, "hidden_size": 32, "num_hidden_layers": 2}, context_length=32, attention_hidden_size=32),
    "recurrent_gemma": _speaks("RecurrentGemma", {**_HEADS_OF_8, "num_hidden_layers": 3}, lru_width=32, attention_window_size=8),
    "qwen3_next": _speaks(
        "Qwen3Next", {**_HEADS_OF_8, "num_hidden_layers": 4}, **_EXPERTS, shared_expert_intermediate_size=32, **_LINEAR_HEADS
    ),
    "bert": _reads("Bert", _ENCODER),
    "roberta": _reads("Roberta", _ENCODER),
    "deberta_v2": _reads(
        *("DebertaV2", _ENCODER),
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    "modernbert": _reads("ModernBert", _TEXT, local_attention=8, cls_token_id=1, sep_token_id=2),
    "albert": _reads("Albert", _ENCODER, embedding_size=16),
    "t5": _translates("T5", _WORDS, _other_words, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": _translates("Bart", _SEQUENCES, _other_words, max_position_embeddings=64),
    "whisper": _translates("Whisper", _SEQUENCES, _spectra, **_LISTENING, suppress_tokens=None, begin_suppress_tokens=None),
    "vit": _sees("ViT", _SMALL, **_PATCHES),
    "swin": _sees("Swin", {"image_size": 32, "patch_size": 2}, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "convnext": _sees("ConvNext", _STAGES),
    "clip": Architecture(
        "CLIP",
        "Model",
        {
            "text_config": {**_SMALL, **_WORDS, "max_position_embeddings": 16},
            "vision_config": {**_SMALL, **_PATCHES},
            "projection_dim": 16,
        },
        _captions,
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2",
        "ForCTC",
        {**_SMALL, **_FILTERS, **_POSITIONS, "vocab_size": 20, "pad_token_id": 0, "mask_time_prob": 0.0, "ctc_loss_reduction": "mean"},
        _sounds,
    ),
}


class Nothing:
    """The context around the steps of a run without a capture."""

    def __init__(self, model: Any = None, optimizer: Any = None) -> None: ...

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def step(self) -> None: ...


def train(
    name: str,
    record: Callable[[Any, Any], Any] = Nothing,
    *,
    autocast: str | None = None,
    device: str = "cpu",
    attention: str | None = None,
    seed: int = 0,
    steps: int = 2,
) -> dict[str, Any]:
    """Train a tiny model of an architecture inside `record(model, optimizer)`.

    Return losses, gradients, parameters, buffers and generators. `autocast` is the dtype of torch.autocast, "bfloat16" for example; without
    one everything is float32.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    architecture = ARCHITECTURES[name]
    model = architecture.build(attention).to(device).train()
    batches = [_moved(architecture.batch(), device) for _ in range(steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with record(model, optimizer) as capture:
        for batch in batches:
            optimizer.zero_grad()
            with _cast(device, autocast):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
            capture.step()
    return _outcome(losses, model, device)


def _moved(batch: Batch, device: str) -> Batch:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _cast(device: str, dtype: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype=getattr(torch, dtype))


def _outcome(losses: list[torch.Tensor], model: Any, device: str) -> dict[str, Any]:
    result: dict[str, Any] = {f"loss {number}": loss for number, loss in enumerate(losses)}
    result |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
    result |= {f"parameter {name}": parameter.detach() for name, parameter in model.named_parameters()}
    result |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    result |= {"generator": torch.get_rng_state(), "generator of Python": hash(random.getstate())}
    return result | ({"generator of the device": torch.cuda.get_rng_state(device)} if torch.device(device).type == "cuda" else {})
