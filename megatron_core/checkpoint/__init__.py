"""Checkpoints that any layout can load, without pickle."""

from megatron_core.checkpoint.boxes import Box, TensorBox, parameter_pieces, pieces_of
from megatron_core.checkpoint.folder import FolderLock, find_candidates, find_checkpoint
from megatron_core.checkpoint.manifest import Manifest
from megatron_core.checkpoint.reader import CheckpointReader, find_newest, open_newest
from megatron_core.checkpoint.writer import Save, save_checkpoint
