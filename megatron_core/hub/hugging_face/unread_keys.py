"""Keys of config.json that an architecture does not read, and that may still describe the model."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_core.config import ModelConfig
from megatron_core.config.setting import Resume, names_by_resume
from megatron_core.errors import quoted
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES, IGNORED_KEYS, Architecture
from megatron_core.hub.hugging_face.rules import Settings
from megatron_core.schema import OBJECT, KeyType

GENERATION = {
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("bad_words_ids", "begin_suppress_tokens", "cache_config", "cache_implementation", "compile_config"),
    *("constraints", "continuous_batching_config", "disable_compile", "diversity_penalty", "do_sample", "dola_layers"),
    *("early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff"),
    *("exponential_decay_length_penalty", "force_words_ids", "guidance_scale", "is_assistant", "length_penalty"),
    *("low_memory", "max_cache_len", "max_length", "max_matching_ngram_size", "max_new_tokens", "max_time", "min_p"),
    *("min_length", "min_new_tokens", "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("num_beam_groups", "num_beams", "num_return_sequences", "output_logits", "output_scores", "penalty_alpha"),
    *("prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits", "temperature"),
    *("repetition_penalty", "return_dict_in_generate", "sequence_bias", "speculation_type", "stop_strings", "top_h"),
    *("suppress_tokens", "target_lookbehind", "token_healing", "top_k", "top_p", "typical_p", "use_mtp"),
    *("watermarking_config", "_from_model_config"),
}
"""Settings of generation, which earlier releases of `transformers` stored in config.json."""
OTHER = {
    # Of `transformers`: classes, tasks, files, and ways of computing.
    *(
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "_commit_hash",
        "custom_pipelines",
    ),
    *("cross_attention_hidden_size", "finetuning_task", "is_decoder", "pruned_heads", "tie_encoder_decoder", "prefix"),
    "custom_pipelines",
    *("task_specific_params", "tf_legacy_loss", "tokenizer_class", "torchscript", "transformers.js_config"),
    *("use_bfloat16", "classifier_dropout", "classifier_bias", "num_labels", "keys_to_ignore_at_inference"),
    *("gradient_checkpointing", "use_flash_attn", "use_flash_attention", "flash_attn", "_flash_attn_2_enabled"),
    *("unsloth_fixed", "unsloth_version", "is_llama_config", "attention_softmax_in_fp32", "logits_to_keep"),
    *("scale_attention_softmax_in_fp32", "reorder_and_upcast_attn", "num_logits_to_keep", "use_mamba_kernels"),
    # Of training and of the first weights.
    *("ep_size", "seq_aux", "aux_loss_alpha", "router_z_loss_coef", "z_loss_coefficient", "z_loss_weight"),
    *("init_method", "init_std", "initializer_factor", "initializer_cutoff_factor", "embedding_initializer_range"),
    *("rescale_prenorm_residual", "output_router_logits", "embd_pdrop", "resid_pdrop", "residual_dropout"),
    *("embedding_dropout", "ffn_dropout", "dropout", "hidden_dropout", "attention_dropout", "router_jitter_noise"),
    # Of tokens and lengths.
    *("model_max_length", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx", "initial_context_length"),
    *("org_vocab_size", "qk_head_dim", "pad_id", "bos_id", "eos_id", "im_start_id", "im_end_id"),
    *("mask_init_id", "sep_id"),
}
"""Further keys on which the logits of a text do not depend, or which repeat others."""
SIZES = {*names_by_resume(ModelConfig, Resume.SHAPE), "num_query_groups"}
"""Settings that shapes of stored tensors determine: a key with another value cannot go unnoticed."""
PATTERNS = re.compile(r"summary_.*|.*_token_ids?|.*_token_index|.*_init_scale|.*use_xavier_init|mup_base.*|_.*pattern")
OBJECTS = ("rope_parameters", "rope_scaling", "attn_config")
"""Objects whose inner keys are checked, too."""


def notes_on_unread_keys(architecture: Architecture, hf_config: Settings) -> Iterator[str]:
    """Notes about keys that say something about the model and have no effect on it.

    A key without effect is off (null, false, 0, empty) or 1, or known not to change logits.
    """
    unread = dict(_unread(architecture, hf_config, architecture.known_keys()))
    elsewhere = {key: _readers(key) for key in unread}
    name = architecture.model_type
    for key, readers in elsewhere.items():
        if readers:
            yield (
                f"config.json says {key}={quoted(unread[key])}, which has no effect on {name} models, here as "
                f"in transformers; it changes the results of {', '.join(readers[:3])}: compare the model with its "
                "authors' code, or remove the key"
            )
    unknown = [f"{key}={quoted(value)}" for key, value in unread.items() if not elsewhere[key]]
    if unknown:
        yield (
            f"config.json has keys without effect on {name} models: {', '.join(unknown)}; if the authors' code reads "
            "one of them, its results differ from those here and of transformers"
        )


def _unread(architecture: Architecture, content: Mapping[str, Any], known: set[str], inside: str = "") -> Settings:
    """Keys, with the path of the objects around them, and values that the architecture does not read."""
    unread: Settings = {}
    for key, value in content.items():
        if isinstance(value, dict) and (key in OBJECTS or inside) and key in known - IGNORED_KEYS:
            unread |= _unread(architecture, value, known, f"{inside}{key}.")
        elif not (key in known or _is_off(value) or is_harmless(key) or _is_size(key)):
            unread[f"{inside}{key}"] = value
    return unread


def _is_off(value: Any) -> bool:
    """Whether a value says that a feature is absent, or is a neutral factor."""
    return value in (None, False, "", [], {}) or (value in (0, 1) and not isinstance(value, bool))


def is_harmless(key: str) -> bool:
    """Whether the logits of no model depend on a key."""
    return key in GENERATION or key in OTHER or PATTERNS.fullmatch(key) is not None


def _is_size(key: str) -> bool:
    return any(architecture.keys.get(key) in SIZES for architecture in ARCHITECTURES.values())


def _readers(key: str) -> list[str]:
    """Architectures whose results depend on a key; not those that have one value of it."""
    key = key.rpartition(".")[2]
    return [architecture.model_type for architecture in ARCHITECTURES.values() if key in _meaning(architecture)]


def _meaning(architecture: Architecture) -> dict[str, KeyType | str]:
    rules: dict[str, KeyType | str] = {
        key: key_type for rule in architecture.rules for key, key_type in rule.types.items()
    }
    return {key: key_type for key, key_type in rules.items() if key_type is not OBJECT} | dict(architecture.keys)
