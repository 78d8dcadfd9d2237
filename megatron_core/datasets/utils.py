"""For Megatron Core's users: splits, blends, and the call that compiles nothing here."""

from megatron_core.datasets.split_names import Split, compile_helpers, get_blend_from_list, normalize

__all__ = ["Split", "compile_helpers", "get_blend_from_list", "normalize"]
