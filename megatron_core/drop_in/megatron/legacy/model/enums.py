"""Kinds of attention, masks and layers, at their former path."""

from megatron.core.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType
