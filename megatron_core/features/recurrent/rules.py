"""When a run has recurrent layers; the rules of their settings are in ``config/rules_recurrent.py``."""

from megatron_core.config.run import RunConfig


def has_recurrence(config: RunConfig) -> bool:
    """Whether a layer of the model has a recurrence."""
    return config.model.has_recurrence
