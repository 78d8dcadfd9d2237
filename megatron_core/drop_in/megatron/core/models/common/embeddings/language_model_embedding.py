"""The embedding of tokens and positions, and the base class of language models."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import layer_context, sequence_context
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core import tensor_parallel
from megatron_core.errors import ConfigError
from megatron_core.models.gpt import embedding
from megatron_core.transformer.context import SequenceContext


class LanguageModelEmbedding(ExportedModule, embedding.LanguageModelEmbedding):
    """Token ids ``[b, s]`` -> ``[s, b, h]``, plus learned positions for position_embedding_type="learned_absolute"."""

    stands_for = embedding.LanguageModelEmbedding

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        tp_group: Any = None,
        pg_collection: Any = None,
    ) -> None:
        if num_tokentypes or not scatter_to_sequence_parallel:
            raise ConfigError("num_tokentypes and scatter_to_sequence_parallel=False are not supported; remove them")
        own = config.model_config(position_embedding_type=position_embedding_type, make_vocab_size_divisible_by=1)
        context = layer_context(config, own, pg_collection, tp_group)
        embedding.LanguageModelEmbedding.__init__(self, context, vocab_size, max_sequence_length)
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        adopt(self, (), config, context, "embedding.")

    @torch.no_grad()
    def zero_parameters(self) -> None:
        """Set all weights to 0."""
        for parameter in self.parameters():
            parameter.zero_()

    def forward(self, input_ids: Tensor, position_ids: Tensor, tokentype_ids: Any = None) -> Tensor:
        """``[b, s]`` twice -> ``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallel)."""
        if isinstance(tokentype_ids, SequenceContext):
            return super().forward(input_ids, position_ids, tokentype_ids)
        refuse("LanguageModelEmbedding.forward", locals())
        samples = self._samples.take(len(input_ids), input_ids.device) if self.training else None
        own = self.context.split.residual(position_ids, dim=1)
        passed = sequence_context(self.context, own.transpose(0, 1), None, None, samples)
        return super().forward(input_ids, own, passed)


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
