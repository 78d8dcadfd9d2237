"""Nemotron and Minitron: squared ReLU, LayerNorm whose weights are stored minus 1, rotary positions in a part of each
head's channels. Arcee: Llama with squared ReLU. Jais 2: with LayerNorm and biases, too."""

from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE, ROPE

ARCEE = variant(
    LLAMA,
    model_type="arcee",
    class_name="ArceeForCausalLM",
    fixed={"swiglu": False, "squared_relu": True},
    required={"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
    rules=(ROPE,),
    layer_tensors={"mlp.linear_fc1": "mlp.up_proj"},
)
NEMOTRON = variant(
    ARCEE,
    model_type="nemotron",
    class_name="NemotronForCausalLM",
    keys={"rms_norm_eps": None, "norm_eps": "norm_epsilon"},
    fixed={"normalization": "LayerNorm", "apply_layernorm_1p": True},
    defaults={"partial_rotary_factor": 0.5},
    rules=(PARTIAL_ROPE,),
)
JAIS2 = register(
    NEMOTRON,
    model_type="jais2",
    class_name="Jais2ForCausalLM",
    keys={
        **{key: name for key, name in LLAMA.keys.items() if key != "rms_norm_eps"},
        "layer_norm_eps": "norm_epsilon",
    },
    fixed={**ARCEE.fixed, "normalization": "LayerNorm", "disable_bias_linear": False},
    defaults={"layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
    required={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    rules=(ROPE,),
)
