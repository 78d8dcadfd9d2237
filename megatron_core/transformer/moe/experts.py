"""The experts of a rank: two grouped matrix products and the activation between them."""

from collections.abc import Sequence

from torch import Tensor, nn

from megatron_core.ops.activation import bias_activation
from megatron_core.parallel.groups import ALONE
from megatron_core.parallel.initialization import Normal
from megatron_core.parallel.sharding import ShardSpec, allocate, split, split_fused, split_over
from megatron_core.tensor_parallel.fp8 import FP8Products
from megatron_core.tensor_parallel.grouped_linear import grouped_linear
from megatron_core.transformer.context import LayerContext
from megatron_core.transformer.mlp import activation_kind
from megatron_core.transformer.recompute import outputs_dropped, recomputed


class GroupedLinear(nn.Module):
    """One matrix per expert; ``weight`` is this rank's part of ``[E, out, in]``."""

    def __init__(
        self, context: LayerContext, spec: ShardSpec, init_method: Normal, *, splits_output: bool = False
    ) -> None:
        """``splits_output``: output features are split over etp; otherwise input features."""
        super().__init__()
        self.weight = allocate(spec, context.parallel.params_dtype, context.parallel.device)
        self.weight.init_method = init_method
        self.fp8: FP8Products | None = None
        if (precision := context.parallel.fp8_precision) is not None:
            etp = context.groups.group("etp")
            of_input, of_output = (ALONE, etp) if splits_output else (etp, ALONE)
            backend = context.config.kernel_backend
            self.fp8 = FP8Products(precision.settings, of_input, of_output, by_row=True, backend=backend)
            if precision.settings.fp8_param_gather:
                self.weight.fp8 = self.fp8  # read by data parallelism

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """``[R, in]`` -> ``[R, out]``; rows are ordered by expert, with ``counts`` rows each."""
        return grouped_linear(rows, self.weight, counts, fp8=self.fp8)


class Experts(nn.Module):
    """y = p W_2 f(W_1 x) for each row, with the matrices of its expert, without biases; gated like ``MLP``.

    Experts are split over ep and their inner features over etp; each rank of etp returns a partial sum of y.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config, groups = context.config, context.groups
        assert config.num_experts is not None
        ffn, kind = config.expert_ffn_size, activation_kind(config)
        pieces = (ffn, ffn) if config.gated_linear_unit else (ffn,)
        ep, etp = ((groups.index(axis), groups.size(axis)) for axis in ("ep", "etp"))
        first, second = (
            (config.num_experts, *shape) for shape in ((sum(pieces), config.hidden_size), (config.hidden_size, ffn))
        )
        inner = split_fused(first, pieces, *etp, dim=1, axis="etp")
        specs = [
            split_over(split(shape, 0, *ep, axis="ep"), over_etp, replica_axes=("edp",))
            for shape, over_etp in ((first, inner), (second, split(second, 2, *etp, axis="etp")))
        ]
        self.activation, self.backend = kind, config.kernel_backend
        self.recompute_activation = config.recomputes("moe_act")
        self.linear_fc1 = GroupedLinear(context, specs[0], context.init_method, splits_output=True)
        self.linear_fc2 = GroupedLinear(context, specs[1], context.output_layer_init_method)

    def forward(self, rows: Tensor, probs: Tensor, counts: Sequence[int]) -> Tensor:
        """``rows`` ``[R, h]``, ``probs`` ``[R]`` -> ``[R, h]``.

        The probability is applied before W_2, with which it commutes, so backward does not need the output of W_2.
        """
        inner, recompute = self.linear_fc1(rows, counts), self.recompute_activation and self.training
        weighted = (recomputed(self._weighted) if recompute else self._weighted)(inner, probs)
        with outputs_dropped([weighted], lambda: [self._weighted(inner, probs)], active=recompute):
            return self.linear_fc2(weighted, counts)

    def _weighted(self, inner: Tensor, probs: Tensor) -> Tensor:
        activated = bias_activation(inner, None, self.activation, backend=self.backend)
        return (activated * probs.unsqueeze(-1)).to(activated.dtype)
