"""Architectures of the Hugging Face hub: what their configuration and their tensors are called here."""

from collections.abc import Callable, Mapping
from functools import partial

from megatron_core.config import ModelConfig
from megatron_core.config.presets import LLAMA_LAYERS
from megatron_core.errors import CheckpointError
from megatron_core.models.hf.architecture import (
    Architecture,
    Settings,
    differences,
    fault,
    gelu_json,
    gelu_settings,
    rope_json,
    rope_of,
    rope_settings,
    window_json,
    window_settings,
)
from megatron_core.models.hf.deepseek import DEEPSEEK_V3
from megatron_core.models.hf.llama import LAYER, LLAMA_TENSORS, QK_NORM, QKV_BIAS, THEIRS, with_experts
from megatron_core.models.hf.tensors import TensorSource, stacked_qkv


def _with_window(theirs: Settings, partial: bool = False) -> Settings:
    return rope_settings(theirs, partial=partial) | window_settings(theirs)


def _with_window_json(config: ModelConfig) -> Settings:
    return rope_json(config) | window_json(config)


def _with_one_window(theirs: Settings, partial: bool = False) -> Settings:
    return _with_window({key: value for key, value in theirs.items() if key != "layer_types"}, partial)


def _qwen_settings(theirs: Settings) -> Settings:
    """Windows of the layers from ``max_window_layers`` on, if they are switched on."""
    if not theirs.get("use_sliding_window", False):
        if "sliding_attention" in theirs.get("layer_types", ()):
            fault("use_sliding_window", False, "but layer_types has sliding_attention")
        return rope_settings(theirs)
    first, layers = theirs["max_window_layers"], theirs["num_hidden_layers"]
    kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(layers)]
    return _with_window({"layer_types": kinds, **theirs})


def _qwen_moe_settings(theirs: Settings) -> Settings:
    """One window for all layers."""
    windows = _with_one_window(theirs) if theirs.get("use_sliding_window", False) else rope_settings(theirs)
    return windows | {"moe_router_pre_softmax": not theirs.get("norm_topk_prob", False)}


def _phi3_settings(theirs: Settings) -> Settings:
    kind = rope_of(theirs).get("rope_type", rope_of(theirs).get("type", "default"))
    if kind != "default":
        fault("rope_type", kind, "for phi3 only default is supported")
    return _with_one_window(theirs, partial=True)


def _qwen_json(config: ModelConfig) -> Settings:
    return _with_window_json(config) | {"use_sliding_window": config.window_size is not None}


_of_llama = partial(Architecture.of, layers=LLAMA_LAYERS)
LLAMA = _of_llama("llama", LLAMA_TENSORS, read=rope_settings, write=rope_json)
MISTRAL = _of_llama("mistral", LLAMA_TENSORS, read=_with_window, write=_with_window_json)
QWEN2 = _of_llama("qwen2", LLAMA_TENSORS | QKV_BIAS, read=_qwen_settings, write=_qwen_json)
QWEN3 = _of_llama("qwen3", LLAMA_TENSORS | QK_NORM, read=_qwen_settings, write=_qwen_json)
PHI3 = _of_llama(
    "phi3",
    LLAMA_TENSORS
    | {
        LAYER + "self_attention.linear_qkv.weight": TensorSource((THEIRS + "self_attn.qkv_proj.weight",), stacked_qkv),
        LAYER + "mlp.linear_fc1.weight": TensorSource((THEIRS + "mlp.gate_up_proj.weight",)),
    },
    read=_phi3_settings,
    write=_with_window_json,
)
_mixtral_experts = with_experts("block_sparse_moe.", ("w1", "w3", "w2"))
MIXTRAL = _of_llama("mixtral", _mixtral_experts, read=_with_one_window, write=_with_window_json)
QWEN3_MOE = _of_llama(
    "qwen3_moe",
    with_experts("mlp.", ("gate_proj", "up_proj", "down_proj")) | QK_NORM,
    read=_qwen_moe_settings,
    write=lambda config: _qwen_json(config) | {"norm_topk_prob": not config.moe_router_pre_softmax},
)


def _layer_pairs(
    pairs: Mapping[str, tuple[str, Callable | None]], prefix: str, transposed: bool
) -> dict[str, TensorSource]:
    """Weights and biases of a layer's parts: our part -> theirs and its blocks."""
    return {
        f"{LAYER}{ours}.{kind}": TensorSource(
            (f"{prefix}{theirs}.{kind}",), blocks, transposed and kind == "weight" and "norm" not in ours
        )
        for ours, (theirs, blocks) in pairs.items()
        for kind in ("weight", "bias")
    }


OLMO2 = _of_llama(
    "olmo2",
    {name: source for name, source in LLAMA_TENSORS.items() if "layernorm" not in name or "final" in name}
    | QK_NORM
    | {
        LAYER + "post_self_attn_layernorm.weight": TensorSource((THEIRS + "post_attention_layernorm.weight",)),
        LAYER + "post_mlp_layernorm.weight": TensorSource((THEIRS + "post_feedforward_layernorm.weight",)),
    },
    read=rope_settings,
    write=rope_json,
)


def _gemma_settings(theirs: Settings) -> Settings:
    """Rotary positions by type of layer, as transformers 5 (``rope_parameters``) or earlier releases write them.

    The files of the hub have no ``layer_types``: of ``sliding_window_pattern`` layers the last one has no window.
    """
    pattern = 2 if theirs["model_type"] == "gemma2" else theirs.get("sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(theirs["num_hidden_layers"])]
    theirs = {"layer_types": kinds, **theirs}
    scale = {"softmax_scale": theirs["query_pre_attn_scalar"] ** -0.5}
    if theirs["model_type"] == "gemma2":
        return _with_window(theirs) | scale
    by_kind: Settings = theirs.get("rope_parameters") or {}
    whole, local = (by_kind.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    whole = whole | (theirs.get("rope_scaling") or {})
    if local.get("rope_type", "default") != "default":
        fault("rope_type", local["rope_type"], "for sliding_attention only default is supported")
    base = rope_settings({"rope_parameters": local, "rope_theta": theirs["rope_local_base_freq"]})["rotary_base"]
    found = rope_settings({**theirs, "rope_parameters": whole, "rope_scaling": None})
    return {**found, "rotary_base_of_windows": base, **window_settings(theirs), **scale}


def _gemma_json(config: ModelConfig) -> Settings:
    local = {} if config.rotary_base_of_windows is None else {"rope_local_base_freq": config.rotary_base_of_windows}
    scale = config.softmax_scale or config.head_size**-0.5
    return {**_with_window_json(config), **local, "query_pre_attn_scalar": round(scale**-2)}


FOUR_NORMS = {
    f"{LAYER}{ours}.weight": TensorSource((f"{THEIRS}{theirs}.weight",))
    for ours, theirs in {
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }.items()
}
GEMMA2 = _of_llama("gemma2", LLAMA_TENSORS | FOUR_NORMS, read=_gemma_settings, write=_gemma_json)
GEMMA3 = _of_llama("gemma3_text", LLAMA_TENSORS | FOUR_NORMS | QK_NORM, read=_gemma_settings, write=_gemma_json)
GPT2 = Architecture.of(
    "gpt2",
    {
        "embedding.word_embeddings.weight": TensorSource(("transformer.wte.weight",)),
        "embedding.position_embeddings.weight": TensorSource(("transformer.wpe.weight",)),
        **_layer_pairs(
            {
                "input_layernorm": ("ln_1", None),
                "self_attention.linear_qkv": ("attn.c_attn", stacked_qkv),
                "self_attention.linear_proj": ("attn.c_proj", None),
                "pre_mlp_layernorm": ("ln_2", None),
                "mlp.linear_fc1": ("mlp.c_fc", None),
                "mlp.linear_fc2": ("mlp.c_proj", None),
            },
            "transformer.h.{n}.",
            transposed=True,
        ),
        "decoder.final_layernorm.weight": TensorSource(("transformer.ln_f.weight",)),
        "decoder.final_layernorm.bias": TensorSource(("transformer.ln_f.bias",)),
        "output_layer.weight": TensorSource(("lm_head.weight",)),
    },
    layers={},
    read=lambda theirs: gelu_settings(theirs, "activation_function", "gelu_new"),
    write=lambda config: {"embd_pdrop": config.hidden_dropout, **gelu_json(config, "activation_function")},
)


def _neox_json(config: ModelConfig) -> Settings:
    rope: Settings = {"rotary_pct": config.rotary_percent, "rotary_emb_base": config.rotary_base}
    return rope | {"use_parallel_residual": config.parallel_residual} | gelu_json(config, "hidden_act")


GPT_NEOX = Architecture.of(
    "gpt_neox",
    {
        "embedding.word_embeddings.weight": TensorSource(("gpt_neox.embed_in.weight",)),
        **_layer_pairs(
            {
                "input_layernorm": ("input_layernorm", None),
                # Head by head query, key, value, which is the order here, too.
                "self_attention.linear_qkv": ("attention.query_key_value", None),
                "self_attention.linear_proj": ("attention.dense", None),
                "pre_mlp_layernorm": ("post_attention_layernorm", None),
                "mlp.linear_fc1": ("mlp.dense_h_to_4h", None),
                "mlp.linear_fc2": ("mlp.dense_4h_to_h", None),
            },
            "gpt_neox.layers.{n}.",
            transposed=False,
        ),
        "decoder.final_layernorm.weight": TensorSource(("gpt_neox.final_layer_norm.weight",)),
        "decoder.final_layernorm.bias": TensorSource(("gpt_neox.final_layer_norm.bias",)),
        "output_layer.weight": TensorSource(("embed_out.weight",)),
    },
    layers={},
    read=lambda theirs: (
        rope_settings(theirs, partial=True)
        | gelu_settings(theirs, "hidden_act", "gelu")
        | {"parallel_residual": theirs.get("use_parallel_residual", True)}
    ),
    write=_neox_json,
)

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GPT2, GPT_NEOX, MIXTRAL, QWEN3_MOE, OLMO2, GEMMA2, GEMMA3, DEEPSEEK_V3)
ARCHITECTURES = {found.model_type: found for found in _ALL}
"""By ``model_type``; where several have a model's settings, the first one is exported."""


def architecture_of(theirs: Settings) -> Architecture:
    """The architecture of a config.json."""
    found = ARCHITECTURES.get(str(theirs.get("model_type")))
    if found is None:
        raise CheckpointError(
            f"config.json says model_type={theirs.get('model_type')!r}, which is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return found


def architecture_for(config: ModelConfig, model_type: str | None = None) -> Architecture:
    """The architecture ``model_type``, or else the first one, that computes what a model of ours does."""
    candidates = list(ARCHITECTURES.values()) if model_type is None else [architecture_of({"model_type": model_type})]
    nearest: tuple[Architecture, Settings] | None = None
    for found in candidates:
        other = differences(found, config)
        if other == {}:
            return found
        if other and (nearest is None or len(other) < len(nearest[1])):
            nearest = found, other
    tried = ", ".join(candidate.model_type for candidate in candidates)
    why = ""
    if nearest:
        faults = (f"{name}={getattr(config, name)}, there {value}" for name, value in nearest[1].items())
        why = f"; nearest is {nearest[0].model_type}, but for {'; '.join(faults)}"
    raise CheckpointError(f"models of the architecture {tried} cannot have the settings of this model{why}")
