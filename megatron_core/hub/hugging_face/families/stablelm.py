"""StableLM: Llama with LayerNorm, and rotary positions in a part of each head's channels; attention and MLP may be in
parallel with one norm. StableLM 2 12B has norms of queries and keys with separate weights for each head."""

from megatron_core.foreign_json import SWITCH
from megatron_core.hub.hugging_face.rules import KeyRule

PARALLEL = KeyRule(
    read=lambda hf_config: dict.fromkeys(
        ("parallel_residual", "parallel_residual_shared_norm"), hf_config.get("use_parallel_residual", False)
    ),
    write=lambda config: {"use_parallel_residual": config.parallel_residual_shared_norm},
    types={"use_parallel_residual": SWITCH},
)
