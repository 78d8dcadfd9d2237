"""Memory of a rank by formula: weights, gradients and optimizer by parameter, activations by layer.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4, gives the activations of a GPT layer with MLP width 4h, dropout
and 16-bit numbers as s b h (34 + 5 a s / h) bytes. Here each of its terms has the sizes of the model at hand, so that
the paper's cases give the paper's numbers. It counts what backward needs: no temporary buffers, no fragmentation. What
a GPT and a Llama keep for backward with the native kernels on a CPU is within 10 % of it (tests/planner); without them
a gated MLP and RMSNorm keep up to 1.7 times as much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_core.config import RunConfig
from megatron_core.schedules.actions import Plan
from megatron_core.schedules.simulate import peak_activations


def state_by_kind(
    compute_dtype: str,
    data_parallel_size: int = 1,
    *,
    zero_stage: int = 0,
    moments: float = 2,
    has_main_weight: bool = True,
) -> dict[str, float]:
    """Bytes of a parameter by kind: ``optimizer`` (main weight and moments, half a moment for one in bfloat16),
    ``gradients`` in float32, ``weights``; in all 18 for 16-bit weights, 16 for float32.

    ZeRO splits over d data-parallel ranks: stage 1 main weight and moments (6 + 12 / d, 8 + 8 / d), 2 gradients, too
    (2 + 16 / d, 4 + 12 / d), 3 all (18 / d, 16 / d); what is whole for a while, a unit at a time, comes on top.
    Source: Rajbhandari et al. 2020, section 3.1, with gradients in float32.
    """
    weight = number_size(compute_dtype)
    wide = max(weight, 4)
    main = wide if weight < wide and has_main_weight else 0
    parts = {"optimizer": wide * moments + main, "gradients": wide, "weights": weight}
    return {
        kind: part / (data_parallel_size if zero_stage > at else 1) for at, (kind, part) in enumerate(parts.items())
    }


def layer_activations(config: RunConfig, layer_number: int = 0) -> float:
    """Bytes that a layer keeps of one micro-batch on one rank, unless the whole layer is recomputed.

    For each token, with n bytes a number, t tensor-parallel ranks, a heads and g groups of d channels, MLP width f:

        (4 n + 2) h / (t with sequence parallel, else 1)    inputs of norms, QKV and MLP; dropout masks
        + 2 n h / (the same)                                inputs of the norms behind them, if there are twice as many
        + n (2 a + 2 g) d / t                               queries, keys, values, and what attention returns
          (latent attention: 2 n a (d + v) / t and its latents, twice if they are normalized, as the first line)
        + n 2 f / t  (gated: 3 f)                           before and after the activation
        + a s (2 n + 1) / t                                 attention weights and their dropout, unless fused

    Selective recompute takes the terms of its modules away.
    A layer with experts has ``_expert_bytes`` instead of the third line.
    """
    model, n = config.model, _number_size(config)
    queries, keys = model.num_attention_heads * model.query_head_size, model.query_groups * model.query_head_size
    values = model.query_groups * model.value_head_size
    whole: float = 4 * n * model.hidden_size + (2 * model.hidden_size if model.hidden_dropout else 0)
    if model.recomputes("layernorm"):
        whole -= 2 * n * model.hidden_size
    experts = model.has_experts(layer_number)
    width = (model.moe_shared_expert_intermediate_size or 0) if experts else model.ffn_size
    if model.multi_latent_attention:
        whole += n * ((model.q_lora_rank or 0) + model.kv_lora_rank) * (2 if model.qk_layernorm else 1)
    if model.recomputes("shared_experts" if experts else "mlp"):
        width = 0
    if model.recomputes("mla_up_proj"):
        queries = keys = values = 0
    outputs = model.num_attention_heads * model.value_head_size * (3 if model.attention_output_gate else 1)
    split: float = n * (queries + keys + values + outputs) + n * width * (3 if model.gated_linear_unit else 2)
    if model.norm_placement == "sandwich":
        whole += 2 * n * model.hidden_size
    if model.qk_layernorm and not model.multi_latent_attention:
        split += n * (queries + keys)
    split += _score_bytes(config) + (_expert_bytes(config) if experts else 0)
    tp = config.parallel.tensor_model_parallel_size
    return _tokens(config) * (whole / _sequence_parts(config) + split / tp)


def _expert_bytes(config: RunConfig) -> float:
    """Bytes of one token for the router and the experts, with the mean load and none dropped; a rank has 1 / t of the
    tokens. With E experts, k of them for a token, width f of each, n bytes a number and u tensor ranks of an expert:

        4 h (16-bit numbers alone) + 4 E (3)    input of the router, logits (and what the balancing loss keeps)
        + k (n u h + n 3 f (gated: 4 f))        rows that are sent, before and after the activation, times probability
    """
    model, n = config.model, _number_size(config)
    if model.recomputes("moe"):
        return 0
    inner = ((4 if model.gated_linear_unit else 3) - 2 * model.recomputes("moe_act")) * model.expert_ffn_size
    rows = model.moe_router_topk * n * (config.parallel.expert_tensor_size * model.hidden_size + inner)
    logits = 4 * (model.num_experts or 0) * (3 if model.balancing_loss else 1)
    return rows + logits + (4 * model.hidden_size if n < 4 else 0)


def _score_bytes(config: RunConfig) -> int:
    """Bytes of one token's attention weights over all heads: none with selective recompute, sums of rows if fused or
    if keys come from other ranks, where backward computes the weights again."""
    model, n = config.model, _number_size(config)
    if model.recomputes("core_attn"):
        return 0
    shared = config.parallel.context_parallel_size > 1 and set(config.parallel.cp_comm_type) != {"a2a"}
    if shared or (model.attention_backend == "auto" and not model.attention_dropout):
        return 4 * model.num_attention_heads
    return model.num_attention_heads * config.data.seq_length * (2 * n + 1 if model.attention_dropout else n)


def stage_activations(
    config: RunConfig,
    layers: range,
    *,
    first: bool,
    last: bool,
    padded_vocab_size: int,
    each: Mapping[int, float] | None = None,
) -> float:
    """Bytes that a stage keeps of one micro-batch: its layers, and those of the embedding and the output layer.

    A recomputed run of layers keeps its input alone: n s b h, over t with sequence parallel. What is offloaded lies on
    the host. The embedding keeps its dropout mask, the output layer its inputs and the logits (Korthikanti et al. 2022,
    section 4.3, where these are float32; here the loss keeps them as they are). ``each`` has the bytes of each layer,
    if they are known.
    """
    model, n, tokens = config.model, _number_size(config), _tokens(config)
    row = tokens * model.hidden_size / _sequence_parts(config)
    recomputed, inputs = recomputed_layers(config, len(layers))
    away = min(model.cpu_offloading_num_layers, len(layers)) if model.cpu_offloading else 0
    if recomputed:
        inputs -= -(-min(away, recomputed) * inputs // recomputed)
    kept = layers[max(recomputed, away if not recomputed else 0) :]
    held = sum(layer_activations(config, layer) if each is None else each[layer] for layer in kept) + inputs * n * row
    if first and model.hidden_dropout:
        held += row
    if last:
        held += 2 * n * row
        if not model.fuses_output_layer_with_loss:
            held += n * tokens * padded_vocab_size / config.parallel.tensor_model_parallel_size
        held += (model.mtp_num_layers or 0) * _mtp_bytes(config, padded_vocab_size)
    return held


def _mtp_bytes(config: RunConfig, padded_vocab_size: int) -> float:
    """Bytes of a layer of multi-token prediction: embedding, last state and both normalized, a layer, and a head."""
    model, n, tokens = config.model, _number_size(config), _tokens(config)
    row = n * tokens * model.hidden_size / _sequence_parts(config)
    recomputed = model.recompute_granularity == "full"
    held = 4 * row if recomputed else 6 * row + layer_activations(config, model.num_layers)
    if not model.fuses_output_layer_with_loss:
        held += n * tokens * padded_vocab_size / config.parallel.tensor_model_parallel_size
    return held


def offloaded_activations(config: RunConfig, layers: range) -> float:
    """Bytes of a stage's activations of one micro-batch that lie in the host's memory."""
    model = config.model
    if not model.cpu_offloading:
        return 0.0
    stays = replace(config, model=replace(model, cpu_offloading=False))
    whole, left = (
        stage_activations(each, layers, first=False, last=False, padded_vocab_size=0) for each in (stays, config)
    )
    return whole - left


def peak_activation_bytes(
    config: RunConfig, plan: Plan, layers: Sequence[range], padded_vocab_size: int
) -> tuple[float, ...]:
    """Each pipeline rank's peak: what the plan holds of every stage at once, and the run of layers being recomputed."""
    last = len(layers) - 1
    sizes = [
        stage_activations(config, run, first=at == 0, last=at == last, padded_vocab_size=padded_vocab_size)
        for at, run in enumerate(layers)
    ]
    working = transient_activations(config, layers)
    return tuple(peak + working for peak in peak_activations(plan, stage_sizes=sizes))


def transient_activations(config: RunConfig, layers: Sequence[range], each: Mapping[int, float] | None = None) -> float:
    """Bytes of the layers whose activations are there for a while alone: a recomputed run, or an offloaded layer."""
    longest, model = 0, config.model
    if model.recompute_granularity == "full":
        longest = model.recompute_num_layers or 1 if model.recompute_method == "uniform" else 1
    elif model.cpu_offloading:
        longest = 1
    if not longest:
        return 0.0
    sizes = (layer_activations(config, layer) if each is None else each[layer] for run in layers for layer in run)
    return min(longest, max(map(len, layers), default=0)) * max(sizes, default=0.0)


def recomputed_layers(config: RunConfig, num_layers: int) -> tuple[int, int]:
    """How many layers of a stage are recomputed, and how many inputs are kept for it."""
    model, every = config.model, config.model.recompute_num_layers or 1
    if model.recompute_granularity != "full":
        return 0, 0
    if model.recompute_method == "uniform":
        return num_layers, -(-num_layers // every)
    return min(every, num_layers), min(every, num_layers)


def number_size(dtype: str) -> int:
    """Bytes of a number."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _number_size(config: RunConfig) -> int:
    return number_size(config.training.compute_dtype)


def _tokens(config: RunConfig) -> float:
    """Tokens of a micro-batch on one rank."""
    return config.data.seq_length * config.training.micro_batch_size / config.parallel.context_parallel_size


def _sequence_parts(config: RunConfig) -> int:
    """Over how many ranks the activations between matrix products are split."""
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
