"""An invented architecture: Llama with other names, fused queries, keys and values, and their norms.

It represents a user's own file: it imports the public names of ``megatron_core.hub.hugging_face`` and its tables,
and nothing in the package refers to it.
"""

from megatron_core.features.presets.published import LAYERS
from megatron_core.foreign_json import POSITIVE
from megatron_core.hub.hugging_face import Architecture, KeyRule, register
from megatron_core.hub.hugging_face.tensors import gate_and_up, stacked_qkv

INVENTED = register(
    Architecture(
        model_type="invented",
        class_name="InventedForCausalLM",
        base="",
        keys={
            "depth": "num_layers",
            "width": "hidden_size",
            "heads": "num_attention_heads",
            "kv_heads": "num_query_groups",
            "channels_per_head": "kv_channels",
            "inner_width": "ffn_hidden_size",
            "epsilon": "norm_epsilon",
            "context": "max_position_embeddings",
        },
        fixed={**LAYERS["llama"], "qk_layernorm": True},
        required={"bias": False},
        rules=(
            KeyRule(
                read=lambda hf_config: {"rotary_base": hf_config["base"]},
                write=lambda config: {"base": config.rotary_base},
                types={"base": POSITIVE},
            ),
        ),
        tensors={"embedding.word_embeddings": "tokens", "decoder.final_layernorm": "norm", "output_layer": "scores"},
        layer_prefix="blocks.{n}.",
        layer_tensors={
            "input_layernorm": "norms.0",
            "self_attention.linear_qkv": stacked_qkv("attention.in"),
            "self_attention.q_layernorm": "attention.query_norm",
            "self_attention.k_layernorm": "attention.key_norm",
            "self_attention.linear_proj": "attention.out",
            "pre_mlp_layernorm": "norms.1",
            "mlp.linear_fc1": gate_and_up("mlp.gate", "mlp.in"),
            "mlp.linear_fc2": "mlp.out",
        },
    )
)
