"""Writes configurations to a folder as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_core.output_file import make_folder, no_follow


def has_config_logger_enabled(config: Any) -> bool:
    """Whether ``config.config_logger_dir`` names a folder."""
    return bool(getattr(config, "config_logger_dir", ""))


def log_config_to_disk(config: Any, dict_data: dict[str, Any], prefix: str = "", rank_str: str = "") -> None:
    """Write ``dict_data`` to ``PREFIX.rank_RANK.json`` in that folder; values unknown to JSON as their ``repr``."""
    folder = Path(config.config_logger_dir)
    make_folder(folder)
    rank = rank_str or str(dist.get_rank() if dist.is_initialized() else 0)
    kept = {name: value for name, value in dict_data.items() if name not in ("self", "__class__")}
    with open(folder / f"{prefix}.rank_{rank}.json", "w", opener=no_follow) as file:
        file.write(json.dumps(kept, default=repr, indent=1))
