"""Rules and tensors of experts as in DeepSeek's models: dense first layers, shared experts, groups of experts."""

from __future__ import annotations

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.rules import Rule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import TensorSource, gate_and_up
from megatron_core.schema import COUNT, COUNT_OR_ZERO

MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys with the number of layers for multi-token prediction."""
EXPERT_MATRICES: dict[str, str | TensorSource] = {
    "mlp.router": "mlp.gate",
    "mlp.experts.linear_fc1": gate_and_up("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "mlp.experts.linear_fc2": "mlp.experts.{e}.down_proj",
}
"""Router and experts, under the names of most architectures."""
SHARED_MATRICES: dict[str, str | TensorSource] = {
    "mlp.shared_experts.linear_fc1": gate_and_up("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}
EXPERT_BIAS = {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"}


def dense_first(*, dense: int, shared: int | None = None) -> Rule:
    """The first layers have dense MLPs, the others routed and shared experts.

    ``dense`` and ``shared`` are the numbers of dense layers and of shared experts if config.json has none.
    """

    def read(hf_config: Settings) -> Settings:
        count = hf_config.get("n_shared_experts", shared)
        if not isinstance(count, int) or count < 1:
            refuse("n_shared_experts", count, f"{hf_config.get('model_type')} models need 1 or more")
        layers = hf_config["num_hidden_layers"]
        first = min(hf_config.get("first_k_dense_replace", dense), layers)
        return {
            "moe_layer_freq": (0,) * first + (1,) * (layers - first),
            "moe_shared_expert_intermediate_size": count * hf_config["moe_intermediate_size"],
        }

    def write(config: ModelConfig) -> Settings:
        sparse, width = config.expert_layers, config.expert_ffn_size
        return {
            "first_k_dense_replace": sparse[0] if sparse else config.num_layers,
            "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // width,
        }

    return Rule(read, write, dict.fromkeys(("n_shared_experts", "first_k_dense_replace", *MTP_LAYERS), COUNT_OR_ZERO))


def limited_to_groups(groups: int, chosen: int, counted: int) -> Settings:
    """Experts come from the ``chosen`` best groups; a group's score is the sum of its ``counted`` best scores."""
    if chosen >= groups:
        return {}
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_score_topk": counted,
    }


def groups_json(config: ModelConfig) -> Settings:
    """``n_group`` and ``topk_group``; 1 if the choice is not limited to groups."""
    if config.group_score_topk is None:
        return {"n_group": 1, "topk_group": 1}
    return {"n_group": config.moe_router_num_groups, "topk_group": config.moe_router_group_topk}


GROUP_TYPES = {"n_group": COUNT, "topk_group": COUNT}
GROUPS_BY_TWO = Rule(
    lambda hf_config: limited_to_groups(hf_config["n_group"], hf_config["topk_group"], 2), groups_json, GROUP_TYPES
)
"""DeepSeek-V3: the score of a group is the sum of its two best scores."""
