"""The softmax of attention scores, at its former path."""

from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
