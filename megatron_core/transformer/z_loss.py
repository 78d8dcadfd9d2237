"""The z-loss of the output layer."""

from __future__ import annotations

from torch import Tensor

from megatron_core.config.model import ModelConfig
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.layer_spec import OUTPUT_Z_LOSS


def with_z_loss(
    config: ModelConfig,
    loss_mask: Tensor | None,
    context: SequenceContext,
    parallel: ModelParallelConfig,
    losses: Tensor,
    log_z: Tensor,
) -> Tensor:
    """Return ``losses`` ``[s, b]`` with the gradient of c log^2 Z attached, for c = ``output_z_loss_coeff``.

    Z is the sum of the exponentials of a token's logits; the mean is over the unmasked tokens of the global batch
    (``loss_mask`` ``[b, s]``). Source: Chowdhery et al. 2022 (PaLM), section 5.
    """
    squares = log_z.square() if loss_mask is None else log_z.square() * loss_mask.transpose(0, 1)
    return context.add_auxiliary_loss(
        losses,
        OUTPUT_Z_LOSS,
        parallel.arithmetic.loss_sum(squares),
        layer_number=config.num_layers,
        coefficient=config.output_z_loss_coeff,
    )
