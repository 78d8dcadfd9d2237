"""The error of a rank that failed. It has its own module because commands catch it before they load torch."""

from megatron_core.errors import MegatronError


class RankFailure(MegatronError):
    """A rank raised, exited or timed out; the message contains the traceback of the first failed rank."""
