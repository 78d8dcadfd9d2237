"""What a planted defect is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A silent error: one fragment of one function, changed so that everything still runs and the loss still falls."""

    name: str
    """What is wrong."""
    target: str
    """The function, ``module:Qualname`` inside the package."""
    old: str
    """What its source has exactly once."""
    new: str
    row: str
    """The row of the parity matrix that must not hold with the defect."""
    bug_class: str = ""
    """Its classes in the list of 65 ways to go silently wrong, as ``C1 C3``."""
