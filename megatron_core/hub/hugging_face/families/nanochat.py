"""NanoChat: norms without weights, also of embeddings, queries and keys; squared ReLU; bounded logits."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.tensors import RowRange


def rows_of_exchanged_halves(config: ModelConfig, _: int) -> list[RowRange]:
    """Queries, key and value of each group in turn.

    Its rotary positions turn in the other direction, which is the usual one for exchanged halves of a head.
    """
    half = config.head_size // 2
    shared = config.num_attention_heads // config.query_groups
    ranges = []

    def halves(tensor: int, head: int) -> list[RowRange]:
        first = 2 * head * half
        return [RowRange(tensor, first + half, first + 2 * half), RowRange(tensor, first, first + half)]

    for group in range(config.query_groups):
        for head in range(group * shared, (group + 1) * shared):
            ranges += halves(0, head)
        ranges += [*halves(1, group), RowRange(2, 2 * group * half, 2 * (group + 1) * half)]
    return ranges
