"""LayerNorm and RMSNorm over the last dim, replicated over the tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_core.ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megatron_core.ops.backend import serving
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.transformer.blueprint import Blueprint


class Norm(nn.Module):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, or RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight.

    ``x`` is ``[..., size]``. ``partial_grad`` says that each tensor-parallel rank sees only a part of what is
    normalized, so that the weights' gradients are parts of the whole. The configuration's ``kernel_backend`` says which
    body of the operation computes it.
    Source: Ba et al. 2016; Zhang and Sennrich 2019.
    """

    def __init__(self, blueprint: Blueprint, size: int, *, partial_grad: bool) -> None:
        super().__init__()
        config, parallel = blueprint.config, blueprint.parallel
        self.size, self.epsilon = size, config.norm_epsilon
        spec = replicated((size,), blueprint.tp_group.rank(), partial_grad=partial_grad)
        self.weight = allocate(spec, parallel.params_dtype, parallel.device)
        self.weight.init_method = nn.init.ones_
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = allocate(spec, parallel.params_dtype, parallel.device)
            self.bias.init_method = nn.init.zeros_
        self.backend = config.kernel_backend
        op = "rms_norm" if self.bias is None else "layer_norm"
        serving(op, self.backend, self.weight.device.type, self.weight.dtype)  # fails now, not at the first step
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weight one, bias zero."""
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize the last dim of ``x``; or of ``x + residual``, in one pass: -> (y, x + residual)."""
        parameters = (self.weight, self.epsilon) if self.bias is None else (self.weight, self.bias, self.epsilon)
        if residual is None:
            norm = rms_norm if self.bias is None else layer_norm
            return norm(x, *parameters, backend=self.backend)
        norm_of_sum = add_rms_norm if self.bias is None else add_layer_norm
        return norm_of_sum(x, residual, *parameters, backend=self.backend)
