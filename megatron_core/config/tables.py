"""Tables of names and values that lie beside the module that reads them, as YAML."""

from pathlib import Path
from typing import Any

import yaml


def read_table(module: str) -> Any:
    """The table of a module, whose ``__file__`` is ``module``."""
    text = Path(module).with_suffix(".yaml").read_text(encoding="utf-8")
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()
