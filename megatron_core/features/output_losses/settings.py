"""Settings and rules of the output layer's losses."""

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

    output_logit_dtype: Literal["bf16", "fp32"] | None = setting(None, needs=c.SIXTEEN_BITS)
    """Precision of logits. fp32: products of 16-bit numbers are summed to logits in float32, of which the loss is
    computed; their gradient is rounded to 16 bits, as in Megatron-LM. Default: the precision of the weights."""

    @property
    def head_name(self) -> str:
        """The kind of the head of the last stage."""
        is_used = self.fuses_output_layer_with_loss or self.output_z_loss_coeff or self.output_logit_dtype == "fp32"
        return HEAD if is_used else super().head_name

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
    if model.output_logit_dtype == "fp32":
        for name, value in (("layout_invariant", True), ("compile", True), ("cross_entropy_fusion_impl", "linear")):
            if config.optional(name) == value:
                yield f"output_logit_dtype=fp32 cannot be used with {name}={value}; remove one of them"
    if model.output_logit_dtype == "bf16" and not config.training.bf16:
        yield "output_logit_dtype=bf16 needs --bf16; remove it"
    for name, reason in excluded.items():
        if model.fuses_output_layer_with_loss and (value := getattr(model, name)):
            yield f"{name}={value} cannot be used with cross_entropy_fusion_impl=linear{reason}; use native"
