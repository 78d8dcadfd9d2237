"""StarCoder2: GPT with rotary positions, and several query heads to a key and value head."""

from megatron_core.hub.hugging_face.architecture import Architecture, register
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import ROPE, WINDOW_OF_ALL_LAYERS, gelu

STARCODER2 = register(
    Architecture(
        model_type="starcoder2",
        class_name="Starcoder2ForCausalLM",
        unread=frozenset({"layer_norm_epsilon", "mlp_type", "norm_type", "scale_attn_weights"}),
        keys={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "num_key_value_heads": "num_query_groups",
            "intermediate_size": "ffn_hidden_size",
            "norm_epsilon": "norm_epsilon",
            "max_position_embeddings": "max_position_embeddings",
            "initializer_range": "init_method_std",
            "embedding_dropout": "hidden_dropout",
            "residual_dropout": "hidden_dropout",  # takes precedence
            "attention_dropout": "attention_dropout",
        },
        fixed={"position_embedding_type": "rope"},
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 2},
        required={"use_bias": True},
        rules=(ROPE, WINDOW_OF_ALL_LAYERS, gelu("hidden_act", "gelu_pytorch_tanh")),
        tensors=LLAMA.tensors,
        layer_prefix=LLAMA.layer_prefix,
        layer_tensors={**LLAMA.layer_tensors, "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"},
    )
)
