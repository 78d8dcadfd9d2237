"""Trinity (AFMoE): a gate on attention's output, and positions only in layers with a window."""

from megatron_core.config import ModelConfig
from megatron_core.foreign_json import COUNT
from megatron_core.hub.hugging_face.rules import WINDOWS_WITH_POSITIONS, KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import RowRange

EVERY = "global_attn_every_n_layers"


def _windows(hf_config: Settings) -> Settings:
    if hf_config.get("sliding_window") is None:
        refuse("sliding_window", None, "afmoe models need the size of their windows")
    return WINDOWS_WITH_POSITIONS.read({"sliding_window_pattern": hf_config.get(EVERY, 4), **hf_config})


WINDOWS = KeyRule(_windows, WINDOWS_WITH_POSITIONS.write, {**WINDOWS_WITH_POSITIONS.types, EVERY: COUNT})


def rows_of_separate_gates(config: ModelConfig, _: int) -> list[RowRange]:
    """Queries, gates, keys and values are stored in one matrix each; ours has those of a group together."""
    d = config.head_size
    heads = config.num_attention_heads // config.query_groups
    sizes = (heads * d, heads * d, d, d)
    return [
        RowRange(tensor, group * size, (group + 1) * size)
        for group in range(config.query_groups)
        for tensor, size in enumerate(sizes)
    ]
