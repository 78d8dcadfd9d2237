"""The exceptions this package raises on purpose; each message says what to change.

They are also of the built-in kinds that users of Megatron Core catch, whose checks are assertions for the most part.
"""


class MegatronError(Exception):
    """Base of every error the package raises on purpose."""


class ConfigError(MegatronError, ValueError, AssertionError):
    """A setting, or a combination of settings, cannot be honoured."""


class DataError(MegatronError, ValueError, AssertionError):
    """A data set, a tokenizer's output or an input file is not what the run needs."""


class CheckpointError(MegatronError, RuntimeError):
    """A checkpoint cannot be written, or what is stored does not fit the run that reads it."""


class LayoutError(MegatronError, RuntimeError, ValueError, AssertionError):
    """The ranks of a job cannot be arranged into the parallel layout that was asked for."""
