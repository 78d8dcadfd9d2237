"""OPT and Galactica: learned positions, ReLU or GELU, and biases in all linear layers or in none."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import Architecture, register
from megatron_core.hub.hugging_face.rules import GELU, KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import RowRange, TensorSource, separate_qkv
from megatron_core.schema import STRING, SWITCH, WIDTH

FIRST_POSITION = 2
"""Row of the stored table of positions that position 0 has; no token has the rows before it."""


def _activation(hf_config: Settings) -> Settings:
    name = hf_config.get("activation_function", "relu")
    if name not in ("relu", *GELU):
        refuse("activation_function", name, f"for opt supported are relu, {', '.join(GELU)}")
    return {"relu": name == "relu", "openai_gelu": GELU.get(name, False)}


def _activation_json(config: ModelConfig) -> Settings:
    gelu = "gelu_new" if config.openai_gelu else "gelu"
    return {"activation_function": "relu" if config.relu else gelu}


def _width_of_embeddings(hf_config: Settings) -> Settings:
    width = hf_config.get("word_embed_proj_dim")
    hidden = hf_config["hidden_size"]
    if width not in (None, hidden):
        refuse("word_embed_proj_dim", width, f"supported is hidden_size={hidden}: OPT 350M cannot be read")
    return {"disable_bias_linear": not hf_config.get("enable_bias", True)}


def _width_of_embeddings_json(config: ModelConfig) -> Settings:
    return {"word_embed_proj_dim": config.hidden_size, "enable_bias": config.add_bias_linear}


OPT = register(
    Architecture(
        model_type="opt",
        class_name="OPTForCausalLM",
        keys={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "ffn_dim": "ffn_hidden_size",
            "max_position_embeddings": "max_position_embeddings",
            "init_std": "init_method_std",
            "dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
        },
        defaults={"tie_word_embeddings": True},
        required={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
            "layerdrop": 0.0,
        },
        rules=(
            KeyRule(_activation, _activation_json, {"activation_function": STRING}),
            KeyRule(
                _width_of_embeddings, _width_of_embeddings_json, {"enable_bias": SWITCH, "word_embed_proj_dim": WIDTH}
            ),
        ),
        tensors={
            "embedding.word_embeddings": "model.decoder.embed_tokens",
            "embedding.position_embeddings": TensorSource(
                ("model.decoder.embed_positions",),
                lambda _, count: [RowRange(0, FIRST_POSITION, FIRST_POSITION + count)],
            ),
            "decoder.final_layernorm": "model.decoder.final_layer_norm",
            "output_layer": "lm_head",
        },
        layer_prefix="model.decoder.layers.{n}.",
        layer_tensors={
            "input_layernorm": "self_attn_layer_norm",
            "self_attention.linear_qkv": separate_qkv("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attention.linear_proj": "self_attn.out_proj",
            "pre_mlp_layernorm": "final_layer_norm",
            "mlp.linear_fc1": "fc1",
            "mlp.linear_fc2": "fc2",
        },
    )
)
