"""Formulas for a rank's memory: weights, gradients and optimizer state per parameter, activations per layer.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4, gives the activations of a GPT layer with MLP width 4h, dropout
and 16-bit elements as s b h (34 + 5 a s / h) bytes. Here each term of this formula uses the sizes of the given model,
so that the paper's cases give the paper's numbers. Only tensors saved for backward are counted, without temporary
buffers and fragmentation. The measured bytes saved by a GPT and a Llama with the native kernels on a CPU are within
10 % of the formula (tests/planner); without native kernels a gated MLP and RMSNorm save up to 1.7 times as much.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_core.config import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from megatron_core.config.attention import QUERY_BLOCK
from megatron_core.config.linear_layers import feed_forward_of, linear_layers
from megatron_core.config.mixers import mixer_of
from megatron_core.planner.hardware import number_size
from megatron_core.planner.parameters import added_tensors, trains_whole_model

ADAM = OptimizerConfig()


def state_by_kind(
    compute_dtype: str,
    data_parallel_size: int = 1,
    *,
    zero_stage: int = 0,
    optimizer: OptimizerConfig = ADAM,
    hidden: bool = True,
    added_moments: int = 0,
) -> dict[str, float]:
    """Bytes per parameter by kind: ``optimizer`` (main weight and moments), ``gradients`` in float32, ``weights``;
    with Adam the total is 18 for 16-bit weights, 16 for float32.

    ``hidden``: whether the parameter is part of a hidden matrix, which may have an optimizer of its own (Muon).
    ``added_moments``: moments of gradient compression.

    ZeRO shards over d data-parallel ranks: stage 1 main weight and moments (6 + 12 / d, 8 + 8 / d), stage 2 also
    gradients (2 + 16 / d, 4 + 12 / d), stage 3 everything (18 / d, 16 / d). Units that are temporarily unsharded are
    not included. Source: Rajbhandari et al. 2020, section 3.1, with gradients in float32.
    """
    weight = number_size(compute_dtype)
    wide = max(weight, 4)
    main = wide if weight < wide and "main_params_dtype" not in optimizer.bf16_settings else 0
    moments = optimizer.kind_of(hidden=hidden).moment_bytes(optimizer, wide) + wide * added_moments
    sizes = {"optimizer": moments + main, "gradients": wide, "weights": weight}
    shards = [data_parallel_size if zero_stage > stage else 1 for stage in range(len(sizes))]
    return {name: size / number for (name, size), number in zip(sizes.items(), shards, strict=True)}


def layer_activations(config: RunConfig, layer_number: int = 0) -> float:
    """Bytes that a layer saves for one micro-batch on one rank, without full recomputation.

    Per token, with n bytes per element, t tensor-parallel ranks, a heads and g groups of d channels, MLP width f:

        (4 n + 2) h / (t with sequence parallel, else 1)    inputs of norms, QKV and MLP; dropout masks
        + 2 n h / (the same)                                inputs of the output norms, with sandwich placement
        + n (2 a + 2 g) d / t                               queries, keys, values, and outputs of attention; other
                                                            kinds: ``AttentionKind.saved``
        + n 2 f / t  (gated: 3 f)                           before and after the activation
        + a s (2 n + 1) / t                                 attention weights and their dropout, unless fused; for
                                                            more than 256 tokens only those of a block's keys

    Selective recomputation removes the terms of its modules. A layer with one part has half of the first two terms.
    If attention and MLP share a norm, the first term has half of its inputs, and both masks. With
    ``fp32_residual_connection`` inputs of norms that read the residual stream have 4 bytes instead of n.
    Other feed-forward parts, as experts, have other terms: ``FeedForward.saved_bytes``.
    """
    model = config.model.of_layer(layer_number)
    n = _number_size(config)
    replicated, of_heads = mixer_of(model, layer_number).saved()
    sublayers = model.has_mixer(layer_number) + model.has_mlp(layer_number)
    saved_per_norm = (1 if model.recomputes("layernorm") else 2) + (model.norm_placement == "sandwich")
    norms = 1 if model.parallel_residual_shared_norm else sublayers
    mask = 1 if model.hidden_dropout else 0
    split_by_sequence: float = model.hidden_size * (norms * n * saved_per_norm + sublayers * mask) + n * replicated
    if model.norm_placement != "post":
        split_by_sequence += model.hidden_size * norms * (number_size(config.residual_dtype) - n)
    if model.stream_size > model.hidden_size:
        # The streams, in float32 for the weights of their sum, the sum, and masks of all streams.
        of_stream = number_size(config.residual_dtype)
        saved_streams = model.stream_size * (of_stream + (4 if of_stream < 4 else 0) + mask)
        split_by_sequence += sublayers * (saved_streams + model.hidden_size * (n - mask))
    split: float = n * of_heads
    split += feed_forward_of(model, layer_number).saved_bytes(n, config.parallel.expert_tensor_size)
    split += _score_bytes(config) if model.has_attention(layer_number) else 0
    tp = config.parallel.tensor_model_parallel_size
    return _tokens(config) * (split_by_sequence / _sequence_parts(config) + split / tp)


def _score_bytes(config: RunConfig) -> int:
    """Bytes per token of attention weights over all heads: 0 with selective recomputation, and with sparse attention,
    which always recomputes; only the log-sum-exp of each row if attention is fused or if keys are on other ranks,
    because backward computes the weights again."""
    model = config.model
    n = _number_size(config)
    if model.recomputes("core_attn") or model.attention_name == "sparse_latent":
        return 0
    shared = config.parallel.context_parallel_size > 1 and set(config.value("cp_comm_type")) != {"a2a"}
    if shared or (model.attention_backend != "unfused" and not model.attention_dropout):
        return 4 * model.num_attention_heads
    keys = computed_weights(model, config.data.seq_length) / config.data.seq_length
    return round(model.num_attention_heads * keys * (2 * n + 1 if model.attention_dropout else n))


def stage_activations(
    config: RunConfig,
    layers: range,
    *,
    first: bool,
    has_head: bool,
    padded_vocab_size: int,
    by_layer: Mapping[int, float] | None = None,
) -> float:
    """Bytes that a stage saves for one micro-batch: its layers, and the embedding and the output layer.

    A recomputed group of layers saves only its input: n s b h (with ``fp32_residual_connection`` 4 s b h), divided by t
    with sequence parallelism. Offloaded activations are in host memory and are not counted. The embedding saves its
    dropout mask and the input of its norm, the output layer its inputs and the logits (Korthikanti et al. 2022,
    section 4.3, where logits are float32; here the loss saves them in their own dtype). ``by_layer`` gives the bytes of
    each layer; None: compute them.
    """
    model = config.model
    n = _number_size(config)
    tokens = _tokens(config)
    row = tokens * model.hidden_size / _sequence_parts(config)
    of_stream = number_size(config.residual_dtype)
    recomputed, inputs = recomputed_layers(config, len(layers))
    away = min(model.cpu_offloading_num_layers, len(layers)) if model.cpu_offloading else 0
    if recomputed:
        inputs -= -(-min(away, recomputed) * inputs // recomputed)
    saving = layers[max(recomputed, away if not recomputed else 0) :]
    size = sum(layer_activations(config, layer) if by_layer is None else by_layer[layer] for layer in saving)
    streams = model.stream_size / model.hidden_size
    # The model's first layer gets one stream.
    size += (inputs * streams - (streams - 1) * (first and inputs > 0)) * of_stream * row
    if first:
        size += row * (bool(model.hidden_dropout) + n * model.embedding_layernorm)
    if has_head:
        size += (of_stream + n) * row
        if not model.fuses_output_layer_with_loss:
            size += (
                _logit_size(config)
                * tokens
                * model.head_columns(padded_vocab_size // config.parallel.tensor_model_parallel_size)
            )
        size += (model.added_layers) * _mtp_bytes(config, padded_vocab_size)
    return size


def _logit_size(config: RunConfig) -> int:
    """Bytes of a logit that the loss saves."""
    return max(_number_size(config), 4 if config.optional("output_logit_dtype") == "fp32" else 0)


def _mtp_bytes(config: RunConfig, padded_vocab_size: int) -> float:
    """Bytes of a multi-token prediction layer: embedding and last hidden state with their norms, a layer, a head."""
    model = config.model
    n = _number_size(config)
    tokens = _tokens(config)
    row = n * tokens * model.hidden_size / _sequence_parts(config)
    recomputed = model.recompute_granularity == "full"
    before_last_norm = number_size(config.residual_dtype) / n * row
    size = 4 * row if recomputed else 5 * row + before_last_norm + layer_activations(config, model.num_layers)
    if not model.fuses_output_layer_with_loss:
        size += _logit_size(config) * tokens * padded_vocab_size / config.parallel.tensor_model_parallel_size
    return size


def offloaded_activations(config: RunConfig, layers: range) -> float:
    """Bytes of a stage's activations of one micro-batch in host memory."""
    model = config.model
    if not model.cpu_offloading:
        return 0.0
    stays = replace(config, model=replace(model, cpu_offloading=False))
    in_all, left = (
        stage_activations(run, layers, first=False, has_head=False, padded_vocab_size=0) for run in (stays, config)
    )
    return in_all - left


def transient_activations(
    config: RunConfig, layers: Sequence[range], by_layer: Mapping[int, float] | None = None
) -> float:
    """Bytes of temporary activations: of a recomputed group of layers, or of two offloaded layers."""
    longest = 0
    model = config.model
    if model.recompute_granularity == "full":
        longest = model.recompute_num_layers or 1 if model.recompute_method == "uniform" else 1
    elif model.cpu_offloading:
        longest = min(model.cpu_offloading_num_layers, 2)  # one runs while the other leaves or returns
    if not longest:
        return 0.0
    all_layers = [layer for run in layers for layer in run]
    sizes = (layer_activations(config, layer) if by_layer is None else by_layer[layer] for layer in all_layers)
    return min(longest, max(map(len, layers), default=0)) * max(sizes, default=0.0)


def recomputed_layers(config: RunConfig, num_layers: int) -> tuple[int, int]:
    """Number of recomputed layers of a stage, and number of inputs saved for them."""
    model = config.model
    every = config.model.recompute_num_layers or 1
    if model.recompute_granularity != "full":
        return 0, 0
    if model.recompute_method == "uniform":
        return num_layers, -(-num_layers // every)
    return min(every, num_layers), min(every, num_layers)


def _number_size(config: RunConfig) -> int:
    return number_size(config.training.compute_dtype)


def _tokens(config: RunConfig) -> float:
    """Tokens of a micro-batch on one rank."""
    return config.data.seq_length * config.training.micro_batch_size / config.parallel.context_parallel_size


def _sequence_parts(config: RunConfig) -> int:
    """Number of ranks that share the activations between matrix products (sequence parallelism)."""
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1


QKV = "linear_qkv"


class Matrices(NamedTuple):
    """Trained matrices of one shape, over all ranks."""

    pieces: tuple[int, ...]
    """Rows of each matrix that is stored in one."""
    columns: int
    copies: int = 1
    """Number of such matrices, such as those of the experts of a layer."""
    has_heads: bool = False
    """Whether the pieces are queries, keys and values."""


def matrix_state_elements(config: RunConfig, layers: list[int], *, has_mtp: bool) -> int:
    """Elements of the state of the hidden matrices in ``layers`` over all ranks, 0 for most optimizers.

    ``has_mtp``: also those of the multi-token prediction layers.
    """
    elements = config.optimizer.kind_of(hidden=True).matrix_elements
    if elements is None:
        return 0
    model = config.model
    owned = [owner for layer in layers for owner in _matrices(config, layer)]
    for _ in range(model.distinct_added_layers * has_mtp):
        if added_tensors(config) is None:
            owned += [*_matrices(config, model.num_layers), Matrices((model.hidden_size,), 2 * model.hidden_size)]
    return sum(
        owner.copies * elements(config.optimizer, owner.pieces, owner.columns, owner.has_heads) for owner in owned
    )


def _matrices(config: RunConfig, layer_number: int) -> Iterator[Matrices]:
    """The trained hidden matrices of a layer."""
    model = config.model
    tensors_of = added_tensors(config)
    if tensors_of is not None:
        for shape, experts in tensors_of(config, ParallelConfig(), layer_number):
            if len(shape) == 2:
                yield Matrices(shape[:1], shape[1], experts or 1)
        return
    is_warmup = not trains_whole_model(config)  # of indexers, while all other weights are frozen
    for path, inputs, pieces, experts, frozen in linear_layers(model, ParallelConfig(), layer_number):
        name = path.rpartition(".")[2]
        if not frozen and not (is_warmup and "indexer" not in path):
            if name == QKV and model.attention_output_gate:  # queries and gates are pieces of their own
                pieces = pieces[0] // 2, pieces[0] // 2, *pieces[1:]
            yield Matrices(pieces, inputs, experts or 1, name == QKV)
    weights = model.connection_elements[0] // model.stream_size
    if weights and not is_warmup:
        yield Matrices((weights,), model.stream_size, model.has_mixer(layer_number) + model.has_mlp(layer_number))
    for outputs, inputs in () if is_warmup else feed_forward_of(model, layer_number).router_matrices():
        yield Matrices((outputs,), inputs)


def computed_weights(model: ModelConfig, length: int) -> int:
    """Attention weights per head that are computed for a sequence if attention is not fused.

    The reference computes all of them; blocks of queries only those of the keys up to the last query of the block.
    """
    if model.attention_backend == "unfused":
        return length**2
    starts = range(0, length, QUERY_BLOCK)
    return sum(min(QUERY_BLOCK, length - start) * min(start + QUERY_BLOCK, length) for start in starts)
