"""The layers of a stage."""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import (
    SampleNumbers,
    TransformerBlockSubmodules,
    layer_context,
    layer_specs_of,
)
from megatron.core.transformer.loss_collector import keep_expert_biases_in_fp32
from megatron.core.transformer.stages import draw_weights, stage_layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import LAYER_PARTS, TransformerLayer
from megatron_core.errors import LayoutError
from megatron_core.parallel.current import current
from megatron_core.transformer import block
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import auxiliary_loss_names


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Layers on a stage of this pipeline rank, or of ``pp_rank``."""
    return len(stage_layers(config, vp_stage, pp_rank))


class TransformerBlock(ExportedModule, block.TransformerBlock):
    """The layers of this rank's stage, and after the last one the final norm, with Megatron Core's arguments.

    ``spec`` is that of one layer, for all of them, or of a block. Weights depend on the seed of
    ``model_parallel_cuda_manual_seed`` and on their names, as everywhere in this package.
    """

    stands_for = block.TransformerBlock

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
        model, specs = config.model_config(), layer_specs_of(config, spec)
        context, samples = layer_context(config, model, pg_collection), SampleNumbers(current())
        block.TransformerBlock.__init__(
            self,
            context,
            stage_layers(config, vp_stage),
            final_norm=post_process and post_layer_norm,
            layer_specs=specs,
        )
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self._loss_names = auxiliary_loss_names(model, specs)
        adopt(self, (*LAYER_PARTS, TransformerLayer), config, context, samples)
        keep_expert_biases_in_fp32(self)
        draw_weights(self, context.seed, "decoder.")

    pre_process = True
    post_process = True
    vp_stage: int | None = None
    input_tensor: Tensor | None = None
    _loss_names: tuple[str, ...] = ()

    def bind(self, config: TransformerConfig, context: LayerContext, samples: SampleNumbers) -> None:
        """Give layers their numbers from 1, too."""
        super().bind(config, context, samples)
        self.expert_layers = context.config.expert_layers
        for number, layer in self.layers_by_number():
            layer.layer_number = number + 1

    def layers_by_number(self) -> list[tuple[int, Any]]:
        """The layers of this stage with their global numbers, from 0."""
        modules: Any = self._modules["layers"]
        return [(int(number), layer) for number, layer in modules.items()]

    @property
    def num_layers_per_pipeline_rank(self) -> int:
        """Layers on this stage."""
        return len(self.layers_by_number())

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Give the previous stage's output to the next ``forward``."""
        self.input_tensor = input_tensor

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor | None,
        attention_mask: Any = None,
        context: Any = None,
        context_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
        rotary_pos_cos: Any = None,
        rotary_pos_sin: Any = None,
        rotary_pos_cos_sin: Any = None,
        attention_bias: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Any = None,
        padding_mask: Tensor | None = None,
        extract_layer_indices: Collection[int] | None = None,
        *,
        inference_params: Any = None,
        dynamic_inference_decode_only: Any = None,
    ) -> Any:
        """``[s, b, h]`` -> the same; not on the first stage: of what ``set_input_tensor`` was given.

        ``padding_mask`` ``[b, s]`` is True for padding, which does not count in losses of experts. With
        ``extract_layer_indices``, global numbers from 0, the result is (output, the outputs of these layers of the
        stage, in their order).
        """
        if isinstance(attention_mask, SequenceContext):
            assert hidden_states is not None, "the model passes them"
            return super().forward(hidden_states, attention_mask)
        refuse(
            "TransformerBlock.forward",
            context=context,
            context_mask=context_mask,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            rotary_pos_cos_sin=rotary_pos_cos_sin,
            attention_bias=attention_bias,
            inference_context=inference_context if inference_params is None else inference_params,
            sequence_len_offset=sequence_len_offset,
        )
        if not self.pre_process:
            hidden_states, self.input_tensor = self.input_tensor, None
        if hidden_states is None:
            raise LayoutError("there is no input: pass hidden_states, or call set_input_tensor before")
        passed = self.sequence(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params, padding_mask)
        passed = self.with_losses(
            self.context, self._loss_names, hidden_states, passed, per_token=self.config.calculate_per_token_loss
        )
        if not extract_layer_indices:
            return super().forward(hidden_states, passed)
        return self._extracting(hidden_states, passed, set(extract_layer_indices))

    def _extracting(self, hidden: Tensor, passed: SequenceContext, wanted: set[int]) -> tuple[Tensor, list[Tensor]]:
        """The output, and those of the layers that are ``wanted``."""
        found: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda module, inputs, output: found.append(output))
            for number, layer in self.layers_by_number()
            if number in wanted
        ]
        try:
            return super().forward(hidden, passed), found
        finally:
            for hook in hooks:
                hook.remove()
