"""Hugging Face checkpoints: read under any layout, written again, from one table for each architecture."""

from megatron_core.models.hf.architecture import Architecture
from megatron_core.models.hf.architectures import ARCHITECTURES, architecture_for, architecture_of
from megatron_core.models.hf.reader import HuggingFaceReader, config_of_folder, settings_of_folder
from megatron_core.models.hf.writer import write_hugging_face
