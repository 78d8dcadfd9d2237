"""Gated delta products: mixers of hybrid models that update their states several times for each token."""

from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import pad, softplus

from megatron_core.features.recurrent import kinds
from megatron_core.features.recurrent.delta_rule import chunked_delta_rule, delta_rule_by_steps, unit_heads
from megatron_core.features.recurrent.mamba import MambaMixer
from megatron_core.ops.rows import wide
from megatron_core.transformer.context import LayerContext


class GatedDeltaProduct(MambaMixer):
    """x -> W_o norm(o * silu(z)), where o are the outputs of the gated delta rule with N updates for each token

        v_j, k_j, q   convolution of W x, with q and k_j of length 1, for j = 1, ..., N
        decay         g = -e^A softplus(a + c), with a = W_a x, before the first update of a token
        rates         b_j = sigmoid(W_bj x)
        gate          z = W_z x

    The output of a token follows its last update. The heads of a group share q and k_j, and a norm.
    Source: Siems et al. 2025 (arXiv 2502.10297), section 4; names of the weights as in Megatron Core's
    ``GatedDeltaProductMixer``, with the pieces v, k, q, z, b, a in this order.
    """

    recurrence: ClassVar[type[kinds.Mamba2]] = kinds.GatedDeltaProductKind

    def __init__(self, context: LayerContext, layer_number: int, **_: Any) -> None:
        super().__init__(context, layer_number)
        sizes = self.recurrence(context.config)
        self.updates = sizes.updates
        self.A_log.init_method = lambda tensor: tensor.uniform_(0.0, 16.0).log_()  # as in Megatron Core
        self.shared = sizes.heads // sizes.groups

    def _projected(self, hidden: Tensor) -> Tensor:
        return self.in_proj(hidden)[0]

    def _recur(
        self, convolved: Tensor, gates: Tensor, *, by_steps: bool = False, **extra: Any
    ) -> tuple[Tensor, Tensor]:
        n = self.updates
        dtype = wide(convolved.dtype)
        shared_width = self.groups * self.keys
        values, keys, query = convolved.to(dtype).split([n * self.inner, n * shared_width, shared_width], dim=-1)
        heads = self.inner // self.values
        rates, decay = gates[..., self.inner :].to(dtype).split([n * heads, heads], dim=-1)
        decay = -self.A_log.to(dtype).exp() * softplus(decay + self.dt_bias.to(dtype))

        # Each token becomes n tokens of the gated delta rule: the first one decays, and the last one has the query.
        query = unit_heads(query.unsqueeze(2), self.keys, self.shared) * self.keys**-0.5
        query = pad(query, (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
        key = unit_heads(keys.unflatten(-1, (n, -1)), self.keys, self.shared).flatten(1, 2)
        value = values.unflatten(-1, (n, -1, self.values)).flatten(1, 2)
        rate = rates.sigmoid().unflatten(-1, (n, -1)).flatten(1, 2)
        decay = pad(decay.unsqueeze(2), (0, 0, 0, n - 1)).flatten(1, 2)
        if extra.get("first") is not None:
            extra["first"] = pad(extra["first"].unsqueeze(-1), (0, n - 1)).flatten(1)
        rule = delta_rule_by_steps if by_steps else chunked_delta_rule
        outputs, state = rule(query, key, value, decay, rate, **extra)
        return outputs[:, n - 1 :: n], state
