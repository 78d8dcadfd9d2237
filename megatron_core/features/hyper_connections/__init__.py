"""Several residual streams with learned connections (mHC: Xie et al. 2025, arXiv 2512.24880)."""

from megatron_core.feature import Feature
from megatron_core.features.hyper_connections.settings import (
    HyperConnectionsConfig,
    connection_problems,
    has_connections,
)

HYPER_CONNECTIONS = Feature(
    name="hyper_connections",
    settings=HyperConnectionsConfig,
    is_used=has_connections,
    problems=connection_problems,
)
