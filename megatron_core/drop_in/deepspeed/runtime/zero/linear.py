"""The linear layer of ZeRO 3: torch's own."""

from torch.nn import Linear as LinearModuleForZeroStage3
from torch.nn.functional import linear as zero3_linear_wrap

__all__ = ["LinearModuleForZeroStage3", "zero3_linear_wrap"]
