"""Rejects the use of ModelOpt."""

from argparse import Namespace

from megatron_core.drop_in.unsupported import unsupported
from megatron_core.errors import ConfigError


def maybe_enable_modelopt(args: Namespace) -> None:
    """Raise ConfigError if ``args.modelopt_enabled`` is set."""
    if getattr(args, "modelopt_enabled", False):
        raise ConfigError("modelopt_enabled=True needs ModelOpt, which is not supported; train without it")


report_current_memory_info = to_empty_if_meta = print_distributed_quant_summary = get_mtbench_chat_data = unsupported(
    "this function of Megatron-LM's ModelOpt examples is not supported; train without ModelOpt"
)
