"""Linear layers in tiles, whose construction is refused: whole layers are gathered one at a time."""

from deepspeed.unavailable import refused

_INSTEAD = "use torch.nn.Linear, and zero_optimization.offload_param for weights that do not fit"
TiledLinear = refused("deepspeed.runtime.zero.tiling.TiledLinear", _INSTEAD)
TiledLinearReturnBias = refused("deepspeed.runtime.zero.tiling.TiledLinearReturnBias", _INSTEAD)
