"""Optional features: one folder each, and those of other packages. ``list.txt`` and this file alone name them."""

from pathlib import Path
from pkgutil import resolve_name

from megatron_core import cpu_ranks, data_parts, hub, reports, resilience, storage, vocabularies

FEATURES = (
    *(
        resolve_name(f"{__name__}.{folder}:{folder.upper()}")
        for folder in Path(__file__).with_name("list.txt").read_text("ascii").split()
    ),
    *cpu_ranks.FEATURES,
    *data_parts.FEATURES,
    *hub.FEATURES,
    *reports.FEATURES,
    *resilience.FEATURES,
    *storage.FEATURES,
    *vocabularies.FEATURES,
)
"""In the order in which their sections are shown, their parts of a run are called, and their methods of a section are
called, and optimizers are listed: ``recurrent`` replaces the layers that ``experts`` chooses, ``value_head`` the head
of ``output_losses``."""
