"""Writers of checkpoint files; checkpoints have one format here (docs/checkpoints.md)."""
