"""Kinds of masks, attention, layers and backends."""

from enum import Enum

from megatron.core.enums import LayerType, ModelType


class AttnType(Enum):
    """The source of the keys."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(Enum):
    """The keys that a query must not see."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnBackend(Enum):
    """The implementation of attention: torch, or plain products and a softmax for ``unfused`` and ``local``."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
