"""Settings of matrix products in 8-bit floating point."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Condition, Resume, given, section, setting
from megatron_core.config.training import TrainingConfig

BLOCK, SMALL_BLOCK = 128, 32
"""Side length in elements of a block of the recipes blockwise and mxfp8."""

DELAYED = Condition("--fp8-recipe delayed", lambda run: run.training.fp8_recipe == "delayed")
LARGEST_AMAX = Condition("--fp8-amax-compute-algo max", lambda run: run.training.fp8_amax_compute_algo == "max")
AMAX_HISTORY = Condition("--fp8-amax-history-len 2 or more", lambda run: run.training.fp8_amax_history_len > 1)
FIRST_LAST_LAYERS = given("first_last_layers_bf16")

Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]


@dataclass(frozen=True, kw_only=True)
@section(needs=given("fp8_format", "hybrid"), resume=Resume.REPORTED)
class FP8Config(TrainingConfig):
    """Matrix products in FP8: formats, scales and layers."""

    fp8_format: Literal["e4m3", "hybrid"] | None = setting(None, when=ALWAYS)
    """Compute linear layers of attention, MLP and experts in FP8; default: no FP8. e4m3: all matrices are e4m3. hybrid:
    gradients are e5m2, the others e4m3. Embedding, output layer, router, norms and attention products are unchanged."""
    fp8_recipe: Recipe = setting("delayed", is_refinement=True)
    """Granularity of scales. delayed: one scale per matrix, from previous steps. tensorwise: one per matrix, from its
    values. rowwise: one per row or column along which the product sums. blockwise: one per 128 x 128 elements of a
    weight and per 128 elements of other matrices (DeepSeek-V3). mxfp8: one per 32 elements (OCP)."""
    fp8_margin: int = setting(0, r.integers(0, 126), needs=DELAYED, is_refinement=True)
    """With --fp8-recipe delayed: divide scales by 2 to the power of this, as headroom for growing values."""
    fp8_amax_history_len: int = setting(1, r.SMALL_COUNT, needs=DELAYED, when=LARGEST_AMAX, is_refinement=True)
    """With --fp8-recipe delayed: number of steps in the history of largest absolute values."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = setting(
        "most_recent", needs=DELAYED, when=AMAX_HISTORY, is_refinement=True
    )
    """With --fp8-recipe delayed: value of the history that is scaled to the format's largest number."""
    fp8_wgrad: bool = setting(True, is_refinement=True)
    """Compute weight gradients in FP8; --no-fp8-wgrad: in the precision of activations."""
    fp8_param_gather: bool = setting(False, when=c.SEVERAL_DATA_RANKS)
    """Gather the weights of these layers over the data-parallel ranks in FP8, in half the bytes, with equal results to
    the bit; weights are stored in 16 bits. Needs --fp8-recipe tensorwise, delayed or blockwise and --zero-stage 1 to
    3."""
    first_last_layers_bf16: bool = setting(False, is_refinement=True)
    """Exclude the first --num-layers-at-start-in-bf16 and the last --num-layers-at-end-in-bf16 layers from FP8."""
    num_layers_at_start_in_bf16: int = setting(1, r.COUNT_FROM_0, needs=FIRST_LAST_LAYERS, is_refinement=True)
    """Number of first layers that --first-last-layers-bf16 excludes."""
    num_layers_at_end_in_bf16: int = setting(1, r.COUNT_FROM_0, needs=FIRST_LAST_LAYERS, is_refinement=True)
    """Number of last layers that --first-last-layers-bf16 excludes."""
    fp8_statistics_interval: int | None = setting(None, r.COUNT, resume=Resume.FREE)
    """Steps between tables of the shares of elements that FP8 clamps or rounds to 0 in each layer."""

    def eight_bit_layers(self, num_layers: int) -> range:
        """The layers (numbered from 0) whose products are in 8 bits."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        start, end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return range(start, max(num_layers - end, start))
