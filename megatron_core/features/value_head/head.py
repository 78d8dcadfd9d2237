"""A head of one output for each token, and its weight in a model that was trained to predict tokens."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.models.gpt.model import GPTModel, LogitLoss
from megatron_core.ops.rows import wide
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import gather_from_sequence
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.training.parts import AddedWeights
from megatron_core.transformer.context import LayerContext, SequenceContext

SCORE = "output_layer.score"
"""The parameter of the head, ``[1, h]``, in the model."""


class ValueHead(nn.Module):
    """v = w h for each token, in float32 or wider.

    The weight is replicated. With sequence parallelism each tensor-parallel rank computes the values of its part of the
    sequence, and gathers the others. Source: Schulman et al. 2017, arXiv 1707.06347, section 5.
    """

    is_tied = False

    def __init__(self, context: LayerContext, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        parallel = context.parallel
        self.tp_group = context.tp_group
        self.sequence_parallel = context.sequence_parallel
        # Ranks with other tokens have parts of the gradient; ranks with the same tokens have all of it.
        spec = replicated((1, context.config.hidden_size), self.tp_group.rank(), partial_grad=context.sequence_parallel)
        self.score = allocate(spec, parallel.params_dtype, parallel.device)
        self.score.init_method = context.init_method
        self.product = parallel.arithmetic.token_product(1, self.tp_group.size() if self.sequence_parallel else 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism) -> values ``[s, b, 1]``."""
        # Advantages are differences of values, which 8 bits of bfloat16 would round away.
        values: Tensor = self.product(hidden.to(wide(hidden.dtype)), self.score, None)
        if self.sequence_parallel:
            # All ranks compute the same loss of the whole sequence, so that each has the complete gradient of its part.
            values = gather_from_sequence(values, self.tp_group, partial_grad=False)
        return values

    def losses(
        self,
        hidden: Tensor,
        target: Tensor,
        weight: nn.Parameter | None,
        logit_loss: LogitLoss | None = None,
        context: SequenceContext | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """``logit_loss`` of the values, ``[s, b]``; see ``VocabularyHead.losses``."""
        if logit_loss is None:
            _refuse("has no loss of the next token; train it with post_training.Trainer and an objective of values")
        return logit_loss(self(hidden), target)

    def logits(self, hidden: Tensor, weight: nn.Parameter | None) -> Tensor:
        """Errors: ``ConfigError``, because there is no vocabulary."""
        _refuse("has no logits of tokens; compute its values with post_training.Trainer.values")


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"value_head=True: the model {reason}, or remove --value-head")


class NewValueHead(AddedWeights):
    """The head of a value model, for a model that was trained to predict tokens."""

    title = "value heads"
    saved_always = True

    def contain(self, name: str) -> bool:
        """Whether a parameter, or a piece of a checkpoint, is that of the head."""
        return name.endswith(SCORE)

    def are_missing(self, stored: Mapping[str, Any]) -> bool:
        """Whether the model with the settings ``stored`` predicts tokens."""
        return not stored.get("value_head", False)

    def replace(self, name: str) -> bool:
        """Whether a piece is of the output layer."""
        return ".output_layer." in name

    def compared(self, stored: Mapping[str, Any], *, only_weights: bool) -> Mapping[str, Any]:
        """The settings without those of output layers. Errors: ``CheckpointError`` if the run resumes the training."""
        if not only_weights:
            raise CheckpointError(
                "value_head=True, but the checkpoint is of a model that predicts tokens; to start with its weights and "
                "a new head, add --finetune; to resume its training, remove --value-head"
            )
        of_output = ("value_head", "untie_embeddings_and_output_weights", "add_output_layer_bias")
        return {name: value for name, value in stored.items() if name not in of_output}


def train_head(config: RunConfig, model: GPTModel, groups: ParallelGroups, *, initialise: bool) -> None:
    """Train the head also where the other weights are frozen; see ``Feature.change_stage``."""
    # Low-rank adapters freeze all weights of the model, and a head that was just drawn would stay random.
    if model.output_layer is not None:
        model.output_layer.requires_grad_(True)
