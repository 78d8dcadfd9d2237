"""The experts of a rank: two grouped matrix products and the activation between them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.features.experts.grouped_linear import Chunks, expert_arithmetic
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.ops.rows import copied_to
from megatron_core.parallel.initialization import Normal
from megatron_core.parallel.sharding import ShardSpec, allocate, replicated, split, split_fused, split_over
from megatron_core.transformer.context import LayerContext
from megatron_core.transformer.mlp import activation_of
from megatron_core.transformer.recompute import outputs_dropped, recomputed


class GroupedLinear(nn.Module):
    """One matrix per expert; ``weight`` is this rank's part of ``[E, out, in]``, ``bias`` of ``[E, out]``."""

    def __init__(
        self,
        context: LayerContext,
        spec: ShardSpec,
        init_method: Normal,
        *,
        product: Callable[..., Tensor],
        bias: ShardSpec | None = None,
    ) -> None:
        super().__init__()
        self.weight = allocate(spec, context.parallel.params_dtype, context.parallel.device)
        self.weight.init_method = init_method
        self.bias = None
        if bias is not None:
            self.bias = allocate(bias, context.parallel.params_dtype, context.parallel.device)
            self.bias.init_method = nn.init.zeros_
            # Two dims, but no matrix: optimizers of matrices must treat it as a bias.
            self.bias.is_vector = True
        self.adapter: Any = None
        self.product = product

    def forward(self, rows: Tensor, counts: Sequence[int], chunks: Chunks | None = None) -> Tensor:
        """``[R, in]`` -> ``[R, out]``; rows are ordered by expert, with ``counts`` rows each."""
        product = partial(self.product, weight=self.weight, counts=counts, chunks=chunks)
        return product(rows) if self.adapter is None else self.adapter(rows, product, self.weight, counts)

    def bias_of_rows(self, counts: Sequence[int]) -> Tensor | None:
        """The bias of the expert of each row, ``[R, out]``."""
        if self.bias is None:
            return None
        repeats = copied_to(counts, torch.int64, self.bias.device)
        return self.bias.repeat_interleave(repeats, dim=0, output_size=sum(counts))


class Experts(nn.Module):
    """y = p (W_2 f(W_1 x + b_1) + b_2) for each row, with the matrices of its expert; gated like ``MLP``.

    Experts are split over ep and their inner features over etp; each rank of etp returns a partial sum of y, to which
    its first rank adds p b_2.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config = context.config.section(MoEConfig)
        groups = context.groups
        assert config.num_experts is not None
        ffn = config.expert_ffn_size
        outer = config.expert_hidden_size
        pieces = (ffn, ffn) if config.gated_linear_unit else (ffn,)
        ep, etp = ((groups.index(axis), groups.size(axis)) for axis in ("ep", "etp"))
        first, second = ((config.num_experts, *shape) for shape in ((sum(pieces), outer), (outer, ffn)))
        inner = split_fused(first, pieces, *etp, dim=1, axis="etp")
        once = replicated(second[:2], etp[0], axis="etp", partial_grad=True)
        # Stacks and not separate parameters: one grouped product computes all experts of a rank.
        specs = [
            split_over(split(shape, 0, *ep, axis="ep"), over_etp, replica_axes=("edp",))
            for shape, over_etp in (
                (first, inner),
                (second, split(second, 2, *etp, axis="etp")),
                (first[:2], split_fused(first[:2], pieces, *etp, dim=1, axis="etp")),
                (second[:2], once),
            )
        ]
        biases = specs[2:] if config.add_bias_linear else [None, None]
        self.adds_bias = etp[0] == 0
        self.activation = activation_of(config)
        self.probs_on_input = config.moe_apply_probs_on_input
        self.recompute_activation = config.recomputes("moe_act")
        self.arithmetic = expert_arithmetic(context.parallel.arithmetic)
        self.etp_group = groups.group("etp")
        split_inner = partial(split_fused, first, pieces, index=0, dim=1, axis="etp")
        product = self.arithmetic.expert_output_product(inner, split_inner, self.etp_group)
        self.linear_fc1 = GroupedLinear(context, specs[0], context.init_method, product=product, bias=biases[0])
        product = self.arithmetic.expert_input_product(ffn // etp[1], self.etp_group)
        self.linear_fc2 = GroupedLinear(
            context, specs[1], context.output_layer_init_method, product=product, bias=biases[1]
        )

    def forward(self, rows: Tensor, probs: Tensor, counts: Sequence[int], chunks: Chunks | None = None) -> Tensor:
        """``rows`` ``[R, expert_hidden_size]``, ``probs`` ``[R]`` -> as ``rows``; ``chunks``: see ``Dispatched``.

        The probability is applied before W_2, with which it commutes, so backward does not need the output of W_2. With
        ``moe_apply_probs_on_input``: y = W_2 f(W_1 (p x)).
        """
        if self.probs_on_input:
            rows = (rows * probs.unsqueeze(-1)).to(rows.dtype)
            probs = torch.ones_like(probs)
        inner = self.linear_fc1(rows, counts, chunks)
        recompute = self.recompute_activation and self.training
        if (bias := self.linear_fc1.bias_of_rows(counts)) is not None:
            inner = inner + bias
        weighted = (recomputed(self._weighted) if recompute else self._weighted)(inner, probs)
        with outputs_dropped([weighted], lambda: [self._weighted(inner, probs)], active=recompute):
            output: Tensor = self.linear_fc2(weighted, counts, chunks)
        if (bias := self.linear_fc2.bias_of_rows(counts)) is not None:
            # All ranks of etp use the bias, so that its gradient, a sum over them, exists on each.
            output = output + (bias * (probs * self.adds_bias).unsqueeze(-1)).to(output.dtype)
        return output

    def _weighted(self, inner: Tensor, probs: Tensor) -> Tensor:
        activated = self.activation(inner, None)
        return self.arithmetic.times_probs(activated, probs, self.etp_group)
