"""The base class of language models."""

from typing import Any

from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron_core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


class LanguageModule(MegatronModule):
    """A ``MegatronModule`` with the loss of its logits over the ranks of ``pg_collection.tp``."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp"])

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Labels ``[b, s]`` and logits ``[s, b, v/tp]`` -> losses ``[b, s]``."""
        losses = vocab_parallel_cross_entropy(logits.float(), labels.transpose(0, 1), tp_group=self.pg_collection.tp)
        return losses.transpose(0, 1).contiguous()
