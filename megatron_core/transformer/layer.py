"""One layer: attention and MLP, each preceded by a norm and followed by dropout and residual addition."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from megatron_core.tensor_parallel import KeyedDropout
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import LayerSpec
from megatron_core.transformer.recompute import outputs_dropped, recomputed


class TransformerLayer(nn.Module):
    """Pre-norm layer: x += drop(attention(norm(x))); x += drop(mlp(norm(x))) (Radford et al. 2019, section 2.3).

    With ``parallel_residual`` both use the same x (Wang and Komatsuzaki 2021). Each += also adds the bias of the
    preceding matrix product, in one pass over x. ``layer_number`` is global and counts from 0, independent of the
    stage. ``spec`` has the constructors of the parts, which may include norms of the two outputs.
    """

    def __init__(self, context: LayerContext, layer_number: int, spec: LayerSpec) -> None:
        super().__init__()
        size, p, partial_grad = context.config.hidden_size, context.config.hidden_dropout, context.sequence_parallel
        self.input_layernorm = spec.input_layernorm(context, size, partial_grad=partial_grad)
        self.self_attention = spec.self_attention(context, layer_number)
        self.post_self_attn_layernorm = self._after(spec.post_self_attn_layernorm, context)
        self.attention_dropout = context.dropout(p, f"layers.{layer_number}.attention")
        self.pre_mlp_layernorm = spec.pre_mlp_layernorm(context, size, partial_grad=partial_grad)
        self.mlp = spec.mlp(context, layer_number)
        self.post_mlp_layernorm = self._after(spec.post_mlp_layernorm, context)
        self.mlp_dropout = context.dropout(p, f"layers.{layer_number}.mlp")
        self.parallel_residual = context.config.parallel_residual
        self.recompute_norms = context.config.recomputes("layernorm")
        self.recompute_mlp = context.config.recomputes("moe" if context.config.has_experts(layer_number) else "mlp")

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism) -> the same shape."""
        normed = self.input_layernorm(hidden)
        with self._dropped(normed, self.input_layernorm, hidden):
            output, bias = self.self_attention(normed, context)
        output, bias = _normed(self.post_self_attn_layernorm, output, bias)
        attended = self._add(hidden, output, bias, self.attention_dropout, context)
        mlp_input = hidden if self.parallel_residual else attended
        normed = self.pre_mlp_layernorm(mlp_input)
        mlp = recomputed(self.mlp) if self.recompute_mlp and self.training else self.mlp
        with self._dropped(normed, self.pre_mlp_layernorm, mlp_input):
            output, bias = mlp(normed, context)
        output, bias = _normed(self.post_mlp_layernorm, output, bias)
        return self._add(attended, output, bias, self.mlp_dropout, context)

    def _dropped(self, normed: Tensor, norm: nn.Module, x: Tensor) -> AbstractContextManager[None]:
        """Return a context in which autograd does not keep ``normed``, if norms are recomputed."""
        return outputs_dropped([normed], lambda: [norm(x)], active=self.recompute_norms and self.training)

    @staticmethod
    def _after(norm: Callable[..., nn.Module] | None, context: LayerContext) -> nn.Module | None:
        size, partial_grad = context.config.hidden_size, context.sequence_parallel
        return None if norm is None else norm(context, size, partial_grad=partial_grad)

    def _add(
        self, hidden: Tensor, x: Tensor, bias: Tensor | None, dropout: KeyedDropout, context: SequenceContext
    ) -> Tensor:
        return dropout(x, context.sample_index, bias=bias, residual=hidden, position_ids=context.residual_positions)


def _normed(norm: nn.Module | None, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the output of attention or MLP and its bias, or, with a norm, the norm of their sum and None."""
    if norm is None:
        return x, bias
    return norm(x if bias is None else x + bias), None
