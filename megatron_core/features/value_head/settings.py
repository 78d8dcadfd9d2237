"""Settings of value models, and their rules."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config.model import ModelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Resume, section, setting

HEAD = "value"
"""Name of the head, as ``ModelConfig.head_name``."""
REFUSED = {
    "mtp_num_layers": "its layers predict tokens; remove --mtp-num-layers",
    "output_z_loss_coeff": "there are no logits of a vocabulary; remove --output-z-loss-coeff",
    "use_mup": "its factor of the output layer is that of a vocabulary; remove --use-mup",
    "dpo": "preferences of answers are sums of log-probabilities; train a reward model with "
    "post_training.objectives.bradley_terry, and remove --dpo",
}
"""Settings that cannot be used with a value head, with the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.TENSORS)
class ValueHeadConfig(ModelConfig):
    """Value models and reward models."""

    value_head: bool = setting(False, when=ALWAYS)
    """Replace the output layer by a head of one output for each token: the critic of PPO, a reward model, or a model
    for sequence classification of transformers with one label. post_training.Trainer trains it."""

    @property
    def head_name(self) -> str:
        """The kind of the head of the last stage."""
        return HEAD if self.value_head else super().head_name

    def head_columns(self, vocabulary: int) -> int:
        """The value of a token."""
        return 1 if self.value_head else super().head_columns(vocabulary)

    def head_elements(self, vocabulary: int, *, tied: bool) -> int:
        """A number for each channel."""
        return self.hidden_size if self.value_head else super().head_elements(vocabulary, tied=tied)

    @property
    def fuses_output_layer_with_loss(self) -> bool:
        """Whether losses are computed without storing all logits, of which a value head has none."""
        return super().fuses_output_layer_with_loss and not self.value_head

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        """Whether the output layer uses the word embedding's weight."""
        return super().share_embeddings_and_output_weights and not self.value_head


def has_value_head(config: RunConfig) -> bool:
    """Whether the model of a run is a value model."""
    return config.model.section(ValueHeadConfig).value_head


def value_head_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that need logits."""
    if not has_value_head(config):
        return
    for name, reason in REFUSED.items():
        if value := config.optional(name):
            yield f"{name}={value} cannot be used with value_head=True: {reason}"
