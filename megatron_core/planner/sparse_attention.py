"""Work and traffic of sparse attention, of one micro-batch on one rank.

A rank has n queries (tokens), of which its indexer scores n' (n divided by the ranks of sequence parallelism), a heads
with channels dq and dv, and t keys of its sequence; the indexer has H heads of d channels. All products are those of
all keys, also of keys that are masked or after the query:

    part        forward                 backward                       precision
    attention   2 n t a (dq + dv)       once more, and 2.5 times       of the model
    selection   2 n' t H (d + 1)        none                           float32; absent if all keys are selected
    loss        2 n t a dq              once more                      float32; absent without a coefficient
                2 n' t H (d + 1)        once more, and twice           float32

Without a fused kernel, backward needs twice the attention and computes only its scores once more. The loss sums the
attention weights of all heads, n t numbers in float32, over tensor-parallel ranks, in forward and once more in
backward. Context parallelism gathers index keys, besides keys and values.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.attention import QUERY_BLOCK, attention_of
from megatron_core.planner.context import layer_traffic
from megatron_core.planner.hardware import Hardware, Rings, number_size
from megatron_core.planner.passes import Seconds

MASKS = 5
SORTED = 96
SCORED = 16
WEIGHTS = 32
DIVERGED = 32
"""Bytes moved for each query and key: masks; a stable sort, with positions in 8 bytes; products of a head and their
sum; weights of a head in the loss; divergence. Each operation reads and writes its float32 numbers once."""
KERNELS = {"attention": 8, "selection": 12, "loss": 20}
"""Kernel launches for each block of queries."""


@dataclass(frozen=True)
class Work:
    """Numbers of one direction."""

    attention: float
    """FLOPs in the precision of the model."""
    wide: float
    """FLOPs in float32, or in float64 with float64."""
    elements: float
    """Bytes read and written."""
    kernels: float
    summed: float
    """Bytes of weights that tensor-parallel ranks sum."""


def sparse_work(config: RunConfig) -> tuple[Work, Work]:
    """Forward and backward of sparse attention, without the indexer's projections."""
    model: Any = config.model  # with the settings of the feature, which the run uses
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    length = config.data.seq_length
    tokens = length * config.training.micro_batch_size / parallel.context_parallel_size
    number = number_size(config.training.compute_dtype)
    scale = max(number, 4) / 4
    attention_layer = attention_of(model)
    heads = model.num_attention_heads / tp
    unfused = model.attention_backend == "unfused"
    pairs = tokens * length
    local_pairs = tokens * length / (tp if parallel.sequence_parallel else 1)
    blocks = ceil(length / parallel.context_parallel_size / QUERY_BLOCK)
    selects = length > model.dsa_indexer_topk and not model.dsa_indexer_warmup
    # Each part once.
    attention = 2 * pairs * heads * (attention_layer.query_head_size + attention_layer.value_head_size)
    scores = 2 * local_pairs * model.dsa_indexer_n_heads * (model.dsa_indexer_head_dim + 1)
    target = 2 * pairs * heads * attention_layer.query_head_size
    attended = pairs * MASKS + (2 * number * heads * pairs if unfused else 0.0)
    scored = scale * SCORED * local_pairs * model.dsa_indexer_n_heads
    lost = scale * (WEIGHTS * heads * pairs + DIVERGED * local_pairs) + scored + pairs * MASKS
    trains = float(model.trains_indexers)
    forward = Work(
        attention,
        selects * scores + trains * (target + scores),
        attended + selects * (scored + scale * SORTED * local_pairs) + trains * lost,
        blocks * (KERNELS["attention"] + selects * KERNELS["selection"] + trains * KERNELS["loss"]),
        trains * 4 * scale * pairs,
    )
    backward = Work(
        2 * attention + target if unfused else 3.5 * attention,
        trains * (target + 3 * scores),
        2.5 * attended + trains * (lost + 2 * scored),
        3 * blocks * (KERNELS["attention"] + trains * KERNELS["loss"]),
        forward.summed,
    )
    return forward, backward


def sparse_seconds(config: RunConfig, layer: int, hardware: Hardware, rings: Rings) -> tuple[Seconds, Seconds]:
    """Seconds of forward and backward by kind."""
    dtype = config.training.compute_dtype
    parallel = config.parallel
    sent = layer_traffic(config, layer)
    tp = rings.ring("tp")
    cp = rings.ring("cp")
    number = number_size(dtype)
    tokens = config.data.seq_length * config.training.micro_batch_size / parallel.context_parallel_size
    index_keys = (cp.size - 1) * tokens * config.value("dsa_indexer_head_dim") * number
    rates = hardware.flops(dtype), hardware.flops("float64" if dtype == "float64" else "float32")
    passes: list[Seconds] = []
    for work, bytes_sent in zip(sparse_work(config), (sent.forward, sent.backward), strict=True):
        products = work.attention / rates[0] + work.wide / rates[1]
        reduced = tp.gather(work.summed) if parallel.sequence_parallel else tp.reduce(work.summed)
        seconds = {
            "attention": products / hardware.attention_efficiency,
            "elements": work.elements / hardware.memory_bandwidth,
            "launches": work.kernels * hardware.launch_seconds,
            "tp": reduced if tp.size > 1 else 0.0,
        }
        if cp.size > 1:
            seconds["cp"] = (bytes_sent + index_keys) / cp.bandwidth + 2 * cp.steps * cp.latency
        passes.append(seconds)
    return passes[0], passes[1]
