"""The class of ``optimizer.type`` Muon in the JSON, whose settings are those of the engine."""

from deepspeed.ops.settings import SettingsOptimizer


class MuonWithAuxAdam(SettingsOptimizer):
    """Parameter groups of the engine's Muon, and of Adam for embeddings, output layer and vectors."""
