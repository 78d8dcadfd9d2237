"""Settings of multi-token prediction, and their rules."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.model import ModelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Condition, Resume, given, section, setting

SEVERAL_DEPTHS = Condition("--mtp-num-layers of 2 or more", lambda run: (run.model.mtp_num_layers or 0) > 1)


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.REPORTED)
class MultiTokenConfig(ModelConfig):
    """Layers after the last one that predict tokens after the next one, in training (DeepSeek-AI 2024, arXiv
    2412.19437, section 2.2)."""

    mtp_num_layers: int | None = setting(None, r.SMALL_COUNT, when=ALWAYS)
    """Number of multi-token prediction layers, which predict 2, 3, ... tokens ahead in training (DeepSeek-V3)."""
    mtp_loss_scaling_factor: float = setting(
        0.1, r.NON_NEGATIVE, needs=given("mtp_num_layers", "N"), is_refinement=True
    )
    """Weight of the mean loss of the multi-token prediction layers."""
    mtp_use_repeated_layer: bool = setting(False, needs=given("mtp_num_layers", "N"))
    """Apply one multi-token prediction layer --mtp-num-layers times, each time to its own output, instead of as many
    layers with weights of their own (Nemotron 3)."""
    mtp_zero_last_input: bool = setting(False, needs=given("mtp_num_layers", "N"))
    """The last input of each multi-token prediction layer is token 0, as in Megatron-LM, instead of the sequence's last
    label. Its prediction never counts, but experts and their losses depend on it."""

    mtp_hsm: bool = setting(False, needs=SEVERAL_DEPTHS, is_refinement=True)
    """Hidden state mixing: in training, the input of each multi-token prediction layer is for each token the output of
    the layer before or of an earlier one, drawn uniformly, at the position from which it predicts the same token."""

    @property
    def added_layers(self) -> int:
        """The layers of multi-token prediction, counted as often as they are applied."""
        return self.mtp_num_layers or 0

    def applications(self, layer_number: int) -> range:
        """The numbers under which a layer (numbered from 0) is applied."""
        if self.mtp_use_repeated_layer and layer_number >= self.num_layers:
            return range(layer_number, layer_number + max(self.added_layers, 1))
        return super().applications(layer_number)

    @property
    def distinct_added_layers(self) -> int:
        """Number of multi-token prediction layers with weights of their own."""
        count = self.mtp_num_layers or 0
        return min(count, 1) if self.mtp_use_repeated_layer else count


def multi_token_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Embeddings that the layers of multi-token prediction do not have."""
    model = config.model.section(MultiTokenConfig)
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        yield (
            f"mtp_num_layers={model.mtp_num_layers} cannot be used with position_embedding_type=learned_absolute, "
            "whose table is on the first stage alone; use --position-embedding-type rope"
        )
    if model.mtp_num_layers and model.embedding_layernorm:
        yield (
            f"mtp_num_layers={model.mtp_num_layers} cannot be used with embedding_layernorm=True: layers of "
            "multi-token prediction have their own norm of embeddings; remove one of them"
        )
