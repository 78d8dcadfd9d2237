"""The description of a planted defect."""

from __future__ import annotations

from dataclasses import dataclass

from tests.defects.patch import Patch, Text


@dataclass(frozen=True)
class Defect:
    """A silent error: one part of one function is changed, so that everything still runs and the loss still
    falls."""

    name: str
    """Title of the defect."""
    target: str
    """The function, ``module:Qualname`` inside the package."""
    patch: Patch | Text
    """The change of the function."""
    row: str
    """The row of the parity matrix that must fail with the defect."""
    bug_class: str = ""
    """Its classes in the list of 65 silent errors, such as ``C1 C3``."""
    culprit: str = ""
    """The first wrong tensor that ``verify.culprit`` must name: beginnings of its sentence with ``*`` and ``?``,
    separated by " or "."""
