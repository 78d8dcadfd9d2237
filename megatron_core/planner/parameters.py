"""Number of parameters per rank of each stage of a layout, from the sizes of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_core.config import RunConfig
from megatron_core.config.model import ModelConfig


@dataclass(frozen=True)
class Parameters:
    """Number of elements on a rank, by the group that reduces their gradients and shards their state."""

    dense: int = 0
    """Elements reduced over data- and context-parallel ranks."""
    experts: int = 0
    """Elements reduced over the replicas of an expert."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """Elements of both kinds."""
        return self.dense + self.experts


def padded_vocabulary(config: RunConfig, vocab_size: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: a multiple of make_vocab_size_divisible_by x TP."""
    unit = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return -(-vocab_size // unit) * unit


def layer_parameters(config: RunConfig, layer_number: int) -> Parameters:
    """Elements of a layer on a rank.

    With hidden size h, a heads and g groups of d channels, MLP width f, t tensor-parallel ranks: QKV h (a + 2 g') d / t
    (g' is g, but at least one group per rank), output projection a d h / t, MLP 2 h f / t (gated: 3), E experts
    E h f_e 2 / (ep etp) (gated: 3), router h E; biases; norms.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    hidden, head = model.hidden_size, model.head_size
    queries, groups = model.num_attention_heads // tp * head, max(model.query_groups // tp, 1) * head
    dense = _latent_attention(model, tp) if model.multi_latent_attention else _attention(model, queries, groups)
    norm = norm_parameters(model)
    dense += norm * {"pre": 2, "sandwich": 4, "post": 2}[model.norm_placement]
    if model.qk_layernorm and not model.multi_latent_attention:
        over_heads = model.qk_layernorm_over_heads
        dense += (queries + groups) if over_heads else 2 * norm_parameters(model, head)
    if not model.has_experts(layer_number):
        return Parameters(dense + _mlp(model, model.ffn_size, tp))
    dense += hidden * (model.num_experts or 0)
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None:
        dense += _mlp(model, shared, tp) + hidden * model.moe_shared_expert_gate
    parallel = config.parallel
    matrices = 3 if model.gated_linear_unit else 2
    local = (model.num_experts or 0) // parallel.expert_model_parallel_size
    width = model.expert_ffn_size // parallel.expert_tensor_size
    return Parameters(dense, local * matrices * hidden * width)


def embedding_parameters(config: RunConfig, vocab_size: int) -> int:
    """Elements of the embedding on a rank: its part of the vocabulary, and all learned positions."""
    model = config.model
    table = padded_vocabulary(config, vocab_size) // config.parallel.tensor_model_parallel_size * model.hidden_size
    learned = model.position_embedding_type == "learned_absolute"
    return table + (config.max_positions * model.hidden_size if learned else 0)


def head_parameters(config: RunConfig, vocab_size: int, *, beside_embedding: bool) -> int:
    """Elements of the last norm and of the output layer (0 if it is tied to an embedding on the same rank)."""
    model = config.model
    table = padded_vocabulary(config, vocab_size) // config.parallel.tensor_model_parallel_size * model.hidden_size
    tied = model.share_embeddings_and_output_weights and beside_embedding
    return norm_parameters(model) + (0 if tied else table)


def rank_units(
    config: RunConfig, layers: Sequence[range], stage_to_rank: Sequence[int], vocab_size: int
) -> list[list[Parameters]]:
    """For each pipeline rank its units (embedding, each layer, head), which data parallelism gathers and frees."""
    ranks: list[list[Parameters]] = [[] for _ in range(max(stage_to_rank) + 1)]
    last = len(layers) - 1
    ends = stage_to_rank[0], stage_to_rank[last]
    each = {kind: layer_parameters(config, layer) for layer, kind in enumerate(layer_kinds(config))}
    kinds = layer_kinds(config)
    for stage, run in enumerate(layers):
        units = ranks[stage_to_rank[stage]]
        if stage == 0:
            units.append(Parameters(embedding_parameters(config, vocab_size)))
        units += [each[kinds[layer]] for layer in run]
        if stage == last:
            beside = ends[0] == ends[1]
            head = Parameters(head_parameters(config, vocab_size, beside_embedding=beside))
            units.append(head + ahead_parameters(config, vocab_size, beside_embedding=beside))
    return ranks


def layer_kinds(config: RunConfig) -> list[int]:
    """A number for each layer, equal for layers with the same computation and the same tensor sizes."""
    model, comm = config.model, config.parallel.cp_comm_type
    seen: dict[object, int] = {}
    found = []
    for layer in range(model.num_layers):
        eight_bit = layer in config.training.fp8_layers(model.num_layers)
        kind = model.has_experts(layer), model.window_of_layer(layer), comm[layer if len(comm) > 1 else 0], eight_bit
        found.append(seen.setdefault(kind, len(seen)))
    return found


def norm_parameters(model: ModelConfig, size: int | None = None) -> int:
    """Elements of a norm: a weight per channel, and for LayerNorm a bias per channel."""
    return (model.hidden_size if size is None else size) * (1 if model.normalization == "RMSNorm" else 2)


def _attention(model: ModelConfig, queries: int, groups: int) -> int:
    fused = (model.hidden_size + model.has_qkv_bias) * (queries + 2 * groups)
    return fused + queries * model.hidden_size + model.hidden_size * model.add_bias_linear


def _latent_attention(model: ModelConfig, tp: int) -> int:
    """Elements of latent attention; down projections and norms of latents are replicated on every rank."""
    hidden, heads, rank, q_rank = (
        model.hidden_size,
        model.num_attention_heads // tp,
        model.kv_lora_rank,
        model.q_lora_rank,
    )
    queries, up = heads * model.query_head_size, heads * (model.qk_head_dim + model.v_head_dim)
    found = hidden * queries if q_rank is None else q_rank * (hidden + queries)
    found += hidden * (rank + model.qk_pos_emb_head_dim) + rank * up
    if model.qk_layernorm:
        found += norm_parameters(model, rank) + (0 if q_rank is None else norm_parameters(model, q_rank))
    return found + heads * model.v_head_dim * hidden + hidden * model.add_bias_linear


def ahead_parameters(config: RunConfig, vocab_size: int, *, beside_embedding: bool) -> Parameters:
    """Elements of the multi-token prediction layers: each has a layer like the last one, three norms, and a projection
    of 2 h^2 / t; a rank without the embedding has a copy of it."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if not model.mtp_num_layers:
        return Parameters()
    own = Parameters(3 * norm_parameters(model) + 2 * model.hidden_size**2 // tp)
    found = sum([own + layer_parameters(config, model.num_layers - 1)] * model.mtp_num_layers, Parameters())
    copied = not beside_embedding and model.untie_embeddings_and_output_weights
    return found + Parameters(padded_vocabulary(config, vocab_size) // tp * model.hidden_size * copied)


def _mlp(model: ModelConfig, width: int, tp: int) -> int:
    inner = width // tp * (2 if model.gated_linear_unit else 1)
    biases = (inner + model.hidden_size) * model.add_bias_linear
    return model.hidden_size * (inner + width // tp) + biases
