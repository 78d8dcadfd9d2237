"""Checkpoints that any layout can load, without pickle."""

from megatron_core.checkpoint.boxes import Box, Piece, parameter_pieces, pieces_of
from megatron_core.checkpoint.manifest import Manifest, find_checkpoint
from megatron_core.checkpoint.reader import CheckpointReader
from megatron_core.checkpoint.writer import save_checkpoint

__all__ = [
    "Box",
    "CheckpointReader",
    "Manifest",
    "Piece",
    "find_checkpoint",
    "parameter_pieces",
    "pieces_of",
    "save_checkpoint",
]
