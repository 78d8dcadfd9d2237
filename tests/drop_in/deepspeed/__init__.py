"""Tests of the drop-in's ``deepspeed``."""

SHARDS = {"stage3_param_persistence_threshold": 0}
"""Stage 3 keeps parameters up to 100,000 elements whole without this key: all of these tests' models."""
