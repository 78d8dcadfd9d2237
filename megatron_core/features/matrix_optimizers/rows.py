"""Rows of the optimizers."""

from dataclasses import replace

from megatron_core.config.optimizers import Moment, OptimizerKind
from megatron_core.features.matrix_optimizers.settings import MatrixOptimizerConfig

FOLDER = "megatron_core.features.matrix_optimizers"


def _second_moment(config: MatrixOptimizerConfig, pieces: tuple[int, ...], columns: int, has_heads: bool) -> int:
    """A second moment of each element of AdaMuon, or of the longer dimension (normuon)."""
    rows = sum(pieces)
    return rows * columns if config.adaptive_muon_moment2_method == "adamuon" else max(rows, columns)


def _moments_and_bases(config: MatrixOptimizerConfig, pieces: tuple[int, ...], columns: int, has_heads: bool) -> int:
    """Two moments of SOAP, and a factor and a basis of each dimension up to ``soap_max_precondition_dim``."""
    is_split = config.soap_split_qkv if has_heads else config.soap_split_gate_up
    sides = [size for rows in (pieces if is_split else (sum(pieces),)) for size in (rows, columns)]
    rotated = sum(2 * size**2 for size in sides if size <= config.soap_max_precondition_dim)
    return 2 * sum(pieces) * columns + rotated


_MUON = OptimizerKind(
    name="muon",
    rule=f"{FOLDER}.muon:Muon",
    all_moments=(Moment("momentum_buffer"),),
    settings=(
        *("muon_momentum", "muon_nesterov", "muon_split_qkv", "muon_split_heads", "muon_split_gate_up"),
        *("muon_scale_mode", "muon_extra_scale_factor", "muon_num_ns_steps"),
        *("muon_coefficient_type", "muon_fp32_matmul_prec", "muon_scalar_optimizer"),
    ),
    scalar_optimizer="muon_scalar_optimizer",
    hidden_lr_power=0,  # the size of Muon's updates does not depend on the width
)
ROWS = (
    _MUON,
    replace(
        _MUON,
        name="adaptive_muon",
        rule=f"{FOLDER}.muon:AdaMuon",
        settings=(*_MUON.settings, "adaptive_muon_moment2_method", "adaptive_muon_beta2", "adaptive_muon_eps"),
        matrix_elements=_second_moment,
    ),
    OptimizerKind(
        name="soap",
        rule=f"{FOLDER}.soap:SOAP",
        all_moments=(),
        settings=(
            *("adam_beta1", "adam_beta2", "adam_eps", "adam_bias_correction", "soap_shampoo_beta"),
            *("soap_precondition_frequency", "soap_max_precondition_dim", "soap_split_qkv", "soap_split_gate_up"),
            "soap_scalar_optimizer",
        ),
        scalar_optimizer="soap_scalar_optimizer",
        matrix_elements=_moments_and_bases,
        hidden_eps_power=-1,
    ),
)
