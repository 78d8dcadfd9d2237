"""For Megatron Core's users: the layers of a stage."""

from typing import Any

from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.current import current
from megatron_core.transformer import block
from megatron_core.transformer.layer_context import (
    SampleNumbers,
    layer_context,
    layer_specs_of,
    sequence_context,
)
from megatron_core.transformer.layer_context import (
    TransformerBlockSubmodules as TransformerBlockSubmodules,
)
from megatron_core.transformer.stages import draw_weights, stage_layers
from megatron_core.transformer.transformer_config import TransformerConfig


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Layers on a stage of this pipeline rank, or of ``pp_rank``."""
    return len(stage_layers(config, vp_stage, pp_rank))


class TransformerBlock(block.TransformerBlock):
    """The layers of this rank's stage, and after the last one the final norm, with Megatron Core's arguments.

    ``spec`` is that of one layer, for all of them, or of a block. Weights depend on the seed of
    ``model_parallel_cuda_manual_seed`` and on their names, as everywhere in this package.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: Any,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: Any = None,
        vp_stage: int | None = None,
    ) -> None:
        model = config.model_config()
        context = layer_context(config, model, pg_collection)
        super().__init__(
            context,
            stage_layers(config, vp_stage),
            final_norm=post_process and post_layer_norm,
            layer_specs=layer_specs_of(config, spec),
        )
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor: Tensor | None = None
        self._context, self._samples = context, SampleNumbers(current())
        draw_weights(self, context.seed, "decoder.")

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Give the previous stage's output to the next ``forward``."""
        self.input_tensor = input_tensor

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None = None,
        context: Any = None,
        context_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
    ) -> Tensor:
        """``[s, b, h]`` -> the same; not on the first stage: of what ``set_input_tensor`` was given."""
        if not self.pre_process:
            hidden_states, self.input_tensor = self.input_tensor, None
        if hidden_states is None:
            raise LayoutError("there is no input: pass hidden_states, or call set_input_tensor before")
        samples = self._samples.take(hidden_states.shape[1], hidden_states.device) if self.training else None
        passed = sequence_context(self._context, hidden_states, attention_mask, rotary_pos_emb, samples)
        return super().forward(hidden_states, passed)
