"""Number of parameters per rank of each stage of a layout, from the sizes of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add
from typing import TypeVar

from megatron_core.config import ParallelConfig, RunConfig
from megatron_core.config.attention import attention_of
from megatron_core.config.linear_layers import AddedTensor, feed_forward_of, mlp_layers
from megatron_core.config.mixers import mixer_of
from megatron_core.config.model import ModelConfig
from megatron_core.feature import load_hook, used_features
from megatron_core.planner.context import comm_type_of

Computed = TypeVar("Computed")


@dataclass(frozen=True)
class Parameters:
    """Number of elements on a rank, by the group that reduces their gradients and shards their state."""

    dense: int = 0
    """Elements reduced over data- and context-parallel ranks."""
    experts: int = 0
    """Elements reduced over the replicas of an expert."""
    outside: int = 0
    """Parameters of ``dense`` outside of hidden matrices: embeddings, output layer, norms and biases."""
    frozen: int = 0
    """Further elements as ``dense``, without gradients and optimizer state."""
    frozen_experts: int = 0
    """Further elements as ``experts``, without gradients and optimizer state."""
    expert_biases: int = 0
    """Biases of ``experts``."""

    def __add__(self, other: Parameters) -> Parameters:
        # dataclasses.astuple copies every value, which took half of the time of a search.
        return Parameters(*map(add, vars(self).values(), vars(other).values()))

    @classmethod
    def sum(cls, terms: Iterable[Parameters]) -> Parameters:
        """Add many of them, in a fraction of the time of ``+``."""
        return cls(*map(sum, zip(*(vars(term).values() for term in terms), strict=True)))

    @property
    def total(self) -> int:
        """Trained elements of both kinds."""
        return self.dense + self.experts

    def freeze(self) -> Parameters:
        """The same elements without training."""
        return Parameters(frozen=self.dense + self.frozen, frozen_experts=self.experts + self.frozen_experts)


def padded_vocabulary(config: RunConfig, vocab_size: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: a multiple of make_vocab_size_divisible_by x TP."""
    unit = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return -(-vocab_size // unit) * unit


def layer_parameters(config: RunConfig, layer_number: int) -> Parameters:
    """Elements of a layer on a rank.

    With hidden size h, a heads and g groups of d channels, MLP width f, t tensor-parallel ranks: QKV h (a + 2 g') d / t
    (g' is g, but at least one group per rank), output projection a d h / t (other kinds of attention:
    ``AttentionKind.projections``), MLP 2 h f / t (gated: 3), E experts
    E h f_e 2 / (ep etp) (gated: 3), router h E; biases; norms.
    """
    model = config.model.of_layer(layer_number)
    tp = config.parallel.tensor_model_parallel_size
    attention = mixer_of(model, layer_number)
    norms = sum(norm_parameters(model, size) for size in attention.norms(tp))
    blocks = 1 if model.parallel_residual_shared_norm else model.has_mixer(layer_number) + model.has_mlp(layer_number)
    total = _vectors(norms + norm_parameters(model) * blocks * (2 if model.norm_placement == "sandwich" else 1))
    matrices, vectors = model.connection_elements
    total += Parameters(blocks * matrices) + _vectors(blocks * vectors)
    for projection in attention.projections(tp):
        of_projection = Parameters(projection.elements) + _vectors(projection.outputs * projection.has_bias)
        total += of_projection.freeze() if projection.frozen else of_projection
    total += _vectors(attention.vectors(tp)) + _vectors(attention.frozen_vectors()).freeze()
    if model.has_dense_mlp(layer_number):
        total += _vectors(2 * model.xielu)
    for layer in mlp_layers(model, config.parallel, layer_number):
        biases = sum(layer.pieces) * model.add_bias_linear * max(layer.experts, 1)
        if layer.experts:
            total += Parameters(experts=layer.experts * layer.elements + biases, expert_biases=biases)
        else:
            total += Parameters(layer.elements) + _vectors(biases)
    for outputs, inputs in feed_forward_of(model, layer_number).router_matrices():
        total += Parameters(outputs * inputs) + _vectors(outputs * model.add_bias_linear)
    return total


def embedding_parameters(config: RunConfig, vocab_size: int) -> Parameters:
    """Elements of the embedding on a rank: its part of the vocabulary, all learned positions, and its norm."""
    model = config.model
    table = padded_vocabulary(config, vocab_size) // config.parallel.tensor_model_parallel_size * model.hidden_size
    learned = model.position_embedding_type == "learned_absolute"
    norm = norm_parameters(model) if model.embedding_layernorm else 0
    return _vectors(table + (config.max_positions * model.hidden_size if learned else 0) + norm)


def head_parameters(config: RunConfig, vocab_size: int, *, with_embedding: bool) -> Parameters:
    """Elements of the last norm and of the output layer (0 if it is tied to an embedding on the same rank)."""
    model = config.model
    rows = padded_vocabulary(config, vocab_size) // config.parallel.tensor_model_parallel_size
    tied = model.share_embeddings_and_output_weights and with_embedding
    return _vectors(norm_parameters(model) + model.head_elements(rows, tied=tied))


def model_parameters(config: RunConfig, vocab_size: int) -> int:
    """Elements of the whole model, with the padding of its vocabulary on one rank."""
    unsplit = replace(config, parallel=ParallelConfig())
    ends = (count(unsplit, vocab_size, with_embedding=True) for count in (head_parameters, ahead_parameters))
    return Parameters.sum([*all_layers(unsplit), *ends, embedding_parameters(unsplit, vocab_size)]).total


def all_layers(config: RunConfig) -> list[Parameters]:
    """``layer_parameters`` of each layer."""
    return each_layer(layer_kinds(config), lambda layer: layer_parameters(config, layer))


def rank_units(
    config: RunConfig,
    layers: Sequence[range],
    stage_to_rank: Sequence[int],
    vocab_size: int,
    kinds: Sequence[int] | None = None,
) -> list[list[Parameters]]:
    """For each pipeline rank its units (embedding, each layer, head), which data parallelism gathers and frees.

    ``kinds``: ``layer_kinds`` of ``config``, if they are known.
    """
    ranks: list[list[Parameters]] = [[] for _ in range(max(stage_to_rank) + 1)]
    final = len(layers) - 1
    ends = stage_to_rank[0], stage_to_rank[final]
    kinds = layer_kinds(config) if kinds is None else kinds
    by_layer = each_layer(kinds, lambda layer: layer_parameters(config, layer))
    for stage, run in enumerate(layers):
        units = ranks[stage_to_rank[stage]]
        if stage == 0:
            units.append(embedding_parameters(config, vocab_size))
        units += [by_layer[layer] for layer in run]
        if stage == final:
            with_embedding = ends[0] == ends[1]
            head = head_parameters(config, vocab_size, with_embedding=with_embedding)
            units.append(head + ahead_parameters(config, vocab_size, with_embedding=with_embedding))
    if trains_whole_model(config):
        # The reference of preferences is a frozen copy of each unit.
        return [[unit + unit.freeze() for unit in units] for units in ranks] if config.optional("dpo") else ranks
    # The tensors that a feature adds, or indexers, are trained, everything else is frozen.
    trained = _indexer_parameters if added_tensors(config) is None else added_parameters
    added = each_layer(kinds, lambda layer: trained(config, layer))
    left = [[unit.freeze() for unit in units] for units in ranks]
    if config.model.head_name != "vocabulary":
        # Other heads are trained although the model is frozen, which was trained without them.
        elements = config.model.head_elements(0, tied=False)
        left[ends[1]][-1] += Parameters(elements, outside=elements, frozen=-elements)
    for stage, run in enumerate(layers):
        rank = stage_to_rank[stage]
        position = sum(len(layers[s]) + (s == 0) for s in range(stage) if stage_to_rank[s] == rank) + (stage == 0)
        for number, layer in enumerate(run, start=position):
            left[rank][number] += added[layer]
    return left


def _indexer_parameters(config: RunConfig, layer_number: int) -> Parameters:
    """The elements of a layer's indexer, of which a frozen layer counts as many as frozen."""
    attention = mixer_of(config.model, layer_number)
    tp = config.parallel.tensor_model_parallel_size
    vectors = 2 * config.value("dsa_indexer_head_dim")
    matrices = sum(projection.elements for projection in attention.projections(tp) if "indexer" in projection.module)
    return Parameters(matrices + vectors, outside=vectors, frozen=-matrices - vectors)


def layer_kinds(config: RunConfig) -> list[int]:
    """A number for each layer, equal for layers with the same computation and the same tensor sizes."""
    model = config.model
    in_eight_bits = config.training.eight_bit_layers(model.num_layers)
    seen: dict[object, int] = {}
    numbers = []
    for layer in range(model.num_layers):
        eight_bit = layer in in_eight_bits
        comm_type = comm_type_of(config, layer)
        added = added_parameters(config, layer)
        mixer = mixer_of(model, layer).name, model.window_of_layer(layer)
        blocks = model.feed_forward_name(layer), mixer, model.block_of(layer)
        traits = *blocks, comm_type, eight_bit, added
        numbers.append(seen.setdefault(traits, len(seen)))
    return numbers


def each_layer(kinds: Sequence[int], compute: Callable[[int], Computed]) -> list[Computed]:
    """``compute`` of each layer, called once for each of ``layer_kinds``."""
    results: dict[int, Computed] = {}
    for layer, layer_kind in enumerate(kinds):
        if layer_kind not in results:
            results[layer_kind] = compute(layer)
    return [results[layer_kind] for layer_kind in kinds]


def joins_parts(config: RunConfig, layer_number: int) -> bool:
    """Whether attention and MLP of a layer have one reduction over tensor-parallel ranks (``transformer.joined``)."""
    model = config.model
    parallel = config.parallel
    if not model.parallel_residual_shared_norm or not model.has_dense_mlp(layer_number):
        return False
    separate = (
        *(model.hidden_dropout > 0, parallel.layout_invariant, parallel.tp_comm_overlap_chunks > 1),
        *(config.optional("compile"), config.optional("lora_rank") is not None),
    )
    return attention_of(model).name == "grouped_query" and not model.is_recurrent(layer_number) and not any(separate)


def added_tensors(config: RunConfig) -> Callable[..., Iterable[AddedTensor]] | None:
    """The ``Feature.added_tensors`` of a run; None if it trains the weights of the model."""
    hooks = [feature.added_tensors for feature in used_features(config) if feature.added_tensors is not None]
    return load_hook(*hooks) if hooks else None


def trains_whole_model(config: RunConfig) -> bool:
    """Whether no weights are frozen."""
    return not config.optional("dsa_indexer_warmup") and added_tensors(config) is None


def added_parameters(config: RunConfig, layer_number: int) -> Parameters:
    """Elements of the tensors that a feature adds to a layer, on a rank."""
    parameters = Parameters()
    tensors_of = added_tensors(config)
    for shape, experts in () if tensors_of is None else tensors_of(config, config.parallel, layer_number):
        if len(shape) == 1:
            parameters += _vectors(*shape)
        else:
            parameters += Parameters(experts=experts * prod(shape)) if experts else Parameters(prod(shape))
    return parameters


def norm_parameters(model: ModelConfig, size: int | None = None) -> int:
    """Elements of a norm of ``size`` channels, by default of hidden states: usually a weight per channel, and for
    LayerNorm a bias per channel."""
    if size is None and model.disable_weight_layernorm:
        return 0
    return (model.hidden_size if size is None else size) * (1 + model.norms_have_biases)


def _vectors(elements: int) -> Parameters:
    """Elements of norms, biases and tables."""
    return Parameters(elements, outside=elements)


def ahead_parameters(config: RunConfig, vocab_size: int, *, with_embedding: bool) -> Parameters:
    """Elements of the multi-token prediction layers: each has a layer, three norms, and a projection
    of 2 h^2 / t; a rank without the embedding has a copy of it."""
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    if not model.added_layers:
        return Parameters()
    outside_of_layer = _vectors(3 * norm_parameters(model)) + Parameters(2 * model.hidden_size**2 // tp)
    layers = Parameters.sum(
        [outside_of_layer + layer_parameters(config, model.num_layers)] * model.distinct_added_layers
    )
    copied = not with_embedding and model.untie_embeddings_and_output_weights
    return layers + _vectors(padded_vocabulary(config, vocab_size) // tp * model.hidden_size * copied)
