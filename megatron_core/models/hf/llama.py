"""Tensors of Llama, with which most architectures of the Hugging Face hub begin."""

from megatron_core.models.hf.tensors import TensorSource, expert_gate_and_value, gate_and_value, separate_qkv

LAYER, THEIRS = "decoder.layers.{n}.", "model.layers.{n}."
LLAMA_TENSORS = {
    "embedding.word_embeddings.weight": TensorSource(("model.embed_tokens.weight",)),
    LAYER + "input_layernorm.weight": TensorSource((THEIRS + "input_layernorm.weight",)),
    LAYER + "self_attention.linear_qkv.weight": TensorSource(
        tuple(f"{THEIRS}self_attn.{x}_proj.weight" for x in "qkv"), separate_qkv
    ),
    LAYER + "self_attention.linear_proj.weight": TensorSource((THEIRS + "self_attn.o_proj.weight",)),
    LAYER + "pre_mlp_layernorm.weight": TensorSource((THEIRS + "post_attention_layernorm.weight",)),
    LAYER + "mlp.linear_fc1.weight": TensorSource(
        (THEIRS + "mlp.gate_proj.weight", THEIRS + "mlp.up_proj.weight"), gate_and_value
    ),
    LAYER + "mlp.linear_fc2.weight": TensorSource((THEIRS + "mlp.down_proj.weight",)),
    "decoder.final_layernorm.weight": TensorSource(("model.norm.weight",)),
    "output_layer.weight": TensorSource(("lm_head.weight",)),
}
QKV_BIAS = {
    LAYER + "self_attention.linear_qkv.bias": TensorSource(
        tuple(f"{THEIRS}self_attn.{x}_proj.bias" for x in "qkv"), separate_qkv
    )
}
QK_NORM = {
    f"{LAYER}self_attention.{x}_layernorm.weight": TensorSource((f"{THEIRS}self_attn.{x}_norm.weight",)) for x in "qk"
}


def with_experts(prefix: str, names: tuple[str, str, str]) -> dict[str, TensorSource]:
    """Llama's tensors with experts in place of the MLP: their gate's, value's and output matrices are ``names``."""
    gate, value, output = (f"{THEIRS}{prefix}experts.{{e}}.{name}.weight" for name in names)
    dense = {name: source for name, source in LLAMA_TENSORS.items() if ".mlp.linear" not in name}
    return dense | {
        LAYER + "mlp.router.weight": TensorSource((f"{THEIRS}{prefix}gate.weight",)),
        LAYER + "mlp.experts.linear_fc1.weight": TensorSource((gate, value), expert_gate_and_value),
        LAYER + "mlp.experts.linear_fc2.weight": TensorSource((output,)),
    }
