"""Work, traffic and temporary memory of layers with a recurrence (gated delta nets), of one micro-batch on one rank.

With dk and dv channels of keys and values of each of a rank's v value heads, chunks of C tokens, c context-parallel
ranks, per token:

    products     2 v (3 C dk + 2 C dv + 3 dk dv)          within a chunk, and with the state
    saved again  v (5 C + A) in float32                    what backward computes once more and holds until its end
                 v (2 C + 2 C dk + A) in float32           the same with a decay for each channel, and chunks of 16
                 A = 8 dk + 3 dv + 2 dk dv / C             inputs of products, and states (dk + dv columns if c > 1)
    sent         (c-1) 2 dk (dk + dv) v per sequence       transitions of the two parts, in float32; the tokens before a
                                                           part for the convolution; backward gathers the
                                                           transitions again, and sends the gradients of both
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_core.config import RunConfig
from megatron_core.config.mixers import RECURRENT_KINDS, KimiDelta
from megatron_core.planner.hardware import GroupBandwidth, Hardware

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens of a chunk, also with a decay for each channel: those of ``ops.delta_rule``."""


@dataclass(frozen=True)
class Recurrence:
    """Numbers of a recurrent layer on a rank."""

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
    def of(cls, config: RunConfig) -> Recurrence:
        """The numbers of a layer of ``config``, which has recurrent layers."""
        model, parallel = config.model, config.parallel
        sizes = RECURRENT_KINDS[model.experimental_attention_variant or ""](model)
        by_channel = isinstance(sizes, KimiDelta)
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        batch, length = config.training.micro_batch_size, config.data.seq_length / cp
        number = {"float64": 8, "float32": 4}.get(config.training.compute_dtype, 2)
        heads, key, value = model.linear_num_value_heads / tp, sizes.query_head_size, sizes.value_head_size
        part = length / (1 if cp == 1 else 2)
        chunk = min(CHANNEL_CHUNK if by_channel else CHUNK, part)
        columns = value if cp == 1 else value + key  # of states, and with context parallelism of transitions
        tokens, wide = length * batch, max(number, 4)
        pairs = 2 * chunk * (1 + key) if by_channel else 5 * chunk
        again = tokens * heads * (pairs + 8 * key + 3 * value + 2 * key * columns / chunk) * wide
        transitions = 2 * key * (key + value) * heads * batch * wide
        tails = 2 * (model.linear_conv_kernel_dim - 1) * sizes.convolved / tp * batch * number
        return cls(
            flops=2 * tokens * heads * (3 * chunk * key + 2 * chunk * value + 3 * key * value),
            elements=2 * again + 8 * number * tokens * sizes.convolved / tp,
            sent=(cp - 1) * (transitions + tails),
            sent_back=(cp - 1) * (2 * transitions + tails),
            again=again,
            steps=part / chunk,
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
