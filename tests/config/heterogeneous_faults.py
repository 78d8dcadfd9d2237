"""Faulty settings of layers of different sizes, in the form of ``faults.FAULTS``."""

from __future__ import annotations

import json
from typing import Any

JSON = "heterogeneous_layers_config_encoded_json"


def of(*blocks: Any, **keys: Any) -> dict[str, Any]:
    """The setting with these entries, and one without own sizes, for 2 layers."""
    return {JSON: json.dumps({"block_configs": [*blocks, {"attention": {}, "mlp": {}}][:2], **keys})}


def first(attention: Any = None, **mlp: Any) -> dict[str, Any]:
    """The setting with these parts of the first layer."""
    return of({"attention": attention or {}, "mlp": mlp})


HETEROGENEOUS_FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    ({JSON: "{"}, 1, (f"{JSON} is not valid JSON", "correct it")),
    ({JSON: "[]"}, 1, (JSON, "must be an object with block_configs")),
    ({JSON: '{"block_configs": []}'}, 1, (JSON, "a list with an entry for each layer")),
    (of(), 1, (f"{JSON} has 1 layers", "give --num-layers 1")),
    (of({"attention": {}}), 1, ("has no object block_configs[0].mlp", "write {}")),
    (first({"num_query_groups": 2.5}), 1, ("block_configs[0].attention.num_query_groups=2.5", "an integer >= 1")),
    (first({"num_query_groups": True}), 1, ("block_configs[0].attention.num_query_groups=True", "a number > 0")),
    (first({"n_heads_in_group": 5}), 1, ("n_heads_in_group=5", "must divide 12 heads")),
    (first(ffn_mult=0), 1, ("block_configs[0].mlp.ffn_mult=0", "a number > 0")),
    (first(ffn_mult=1e-300), 1, ("block_configs[0].mlp.ffn_mult=1e-300", "a width of 0")),
    (first(ffn_mult=2e9), 1, ("block_configs[0].mlp.ffn_mult=2000000000.0", "2**31 - 1")),
    (first({"n_heads_in_group": 2, "num_query_groups": 2}), 1, ("two sizes of one part in block_configs[0]", "keep")),
    (first(ffn_mult=2, ffn_hidden_size=256), 1, ("two sizes of one part in block_configs[0]", "keep one")),
    (of({"attention": {}, "mlp": {}, "ffn": {"ffn_mult": 1}}), 1, ("block_configs[0].mlp={}", "remove it")),
    (of({"attention": {}, "mlp": {}, "parallel_blocks": 2}), 1, ("block_configs[0].parallel_blocks=2", "remove it")),
    (first(gated=0), 1, ("block_configs[0].mlp.gated=0", "remove it")),
    (first(no_op=1), 1, ("block_configs[0].mlp.no_op", "not true or false")),
    (first({"no_op": True, "replace_with_linear": True}), 1, ("block_configs[0].attention", "keep one")),
    (first(no_op=True, ffn_hidden_size=8), 1, ("block_configs[0].mlp", "keep one")),
    (first({"window_length": 128}), 1, ("block_configs[0].attention.window_length=128", "remove it")),
    (first({"num_query_groups": 5}), 1, ("block_configs[0]", "num_query_groups=5", "legal: 1, 2, 3")),
    (
        first(ffn_hidden_size=9) | {"tensor_model_parallel_size": 2},
        2,
        ("block_configs[0]", "ffn_hidden_size=9", "tensor_model_parallel_size=2"),
    ),
    (
        first({"num_query_groups": 3}) | {"tensor_model_parallel_size": 2},
        2,
        ("block_configs[0]", "num_query_groups=3", "tensor_model_parallel_size=2"),
    ),
    (first() | {"num_experts": 4}, 1, ("num_experts=4", JSON, "remove one of them")),
    (first() | {"parallel_residual": True}, 1, ("parallel_residual=True", JSON, "remove one of them")),
    (
        first() | {"mtp_num_layers": 1, "position_embedding_type": "rope"},
        1,
        ("mtp_num_layers=1", JSON, "remove one of them"),
    ),
    (first() | {"layout_invariant": True}, 1, ("layout_invariant=True", JSON, "remove one of them")),
    (of({"attention": {}, "mlp": {}}, hidden_size=64), 1, ("hidden_size=64", "hidden_size=120", "change one of them")),
    (of({"attention": {}, "mlp": {}}, hidden_act="silu"), 1, ("hidden_act=silu", "swiglu=False", "--swiglu")),
    (
        of({"attention": {}, "mlp": {}}, tie_word_embeddings=False),
        1,
        ("tie_word_embeddings=False", "untie_embeddings_and_output_weights=False", "change one of them"),
    ),
]
