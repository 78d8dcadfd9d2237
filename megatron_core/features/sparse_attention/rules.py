"""When a run has sparse attention; the rules of its settings are in ``config/rules_sparse_attention.py``."""

from megatron_core.config.run import RunConfig


def has_sparse_attention(config: RunConfig) -> bool:
    """Whether indexers select the keys of queries."""
    return config.model.has_sparse_attention
