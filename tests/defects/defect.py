"""The description of a planted defect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A silent error: one fragment of one function is changed, so that everything still runs and the loss still
    falls."""

    name: str
    """Title of the defect."""
    target: str
    """The function, ``module:Qualname`` inside the package."""
    old: str
    """A fragment that its source contains exactly once."""
    new: str
    row: str
    """The row of the parity matrix that must fail with the defect."""
    bug_class: str = ""
    """Its classes in the list of 65 silent errors, such as ``C1 C3``."""
    culprit: str = ""
    """The first wrong tensor that ``verify.culprit`` must name: beginnings of its sentence with ``*`` and ``?``,
    separated by " or "."""
