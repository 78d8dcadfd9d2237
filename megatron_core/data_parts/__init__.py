"""Token files of many parts: a list in the place of one pair, and its reader."""

from megatron_core.feature import Feature

FEATURES = (
    # Its only hook is called for every token file, used or not.
    Feature(name="data_parts", is_used=lambda config: False, token_files="megatron_core.data_parts.dataset:open_parts"),
)
