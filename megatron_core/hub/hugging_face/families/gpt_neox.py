"""GPT-NeoX and Pythia: attention and MLP in parallel, rotary positions in a part of each head's channels."""

from dataclasses import replace

from megatron_core.hub.hugging_face.architecture import Architecture, register
from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE, gelu

GPT_NEOX = register(
    Architecture(
        model_type="gpt_neox",
        class_name="GPTNeoXForCausalLM",
        base="gpt_neox.",
        keys={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "intermediate_size": "ffn_hidden_size",
            "max_position_embeddings": "max_position_embeddings",
            "layer_norm_eps": "norm_epsilon",
            "initializer_range": "init_method_std",
            "use_parallel_residual": "parallel_residual",
            "hidden_dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
        },
        fixed={"position_embedding_type": "rope"},
        defaults={"rotary_pct": 0.25, "use_parallel_residual": True},
        required={"attention_bias": True},
        rules=(
            replace(
                PARTIAL_ROPE,
                write=lambda config: {"rotary_pct": config.rotary_percent, "rotary_emb_base": config.rotary_base},
            ),
            gelu("hidden_act", "gelu"),
        ),
        tensors={
            "embedding.word_embeddings": "gpt_neox.embed_in",
            "decoder.final_layernorm": "gpt_neox.final_layer_norm",
            "output_layer": "embed_out",
        },
        layer_prefix="gpt_neox.layers.{n}.",
        layer_tensors={
            "input_layernorm": "input_layernorm",
            "self_attention.linear_qkv": "attention.query_key_value",  # query, key and value of each head in turn, too
            "self_attention.linear_proj": "attention.dense",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "mlp.linear_fc1": "mlp.dense_h_to_4h",
            "mlp.linear_fc2": "mlp.dense_4h_to_h",
        },
        derived=r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    )
)
