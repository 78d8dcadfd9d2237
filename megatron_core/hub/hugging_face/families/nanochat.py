"""NanoChat: norms without weights, also of embeddings, queries and keys; squared ReLU; bounded logits."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import register
from megatron_core.hub.hugging_face.families.nemotron import ARCEE
from megatron_core.hub.hugging_face.rules import ATTENTION_BIASES, ROPE
from megatron_core.hub.hugging_face.tensors import RowRange, TensorSource


def _rows(config: ModelConfig, _: int) -> list[RowRange]:
    """Queries, key and value of each group in turn.

    Its rotary positions turn in the other direction, which is the usual one for exchanged halves of a head.
    """
    half = config.head_size // 2
    shared = config.num_attention_heads // config.query_groups
    ranges = []

    def halves(tensor: int, head: int) -> list[RowRange]:
        first = 2 * head * half
        return [RowRange(tensor, first + half, first + 2 * half), RowRange(tensor, first, first + half)]

    for group in range(config.query_groups):
        for head in range(group * shared, (group + 1) * shared):
            ranges += halves(0, head)
        ranges += [*halves(1, group), RowRange(2, 2 * group * half, 2 * (group + 1) * half)]
    return ranges


NANOCHAT = register(
    ARCEE,
    model_type="nanochat",
    class_name="NanoChatForCausalLM",
    keys={**ARCEE.keys, "final_logit_softcapping": "final_logit_softcapping"},
    fixed={**ARCEE.fixed, "disable_weight_layernorm": True, "embedding_layernorm": True, "qk_l2_norm": True},
    defaults={"rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0},
    required={"hidden_act": "relu2"},
    rules=(ROPE, ATTENTION_BIASES),
    tensors={name: stored for name, stored in ARCEE.tensors.items() if "layernorm" not in name},
    layer_tensors={
        "self_attention.linear_qkv": TensorSource(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), _rows),
        "self_attention.linear_proj": "self_attn.o_proj",
        "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2",
    },
)
