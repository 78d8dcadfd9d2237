"""All rows of the parity matrix by name, for those who look one up."""

from __future__ import annotations

from tests.parity.context_rows import CONTEXT_ROWS
from tests.parity.fp8_rows import FP8_ROWS
from tests.parity.rows import ROWS

EVERY_ROW = ROWS | CONTEXT_ROWS | FP8_ROWS
