"""Optimizers that update whole matrices (Muon, AdaMuon, SOAP), each on one rank wherever its parts are."""

from megatron_core.feature import Feature
from megatron_core.features.matrix_optimizers.rows import ROWS

MATRIX_OPTIMIZERS = Feature(
    name="matrix_optimizers",
    is_used=lambda config: config.optimizer.optimizer in {row.name for row in ROWS},
    optimizers=ROWS,
)
