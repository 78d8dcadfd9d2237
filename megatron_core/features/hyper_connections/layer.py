"""A layer that connects attention and MLP with several residual streams."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from megatron_core.features.hyper_connections.settings import HyperConnectionsConfig
from megatron_core.ops.rows import wide
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.tensor_parallel import KeyedDropout
from megatron_core.transformer.block import TransformerLayer
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import LayerSpec
from megatron_core.transformer.recompute import recomputed

EPSILON = 1e-6
"""Added to the root mean square, and least sum of a row or column, as in Megatron Core."""


class HyperConnection(nn.Module):
    """The weights of one sublayer for n streams of h channels, x ``[..., n h]`` (arXiv 2512.24880, equations 5 to 9).

        w = W x / rms(x),   read = sigmoid(a_1 w_1 + b_1)   [n]
                            write = 2 sigmoid(a_2 w_2 + b_2)   [n]
                            mix = sinkhorn(a_3 w_3 + b_3)   [n, n], doubly stochastic

    W ``[n^2 + 2 n, n h]``, the factors a and the biases b are replicated, under the names of Megatron Core. Products
    and weights are in float32 or wider.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config = context.config.section(HyperConnectionsConfig)
        parallel = context.parallel
        self.streams = config.mhc_num_residual_streams
        self.iterations = config.mhc_sinkhorn_iterations
        outputs = config.connection_weights
        # Ranks with other tokens have parts of the gradient; ranks with the same tokens have all of it.
        spec_of = partial(replicated, index=context.tp_group.rank(), partial_grad=context.sequence_parallel)

        def parameter(shape: tuple[int, ...], init_method: object) -> nn.Parameter:
            allocated: Any = allocate(spec_of(shape), parallel.params_dtype, parallel.device)
            allocated.init_method = init_method
            return cast(nn.Parameter, allocated)

        weight = parameter((outputs, config.stream_size), nn.init.xavier_uniform_)
        self.mapping_proj = nn.ParameterDict({"weight": weight})
        constant = partial(nn.init.constant_, val=config.mhc_init_gating_factor)
        self.alpha_pre = parameter((1,), constant)
        self.alpha_post = parameter((1,), constant)
        self.alpha_res = parameter((1,), constant)
        self.bias = parameter((outputs,), nn.init.zeros_)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[s, b, n h]`` -> the input of the sublayer ``[s, b, h]``, the weights of its output ``[s, b, n]``, and the
        mixed streams ``[s, b, n h]``."""
        count = self.streams
        x = streams.to(wide(streams.dtype))
        rms = x.square().mean(dim=-1, keepdim=True).sqrt()
        logits = functional.linear(x, self.mapping_proj["weight"].to(x.dtype)) / (rms + EPSILON)
        parts = logits.split([count, count, count * count], dim=-1)
        biases = self.bias.to(x.dtype).split([count, count, count * count])
        factors = (self.alpha_pre, self.alpha_post, self.alpha_res)
        read, write, mix = (
            factor.to(x.dtype) * part + bias for factor, part, bias in zip(factors, parts, biases, strict=True)
        )
        matrix = mix.unflatten(-1, (count, count))
        # The iterations would save 2 x 20 matrices for each token.
        mixing = recomputed(self._doubly_stochastic)(matrix)
        by_stream = streams.unflatten(-1, (count, -1))
        total = (read.sigmoid().to(streams.dtype).unsqueeze(-1) * by_stream).sum(dim=-2)
        mixed = (mixing.to(streams.dtype) @ by_stream).flatten(-2)
        return total, 2 * write.sigmoid().to(streams.dtype), mixed

    def _doubly_stochastic(self, logits: Tensor) -> Tensor:
        """The matrices after Sinkhorn's and Knopp's iterations from exp(logits)."""
        # The first normalization of rows cancels the maximum, which only keeps exp finite.
        matrix = (logits - logits.detach().amax(dim=-1, keepdim=True)).exp()
        for _ in range(self.iterations):
            matrix = matrix / matrix.sum(dim=-1, keepdim=True).clamp(min=EPSILON)
            matrix = matrix / matrix.sum(dim=-2, keepdim=True).clamp(min=EPSILON)
        return matrix


class HyperConnectedLayer(TransformerLayer):
    """x' = mix x + write drop(f(norm(read x))) for the attention f, then for the MLP, with n streams x.

    The first layer of the model copies its input to all streams; the last one returns their mean.
    """

    def __init__(self, context: LayerContext, layer_number: int, spec: LayerSpec) -> None:
        super().__init__(context, layer_number, spec)
        self.streams = context.config.section(HyperConnectionsConfig).mhc_num_residual_streams
        self.is_first = layer_number == 0
        self.is_last = layer_number == context.config.num_layers - 1
        self.self_attention_hyper_connection = HyperConnection(context)
        self.mlp_hyper_connection = HyperConnection(context)

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """``[s, b, n h]`` -> the same shape; ``[s, b, h]`` before the first layer and after the last one."""
        streams = hidden.repeat(1, 1, self.streams) if self.is_first else hidden
        streams = super().forward(streams, context)
        return streams.unflatten(-1, (self.streams, -1)).mean(dim=-2) if self.is_last else streams

    def attend(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Connect attention with the streams."""
        total, write, mixed = self.self_attention_hyper_connection(hidden)
        return self._written(mixed, write, self.attention_output(total, context), self.attention_dropout, context)

    def feed_forward(self, attended: Tensor, mlp_input: Tensor, context: SequenceContext) -> Tensor:
        """Connect the MLP with the streams."""
        total, write, mixed = self.mlp_hyper_connection(attended)
        return self._written(mixed, write, self.mlp_output(total, context), self.mlp_dropout, context)

    def _written(
        self,
        mixed: Tensor,
        write: Tensor,
        output: tuple[Tensor, Tensor | None],
        dropout: KeyedDropout,
        context: SequenceContext,
    ) -> Tensor:
        """Add an output, times the weight of each stream, to the streams."""
        x, bias = output
        written = write.unsqueeze(-1) * (x if bias is None else x + bias).unsqueeze(-2)
        return self._add(mixed, written.flatten(-2), None, dropout, context)
