"""Apertus: Llama with norms of queries and keys, and an MLP with xIELU instead of a gate."""

from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA, QK_NORMS
from megatron_core.hub.hugging_face.rules import ATTENTION_BIASES, LLAMA3, LLAMA3_CONTEXT, ROPE_PARAMETERS
from megatron_core.ops.reference import XIELU_BETA, XIELU_EPSILON

POSITIONS = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, **LLAMA3}
POSITIONS["original_max_position_embeddings"] = LLAMA3_CONTEXT
APERTUS = variant(
    LLAMA,
    model_type="apertus",
    class_name="ApertusForCausalLM",
    keys={"head_dim": None},
    fixed={"swiglu": False, "xielu": True, "qk_layernorm": True},
    defaults={"rope_parameters": POSITIONS},
    # Keys of published files that transformers does not read.
    required={"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True},
    rules=(ROPE_PARAMETERS, ATTENTION_BIASES),
    layer_tensors={
        **QK_NORMS,
        "input_layernorm": "attention_layernorm",
        "pre_mlp_layernorm": "feedforward_layernorm",
        "mlp.linear_fc1": "mlp.up_proj",
        "mlp.activation": "mlp.act_fn",
        "mlp.linear_fc2": "mlp.down_proj",
    },
    layer_constants={"mlp.act_fn.beta": XIELU_BETA, "mlp.act_fn.eps": XIELU_EPSILON},
)
