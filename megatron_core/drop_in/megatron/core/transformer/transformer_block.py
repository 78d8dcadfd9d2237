"""The layers of a stage."""

from typing import Any

from torch import Tensor

from megatron.core.transformer.exported import adopt
from megatron.core.transformer.layer_context import (
    SampleNumbers,
    TransformerBlockSubmodules,
    layer_context,
    layer_specs_of,
    stage_layers,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    LAYER_PARTS,
    LayerCall,
    TransformerLayer,
    get_transformer_layer_offset,
)
from megatron_core.features.offload.activations import offload_activations
from megatron_core.transformer import block
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import auxiliary_loss_names


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Return the number of layers on a stage of this pipeline rank, or of ``pp_rank``."""
    return len(stage_layers(config, vp_stage, pp_rank))


class TransformerBlock(LayerCall, block.TransformerBlock):  # type: ignore[misc]  # both arguments of ``forward``
    """The layers of this rank's stage, and after the last layer the final norm, with Megatron Core's arguments.

    ``spec`` is the specification of every layer, or of a block. Weights depend on the seed of
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
        context, norm = layer_context(config, model, pg_collection), post_process and post_layer_norm
        block.TransformerBlock.__init__(
            self, context, stage_layers(config, vp_stage), final_norm=norm, layer_specs=specs
        )
        offload_activations(self)
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self._loss_names = auxiliary_loss_names(model, specs)
        adopt(self, (*LAYER_PARTS, TransformerLayer), config, context, "decoder.")

    pre_process = True
    post_process = True
    vp_stage: int | None = None

    def bind(self, config: TransformerConfig, context: LayerContext, samples: SampleNumbers) -> None:
        """Bind the block and number its layers from 1."""
        super().bind(config, context, samples)
        self.expert_layers = context.config.counting_layers[0]
        for number, layer in self.layers_by_number():
            layer.layer_number = number + 1

    def layers_by_number(self) -> list[tuple[int, Any]]:
        """Return the layers of this stage with their global numbers, from 0."""
        return [*zip(self.layer_numbers, self.layers, strict=True)]

    @property
    def num_layers_per_pipeline_rank(self) -> int:
        """The number of layers on this stage."""
        return len(self.layers_by_number())

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the input of the next ``forward``: the output of the previous stage."""
        self.input_tensor = input_tensor

    def _returned(self, hidden: Tensor, passed: SequenceContext, indices: Any) -> Any:
        """Return the output, and with ``indices`` also the outputs of these layers."""
        found: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda module, inputs, output: found.append(output))
            for number, layer in self.layers_by_number()
            if number in (indices or ())
        ]
        try:
            output = block.TransformerBlock.forward(self, hidden, passed)
        finally:
            for hook in hooks:
                hook.remove()
        return (output, found) if indices else output
