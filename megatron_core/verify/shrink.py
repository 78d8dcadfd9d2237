"""Reduce the sizes of a model and keep all its features."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, lcm
from typing import Any

from megatron_core.config import CheckpointConfig, ModelConfig, RunConfig
from megatron_core.config.attention import attention_of
from megatron_core.config.layer_settings import LayerBlock
from megatron_core.config.setting import declarations
from megatron_core.config.training import BadStepConfig
from megatron_core.config.validate import problems
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.features.layer_sizes.settings import HeterogeneousConfig, write_blocks
from megatron_core.features.outer_steps.settings import OuterConfig
from megatron_core.features.recurrent.kinds import Mamba2
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.features.sparse_attention.settings import SparseAttentionConfig
from megatron_core.features.stage_layouts.settings import ENDS, StageLayoutConfig
from megatron_core.planner.layout import Layout
from megatron_core.resilience.settings import ElasticConfig, FaultConfig, RecoveryConfig, RerunConfig
from megatron_core.text_file import read_table
from megatron_core.verify.together import shared_micro_batches

MOST_LAYERS = MOST_HEADS = MOST_EXPERTS = 8
HEAD_SIZE, SEQUENCE = 8, 16
LARGE_WORLD, LARGE_WORLD_HEAD_SIZE, LARGE_WORLD_SEQUENCE = 512, 4, 8
"""Worlds of at least ``LARGE_WORLD`` ranks hold many activations: with Llama 3 405B's stages on 128 ranks, two steps
took 5.8 GB with the usual sizes and 2.3 GB with these."""
_NAMES = read_table(__file__)
SIZES, RESET, OF_COMPARISON = (_NAMES[table].split() for table in ("sizes", "reset", "of_comparison"))
VOCABULARY = 101  # a prime: some rank always has padding in its part of the vocabulary
STEPS = 10
"""Steps of the whole training, of which a comparison takes the first ones."""
LEARNING_RATE = 1e-3
WARMUP, DECAY, LAST_PHASE = 2, 8, 4
"""Steps of the parts of the learning rate's schedule."""
FP16: dict[str, Any] = {"initial_loss_scale": 256.0}
"""The first steps of a comparison must not be left out because of infinite gradients."""


def shrunk(config: RunConfig, layouts: Sequence[Layout], *, keep_layers: bool = False) -> RunConfig:
    """Return ``config`` with sizes that take milliseconds per step and are legal for all ``layouts``.

    ``keep_layers`` keeps the number of layers, for settings that assign layers to stages.

    The features of the model are kept: norms, activations, positions, biases, the share of query groups, tying,
    dropout, recomputation, optimizer. Whether stages have equally many layers, and whether a rank has whole key-value
    groups and several experts, remains as it is, because ranks compute differently then. Data and checkpoints are
    removed.
    """
    tp, cp = (lcm(*(getattr(layout, axis) for layout in layouts)) for axis in ("tp", "cp"))
    stages = max(layout.num_stages for layout in layouts)
    small = config.flat() | small_run() | _training(config, layouts) | _outer(config)
    small |= _model(config, tp, cp, stages, layouts)
    small |= {"num_layers": config.model.num_layers} if keep_layers else {}
    for schedule in short_schedules(config, small["global_batch_size"], small["seq_length"]):
        candidate = RunConfig.from_flat(small | schedule).flat()
        configs = [(RunConfig.from_flat(candidate | layout.settings()), layout.world_size) for layout in layouts]
        if not any(any(problems(*config_and_size)) for config_and_size in configs):
            small |= schedule
    return RunConfig.from_flat(small)


def shrunk_stages(config: RunConfig, layout: Layout) -> dict[str, Any] | None:
    """``num_layers`` and the settings that assign layers to stages with fewer layers, and the same differences between
    the stages; None if there is no smaller number, or for a ``pipeline_model_parallel_layout``.
    """
    parallel = config.parallel.section(StageLayoutConfig)
    layers = config.model.num_layers
    if parallel.pipeline_model_parallel_layout is not None or layout.pp == 1:
        return None
    if parallel.accounted_layers:
        layers_per_stage, remainder = divmod(layers + parallel.accounted_layers, layout.num_stages)
        fewer = layout.num_stages * min(layers_per_stage, 2) + remainder - parallel.accounted_layers
        return {"num_layers": fewer} if fewer < layers else None
    ends = {name: getattr(parallel, name) for name in ENDS if getattr(parallel, name) is not None}
    middle_stages = layout.pp - len(ends)
    if not ends or middle_stages == 0:
        return None
    usual = (layers - sum(ends.values())) // middle_stages
    more = {name: count - usual for name, count in ends.items()}
    least = max(layout.chunks, *(layout.chunks - number for number in more.values()))
    small = {name: least + number for name, number in more.items()}
    fewer = least * middle_stages + sum(small.values())
    return {"num_layers": fewer, **small} if fewer < layers else None


def _model(config: RunConfig, tp: int, cp: int, stages: int, layouts: Sequence[Layout]) -> dict[str, Any]:
    # Heads, layers, hidden size and sequence length.
    model = config.model.section(RecurrentConfig)
    large = max(layout.world_size for layout in layouts) >= LARGE_WORLD
    head_size, sequence = (LARGE_WORLD_HEAD_SIZE, LARGE_WORLD_SEQUENCE) if large else (HEAD_SIZE, SEQUENCE)
    head_ranks = tp if set(config.value("cp_comm_type")) <= {"p2p", "all_gather"} else tp * cp  # a2a exchanges heads
    heads, groups = _heads(model, tp, head_ranks)
    layers = max(min(model.num_layers, MOST_LAYERS), stages)
    if model.num_layers > layers:
        layers += (model.num_layers - layers) % stages  # stages remain as uneven as they are
    hidden = heads * head_size
    unit = lcm(tp * cp, 2 * cp) if cp > 1 else tp
    sizes: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": head_size if model.kv_channels else None,
        "max_position_embeddings": None,
        "seq_length": -(-min(config.data.seq_length, sequence) // unit) * unit,
        "make_vocab_size_divisible_by": min(model.make_vocab_size_divisible_by, 8),
        # Large enough that every part of the small model affects its loss.
        "init_method_std": 0.05,
    }
    # Sizes of optional features.
    if model.ffn_hidden_size is not None:
        unit = 8 * tp
        sizes["ffn_hidden_size"] = max(round(hidden * model.ffn_hidden_size / model.hidden_size / unit), 1) * unit
    if (experts := model.section(MoEConfig)).num_experts is not None:
        sizes |= _experts(experts, layouts, layers, hidden)
    if model.num_query_groups is not None:
        sizes["num_query_groups"] = groups
    if (latent := model.section(LatentAttentionConfig)).multi_latent_attention:
        rank = None if latent.q_lora_rank is None else 12
        sizes |= {"q_lora_rank": rank, "kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 8, "v_head_dim": 10}
    if model.section(SparseAttentionConfig).has_sparse_attention:
        sizes |= {"dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 10}
        sizes["dsa_indexer_topk"] = min(model.section(SparseAttentionConfig).dsa_indexer_topk, sequence // 4)
    if attention_of(model).rotary_channels:
        sizes["rotary_percent"] = max(round(head_size * model.rotary_percent / 2), 1) * 2 / head_size
    # Windows, lists by layer, and recomputation.
    if model.window_size is not None:
        sizes["window_size"] = (min(model.window_size[0], sequence // 4), model.window_size[1])
    if model.window_attn_skip_freq is not None and len(model.window_attn_skip_freq) > 1:
        sizes["window_attn_skip_freq"] = (model.window_attn_skip_freq * layers)[:layers]
    if model.attention_chunk_size is not None:
        sizes["attention_chunk_size"] = min(model.attention_chunk_size, sequence // 4)
    if model.no_rope_freq is not None and len(model.no_rope_freq) > 1:
        sizes["no_rope_freq"] = (model.no_rope_freq * layers)[:layers]
    if model.hybrid_layer_pattern is not None:
        sizes |= _pattern(model, tp, layers)
    if model.layers_differ_in_size:
        sizes["heterogeneous_layers_config_encoded_json"] = write_blocks(_blocks(model, tp, layers, heads, hidden))
    if model.has_recurrence:
        sizes |= _recurrence(model, tp, layers) if model.may_have("G") else {}
        needed = 2 * cp * (model.linear_conv_kernel_dim - 1)  # tokens of each part for the convolution
        sizes["seq_length"] = max(sizes["seq_length"], -(-needed // unit) * unit)
    if len(config.value("cp_comm_type")) > 1:
        sizes["cp_comm_type"] = (config.value("cp_comm_type") * layers)[:layers]
    if model.recompute_num_layers is not None:
        sizes["recompute_num_layers"] = min(model.recompute_num_layers, max(layers // stages, 1))
    return sizes


def _recurrence(model: ModelConfig, tp: int, layers: int) -> dict[str, Any]:
    """Sizes of few small heads, and the kinds of the last layers, among them both kinds if the model has both."""
    model = model.section(RecurrentConfig)
    heads = tp * max(MOST_HEADS // tp, 1)
    shared = model.linear_num_value_heads // model.linear_num_key_heads
    kinds: dict[str, Any] = {}
    if model.hybrid_layer_pattern is None:
        pattern = [model.is_recurrent(layer) for layer in range(model.num_layers)]
        pattern = [any(pattern), *(pattern * layers)[-(layers - 1) :]] if layers > 1 else [True]
        kinds["linear_attention_freq"] = tuple(map(int, pattern)) if layers > 1 else (2,)
    return kinds | {
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * min(shared, 2),
    }


def _pattern(model: ModelConfig, tp: int, layers: int) -> dict[str, Any]:
    """A pattern of ``layers`` letters with all letters of the model, and sizes of few small Mamba heads."""
    model = model.section(RecurrentConfig)
    pattern = model.hybrid_layer_pattern or ""
    letters = "".join(dict.fromkeys(pattern))
    remainder = (pattern * layers)[: max(layers - len(letters), 0)]
    sizes: dict[str, Any] = {"hybrid_layer_pattern": (letters + remainder)[:layers]}
    if not model.has_mamba:
        return sizes
    groups = tp * max(min(model.mamba_num_groups, MOST_HEADS) // tp, 1)
    shared = min(Mamba2(model).heads // model.mamba_num_groups, 2)
    heads = {"mamba_num_groups": groups, "mamba_num_heads": groups * shared}
    return sizes | heads | {"mamba_state_dim": 6, "mamba_head_dim": 4}


def _blocks(model: ModelConfig, tp: int, layers: int, heads: int, hidden: int) -> list[LayerBlock]:
    """``layers`` layers, among them as many as possible of the kinds of layers of the model, with small sizes."""
    model = model.section(HeterogeneousConfig)
    kinds = [*dict.fromkeys(model.blocks)]
    unit = 8 * tp
    blocks = list[LayerBlock]()
    for block in (kinds + [*model.blocks] * layers)[:layers]:
        groups = block.attention.size
        width = block.mlp.size
        if groups is not None:
            groups = _groups(groups, model.num_attention_heads, heads, tp)
        if width is not None:
            width = max(round(hidden * width / model.hidden_size / unit), 1) * unit
        blocks.append(LayerBlock(replace(block.attention, size=groups), replace(block.mlp, size=width)))
    return blocks


def _heads(model: ModelConfig, tp: int, head_ranks: int) -> tuple[int, int]:
    """Numbers of heads and of key-value groups; a rank that has whole groups keeps one."""
    old = heads = model.num_attention_heads
    if heads > MOST_HEADS or heads % head_ranks:
        heads = head_ranks * max(MOST_HEADS // head_ranks, 1)
    if model.num_query_groups is None:
        return heads, heads
    groups = _groups(model.num_query_groups, old, heads, tp)
    if model.num_query_groups % tp == 0 and groups % tp:
        groups = tp
        heads = lcm(heads, groups * min(max(old // model.num_query_groups, 1), 2))
    return heads, groups


def _groups(groups: int, old_heads: int, heads: int, tp: int) -> int:
    """Number of key-value groups: about the same share, a divisor of the heads, and compatible with ``tp``."""
    share = gcd(max(heads * groups // old_heads, 1), heads)
    return share if share % tp == 0 or tp % share == 0 else gcd(share, tp)


def _experts(model: MoEConfig, layouts: Sequence[Layout], layers: int, hidden: int) -> dict[str, Any]:
    """Sizes of few small experts: their number is divisible by ep, their widths by etp and tp."""
    ep = lcm(*(layout.ep for layout in layouts))
    unit = 8 * lcm(*(layout.etp or layout.tp for layout in layouts), *(layout.tp for layout in layouts))
    experts = model.num_experts or 1
    k = model.moe_router_topk
    groups = model.moe_router_num_groups
    sizes: dict[str, Any] = {}
    if experts > MOST_EXPERTS or experts % ep:
        share = model.moe_router_group_topk
        if groups is not None and share is not None:
            groups, share = (2, 1) if share < groups else (2, 2)
            sizes |= {"moe_router_num_groups": groups, "moe_router_group_topk": share}
        several = 2 * ep if experts >= 2 * ep else ep  # a rank with several experts sorts its rows
        experts = lcm(MOST_EXPERTS, several)
        sizes |= {"num_experts": experts, "moe_router_topk": min(k, 2)}
    for name in ("moe_ffn_hidden_size", "moe_latent_size", "moe_shared_expert_intermediate_size"):
        if (size := getattr(model, name)) is not None:
            sizes[name] = max(round(hidden * size / model.hidden_size / unit), 1) * unit
    if model.moe_ffn_hidden_size is None and model.ffn_hidden_size is None:
        sizes["moe_ffn_hidden_size"] = unit
    if len(model.moe_layer_freq) > 1:
        pattern = model.moe_layer_freq[-layers:]
        sizes["moe_layer_freq"] = (*([0] if 0 in model.moe_layer_freq else pattern[:1]), *pattern[1:])
        sizes["moe_layer_freq"] += (1,) * (layers - len(sizes["moe_layer_freq"]))
    return sizes


def _training(config: RunConfig, layouts: Sequence[Layout]) -> dict[str, Any]:
    copies = lcm(*(layout.dp for layout in layouts))
    # Enough micro-batches to fill the pipeline.
    batches_per_copy = max(-(-8 // copies), *(-(-layout.pp * layout.dp // copies) for layout in layouts))
    # Sequences that are computed together and affect each other need company in pipelines, too.
    size = 2 if shared_micro_batches(config) else 1
    return {
        "micro_batch_size": size,
        "global_batch_size": copies * batches_per_copy * size,
        "lr": LEARNING_RATE,
        "min_lr": 0.0,
        # Adam divides by the magnitude of the gradients, which hides a constant factor and magnifies the rounding of
        # gradients close to zero; a large epsilon prevents both.
        "adam_eps": 1e-3,
        # Below the gradient norms of this model, so that clipping, and thus the norm, affects every weight.
        "clip_grad": 0.5,
        # Several buckets instead of one.
        "ddp_bucket_size": 3000,
    } | (FP16 if config.training.fp16 else {})


def _outer(config: RunConfig) -> dict[str, Any]:
    """Exchanges of groups of replicas that begin and end within three steps."""
    outer = config.section(OuterConfig)
    steps = {"outer_steps": min(outer.outer_steps, 2), "outer_delay": min(outer.outer_delay, 1)}
    return steps | {"outer_fragments": min(outer.outer_fragments, 2)}


def short_schedules(config: RunConfig, batch: int, length: int) -> Iterator[dict[str, Any]]:
    """Yield settings for each schedule of ``config``, which can be left out on their own.

    A ramp begins with ``batch`` samples, or ``length`` tokens, which are legal in all layouts, and ends with twice as
    many after the first step.
    """
    # GroupsInOneProcess, with which outer groups are compared, has a constant batch.
    if config.num_groups == 1 and config.optional("step_batch_size_schedule") is not None:
        steps = (f"0:{batch}", f"{batch * length}:{2 * batch}")
        yield {"global_batch_size": None, "step_batch_size_schedule": steps}
    elif config.num_groups == 1 and config.optional("rampup_batch_size") is not None:
        yield {"global_batch_size": 2 * batch, "rampup_batch_size": (batch, batch, batch)}
    if config.optional("seq_length_warmup") is not None:
        yield {"seq_length": 2 * length, "seq_length_warmup": (length, length, batch)}
    yield short_rates(config, LEARNING_RATE)


def short_rates(config: RunConfig, lr: float) -> dict[str, Any]:
    """Settings with which the learning rate has the course of ``config`` from ``lr`` on within ``STEPS`` steps."""
    optimizer = config.optimizer
    scale = lr / optimizer.lr if optimizer.lr else 0.0
    settings: dict[str, Any] = {
        "lr_decay_style": optimizer.lr_decay_style,
        "min_lr": optimizer.min_lr * scale,
        "lr_warmup_init": optimizer.lr_warmup_init * scale,
    }
    if optimizer.lr_warmup_fraction is not None:
        settings["lr_warmup_fraction"] = max(optimizer.lr_warmup_fraction, WARMUP / STEPS)
    elif optimizer.lr_warmup_iters or optimizer.lr_warmup_samples:
        settings["lr_warmup_iters"] = WARMUP
    if optimizer.lr_decay_iters is not None or optimizer.lr_decay_samples is not None:
        settings["lr_decay_iters"] = DECAY
    if optimizer.lr_wsd_decay_iters is not None or optimizer.lr_wsd_decay_samples is not None:
        settings["lr_wsd_decay_iters"] = LAST_PHASE
    return settings


def small_run() -> dict[str, Any]:
    """Settings of a run of a few steps without data files, evaluation and checkpoints."""
    defaults = RunConfig().flat()
    sections = (CheckpointConfig, BadStepConfig, ElasticConfig, RecoveryConfig, RerunConfig, FaultConfig)
    unused = [name for section in sections for name, _ in declarations(section)]
    return {name: defaults[name] for name in (*RESET, *unused)} | {
        "train_iters": STEPS,
        "lr_warmup_iters": 0,  # the first step must change the weights
        "lr_decay_style": "constant",
        "eval_iters": 0,
        "num_workers": 0,  # the data is in memory
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",  # its last id is the end-of-document id, for packed documents
        "vocab_size": VOCABULARY,
    }


def at_full_size(config: RunConfig, vocab_size: int) -> RunConfig:
    """Return ``config`` with its own sizes, batches and learning rate, for few steps on synthetic data."""
    full = config.flat() | small_run() | {"vocab_size": vocab_size} | short_rates(config, config.optimizer.lr)
    if config.num_groups == 1:  # groups are compared with one process for a constant batch
        full |= {name: config.flat()[name] for name in ("rampup_batch_size", "step_batch_size_schedule")}
    return RunConfig.from_flat(full | {"seq_length_warmup": config.optional("seq_length_warmup")})
