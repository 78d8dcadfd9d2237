"""The consecutive layers of one pipeline stage, and one layer: norm, attention, norm, MLP."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_core.config.linear_layers import feed_forward_of
from megatron_core.feature import load_hook
from megatron_core.ops.rows import wide
from megatron_core.tensor_parallel import KeyedDropout
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.joined import JoinedParts, added
from megatron_core.transformer.layer_spec import LayerSpec, LayerSpecs, layer_spec
from megatron_core.transformer.mlp import scaled
from megatron_core.transformer.norm import norm_of
from megatron_core.transformer.recompute import outputs_dropped, recompute_runs, recomputed

UnitRunner = Callable[[int, Callable[[], Tensor], Sequence[nn.Module]], Tensor]
"""Calls the forward of consecutive layers, given the number of the first layer in the stage and the layers."""


def run_plainly(number: int, forward: Callable[[], Tensor], layers: Sequence[nn.Module]) -> Tensor:
    """Return ``forward()``; see ``UnitRunner``."""
    return forward()


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
        make = load_hook(context.config.layer_class)
        self.layer_numbers = tuple(layers)
        self.layers = Layers(
            {str(layer): make(context.of_layer(layer), layer, layer_specs(context.config, layer)) for layer in layers}
        )
        self.run_unit: UnitRunner = run_plainly
        """Runs layers in training; a feature may replace it, for example to move the tensors that they save."""
        self.final_layernorm = None
        if final_norm:
            size = context.config.hidden_size
            self.final_layernorm = norm_of(context.config)(context, size, partial_grad=context.sequence_parallel)

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Run the stage's layers, with the configured recomputation."""
        # Indexing ``Layers`` builds a list each time.
        layers = list(self.layers)
        received = hidden
        for run, recompute in recompute_runs(self.model_config, len(layers)):
            # ``run`` is a default argument because backward may call the function after the loop has moved on.
            def forward_run(x: Tensor, run: range = run) -> Tensor:
                for i in run:
                    x = layers[i](x, context)
                return x

            # In evaluation nothing is kept for backward.
            run_layers = recomputed(forward_run) if recompute and self.training else forward_run
            if self.training:
                hidden = self.run_unit(run.start, partial(run_layers, hidden), [layers[i] for i in run])
            else:
                hidden = run_layers(hidden)
        if self.final_layernorm is not None:
            return self.final_layernorm(hidden)
        # The pipeline frees outputs and inputs separately: they must not share memory, also if all layers are empty.
        return hidden.clone() if hidden is received else hidden


class TransformerLayer(nn.Module):
    """Pre-norm layer: x += drop(attention(norm(x))); x += drop(mlp(norm(x))) (Radford et al. 2019, section 2.3).

    With ``parallel_residual`` both use the same x (Wang and Komatsuzaki 2021), and share one norm of it if ``spec`` has
    no second one. ``residual_multiplier`` scales both. ``layer_number`` is global and counts from 0. ``spec`` has the
    constructors of the parts. A layer without attention, or without MLP, has neither the norms nor the addition of this
    part. With ``fp32_residual_connection`` and weights in 16 bits, x is float32.
    """

    # Each += also adds the bias of the preceding matrix product, in one pass over x: x is read once, not twice.
    # With a float32 x, norms return the dtype of the weights, and outputs are added in float32: in 16 bits, small
    # outputs of late layers would be lost in a large x.

    def __init__(self, context: LayerContext, layer_number: int, spec: LayerSpec) -> None:
        super().__init__()
        p = context.config.hidden_dropout
        norm = partial(_norm, context)
        self.input_layernorm: Any = None
        self.self_attention: Any = None
        self.post_self_attn_layernorm = None
        if spec.self_attention is not None:
            self.input_layernorm = norm(spec.input_layernorm)
            self.self_attention = spec.self_attention(context, layer_number)
            self.post_self_attn_layernorm = norm(spec.post_self_attn_layernorm)
        # Named by the layer's global number, so that masks do not depend on the stage.
        self.attention_dropout = context.dropout(p, f"layers.{layer_number}.attention")
        self.pre_mlp_layernorm: Any = None
        self.mlp: Any = None
        self.post_mlp_layernorm = None
        if spec.mlp is not None:
            self.pre_mlp_layernorm = norm(spec.pre_mlp_layernorm)
            self.mlp = spec.mlp(context, layer_number)
            self.post_mlp_layernorm = norm(spec.post_mlp_layernorm)
        self.mlp_dropout = context.dropout(p, f"layers.{layer_number}.mlp")
        self.parallel_residual = context.config.parallel_residual
        self.shares_norm = self.mlp is not None and self.pre_mlp_layernorm is None
        # Dropout needs both outputs, and so do norms of outputs, which models with a shared norm do not have.
        sublayers = [self.self_attention, self.mlp]
        self.joined = JoinedParts.of(sublayers, context) if self.shares_norm and p == 0.0 else None
        self.residual_multiplier = context.config.residual_multiplier
        self.wide_stream = context.config.fp32_residual_connection
        # A norm is cheap to compute again, and its output is as large as the residual stream.
        self.recompute_norms = context.config.recomputes("layernorm")
        self.recompute_mlp = context.config.recomputes(feed_forward_of(context.config, layer_number).recomputed_as)

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism) -> the same shape."""
        if self.shares_norm:
            return self.attend_and_feed_forward(hidden, context)
        attended = hidden if self.self_attention is None else self.attend(hidden, context)
        if self.mlp is None:
            return attended
        return self.feed_forward(attended, hidden if self.parallel_residual else attended, context)

    def attend(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Return ``hidden`` + drop(attention(norm(hidden)))."""
        output, bias = self.attention_output(hidden, context)
        return self._add(hidden, output, bias, self.attention_dropout, context)

    def attention_output(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """Return attention(norm(hidden)) and its bias."""
        normed = self.input_layernorm(hidden)
        with self._dropped(normed, self.input_layernorm, hidden):
            output, bias = self.self_attention(normed, context)
        return _normed(self.post_self_attn_layernorm, output, bias)

    def feed_forward(self, attended: Tensor, mlp_input: Tensor, context: SequenceContext) -> Tensor:
        """Return ``attended`` + drop(mlp(norm(mlp_input)))."""
        output, bias = self.mlp_output(mlp_input, context)
        return self._add(attended, output, bias, self.mlp_dropout, context)

    def mlp_output(self, mlp_input: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """Return mlp(norm(mlp_input)) and its bias."""
        normed = self.pre_mlp_layernorm(mlp_input)
        with self._dropped(normed, self.pre_mlp_layernorm, mlp_input):
            output, bias = self._run_mlp(normed, context)
        return _normed(self.post_mlp_layernorm, output, bias)

    def attend_and_feed_forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Return ``hidden`` + drop(attention(y)) + drop(mlp(y)) for y = norm(hidden)."""
        normed = self.input_layernorm(hidden)
        with self._dropped(normed, self.input_layernorm, hidden):
            attended, attention_bias = self.self_attention(normed, context)
            output, bias = self._run_mlp(normed, context)
        # Both sublayers return this rank's part of a sum over ranks: one collective reduces the sum of both.
        if self.joined is not None:
            total, bias = added([(attended, attention_bias), (output, bias)])
            return self._add(hidden, self.joined.reduced(total), bias, self.mlp_dropout, context)
        hidden = self._add(hidden, attended, attention_bias, self.attention_dropout, context)
        return self._add(hidden, output, bias, self.mlp_dropout, context)

    def _run_mlp(self, normed: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        mlp = recomputed(self.mlp) if self.recompute_mlp and self.training else self.mlp
        return mlp(normed, context)

    def _dropped(self, normed: Tensor, norm: nn.Module, x: Tensor) -> AbstractContextManager[None]:
        """Return a context in which autograd does not keep ``normed``, if norms are recomputed."""
        return outputs_dropped([normed], lambda: [norm(x)], active=self.recompute_norms and self.training)

    def _add(
        self, hidden: Tensor, x: Tensor, bias: Tensor | None, dropout: KeyedDropout, context: SequenceContext
    ) -> Tensor:
        if self.wide_stream:
            dtype = wide(hidden.dtype)
            hidden = hidden.to(dtype)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        x, bias = scaled((x, bias), self.residual_multiplier)
        return dropout(x, context.sample_index, bias=bias, residual=hidden, position_ids=context.residual_positions)


def _norm(context: LayerContext, make: Callable[..., nn.Module] | None) -> Any:
    """Construct a norm of hidden states; None without one."""
    size = context.config.hidden_size
    partial_grad = context.sequence_parallel
    return None if make is None else make(context, size, partial_grad=partial_grad)


def _normed(norm: nn.Module | None, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the output of attention or MLP and its bias, or, with a norm, the norm of their sum and None."""
    if norm is None:
        return x, bias
    return norm(x if bias is None else x + bias), None
