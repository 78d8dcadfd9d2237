"""The base class of language models."""

from typing import Any

from torch import Tensor

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule


class LanguageModule(MegatronModule):
    """A ``MegatronModule`` with the loss of its logits over the ranks of ``pg_collection.tp``."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp"])
        self.tp_group = self.pg_collection.tp

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Labels ``[b, s]`` and logits ``[s, b, v/tp]`` -> losses ``[b, s]``, float32 or wider."""
        targets = labels.transpose(0, 1).contiguous()
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits, targets, tp_group=self.tp_group)
        return losses.transpose(0, 1).contiguous()
