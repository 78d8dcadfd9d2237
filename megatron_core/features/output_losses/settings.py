"""Settings and rules of the output layer's losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.model import ModelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting

HEAD = "output_losses"
Z_LOSS = "output_z_loss"
"""Names of the head, as ``ModelConfig.head_name``, and of the auxiliary loss."""


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class OutputLossConfig(ModelConfig):
    """The output layer and its loss together, and the z-loss."""

    cross_entropy_loss_fusion: bool = setting(False, when=ALWAYS, resume=Resume.FREE)
    """Fuse the loss with the method --cross-entropy-fusion-impl; default: native."""
    cross_entropy_fusion_impl: Literal["native", "linear"] = setting(
        "native", needs=given("cross_entropy_loss_fusion"), resume=Resume.FREE, is_refinement=True
    )
    """With --cross-entropy-loss-fusion. native: the loss in one pass over the logits. linear: output layer and loss
    together, a few tokens at a time, which saves the memory of logits and costs one more matrix product."""
    output_z_loss_coeff: float = setting(0.0, r.from_0(1e6), when=c.TRAINING)
    """Add this times the mean of log^2 Z to the loss, where Z is the sum of the exponentials of a token's logits
    (PaLM: 1e-4); it keeps logits near 0. The reported loss does not include it."""

    @property
    def head_name(self) -> str:
        """The kind of the head of the last stage."""
        return HEAD if self.fuses_output_layer_with_loss or self.output_z_loss_coeff else super().head_name

    @property
    def head_loss_names(self) -> tuple[str, ...]:
        """The name of the z-loss."""
        return (*super().head_loss_names, *(Z_LOSS,) * bool(self.output_z_loss_coeff))

    @property
    def fuses_output_layer_with_loss(self) -> bool:
        """Whether losses are computed without storing all logits."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"


def output_loss_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that a fused output layer excludes."""
    model = config.model.section(OutputLossConfig)
    excluded = {
        "output_z_loss_coeff": ", which does not store the sums of exponentials",
        "add_output_layer_bias": ", which has no biases",
        "final_logit_softcapping": "",
    }
    for name, reason in excluded.items():
        if model.fuses_output_layer_with_loss and (value := getattr(model, name)):
            yield f"{name}={value} cannot be used with cross_entropy_fusion_impl=linear{reason}; use native"
