"""QLoRA: frozen linear layers with weights of 4 bits, next to trained adapters.

Source: Dettmers et al. 2023 (arXiv 2305.14314), sections 2 and 3: NormalFloat in blocks of 64, and double quantization.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.any_model.tensor import ParallelLinear, split_product
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import reduce_from_region
from megatron_core.parallel.sharding import ShardSpec, Split, spec_of

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
    ``fully_shard``: codes and scales are frozen parameters, so ZeRO stage 3 shards them. Call it after ``parallelize``,
    on all ranks: a split layer keeps its part of the codes of the whole weight. Scales of blocks have 8 bits with
    ``double_quantization``, else 32. Errors: ``ConfigError`` if no layer has such a name, one is trained, or a part
    of a split one does not consist of whole blocks of a row.
    """
    chosen = {
        name: module for name, module in model.named_modules() if name and any(fnmatchcase(name, p) for p in names)
    }
    if not chosen:
        raise ConfigError(f"quantize_frozen: no module of the model has a name like {', '.join(names)}; give names=")
    for name, module in chosen.items():
        if type(module) not in (nn.Linear, ParallelLinear):
            raise ConfigError(
                f"quantize_frozen: {name} is a {type(module).__name__}, and only nn.Linear has weights of 4 bits; "
                "leave it out of names="
            )
        if module.weight.requires_grad or module.weight.is_meta:
            state = "on the meta device" if module.weight.is_meta else "trained"
            raise ConfigError(f"quantize_frozen: {name}.weight is {state}; load and freeze it first")
        if type(module) is ParallelLinear and (module.transposed or not _has_whole_blocks(spec_of(module.weight))):
            raise ConfigError(
                f"quantize_frozen: {name}.weight of shape {spec_of(module.weight).global_shape} over "
                f"{module.group.size()} tensor-parallel ranks has blocks of {BLOCK} weights on several ranks; leave it "
                "out of names=, or use fewer ranks"
            )
    for name, module in chosen.items():
        path, _, label = name.rpartition(".")
        layer_class = NF4Linear if type(module) is nn.Linear else SplitNF4Linear
        setattr(model.get_submodule(path), label, layer_class(module, double_quantization=double_quantization))
    return list(chosen)


@torch.no_grad()
def restore_frozen(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Replace the layers of 4 bits by ``nn.Linear`` layers with the restored weights; return their names.

    Then ``merge_and_unload`` of peft adds the adapters to them. Errors: ``ConfigError`` for a split model.
    """
    chosen = {name: module for name, module in model.named_modules() if isinstance(module, NF4Linear)}
    split = next((name for name, module in chosen.items() if isinstance(module, SplitNF4Linear)), None)
    if split is not None:
        raise ConfigError(
            f"restore_frozen: {split} has a part of its weight; load engine.full_state_dict() into a whole model after "
            "quantize_frozen, and restore that"
        )
    for name, module in chosen.items():
        linear = nn.Linear(module.in_features, module.out_features, bias=False, device=module.codes.device, dtype=dtype)
        linear.weight.copy_(module.restored(dtype))
        linear.weight.requires_grad_(False)
        linear.register_parameter("bias", module.bias)
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], linear)
    return list(chosen)


def _has_whole_blocks(spec: ShardSpec) -> bool:
    """Whether every rank has whole blocks of whole rows."""
    of_columns = (runs for split in spec.splits if split.dim == 1 for runs in split.ranges)
    edges = [edge for runs in of_columns for run in runs for edge in run]
    return all(extent % BLOCK == 0 for extent in (spec.global_shape[1], *edges))


class NF4Linear(nn.Module):
    """y = W x + b for a frozen W of 4 bits, which forward and backward restore one layer at a time.

    ``codes`` [blocks, 32] has two weights a byte. ``scales`` [blocks, n] has the bytes of float32, or float8 codes
    relative to ``outer_scales``: the maxima of blocks of scales, then their mean. If rows consist of whole blocks,
    ``blocks`` are two dims: rows, and blocks of a row.
    """

    # Bytes, so that neither bf16 nor fp64 of an engine rounds or widens them.

    def __init__(self, linear: Any, *, double_quantization: bool = True) -> None:
        super().__init__()
        weight = self._gathered(linear)
        self.out_features, self.in_features = weight.shape
        self.bias: nn.Parameter | None = linear.bias
        codes, maxima = quantize(weight)
        outer_scales = maxima.new_zeros(0)
        if double_quantization:
            scales, outer_scales = quantize_maxima(maxima)
        else:
            scales = maxima.view(torch.uint8).view(-1, maxima.element_size())
        blocks = (-1,) if self.in_features % BLOCK else (self.out_features, self.in_features // BLOCK)
        self.codes = nn.Parameter(codes.view(*blocks, BLOCK // 2), requires_grad=False)
        self.scales = nn.Parameter(scales.view(*blocks, scales.shape[-1]), requires_grad=False)
        self.register_buffer("outer_scales", outer_scales)

    def _gathered(self, linear: Any) -> Tensor:
        return linear.weight.detach()

    def outer_blocks(self) -> Tensor:
        """Return the number of the block of scales of each block of weights."""
        return torch.arange(self.codes.numel() * 2 // BLOCK, device=self.codes.device) // OUTER_BLOCK

    def restored(self, dtype: torch.dtype) -> Tensor:
        """Return the weights in ``dtype``."""
        shape = self.out_features, self.in_features
        scales: Any = self.outer_scales
        return dequantize(self.codes, self.scales, scales, self.outer_blocks(), shape, dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b in the dtype of ``x``."""
        shape = self.out_features, self.in_features
        y: Tensor = _Product.apply(x, self.codes, self.scales, self.outer_scales, self.outer_blocks, shape)
        return y if bias is None else y + bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the output in the dtype of ``x``."""
        return self.product(x, self.bias)

    def extra_repr(self) -> str:
        """The sizes of the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class SplitNF4Linear(NF4Linear):
    """This rank's part of a layer that tensor parallelism has split: of the codes of the whole weight.

    So the model is the same in every layout: blocks of scales may be on several ranks.
    """

    rows: Tensor
    """Numbers of the local rows in the whole weight."""

    def __init__(self, linear: ParallelLinear, *, double_quantization: bool = True) -> None:
        super().__init__(linear, double_quantization=double_quantization)
        self.style = linear.style
        self.group = linear.group
        spec = spec_of(linear.weight)
        self.blocks_of_row = self.in_features // BLOCK
        numbers = torch.arange(self.out_features * self.blocks_of_row, dtype=torch.int32, device=linear.weight.device)
        numbers, _ = self._local(numbers.view(self.out_features, -1, 1), spec)
        self.first_block = int(numbers[0, 0, 0]) % self.blocks_of_row
        self.register_buffer("rows", numbers[:, 0, 0] // self.blocks_of_row, persistent=False)
        for name in ("codes", "scales"):
            codes, part_spec = self._local(getattr(self, name).detach(), spec)
            parameter: Any = nn.Parameter(codes, requires_grad=False)
            parameter.shard_spec = part_spec
            setattr(self, name, parameter)
        self.out_features, self.in_features = linear.weight.shape

    def _gathered(self, linear: ParallelLinear) -> Tensor:
        spec = spec_of(linear.weight)
        gathered = linear.weight.new_zeros(spec.global_shape)
        for piece in spec.parts:
            if piece.owned:
                gathered[piece.whole.index] = linear.weight.detach()[piece.local.index]
        return reduce_from_region(gathered, linear.group)

    @staticmethod
    def _local(table: Tensor, spec: ShardSpec) -> tuple[Tensor, ShardSpec]:
        """Return this rank's part of ``[rows, blocks of a row, n]``, and its spec; ``spec`` is that of the weight."""

        def in_blocks(split: Split) -> Split:
            size = BLOCK if split.dim == 1 else 1
            ranges = tuple(tuple((start // size, stop // size) for start, stop in runs) for runs in split.ranges)
            return replace(split, ranges=ranges)

        splits = tuple(map(in_blocks, spec.splits))
        part_spec = replace(spec, global_shape=tuple(table.shape), splits=splits, fused=None)
        local_blocks = table.new_empty(part_spec.local_shape)
        part_spec.localise(table, local_blocks)
        return local_blocks, part_spec

    def outer_blocks(self) -> Tensor:
        """Return the number of the block of scales of each block of weights, from their places in the whole weight."""
        blocks = torch.arange(self.codes.shape[1], device=self.codes.device) + self.first_block
        return (self.rows[:, None] * self.blocks_of_row + blocks).flatten() // OUTER_BLOCK

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the split layer in the dtype of ``x``."""
        return split_product(x, self.style, self.group, self.product, self.bias)


class _Product(torch.autograd.Function):
    """x W^T; backward restores W again, because weights of 16 bits of all layers would be kept otherwise."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        outer: Tensor,
        blocks: Callable[[], Tensor],
        shape: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, outer)
        ctx.shape = shape
        ctx.blocks = blocks
        return nn.functional.linear(x, dequantize(codes, scales, outer, blocks(), shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        codes, scales, outer = ctx.saved_tensors
        weight = dequantize(codes, scales, outer, ctx.blocks(), ctx.shape, gradient.dtype)
        return gradient @ weight, None, None, None, None, None


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
    codes: Tensor,
    scales: Tensor,
    outer_scales: Tensor,
    outer_blocks: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Return the weights of ``shape`` in ``dtype``; products are computed in float32, or in float64 for float64."""
    wide = torch.promote_types(dtype, torch.float32)
    if outer_scales.numel():
        maxima = scales.flatten().view(torch.float8_e4m3fn).to(wide)
        maxima = maxima * outer_scales[:-1].to(wide)[outer_blocks] + outer_scales[-1]
    else:
        maxima = scales.contiguous().view(torch.float32).flatten().to(wide)
    levels = torch.tensor(LEVELS, dtype=wide, device=codes.device)
    pairs = torch.stack([levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))], 1)  # both of a byte
    values = pairs.index_select(0, codes.flatten().int()).view(-1, BLOCK) * maxima[:, None]
    return values.flatten()[: math.prod(shape)].view(shape).to(dtype)
