"""Token files of many parts: a list in the place of one pair, and its reader."""

from megatron_core.feature import Feature

FEATURES = (
    Feature(
        name="data_parts",
        is_used=lambda config: False,  # its only hook is called for every token file
        token_files="megatron_core.data_parts.dataset:open_parts",
    ),
)
