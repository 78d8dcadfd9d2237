"""The text model in a multimodal folder, which also holds a vision tower or another encoder."""

from collections.abc import Iterable
from typing import Any

from megatron_core.errors import CheckpointError
from megatron_core.hub.hugging_face.rules import Settings
from megatron_core.hub.settings import TOKEN_ID_KEYS

PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("lm_head.", "lm_head."),
)
"""Prefix of stored names -> prefix of the text model's own names: of files of the hub, of a model without output layer,
of releases from 4.52 on, and of Idefics and SmolVLM."""
NESTED = ("language_model.", "model.language_model.", "model.text_model.")
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
        token_ids = {key: hf_config[key] for key in TOKEN_ID_KEYS if key in hf_config}
        text: Settings = shared | token_ids | inner
    else:  # earlier files of Qwen2-VL and Qwen2.5-VL
        text = {key: value for key, value in hf_config.items() if not key.startswith(("vision_", "image_", "video_"))}
    if not text.get("model_type"):
        raise CheckpointError(
            "config.json: text_config has no model_type, so the architecture of the text model is unknown; add it"
        )
    model_type, defaults = TEXT_TYPES.get(text["model_type"], (text["model_type"], {}))
    stated = [settings["tie_word_embeddings"] for settings in (hf_config, text) if "tie_word_embeddings" in settings]
    text |= {
        "model_type": model_type,
        "tie_word_embeddings": any(stated) if stated else "lm_head.weight" not in text_names(names),
    }
    positions: Settings = {key: _positions(text[key]) for key in ("rope_scaling", "rope_parameters") if key in text}
    return {**defaults, **text, **positions}


def _positions(rope: Any) -> Any:
    """Positions in time, height and width, which are equal for text, as plain ones."""
    if not isinstance(rope, dict):
        return rope
    plain = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Names of the text model's tensors -> their stored names in a multimodal folder."""
    stored = list(names)
    nested = any(name.startswith(NESTED) for name in stored)
    stored_names: dict[str, str] = {}
    for name in stored:
        for prefix, text_prefix in PREFIXES if nested else FLAT_PREFIXES:
            if name.startswith(prefix):
                stored_names[text_prefix + name.removeprefix(prefix)] = name
                break
    return stored_names


def part_of_multimodal(name: str) -> str:
    """The part of a multimodal model, such as ``vision_tower``, to which a stored tensor belongs."""
    first, _, inner = name.removeprefix("model.").partition(".")
    return first if inner else name
