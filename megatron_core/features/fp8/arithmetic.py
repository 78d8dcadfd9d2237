"""Layers whose matrix products are in FP8."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.features.experts.grouped_linear import ExpertArithmetic
from megatron_core.features.fp8.experts import FP8ExpertProducts
from megatron_core.features.fp8.gather import start_fp8_gather
from megatron_core.features.fp8.products import FP8Products
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.ops import Backend
from megatron_core.parallel.groups import ALONE, Group
from megatron_core.parallel.sharding import ShardSpec
from megatron_core.tensor_parallel.arithmetic import PLAIN, LayerArithmetic, Product, SplitOver


def fp8_arithmetic(config: RunConfig, context: Group, data_ranks: int) -> LayerArithmetic:
    """See ``Feature.arithmetic``."""
    settings = config.section(FP8Config)
    layers = settings.eight_bit_layers(config.model.num_layers)
    unquantised = frozenset(range(config.model.num_layers)) - frozenset(layers)
    return FP8Arithmetic(settings, unquantised, context, config.model.kernel_backend)


class FP8Arithmetic(LayerArithmetic):
    """Plain outside of the transformer layers, and inside of the layers ``unquantised``; FP8 in the others."""

    def __init__(self, settings: FP8Config, unquantised: frozenset[int], sequence: Group, backend: Backend) -> None:
        """``sequence``: the ranks that split sequences."""
        self._layers = FP8LayerArithmetic(settings, sequence, backend)
        self._kept = unquantised

    def of_layer(self, layer_number: int) -> LayerArithmetic:
        """The arithmetic of a layer. Layers of multi-token prediction, which follow the last layer, also use FP8."""
        return PLAIN if layer_number in self._kept else self._layers


class FP8LayerArithmetic(LayerArithmetic, ExpertArithmetic):
    """Linear layers of attention, MLP and experts in FP8; router and gates as they are."""

    def __init__(self, settings: FP8Config, sequence: Group = ALONE, backend: Backend = "auto") -> None:
        self.settings = settings
        self.sequence = sequence
        self.backend = backend

    def output_product(self, spec: ShardSpec, split_over: SplitOver, group: Group) -> Product:
        """Products of a layer whose output features are split."""
        return FP8Products(self.settings, ALONE, group, sequence=self.sequence, backend=self.backend)

    def input_product(self, inputs: int, group: Group) -> Product:
        """Products of a layer whose input features are split."""
        return FP8Products(self.settings, group, ALONE, sequence=self.sequence, backend=self.backend)

    def expert_output_product(self, spec: ShardSpec, split_over: SplitOver, group: Group) -> Callable[..., Tensor]:
        """As ``output_product``, with scales of rows that no layout changes."""
        return FP8ExpertProducts(FP8Products(self.settings, ALONE, group, by_row=True, backend=self.backend))

    def expert_input_product(self, inputs: int, group: Group) -> Callable[..., Tensor]:
        """As ``input_product``, with scales of rows that no layout changes."""
        return FP8ExpertProducts(FP8Products(self.settings, group, ALONE, by_row=True, backend=self.backend))


def fp8_of(module: nn.Module) -> FP8Products | None:
    """The products of a linear layer or a stack of experts in FP8."""
    products = getattr(module, "product", None)
    products = products.fp8 if isinstance(products, FP8ExpertProducts) else products
    return products if isinstance(products, FP8Products) else None


def mark_gathered_weights(config: RunConfig, stage: nn.Module, groups: Any, *, initialise: bool) -> None:
    """With ``fp8_param_gather``, let data parallelism gather the weights in FP8; see ``Feature.change_stage``."""
    if not config.section(FP8Config).fp8_param_gather:
        return
    for module in stage.modules():
        products = fp8_of(module)
        if products is not None and isinstance(module.weight, nn.Parameter):
            weight: Any = module.weight
            weight.fp8 = products
            weight.start_gather = start_fp8_gather
