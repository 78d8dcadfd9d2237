"""LayerNorm and RMSNorm over the last dim, replicated over the tensor-parallel ranks."""

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.ops import layer_norm, rms_norm
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import copy_to_region, reduce_from_region
from megatron_core.parallel.sharding import allocate, replicated, split
from megatron_core.transformer.context import LayerContext


class Norm(nn.Module):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, or RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight.
    LayerNorm has no bias with ``disable_bias_layernorm``.

    ``x`` is ``[..., size]``. ``partial_grad``: each tensor-parallel rank normalizes only a part of the activations, so
    its weight gradient must be summed over these ranks. ``epsilon`` replaces ``norm_epsilon``. The configuration's
    ``kernel_backend`` selects the backend of the operation.
    Source: Ba et al. 2016; Zhang and Sennrich 2019.
    """

    def __init__(
        self, context: LayerContext, size: int, *, partial_grad: bool, heads: int = 1, epsilon: float | None = None
    ) -> None:
        super().__init__()
        config = context.config
        parallel = context.parallel
        self.size = size
        self.epsilon = config.norm_epsilon if epsilon is None else epsilon
        spec = replicated((size,), context.tp_group.rank(), partial_grad=partial_grad)
        self.weight = allocate(spec, parallel.params_dtype, parallel.device)
        self.weight_minus_one = config.apply_layernorm_1p
        self.weight.init_method = nn.init.zeros_ if self.weight_minus_one else nn.init.ones_
        self.subtracts_mean = config.normalization == "LayerNorm"
        self.bias = None
        if config.norms_have_biases:
            self.bias = allocate(spec, parallel.params_dtype, parallel.device)
            self.bias.init_method = nn.init.zeros_
        self.backend = config.kernel_backend
        self.arithmetic = parallel.arithmetic
        self.heads = heads
        # Norms are usable without the model's initialization by name.
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize to the identity scale and a zero bias."""
        self.weight.fill_(0.0 if self.weight_minus_one else 1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` -> the same shape, in the dtype of the weights."""
        return self.arithmetic.normalise(self, x)

    def normalised(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The norm of ``x`` with these parameters, in their dtype; ``x`` may be a wider residual stream."""
        # A float32 residual stream is normalized in float32; only the result is rounded.
        if self.weight_minus_one or x.dtype != weight.dtype:
            dtype = wide(x.dtype)
            factor = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            if self.weight_minus_one:  # in 16 bits, 1 + weight would round small weights away
                factor = 1 + factor
            return self.plain_norm(x.to(dtype), factor, bias).to(weight.dtype)
        return self.plain_norm(x, weight, bias)

    def plain_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The norm with this factor on each channel, all in one dtype."""
        if not self.subtracts_mean:
            return rms_norm(x, weight, self.epsilon, backend=self.backend)
        # The kernel has no variant without a bias.
        bias = torch.zeros_like(weight) if bias is None else bias
        return layer_norm(x, weight, bias, self.epsilon, backend=self.backend)


class L2Norm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) over the last dim, without weights (Llama 4, NanoChat).

    It has the constructor of ``Norm``.
    """

    def __init__(self, context: LayerContext, size: int, *, partial_grad: bool, heads: int = 1) -> None:
        super().__init__()
        self.size = size
        self.epsilon = context.config.norm_epsilon
        self.dtype = _narrow_dtype(context)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` -> the same shape, in the dtype of the weights."""
        normed = nn.functional.rms_norm(x.to(wide(x.dtype)), (self.size,), eps=self.epsilon)
        return normed.to(self.dtype or x.dtype)


class NoNorm(nn.Module):
    """Return the residual stream in the dtype of the weights, for layers without a norm of their input.

    It has the constructor of ``Norm``.
    """

    def __init__(self, context: LayerContext, size: int, *, partial_grad: bool) -> None:
        super().__init__()
        self.dtype = _narrow_dtype(context)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` -> the same shape."""
        return x.to(self.dtype or x.dtype)


def _narrow_dtype(context: LayerContext) -> torch.dtype | None:
    """The dtype of a layer's parts if the residual stream may have a wider one."""
    return context.parallel.params_dtype if context.config.fp32_residual_connection else None


def norm_of(config: ModelConfig) -> type[nn.Module]:
    """The norm of hidden states: with weights, or without them."""
    return L2Norm if config.disable_weight_layernorm else Norm


class HeadsNorm(nn.Module):
    """RMSNorm over the channels of all heads together, with heads split over the tensor-parallel ranks.

    y = x / sqrt(mean(x^2) + eps) * weight, where the mean is over all ``heads * d`` channels (OLMo 2, arXiv 2501.00656,
    section 3.1).
    """

    def __init__(self, context: LayerContext, size: int, *, partial_grad: bool, heads: int) -> None:
        super().__init__()
        parallel = context.parallel
        self.group = context.tp_group
        self.channels = size * heads
        self.epsilon = context.config.norm_epsilon
        spec = split((self.channels,), 0, self.group.rank(), self.group.size())
        self.weight = allocate(spec, parallel.params_dtype, parallel.device)
        self.weight.init_method = nn.init.ones_

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, ..., d]`` of this rank's heads -> the same shape."""
        flat = x.flatten(2).to(wide(x.dtype))
        # One number per token is summed over ranks instead of gathering the heads.
        squares = flat.square().sum(-1, keepdim=True)
        # Each rank uses the total for its own channels, so the gradient of the total is summed over ranks as well.
        total = copy_to_region(reduce_from_region(squares, self.group), self.group)
        normed = flat * torch.rsqrt(total / self.channels + self.epsilon) * self.weight
        return normed.to(x.dtype).view_as(x)


class NormOfEachHead(nn.Module):
    """The configured norm of each head's channels, with separate weights for each head and without biases.

    y = (x - mean) / sqrt(var + eps) * weight (Command R+), or x / sqrt(mean(x^2) + eps) * weight. The weight of all
    heads ``[heads * d]`` is split over the tensor-parallel ranks with the heads. It has the constructor of ``Norm``.
    """

    def __init__(self, context: LayerContext, size: int, *, partial_grad: bool, heads: int) -> None:
        super().__init__()
        config = context.config
        parallel = context.parallel
        group = context.tp_group
        self.size = size
        self.epsilon = config.norm_epsilon
        self.subtracts_mean = config.normalization == "LayerNorm"
        self.weight_minus_one = config.apply_layernorm_1p
        spec = split((size * heads,), 0, group.rank(), group.size())
        self.weight = allocate(spec, parallel.params_dtype, parallel.device)
        self.weight.init_method = nn.init.zeros_ if self.weight_minus_one else nn.init.ones_

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, ..., d]`` of this rank's heads -> the same shape."""
        dtype = wide(x.dtype)
        norm = nn.functional.layer_norm if self.subtracts_mean else nn.functional.rms_norm
        weight = self.weight.to(dtype).view(x.shape[2:]) + float(self.weight_minus_one)
        return (norm(x.to(dtype), (self.size,), eps=self.epsilon) * weight).to(x.dtype)
