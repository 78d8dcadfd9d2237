"""Reads a dashboard with Grafana's classes (package grafana-foundation-sdk) and writes it again: nothing may be lost.

python -m tests.reports.grafana_schema examples/monitoring/grafana_dashboard.json
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def check_equal(expected: Any, value: Any, place: str = "dashboard") -> None:
    """AssertionError if a value differs, or a field is missing; defaults may be added."""
    if isinstance(expected, dict):
        missing = expected.keys() - value.keys()
        assert not missing, f"{place}: {missing} are not in the schema"
        for name, inner in expected.items():
            check_equal(inner, value[name], f"{place}.{name}")
    elif isinstance(expected, list):
        assert len(expected) == len(value), place
        for number, (inner, other) in enumerate(zip(expected, value, strict=True)):
            check_equal(inner, other, f"{place}[{number}]")
    else:
        assert expected == value, f"{place}: {expected!r} became {value!r}"


def main() -> None:
    """Check the file."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    dashboard = json.loads(Path(sys.argv[1]).read_text())
    check_equal(dashboard, json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard))))
    print(version("grafana-foundation-sdk"))


if __name__ == "__main__":
    main()
