"""Functions of ModelOpt, which is not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "ModelOpt is not supported; train without it"
report_draft_acceptance_length = unsupported(_MESSAGE)
