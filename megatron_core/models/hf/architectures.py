"""Architectures of the Hugging Face hub: what their configuration and their tensors are called here."""

from collections.abc import Callable, Mapping

from megatron_core.config import ModelConfig
from megatron_core.config.presets import LLAMA_LAYERS
from megatron_core.errors import CheckpointError
from megatron_core.models.hf.architecture import (
    Architecture,
    Settings,
    differences,
    fault,
    rope_json,
    rope_of,
    rope_settings,
    window_json,
    window_settings,
)
from megatron_core.models.hf.deepseek import DEEPSEEK_V3
from megatron_core.models.hf.llama import LAYER, LLAMA_KEYS, LLAMA_TENSORS, QK_NORM, QKV_BIAS, THEIRS, with_experts
from megatron_core.models.hf.tensors import Source, stacked_qkv


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


WINDOWS_OF_QWEN: Settings = {"sliding_window": 4096, "max_window_layers": 28}
LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    LLAMA_KEYS,
    LLAMA_TENSORS,
    fixed=LLAMA_LAYERS,
    required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    read=rope_settings,
    write=rope_json,
)
MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    LLAMA_KEYS,
    LLAMA_TENSORS,
    fixed=LLAMA_LAYERS,
    assumed={"sliding_window": 4096},
    required={"hidden_act": "silu", "attention_bias": False},
    read=_with_window,
    write=_with_window_json,
)
QWEN2 = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    LLAMA_KEYS,
    LLAMA_TENSORS | QKV_BIAS,
    fixed=LLAMA_LAYERS | {"add_qkv_bias": True},
    assumed=WINDOWS_OF_QWEN,
    required={"hidden_act": "silu"},
    read=_qwen_settings,
    write=_qwen_json,
)
QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    LLAMA_KEYS,
    LLAMA_TENSORS | QK_NORM,
    fixed=LLAMA_LAYERS | {"qk_layernorm": True},
    assumed=WINDOWS_OF_QWEN | {"head_dim": 128},
    required={"hidden_act": "silu", "attention_bias": False},
    read=_qwen_settings,
    write=_qwen_json,
)
PHI3 = Architecture(
    "phi3",
    "Phi3ForCausalLM",
    {key: ours for key, ours in LLAMA_KEYS.items() if key != "head_dim"} | {"resid_pdrop": "hidden_dropout"},
    LLAMA_TENSORS
    | {
        LAYER + "self_attention.linear_qkv.weight": Source((THEIRS + "self_attn.qkv_proj.weight",), stacked_qkv),
        LAYER + "mlp.linear_fc1.weight": Source((THEIRS + "mlp.gate_up_proj.weight",)),
    },
    fixed=LLAMA_LAYERS,
    required={"hidden_act": "silu"},
    read=_phi3_settings,
    write=_with_window_json,
)

MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    LLAMA_KEYS
    | {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
    },
    with_experts("block_sparse_moe.", ("w1", "w3", "w2")),
    fixed=LLAMA_LAYERS,
    assumed={"rope_theta": 1e6},
    required={"hidden_act": "silu", "router_jitter_noise": 0.0},
    read=_with_one_window,
    write=_with_window_json,
)
QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    LLAMA_KEYS
    | {
        "num_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
        "moe_intermediate_size": "moe_ffn_hidden_size",
    },
    with_experts("mlp.", ("gate_proj", "up_proj", "down_proj")) | QK_NORM,
    fixed=LLAMA_LAYERS | {"qk_layernorm": True},
    aliases={"num_local_experts": "num_experts"},
    assumed=WINDOWS_OF_QWEN,
    required={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    read=_qwen_moe_settings,
    write=lambda config: _qwen_json(config) | {"norm_topk_prob": not config.moe_router_pre_softmax},
)


def _layer_pairs(pairs: Mapping[str, tuple[str, Callable | None]], prefix: str, transposed: bool) -> dict[str, Source]:
    """Weights and biases of a layer's parts: our part -> theirs and its blocks."""
    return {
        f"{LAYER}{ours}.{kind}": Source(
            (f"{prefix}{theirs}.{kind}",), blocks, transposed and kind == "weight" and "norm" not in ours
        )
        for ours, (theirs, blocks) in pairs.items()
        for kind in ("weight", "bias")
    }


OLMO2 = Architecture(
    "olmo2",
    "Olmo2ForCausalLM",
    {key: ours for key, ours in LLAMA_KEYS.items() if key != "head_dim"},
    {name: source for name, source in LLAMA_TENSORS.items() if "layernorm" not in name or "final" in name}
    | QK_NORM
    | {
        LAYER + "post_self_attn_layernorm.weight": Source((THEIRS + "post_attention_layernorm.weight",)),
        LAYER + "post_mlp_layernorm.weight": Source((THEIRS + "post_feedforward_layernorm.weight",)),
    },
    fixed=LLAMA_LAYERS | {"qk_layernorm": True, "qk_layernorm_over_heads": True, "norm_placement": "post"},
    required={"hidden_act": "silu", "attention_bias": False},
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


def _gemma(
    model_type: str, class_name: str, tensors: dict[str, Source], fixed: Settings, assumed: Settings
) -> Architecture:
    norms = {
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
    four = {f"{LAYER}{ours}.weight": Source((f"{THEIRS}{theirs}.weight",)) for ours, theirs in norms.items()}
    gemma = {"swiglu": False, "geglu": True, "openai_gelu": True, "norm_placement": "sandwich"}
    return Architecture(
        model_type,
        class_name,
        LLAMA_KEYS
        | {"final_logit_softcapping": "final_logit_softcapping", "attn_logit_softcapping": "attn_logit_softcapping"},
        LLAMA_TENSORS | four | tensors,
        fixed=LLAMA_LAYERS | gemma | {"apply_layernorm_1p": True, "scale_embeddings": True, **fixed},
        assumed={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            **assumed,
        },
        required={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": False,
        },
        read=_gemma_settings,
        write=_gemma_json,
    )


GEMMA2 = _gemma(
    "gemma2",
    "Gemma2ForCausalLM",
    {},
    {},
    {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
)
GEMMA3 = _gemma(
    "gemma3_text",
    "Gemma3ForCausalLM",
    QK_NORM,
    {"qk_layernorm": True},
    {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
)
GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_hidden_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "norm_epsilon",
        "initializer_range": "init_method_std",
        "resid_pdrop": "hidden_dropout",
        "attn_pdrop": "attention_dropout",
    },
    {
        "embedding.word_embeddings.weight": Source(("transformer.wte.weight",)),
        "embedding.position_embeddings.weight": Source(("transformer.wpe.weight",)),
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
        "decoder.final_layernorm.weight": Source(("transformer.ln_f.weight",)),
        "decoder.final_layernorm.bias": Source(("transformer.ln_f.bias",)),
        "output_layer.weight": Source(("lm_head.weight",)),
    },
    fixed={"openai_gelu": True},
    assumed={"tie_word_embeddings": True},
    required={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    write=lambda config: {"embd_pdrop": config.hidden_dropout},
    base="transformer.",
)


def _neox_json(config: ModelConfig) -> Settings:
    rope: Settings = {"rotary_pct": config.rotary_percent, "rotary_emb_base": config.rotary_base}
    return rope | {"use_parallel_residual": config.parallel_residual}


GPT_NEOX = Architecture(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "max_position_embeddings",
        "layer_norm_eps": "norm_epsilon",
        "initializer_range": "init_method_std",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    {
        "embedding.word_embeddings.weight": Source(("gpt_neox.embed_in.weight",)),
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
        "decoder.final_layernorm.weight": Source(("gpt_neox.final_layer_norm.weight",)),
        "decoder.final_layernorm.bias": Source(("gpt_neox.final_layer_norm.bias",)),
        "output_layer.weight": Source(("embed_out.weight",)),
    },
    fixed={"position_embedding_type": "rope"},
    assumed={"rotary_pct": 0.25},
    required={"hidden_act": "gelu", "attention_bias": True},
    read=lambda theirs: (
        rope_settings(theirs, partial=True) | {"parallel_residual": theirs.get("use_parallel_residual", True)}
    ),
    write=_neox_json,
    base="gpt_neox.",
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
