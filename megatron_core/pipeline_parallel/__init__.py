"""The executor of pipeline schedules, messages between stages, and deferred weight gradients."""
