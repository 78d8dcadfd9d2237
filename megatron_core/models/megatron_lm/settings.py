"""From the arguments that Megatron-LM stores with its weights to settings of ours."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_core.config import ModelConfig
from megatron_core.config.file import convert, field_types
from megatron_core.config.model import EXECUTION_SETTINGS
from megatron_core.config.tables import read_table
from megatron_core.errors import CheckpointError

_TABLES = read_table(__file__)
NEUTRAL: dict[str, list[Any]] = _TABLES["neutral"]
"""Arguments that change what the model computes in a way that is not supported -> the values that do not."""
RENAMED: dict[str, str] = _TABLES["renamed"]
"""Their name -> our setting of the same meaning."""
DATA = ("seq_length", "vocab_size", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def settings_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings of the model, its vocabulary and, where its files are there, its tokenizer.

    Errors: ``CheckpointError`` for what has no counterpart.
    """
    for name, values in NEUTRAL.items():
        if arguments.get(name, values[0]) not in values:
            raise CheckpointError(_unsupported(name, arguments[name]))
    given = {RENAMED.get(name, name): value for name, value in arguments.items() if value is not None}
    given |= {"disable_bias_linear": not arguments.get("add_bias_linear", True)}
    given |= _positions(arguments)
    plain = not any(arguments.get(name) for name in ("swiglu", "squared_relu"))
    if plain and arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear", True):
        given["openai_gelu"] = True  # the fused kernel is the approximation
    if not arguments.get("num_experts"):
        given = {name: value for name, value in given.items() if not name.startswith("moe_")}
    if not arguments.get("group_query_attention"):
        given.pop("num_query_groups", None)  # Megatron-LM fills it in
    kinds = field_types()
    wanted = [f.name for f in fields(ModelConfig) if f.name not in EXECUTION_SETTINGS] + [*DATA[:2]]
    found = {}
    for name in wanted:
        if name in given:
            value = given[name]
            try:
                found[name] = convert(list(value) if isinstance(value, tuple) else value, kinds[name])
            except (TypeError, ValueError, OverflowError):
                raise CheckpointError(_unsupported(name, value)) from None
    return found | _tokenizer(given)


def _unsupported(name: str, value: Any) -> str:
    return f"the checkpoint was trained with {name}={value!r}, which is not supported"


def _positions(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions: a type of its own there, also for YaRN."""
    kind = arguments.get("position_embedding_type", "learned_absolute")
    latent = bool(arguments.get("multi_latent_attention"))
    if latent or arguments.get("use_rotary_position_embeddings"):
        kind = "rope" if kind != "yarn" else kind
    yarn = kind == "yarn" or (latent and arguments.get("rope_type") in (None, "yarn"))
    if not yarn:
        return {"position_embedding_type": kind}
    original = arguments.get("yarn_original_max_position_embeddings") or 4096
    scaled = {"use_rope_scaling": True, "rope_scaling_type": "yarn", "original_max_position_embeddings": original}
    return {"position_embedding_type": "rope", **scaled}


def _tokenizer(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer if it is one of ours and its files are still where they were."""
    from megatron_core.tokenizers import TOKENIZER_TYPES

    files = {name: str(given[name]) for name in DATA[3:] if given.get(name)}
    kind = given.get("tokenizer_type")
    if kind not in TOKENIZER_TYPES or not files or not all(Path(path).exists() for path in files.values()):
        return {}
    return {"tokenizer_type": kind, **files}
