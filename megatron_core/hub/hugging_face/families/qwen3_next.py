"""Qwen3-Next and Qwen3.5 (text): gated delta nets, and attention with a gate in every fourth layer."""

from megatron_core.config import ModelConfig
from megatron_core.features.recurrent.kinds import GatedDeltaNetKind
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.llama import LLAMA, QK_NORMS
from megatron_core.hub.hugging_face.families.qwen import EXPERT_LAYERS, QWEN2_MOE, QWEN3_MOE, ROUTER_SOFTMAX
from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE, KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import RowRange, TensorSource
from megatron_core.schema import COUNT, STRINGS

KINDS = ("full_attention", "linear_attention")
"""Values of ``layer_types``: attention, and the recurrence."""
EVERY = 4
"""Every n-th layer has attention, if config.json has neither ``layer_types`` nor ``full_attention_interval``."""


def _layers(hf_config: Settings) -> Settings:
    count = hf_config["num_hidden_layers"]
    every = hf_config.get("full_attention_interval", EVERY)
    kinds = hf_config.get("layer_types", [KINDS[(n + 1) % every != 0] for n in range(count)])
    if set(kinds) - set(KINDS) or len(kinds) != count or KINDS[1] not in kinds or count < 2:
        refuse("layer_types", kinds, f"supported are {' and '.join(KINDS)}, one of 2 or more layers with the latter")
    return {"linear_attention_freq": tuple(KINDS.index(layer_type) for layer_type in kinds)}


def _layers_json(config: ModelConfig) -> Settings:
    kinds = [KINDS[config.is_recurrent(n)] for n in range(config.num_layers)]
    return {"layer_types": kinds}


def _gated_qkv_rows(config: ModelConfig, _: int) -> list[RowRange]:
    """Stored queries are followed by their gates, head by head; ours has queries, gates, key and value of a group."""
    d = config.head_size
    groups = config.query_groups
    heads = config.num_attention_heads // groups
    ranges = []
    for group in range(groups):
        group_heads = range(group * heads, (group + 1) * heads)
        ranges += [
            RowRange(0, (2 * head + half) * d, (2 * head + half + 1) * d) for half in (0, 1) for head in group_heads
        ]
        ranges += [RowRange(tensor, group * d, (group + 1) * d) for tensor in (1, 2)]
    return ranges


def _rows_by_key_head(config: ModelConfig, _: int) -> list[RowRange]:
    """Qwen3-Next stores queries, keys, values and gates of each key head together, and rates and decays of each."""
    config = config.section(RecurrentConfig)
    groups = config.linear_num_key_heads
    values = config.linear_num_value_heads // groups
    key = config.linear_key_head_dim
    value = config.linear_value_head_dim * values
    ranges = []
    for tensor, sizes in enumerate(((key, key, value, value), (values, values))):
        for number, size in enumerate(sizes):
            firsts = (group * sum(sizes) + sum(sizes[:number]) for group in range(groups))
            ranges += [RowRange(tensor, first, first + size) for first in firsts]
    return ranges


def _separate_rows(config: ModelConfig, _: int) -> list[RowRange]:
    """Qwen3.5 stores queries, keys and values in one matrix, and gates, rates and decays in one each."""
    sizes = GatedDeltaNetKind(config).pieces
    joined = (sum(sizes[:3]), *sizes[3:])
    return [RowRange(tensor, 0, size) for tensor, size in enumerate(joined)]


LINEAR_KEYS = {
    name: name
    for name in (
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    )
}
SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
"""Values that config.json may leave out."""
LAYERS = {
    **LLAMA.fixed,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
}
LAYER_TYPES = KeyRule(_layers, _layers_json, {"layer_types": STRINGS, "full_attention_interval": COUNT})
MIXERS = {
    **QK_NORMS,
    "self_attention.linear_qkv": TensorSource(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), _gated_qkv_rows
    ),
    "self_attention.conv1d": "linear_attn.conv1d",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.out_norm": "linear_attn.norm.weight",
    "self_attention.out_proj": "linear_attn.out_proj",
}
SEPARATE = TensorSource(
    tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
    _separate_rows,
)
DERIVED = rf"{LLAMA.derived}|visual\..*"
AHEAD = r"mtp\..*"
"""Images and layers for multi-token prediction, which transformers does not read in the text model either."""

QWEN3_NEXT = register(
    QWEN3_MOE,
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    keys={**QWEN3_MOE.keys, **LINEAR_KEYS, "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"},
    fixed={**LAYERS, "moe_shared_expert_gate": True},
    aliases={},
    defaults={**SIZES, "norm_topk_prob": True},
    rules=(PARTIAL_ROPE, LAYER_TYPES, ROUTER_SOFTMAX, EXPERT_LAYERS),
    layer_tensors={
        **QWEN2_MOE.layer_tensors,
        **MIXERS,
        "self_attention.in_proj": TensorSource(
            ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), _rows_by_key_head
        ),
    },
    derived=DERIVED,
    mtp_names=AHEAD,
)
QWEN35 = register(
    LLAMA,
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    keys={**LLAMA.keys, **LINEAR_KEYS},
    fixed=LAYERS,
    defaults=SIZES,
    required={"hidden_act": "silu", "attention_bias": False},
    rules=(PARTIAL_ROPE, LAYER_TYPES),
    layer_tensors={**LLAMA.layer_tensors, **MIXERS, "self_attention.in_proj": SEPARATE},
    derived=DERIVED,
    mtp_names=AHEAD,
)
QWEN35_MOE = variant(
    QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    keys={"intermediate_size": None},
    defaults=SIZES,
    rules=(PARTIAL_ROPE, LAYER_TYPES),
    layer_tensors={"self_attention.in_proj": SEPARATE},
)
