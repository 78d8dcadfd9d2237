"""The consecutive layers of one pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer import TransformerLayer
from megatron_core.transformer.layer_spec import LayerSpecs, layer_spec
from megatron_core.transformer.norm import Norm
from megatron_core.transformer.offload import offloaded
from megatron_core.transformer.recompute import recompute_runs, recomputed


class Layers(nn.ModuleDict):
    """Layers under their global numbers, so that parameter names do not depend on the stage.

    Iteration and integer indices return the layers of this stage, as for a list.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, key: str | int) -> Any:
        return list(self._modules.values())[key] if isinstance(key, int) else super().__getitem__(key)


class TransformerBlock(nn.Module):
    """The layers of one stage, under their global numbers, and with ``final_norm`` the final norm after them.

    ``layer_specs`` returns the specification of each layer.
    """

    def __init__(
        self, context: LayerContext, layers: Sequence[int], *, final_norm: bool, layer_specs: LayerSpecs = layer_spec
    ) -> None:
        super().__init__()
        self.config = self.model_config = context.config
        self.layers = Layers(
            {
                str(layer): TransformerLayer(context.of_layer(layer), layer, layer_specs(context.config, layer))
                for layer in layers
            }
        )
        self.final_layernorm = None
        if final_norm:
            size = context.config.hidden_size
            self.final_layernorm = Norm(context, size, partial_grad=context.sequence_parallel)

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Run the stage's layers, with the configured recomputation and offloading of activations."""
        layers = list(self.layers)
        if not layers and self.final_layernorm is None:
            return hidden.clone()  # the pipeline frees outputs and inputs separately: they must not share memory
        for run, recompute in recompute_runs(self.model_config, len(layers)):

            def forward_run(x: Tensor, run: range = run) -> Tensor:
                for i in run:
                    x = layers[i](x, context)
                return x

            run_layers = recomputed(forward_run) if recompute and self.training else forward_run
            if self.training and run.start < self.model_config.cpu_offloading_num_layers:
                run_layers = offloaded(run_layers, [layers[i] for i in run])
            hidden = run_layers(hidden)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)
