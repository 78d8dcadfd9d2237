"""Complete and average the gradients of a step."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.process_groups_config import check_groups
from megatron.core.transformer.loss_collector import update_expert_biases_of
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
    parallelism sums them. The biases of experts (``moe_router_enable_expert_bias``) move by the loads of the step.
    ``num_tokens`` is this rank's count of tokens whose loss was added up, of which the last stage's counts, for models
    with ``calculate_per_token_loss``. ConfigError: groups of ``pg_collection`` that are not the current layout's.
    """
    check_groups(pg_collection, ("tp", "pp", "embd", "pos_embd", "dp_cp", "tp_dp_cp"), "finalize_model_grads")
    groups = current()
    for chunk in model:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    for chunk in model:
        update_expert_biases_of(chunk.modules(), groups.group("tp-dp-cp"))
    if num_tokens is not None:
        is_last = groups.index("pp") == groups.size("pp") - 1
        total = num_tokens.detach().to(torch.float64) * is_last
        for axes in ("dp-cp", "pp"):
            all_reduce_(total, groups.group(axes))
        for chunk in model:
            chunk.scale_gradients(1.0 / max(total.item(), 1.0))
