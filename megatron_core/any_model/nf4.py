"""QLoRA: frozen linear layers with weights of 4 bits, next to trained adapters.

Source: Dettmers et al. 2023 (arXiv 2305.14314), sections 2 and 3: NormalFloat in blocks of 64, and double quantization.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of a code of 4 bits: appendix E of the paper."""
BLOCK = 64
"""Weights with one absolute maximum."""
OUTER_BLOCK = 256
"""Absolute maxima with one maximum of their own."""
LARGEST_FP8 = 448.0
"""Largest value of float8_e4m3fn."""
ADAPTED = ("*.base_layer",)
"""Names of the layers with an adapter of peft."""


def quantize_frozen(model: nn.Module, names: Sequence[str] = ADAPTED, *, double_quantization: bool = True) -> list[str]:
    """Replace frozen ``nn.Linear`` layers of ``model`` by layers with weights of 4 bits; return their names.

    ``names``: patterns of names, by default the layers with an adapter of peft. Call it before ``initialize`` or
    ``fully_shard``: codes and scales are frozen parameters, so ZeRO stage 3 shards them. Scales of blocks have 8 bits
    with ``double_quantization``, else 32. Errors: ``ConfigError`` if no layer has such a name, or one is trained.
    """
    chosen = {
        name: module for name, module in model.named_modules() if name and any(fnmatchcase(name, p) for p in names)
    }
    if not chosen:
        raise ConfigError(f"quantize_frozen: no module of the model has a name like {', '.join(names)}; give names=")
    for name, module in chosen.items():
        if type(module) is not nn.Linear:
            raise ConfigError(
                f"quantize_frozen: {name} is a {type(module).__name__}, and only nn.Linear has weights of 4 bits; "
                "leave it out of names="
            )
        if module.weight.requires_grad or module.weight.is_meta:
            state = "on the meta device" if module.weight.is_meta else "trained"
            raise ConfigError(f"quantize_frozen: {name}.weight is {state}; load and freeze it first")
    for name, module in chosen.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], NF4Linear(module, double_quantization=double_quantization))
    return list(chosen)


class NF4Linear(nn.Module):
    """y = W x + b for a frozen W of 4 bits, which forward and backward restore one layer at a time.

    ``codes`` [blocks, 32] has two weights a byte. ``scales`` [blocks, n] has the bytes of float32, or float8 codes
    relative to ``outer_scales``: the maxima of blocks of scales, then their mean.
    """

    # Bytes, so that neither bf16 nor fp64 of an engine rounds or widens them.

    def __init__(self, linear: nn.Linear, *, double_quantization: bool = True) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        codes, maxima = quantize(linear.weight.detach())
        outer_scales = maxima.new_zeros(0)
        if double_quantization:
            scales, outer_scales = quantize_maxima(maxima)
        else:
            scales = maxima.view(torch.uint8).view(-1, maxima.element_size())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.register_buffer("outer_scales", outer_scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output in the dtype of ``x``."""
        shape = self.out_features, self.in_features
        y: Tensor = _Product.apply(x, self.codes, self.scales, self.outer_scales, shape)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """The sizes of the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class _Product(torch.autograd.Function):
    """x W^T; backward restores W again, because weights of 16 bits of all layers would be kept otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, outer: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(codes, scales, outer)
        ctx.shape = shape
        return nn.functional.linear(x, dequantize(codes, scales, outer, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        codes, scales, outer = ctx.saved_tensors
        weight = dequantize(codes, scales, outer, ctx.shape, gradient.dtype)
        return gradient @ weight, None, None, None, None


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [blocks, 32] of the nearest levels, two a byte, and the blocks' absolute maxima in float32."""
    flat = weight.float().flatten()
    padding = -flat.numel() % BLOCK
    blocks = nn.functional.pad(flat, (0, padding)).view(-1, BLOCK)
    maxima = blocks.abs().amax(1)
    levels = torch.tensor(LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / maxima.clamp(min=torch.finfo(torch.float32).tiny)[:, None], between)
    pairs = codes.view(-1, BLOCK // 2, 2).to(torch.uint8)
    return pairs[..., 0] * 16 + pairs[..., 1], maxima


def quantize_maxima(maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``maxima`` as float8 codes [blocks, 1], and the scales of their blocks of 256, then their mean."""
    mean = maxima.mean()
    centred = nn.functional.pad(maxima - mean, (0, -maxima.numel() % OUTER_BLOCK)).view(-1, OUTER_BLOCK)
    outer = (centred.abs().amax(1) / LARGEST_FP8).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (centred / outer[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten()[: maxima.numel(), None].contiguous(), torch.cat([outer, mean[None]])


def dequantize(
    codes: Tensor, scales: Tensor, outer_scales: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the weights of ``shape`` in ``dtype``; products are computed in float32, or in float64 for float64."""
    wide = torch.promote_types(dtype, torch.float32)
    if outer_scales.numel():
        outer = outer_scales[:-1].to(wide).repeat_interleave(OUTER_BLOCK)[: scales.shape[0]]
        maxima = scales.flatten().view(torch.float8_e4m3fn).to(wide) * outer + outer_scales[-1]
    else:
        maxima = scales.contiguous().view(torch.float32).flatten().to(wide)
    levels = torch.tensor(LEVELS, dtype=wide, device=codes.device)
    pairs = torch.stack([levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))], 1)  # both of a byte
    values = pairs.index_select(0, codes.flatten().int()).view(-1, BLOCK) * maxima[:, None]
    return values.flatten()[: math.prod(shape)].view(shape).to(dtype)
