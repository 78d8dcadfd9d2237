"""For Megatron Core's users: complete and average the gradients of a step."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.current import current


def finalize_model_grads(
    model: Sequence[Any],
    num_tokens: torch.Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """Finish the gradients of all chunks; with ``num_tokens`` divide them by its sum over all ranks.

    Gradients of norms under sequence parallelism, of shared keys and of tied embeddings are completed before data
    parallelism sums them. ``num_tokens`` is this rank's count of tokens whose loss was added up, 0 on ranks without the
    last stage, for models with ``calculate_per_token_loss``.
    """
    for chunk in model:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    if num_tokens is not None:
        total = num_tokens.detach().clone().to(torch.float64)
        for axes in ("dp-cp", "pp"):
            all_reduce_(total, current().group(axes))
        for chunk in model:
            chunk.scale_gradients(1.0 / max(total.item(), 1.0))
