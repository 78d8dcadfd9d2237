"""The text model in a multimodal folder, which also holds a vision tower or another encoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_core.config.token_ids import KEYS
from megatron_core.errors import CheckpointError
from megatron_core.hub.hugging_face.rules import Settings

PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
"""Prefix of stored names -> prefix of the text model's own names: of files of the hub, of a model without output layer,
and of releases from 4.52 on."""
FLAT_PREFIXES = (("model.", "model."), ("lm_head.", "lm_head."))
"""The same in files without ``language_model``, in which other parts have other prefixes: Qwen2-VL, Qwen2.5-VL."""
SHARED_KEYS = ("quantization_config", "torch_dtype", "dtype")
"""Keys outside ``text_config`` that also concern the text model."""
TEXT_TYPES: dict[str, tuple[str, Settings]] = {}
"""``model_type`` of a text part with the architecture of a supported model -> its ``model_type``, other defaults."""


def register_text_part(model_type: str, *, architecture: str, defaults: Settings) -> None:
    """Make ``model_type`` known as a text part of ``architecture`` with other ``defaults`` of keys."""
    TEXT_TYPES[model_type] = architecture, defaults


def is_multimodal(hf_config: Settings) -> bool:
    """Whether a config.json describes a text model and other parts."""
    return any(isinstance(hf_config.get(key), dict) for key in ("text_config", "vision_config"))


def text_settings(hf_config: Settings, names: Iterable[str]) -> Settings:
    """The config.json of the text model in a multimodal one.

    ``names`` are the stored names of tensors. Files of the hub often say nothing about tied embeddings: then they are
    tied if no output layer is stored.
    Errors: ``CheckpointError`` for a text part without ``model_type``.
    """
    inner = hf_config.get("text_config")
    if isinstance(inner, dict):
        shared: Settings = {key: hf_config[key] for key in SHARED_KEYS if hf_config.get(key)}
        token_ids = {key: hf_config[key] for key in KEYS if key in hf_config}
        found: Settings = shared | token_ids | inner
    else:  # earlier files of Qwen2-VL and Qwen2.5-VL
        found = {key: value for key, value in hf_config.items() if not key.startswith(("vision_", "image_", "video_"))}
    if not found.get("model_type"):
        raise CheckpointError(
            "config.json: text_config has no model_type, so the architecture of the text model is unknown; add it"
        )
    model_type, defaults = TEXT_TYPES.get(found["model_type"], (found["model_type"], {}))
    stated = [each["tie_word_embeddings"] for each in (hf_config, found) if "tie_word_embeddings" in each]
    found |= {
        "model_type": model_type,
        "tie_word_embeddings": any(stated) if stated else "lm_head.weight" not in text_names(names),
    }
    positions: Settings = {key: _positions(found[key]) for key in ("rope_scaling", "rope_parameters") if key in found}
    return {**defaults, **found, **positions}


def _positions(rope: Any) -> Any:
    """Positions in time, height and width, which are equal for text, as plain ones."""
    if not isinstance(rope, dict):
        return rope
    plain = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Names of the text model's tensors -> their stored names in a multimodal folder."""
    stored = list(names)
    nested = any(name.startswith(("language_model.", "model.language_model.")) for name in stored)
    found: dict[str, str] = {}
    for name in stored:
        for prefix, own in PREFIXES if nested else FLAT_PREFIXES:
            if name.startswith(prefix):
                found[own + name.removeprefix(prefix)] = name
                break
    return found


def part_of(name: str) -> str:
    """The part of a multimodal model, such as ``vision_tower``, to which a stored tensor belongs."""
    first, _, rest = name.removeprefix("model.").partition(".")
    return first if rest else name
