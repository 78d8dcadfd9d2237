"""Hugging Face checkpoints: import into any layout and export, from a declaration of each architecture."""

from megatron_core.hub.hugging_face.architecture import Architecture, architecture_for, architecture_of, register
from megatron_core.hub.hugging_face.reader import (
    HuggingFaceReader,
    config_of_folder,
    is_multimodal_folder,
    notes_of_folder,
    settings_of_folder,
)
from megatron_core.hub.hugging_face.rules import KeyRule
from megatron_core.hub.hugging_face.writer import MTP_PREFIX, stored_dtype, write_hugging_face
