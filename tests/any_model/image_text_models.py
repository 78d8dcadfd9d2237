"""Small transformers models of images and text, their batches, and training of them with and without the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import megatron_core
from tests.any_model.models import CLIP, COMMON, DECAY, LR, Result, throughout_float64, weights_of

STEPS, MICRO_BATCHES = 3, 4
IMAGE, WORDS = 40, 48
"""The id that stands for a patch of an image, and the size of the vocabulary."""
TEXT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
VISION: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4, "num_channels": 3}
MROPE = {"rope_type": "default", "rope_theta": 1e4}

Batch = dict[str, Tensor]


def _qwen3_vl() -> nn.Module:
    vision = {"depth": 2, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "patch_size": 2}
    vision |= {"out_hidden_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    text = {**TEXT, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True}}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen25_vl() -> nn.Module:
    vision = {"depth": 2, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "patch_size": 2}
    vision |= {"out_hidden_size": 16, "window_size": 8, "fullatt_block_indexes": [1]}
    text = {**TEXT, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 0]}}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _gemma3() -> nn.Module:
    layers = ["sliding_attention", "full_attention"] * 2
    text = {**TEXT, "layer_types": layers, "sliding_window": 5, "query_pre_attn_scalar": 7}
    vision = {**VISION, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_id=IMAGE
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _llama4() -> nn.Module:
    text = {**TEXT, "intermediate_size_mlp": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    text |= {"interleave_moe_layer_step": 2, "attention_chunk_size": 8, "no_rope_layers": [1, 1, 1, 0]}
    vision = {**VISION, "intermediate_size": 32, "vision_output_dim": 16, "projector_input_dim": 16}
    vision |= {"projector_output_dim": 16, "pixel_shuffle_ratio": 0.5}
    config = transformers.Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE)
    model = transformers.Llama4ForConditionalGeneration(config)
    # transformers 5.24 reads an attribute that the outputs of its own language model do not have.
    model.language_model.register_forward_hook(_without_image_outputs)
    return model


def _without_image_outputs(_: nn.Module, args: Any, output: Any) -> None:
    output.image_outputs = None


def _of_siglip(kind: str, **settings: Any) -> nn.Module:
    config_class = getattr(transformers, f"{kind}Config")
    text = {**TEXT, "model_type": settings.pop("text", "llama")}
    vision = {**VISION, **settings.pop("vision", {"model_type": "siglip_vision_model", "vision_use_head": False})}
    config = config_class(text_config=text, vision_config=vision, **settings)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _mllama() -> nn.Module:
    text = {**TEXT, "cross_attention_layers": [1, 3], "rope_parameters": MROPE}
    vision = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 8, "patch_size": 4, "max_num_tiles": 2, "vision_output_dim": 16}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]]}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return transformers.MllamaForConditionalGeneration(config)


def _beit(**settings: Any) -> nn.Module:
    return transformers.BeitForImageClassification(
        transformers.BeitConfig(**VISION, num_labels=3, drop_path_rate=0.0, **settings)
    )


def _labelled(number: int) -> Batch:
    """One image of a class."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randn(1, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.tensor([number % 3])}


def _tokens(number: int, images: list[int]) -> Batch:
    """One sequence of text with runs of patches of images, which have no label."""
    generator = torch.Generator().manual_seed(number)
    parts = [torch.randint(2, 39, (3,), generator=generator)]
    for patches in images:
        parts += [torch.full((patches,), IMAGE), torch.randint(2, 39, (4,), generator=generator)]
    parts.append(torch.randint(2, 39, (24 - sum(map(len, parts)),), generator=generator))
    tokens = torch.cat(parts)[None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == IMAGE, -100)}


def _packed_grids(number: int) -> Batch:
    """No image, one, or two of different sizes, as packed patches with their grids."""
    grids = [[], [(1, 4, 2), (1, 2, 6)], [(1, 4, 4)], []][number % 4]
    batch = _tokens(number, [height * width // 4 for _, height, width in grids])
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    if grids:
        patches = sum(height * width for _, height, width in grids)
        generator = torch.Generator().manual_seed(number)
        # 2 frames of 2 x 2 pixels with 3 channels.
        batch["pixel_values"] = torch.randn(patches, 24, generator=generator, dtype=torch.float64)
        batch["image_grid_thw"] = torch.tensor(grids)
    return batch


def _squares(number: int, *, tokens: int = 1, kind: str = "") -> Batch:
    """No image, one, or two of one size."""
    count = [0, 2, 1, 0][number % 4]
    batch = _tokens(number, [tokens] * count)
    if kind == "token types":
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    if count:
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
        batch["pixel_values"] = pixels[None] if kind == "nested" else pixels
        if kind == "sizes":
            batch["image_sizes"] = torch.tensor([[8, 8]] * count)
    return batch


def _tiles(number: int) -> Batch:
    """No image, or one of two tiles."""
    batch = _tokens(number, [1] if number % 4 in (1, 2) else [])
    if number % 4 in (1, 2):
        generator = torch.Generator().manual_seed(number)
        length = batch["input_ids"].shape[1]
        batch["pixel_values"] = torch.randn(1, 1, 2, 3, 8, 8, generator=generator, dtype=torch.float64)
        batch["aspect_ratio_ids"] = torch.tensor([[2]])
        batch["aspect_ratio_mask"] = torch.ones(1, 1, 2, dtype=torch.int64)
        mask = torch.ones(1, length, 1, 2, dtype=torch.int64)
        batch["cross_attention_mask"] = mask
    return batch


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "qwen3-vl": (_qwen3_vl, _packed_grids),
    "qwen2.5-vl": (_qwen25_vl, _packed_grids),
    "gemma3": (_gemma3, partial(_squares, kind="token types")),
    "llama4": (_llama4, _squares),
    "llava": (
        partial(_of_siglip, "Llava", image_token_index=IMAGE, vision_feature_select_strategy="full"),
        partial(_squares, tokens=4),
    ),
    "paligemma": (
        partial(_of_siglip, "PaliGemma", text="gemma", image_token_id=IMAGE, projection_dim=16),
        partial(_squares, tokens=4, kind="token types"),
    ),
    "idefics3": (
        partial(_of_siglip, "Idefics3", image_token_id=IMAGE, scale_factor=2, vision={}),
        partial(_squares, kind="nested"),
    ),
    "smolvlm": (
        partial(_of_siglip, "SmolVLM", image_token_id=IMAGE, scale_factor=2, vision={}),
        partial(_squares, kind="nested"),
    ),
    "mllama": (_mllama, _tiles),
}

CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "beit": (partial(_beit, use_relative_position_bias=True), _labelled),
    "beit-shared": (partial(_beit, use_shared_relative_position_bias=True), _labelled),
}
"""Models without text; their attention receives a mask with an entry for each head."""


def model_of(name: str, *, frozen: bool = False) -> nn.Module:
    """A model with the same weights in each call; ``frozen``: its tower is not trained."""
    torch.manual_seed(0)
    model = (MODELS | CLASSIFIERS)[name][0]()
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():  # biases, gates and norms that are not all 0 or 1
        for parameter in model.parameters():
            parameter.copy_(parameter.nan_to_num() + 0.05 * torch.randn(parameter.shape))
    if frozen:
        for parameter in tower_of(model).parameters():
            parameter.requires_grad_(False)
    return model


def tower_of(model: nn.Module) -> nn.Module:
    """The module that computes features of images."""
    names = ("visual", "vision_tower", "vision_model")
    return next(m for n, m in model.named_modules() if n.rpartition(".")[2] in names)


def batches_of(name: str) -> list[Batch]:
    """The micro-batches of all steps."""
    return [(MODELS | CLASSIFIERS)[name][1](number) for number in range(STEPS * MICRO_BATCHES)]


def train_with_torch(name: str, *, frozen: bool = False) -> Result:
    """Losses, norms, weights and the gradients of the last step, in one process with torch's AdamW."""
    model = model_of(name, frozen=frozen).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, eps=1e-4)
    losses, norms, gradients = [], [], {}
    batches = batches_of(name)
    for step in range(STEPS):
        total = 0.0
        for batch in batches[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]:
            with throughout_float64(model):
                loss = model(**batch).loss / MICRO_BATCHES
                loss.backward()
            total += loss.item()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(model.state_dict(), model)
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def train_with_engine(name: str, settings: dict[str, Any], *, frozen: bool = False, **options: Any) -> Result:
    """The same through ``initialize``; one rank of a job. Micro-batches of data-parallel ranks alternate."""
    model = model_of(name, frozen=frozen)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    settings = {**COMMON, "global_batch_size": MICRO_BATCHES, **settings}
    engine = megatron_core.initialize(model, settings, **options).engine
    gradients: dict[str, np.ndarray] = {}

    def read_gradients() -> None:
        for parameter, label in labels.items():
            if parameter.requires_grad:
                gradients[label] = engine.whole.gradient(parameter).numpy().copy()

    engine.before_update = read_gradients
    is_cut = engine.groups.size("pp") > 1
    labels = {p: place.name for p, place in engine.staged.places.items()} if is_cut else {}
    labels = labels or {parameter: label for label, parameter in engine.module.named_parameters()}
    losses, norms = [], []
    batches = iter(batches_of(name)[engine.groups.index("dp") :: engine.groups.size("dp")])
    for _ in range(STEPS):
        with throughout_float64(engine):
            report = engine.train_batch(batches)
        losses.append(report.loss)
        norms.append(report.grad_norm)
    weights = {label: tensor.numpy() for label, tensor in engine.full_state_dict().items() if label in names}
    result = {"losses": losses, "norms": norms, "weights": weights}
    # With tp and ep they are parts of the model's gradients.
    if engine.groups.size("tp") == engine.groups.size("ep") == 1:
        result["gradients"] = gradients
    return result
