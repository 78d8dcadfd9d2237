"""Optimizers that update whole matrices (Muon, AdaMuon, SOAP), each on one rank wherever its parts are."""

from megatron_core.feature import Feature
from megatron_core.features.matrix_optimizers.rows import ROWS
from megatron_core.features.matrix_optimizers.settings import MatrixOptimizerConfig

MATRIX_OPTIMIZERS = Feature(
    name="matrix_optimizers",
    settings=MatrixOptimizerConfig,
    is_used=lambda config: config.optimizer.optimizer in {row.name for row in ROWS},
    optimizers=ROWS,
    in_any_model=True,
)
