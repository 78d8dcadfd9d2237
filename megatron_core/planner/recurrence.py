"""Work, traffic and temporary memory of layers with a recurrence, of one micro-batch on one rank.

Gated delta nets, with dk and dv channels of keys and values of each of a rank's v value heads, chunks of C tokens, c
context-parallel ranks, per token:

    products     2 v (3 C dk + 2 C dv + 3 dk dv)          within a chunk, and with the state
    saved again  v (5 C + A) in float32                    what backward computes once more and holds until its end
                 v (2 C + 2 C dk + A) in float32           the same with a decay for each channel, and chunks of 16
                 A = 8 dk + 3 dv + 2 dk dv / C             inputs of products, and states (dk + dv columns if c > 1)

Mamba-2, with v heads in g groups:

    products     2 g C dk + 2 v (C dv + 2 dk dv)
    saved again  v (2 C + 2 + 3 dv + 2 dk dv / C) + g (4 dk + C) in float32

Both send (c-1) 2 T v numbers per sequence in float32 (T: ``transition_elements``), the transitions of the two parts,
and the tokens before a part for the convolution; backward gathers the transitions again, and sends the gradients of
both. Short convolutions have neither transitions nor anything to compute again.
"""

from dataclasses import dataclass
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.mixers import recurrence_of
from megatron_core.planner.hardware import GroupBandwidth, Hardware, number_size

CHUNK = 64
CHANNEL_CHUNK = 16
"""Tokens of a chunk, also with a decay for each channel, as in ``features.recurrent``."""


@dataclass(frozen=True)
class RecurrenceCost:
    """Numbers of a layer with a recurrence on a rank."""

    flops: float
    """Forward."""
    elements: float
    """Bytes that forward reads and writes."""
    sent: float
    """Bytes sent in forward."""
    sent_back: float
    """Bytes sent in backward, which gathers the transitions again."""
    again: float
    """Bytes that backward computes once more, and frees at the end of the layer."""
    steps: float
    """Number of chunks, one after another."""

    @classmethod
    def of(cls, config: RunConfig, layer_number: int) -> "RecurrenceCost":
        """The numbers of a layer of ``config`` that has a recurrence."""
        model = config.model
        parallel = config.parallel
        sizes: Any = recurrence_of(model, layer_number)
        assert sizes is not None, layer_number
        tp = parallel.tensor_model_parallel_size
        cp = parallel.context_parallel_size
        batch = config.training.micro_batch_size
        length = config.data.seq_length / cp
        number = number_size(config.training.compute_dtype)
        block = length / (1 if cp == 1 else 2)
        tokens = length * batch
        wide = max(number, 4)
        chunk = min(CHUNK if sizes.decay_channels == 1 else CHANNEL_CHUNK, block)
        flops, elements = _work(sizes, chunk, passes_transitions=cp > 1)
        again = tokens * elements / tp * wide
        transitions = 2 * sizes.transition_elements * sizes.heads / tp * batch * wide
        tails = 2 * (sizes.model.linear_conv_kernel_dim - 1) * sizes.convolved / tp * batch * number
        return cls(
            flops=tokens * flops / tp,
            elements=2 * again + 8 * number * tokens * sizes.convolved / tp,
            sent=(cp - 1) * (transitions + tails),
            sent_back=(cp - 1) * (2 * transitions + tails),
            again=again,
            steps=block * sizes.updates / chunk if transitions else 0.0,
        )

    def seconds(self, hardware: Hardware, ring: GroupBandwidth) -> dict[str, float]:
        """Seconds of forward by kind; ``ring``: the context-parallel ranks."""
        rate = hardware.flops("float32") * hardware.attention_efficiency
        return {
            "attention": self.flops / rate,
            "elements": self.elements / hardware.memory_bandwidth,
            "cp": self.sent / ring.bandwidth + ring.steps * ring.latency if self.sent else 0.0,
            "launches": (30 + 5 * self.steps) * hardware.launch_seconds,
        }


def _work(sizes: Any, chunk: float, *, passes_transitions: bool) -> tuple[float, float]:
    """Forward FLOPs per token, and elements per token that backward computes once more, over all ranks."""
    heads = sizes.heads
    key = sizes.query_head_size
    value = sizes.value_head_size
    if sizes.name == "short_convolution":
        return sizes.score_flops(0)[0], 0.0
    if sizes.name == "mamba2":
        of_heads = 2 * chunk + 2 + 3 * value + 2 * key * value / chunk
        products = 2 * sizes.groups * chunk * key + 2 * heads * (chunk * value + 2 * key * value)
        return products, heads * of_heads + sizes.groups * (4 * key + chunk)
    columns = value + (key if passes_transitions else 0)  # of states, or of transitions
    pairs = 2 * chunk * (1 + key) if sizes.decay_channels > 1 else 5 * chunk
    products = 2 * heads * (3 * chunk * key + 2 * chunk * value + 3 * key * value)
    elements = heads * (pairs + 8 * key + 3 * value + 2 * key * columns / chunk)
    return products * sizes.updates, elements * sizes.updates
