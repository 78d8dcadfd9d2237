"""Print the measures of the structure, their limits and aims; with ``--arrows`` the core's imports of features."""

from __future__ import annotations

import sys

from tests.structure.imports import arrows_to_features
from tests.structure.measures import MEASURES


def main() -> None:
    """Print one line for each measure."""
    print(f"{'measure':45}{'value':>10}{'limit':>10}{'aim':>10}")
    for measure in MEASURES:
        value = measure.compute()
        print(f"{measure.name:45}{value:>10,.5g}{measure.limit:>10,.5g}{measure.aim:>10,.5g}")
    if "--arrows" in sys.argv[1:]:
        for module, targets in arrows_to_features().items():
            print(f"{module}: {', '.join(targets)}")


if __name__ == "__main__":
    main()
