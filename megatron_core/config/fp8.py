"""Matrix products in 8-bit floating point."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Resume, section, setting

BLOCK, SMALL_BLOCK = 128, 32
"""Elements along a side of a block of the recipes blockwise and mxfp8."""

Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]


@dataclass(frozen=True, kw_only=True)
@section(needs=c.FP8, resume=Resume.REPORTED)
class FP8Config:
    """Which products of linear layers are computed in FP8, and how its scales are found."""

    fp8_format: Literal["e4m3", "hybrid"] | None = setting(None, when=ALWAYS)
    """Compute the linear layers of attention, MLP and experts in FP8. e4m3: all matrices in that format. hybrid: those
    of gradients in e5m2. Default: no FP8. Embedding, output layer, router, norms and attention stay as they are."""
    fp8_recipe: Recipe = setting("delayed")
    """What has a scale. delayed: each matrix, from the steps before. tensorwise: each matrix, from itself. rowwise:
    each row (or column) that is summed over. blockwise: 128 x 128 elements of weights, 128 of others (DeepSeek-V3).
    mxfp8: 32 elements (OCP)."""
    fp8_margin: int = setting(0, r.integer(0, 126), needs=c.DELAYED)
    """With --fp8-recipe delayed: divide scales by 2 to the power of this, as room for values that grow."""
    fp8_amax_history_len: int = setting(1, r.SMALL_COUNT, needs=c.DELAYED, when=c.LARGEST_AMAX)
    """With --fp8-recipe delayed: steps whose largest absolute values are kept."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = setting("most_recent", needs=c.DELAYED, when=c.AMAX_HISTORY)
    """With --fp8-recipe delayed: which value of the history is scaled to the format's largest number."""
    fp8_wgrad: bool = setting(True)
    """Weight gradients are products in FP8, too; --no-fp8-wgrad: in the precision of the activations."""
    fp8_param_gather: bool = setting(False, when=c.SEVERAL_DATA_RANKS)
    """Gather the weights of these layers over the data-parallel ranks in FP8: half the bytes. They are kept in 16 bits;
    the products are the same to the bit. With --fp8-recipe tensorwise, delayed or blockwise and --zero-stage 1 to 3."""
    first_last_layers_bf16: bool = setting(False)
    """Leave the first --num-layers-at-start-in-bf16 and the last --num-layers-at-end-in-bf16 layers out."""
    num_layers_at_start_in_bf16: int = setting(1, r.COUNT_FROM_0, needs=c.FIRST_LAST_LAYERS)
    """First layers that --first-last-layers-bf16 leaves out."""
    num_layers_at_end_in_bf16: int = setting(1, r.COUNT_FROM_0, needs=c.FIRST_LAST_LAYERS)
    """Last layers that --first-last-layers-bf16 leaves out."""
    fp8_statistics_interval: int | None = setting(None, r.COUNT, resume=Resume.FREE)
    """Steps between tables of what FP8 loses in each layer: shares of elements that are clamped and that become 0."""

    def fp8_layers(self, num_layers: int) -> range:
        """The layers whose products are in FP8, from 0; they are always neighbours."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        start, end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return range(start, max(num_layers - end, start))
