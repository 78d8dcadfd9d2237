"""Numbers of attention heads of a module: the attributes that hold them, and their values on each rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import listed

HEAD_COUNTS = (
    *("num_heads", "num_attention_heads", "num_q_heads", "num_query_heads", "num_head", "heads", "n_heads", "n_head"),
    *("n_q_heads", "nheads", "nhead", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads"),
)
"""Names of attributes that hold the number of heads."""
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
"""Names in ``HEAD_COUNTS`` that count the heads of keys and values."""
HEAD_SIZES = (
    *("head_dim", "attention_head_size", "head_size", "dim_head", "dim_per_head", "d_head", "d_k", "d_kv"),
    *("key_value_proj_dim", "hidden_size_per_attention_head"),
)
"""Names of attributes that hold the number of channels of one head."""
WIDTHS = ("all_head_size", "split_size")
"""Names of attributes that hold the channels of all heads."""
QUERIES_PER_KEY = ("num_key_value_groups", "n_rep")
"""Names of attributes that hold the number of query heads of each key head."""
KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value", "wk", "wv", "k_lin", "v_lin", "to_k", "to_v")
FEED_FORWARD = ("gate_proj", "up_proj", "fc1", "c_fc", "w1", "w3", "lin1")
"""Column-parallel layers without heads, by name."""

LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")
"""Names of attributes that differ between equal layers."""

Heads = int | str | Sequence[str]
"""The number of query heads, or the names of the attributes that hold numbers of heads."""
Attributes = dict[tuple[str, str], int]
"""Values of attributes, by the name of the module inside of a region and that of the attribute."""


def check_heads(model: nn.Module, heads: Any) -> None:
    """ConfigError unless ``heads`` is a number >= 1, or names of attributes that modules of ``model`` have."""
    if heads is None:
        return
    if isinstance(heads, int) and not isinstance(heads, bool) and heads >= 1:
        return
    names = [heads] if isinstance(heads, str) else heads
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"heads={heads!r} must be the number of attention heads, or the names of the attributes of attention "
            "modules that hold it, such as 'num_heads'"
        )
    known = {name for module in model.modules() for name in integers_of(module)}
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(
            f"heads={heads!r}: no module of {type(model).__name__} has {listed(missing)} as an attribute with an "
            f"integer; its integers are {listed(sorted(known), 24) or 'none'}"
        )


def integers_of(module: nn.Module) -> dict[str, int]:
    """Return the attributes of ``module`` itself that are positive integers."""
    values: Mapping[str, Any] = vars(module)
    return {name: value for name, value in values.items() if type(value) is int and value > 0 and name[0] != "_"}


def plain_values(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``module`` itself by which its forward may differ from that of another module."""
    values: Mapping[str, Any] = vars(module)
    kinds = (int, float, str, list, tuple, dict, type(None))
    skipped = ("training", *LAYER_NUMBERS)
    attributes = {name: value for name, value in values.items() if not name.startswith("_") and name not in skipped}
    return {name: value if isinstance(value, kinds) else id(value) for name, value in attributes.items()}


def counts_in(module: nn.Module, heads: Heads | None) -> dict[str, int]:
    """Return the attributes of ``module`` that hold numbers of heads."""
    values = integers_of(module)
    if isinstance(heads, int):
        sizes = (*HEAD_SIZES, *WIDTHS, *QUERIES_PER_KEY)
        return {name: n for name, n in values.items() if (n == heads and name not in sizes) or name in KEY_COUNTS}
    names = HEAD_COUNTS if heads is None else heads
    names = [names] if isinstance(names, str) else names
    return {name: values[name] for name in names if name in values}


def head_size(module: nn.Module, widest: int, heads: Heads | None) -> int:
    """Return the channels of a head of ``module``, whose widest projection has ``widest`` outputs; 0: unknown."""
    values = integers_of(module)
    sizes = [values[name] for name in HEAD_SIZES if name in values]
    if isinstance(heads, int):
        counts = [heads]
    else:
        counts = [n for name, n in counts_in(module, heads).items() if name not in KEY_COUNTS]
    if sizes and (heads is None or not counts):
        return sizes[0] if widest % sizes[0] == 0 else 0
    queries = max(counts, default=0)  # keys and values have as many heads, or fewer
    return widest // queries if queries and widest % queries == 0 else 0


def divided(value: int, size: int) -> int | None:
    """Return this rank's share of ``value`` heads on ``size`` ranks; shared heads count 1; None: indivisible."""
    if value % size == 0:
        return value // size
    return 1 if size % value == 0 else None


def ways_to_divide(
    scopes: Mapping[str, tuple[nn.Module, int, int]], size: int, heads: Heads | None
) -> list[tuple[str, Attributes]]:
    """Return the ways to adjust the attributes of a region to this rank's heads, the likeliest first.

    ``scopes``: by name, a module, the outputs of its widest projection (0: it has none), and the number of its key and
    value heads if ranks share these, else 0. Each way is a sentence and the new values.
    """
    counts: Attributes = {}
    widths: Attributes = {}
    divisible: Attributes = {}
    for path, (module, widest, shared) in scopes.items():
        values = integers_of(module)
        known = counts_in(module, heads)
        for name, value in values.items():
            share = divided(value, size)
            if share is None:
                continue
            if name in known or (name in WIDTHS and heads is None):
                counts[path, name] = share
            elif name in QUERIES_PER_KEY and shared:
                counts[path, name] = value * shared // size
            elif widest and value == widest and value % size == 0:
                widths[path, name] = share
            elif widest and value % size == 0 and widest % value == 0 and name not in (*HEAD_SIZES, *QUERIES_PER_KEY):
                divisible[path, name] = share
    ways = [counts, {**counts, **widths}, {}]
    if heads is None:
        for name in dict.fromkeys(name for _, name in divisible):
            single = {key: share for key, share in divisible.items() if key[1] == name}
            ways += [{**counts, **single}, {**counts, **widths, **single}]
    unique = [choice for number, choice in enumerate(ways) if choice not in ways[:number]]
    return [(_sentence(choice), choice) for choice in unique]


def _sentence(choice: Attributes) -> str:
    names = list(dict.fromkeys(name for _, name in choice))
    return f"dividing {listed(names)}" if names else "dividing no attribute"
