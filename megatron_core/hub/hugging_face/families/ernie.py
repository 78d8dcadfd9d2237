"""ERNIE 4.5: Llama with rotary positions of adjacent channels; with experts that are chosen by a softmax and a bias."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import EXPERT_MATRICES, ROPE, SHARED_MATRICES, KeyRule, Settings
from megatron_core.hub.hugging_face.tensors import TensorSource
from megatron_core.schema import COUNT, COUNT_OR_ZERO, KeyType

ERNIE = variant(
    LLAMA,
    model_type="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    keys={"attention_dropout": None},
    fixed={"rotary_interleaved": True},
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 500000.0},
    required={"hidden_act": "silu", "use_bias": False},
    rules=(ROPE,),
)
INTEGER = KeyType("an integer", lambda value: type(value) is int)


def _layers(hf_config: Settings) -> Settings:
    """Every n-th layer from a first to a last one has experts; -1 is the last layer of the model."""
    layers = hf_config["num_hidden_layers"]
    every = hf_config["moe_layer_interval"]
    first = hf_config["moe_layer_start_index"]
    last_layer = hf_config["moe_layer_end_index"]
    last_layer = layers - 1 if last_layer == -1 else last_layer
    shared = hf_config["moe_num_shared_experts"] * hf_config["moe_intermediate_size"]
    return {
        "moe_layer_freq": tuple(int((n + 1) % every == 0 and first <= n <= last_layer) for n in range(layers)),
        "moe_shared_expert_intermediate_size": shared or None,
    }


def _layers_json(config: ModelConfig) -> Settings:
    sparse = config.expert_layers
    shared = config.moe_shared_expert_intermediate_size or 0
    return {
        "moe_layer_start_index": sparse[0] if sparse else config.num_layers,
        "moe_layer_end_index": sparse[-1] if sparse else config.num_layers,
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
        "moe_num_shared_experts": shared // config.expert_ffn_size,
    }


LAYERS = KeyRule(
    _layers,
    _layers_json,
    {
        "moe_layer_start_index": COUNT_OR_ZERO,
        "moe_layer_end_index": INTEGER,
        "moe_layer_interval": COUNT,
        "moe_num_shared_experts": COUNT_OR_ZERO,
    },
)
ERNIE_MOE = variant(
    ERNIE,
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    keys={
        "head_dim": None,
        "moe_num_experts": "num_experts",
        "moe_k": "moe_router_topk",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
    },
    fixed={"moe_router_enable_expert_bias": True},
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "rope_theta": 500000.0,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    required={"hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12},
    rules=(ROPE, LAYERS),
    layer_tensors={
        **EXPERT_MATRICES,
        **SHARED_MATRICES,
        "mlp.router.expert_bias": TensorSource(("mlp.moe_statics.e_score_correction_bias",), ones=(1, 0)),
    },
    mtp_names=r"mtp_.*",  # transformers does not read them either
)
