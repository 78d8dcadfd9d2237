"""Settings of Muon, AdaMuon and SOAP."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.optimizers import read_by
from megatron_core.config.setting import Condition, Resume, given, section, setting
from megatron_core.config.training import OptimizerConfig

MUON_SPLIT_QKV = given("muon_split_qkv")


MATRICES_ZERO_1 = Condition(
    "--optimizer muon, adaptive_muon or soap, and --zero-stage 1",
    lambda run: run.parallel.dp_zero_stage == 1 and any(row.scalar_optimizer for row in run.optimizer.kinds),
)


@dataclass(frozen=True, kw_only=True)
@section(when=c.TRAINING, resume=Resume.REPORTED)
class MatrixOptimizerConfig(OptimizerConfig):
    """Optimizers that update whole matrices."""

    muon_momentum: float = setting(0.9, r.BELOW_1, when=read_by("muon_momentum", "muon"))
    """Decay rate of the sum of gradients, for --optimizer muon."""
    muon_nesterov: bool = setting(False, when=read_by("muon_nesterov", "muon"))
    """Nesterov momentum, for --optimizer muon."""
    muon_split_qkv: bool = setting(True, when=read_by("muon_split_qkv", "muon"))
    """Orthogonalize queries, keys and values separately, for --optimizer muon; --no-muon-split-qkv: the whole fused
    matrix."""
    muon_split_heads: bool = setting(False, when=(read_by("muon_split_heads", "muon"), MUON_SPLIT_QKV))
    """Orthogonalize the queries, keys and values of each attention head separately, for --optimizer muon."""
    muon_split_gate_up: bool = setting(False, when=read_by("muon_split_gate_up", "muon"))
    """Orthogonalize the gate and the up projection of gated MLPs and experts separately, for --optimizer muon. Off, as
    in Megatron-LM: both as one matrix."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting(
        "spectral", when=read_by("muon_scale_mode", "muon")
    )
    """Factor of Muon's updates of a matrix: sqrt(max(rows, columns)), sqrt(rows / columns) or
    sqrt(max(1, rows / columns))."""
    muon_extra_scale_factor: float = setting(1.0, r.POSITIVE, when=read_by("muon_extra_scale_factor", "muon"))
    """Additional factor of Muon's updates; 0.2 with spectral gives updates the size of AdamW's (Liu et al. 2025)."""
    muon_num_ns_steps: int = setting(5, r.SMALL_COUNT, when=read_by("muon_num_ns_steps", "muon"))
    """Number of Newton-Schulz iterations, for --optimizer muon."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = setting(
        "quintic", when=read_by("muon_coefficient_type", "muon")
    )
    """Coefficients of the Newton-Schulz iterations, for --optimizer muon."""
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = setting(
        "medium", when=read_by("muon_fp32_matmul_prec", "muon")
    )
    """Precision of the matrix products of Newton-Schulz iterations, for --optimizer muon. medium: bfloat16. high: TF32
    if the GPU has it. highest: float32. With --fp64 always float64."""
    muon_scalar_optimizer: Literal["adam", "lion"] = setting("adam", when=read_by("muon_scalar_optimizer", "muon"))
    """Optimizer of embeddings, output layer, norms and biases, for --optimizer muon."""
    adaptive_muon_moment2_method: Literal["adamuon", "normuon"] = setting(
        "adamuon", when=read_by("adaptive_muon_moment2_method", "adaptive_muon")
    )
    """Second moment of --optimizer adaptive_muon. adamuon: of each element (Si et al. 2025). normuon: of each row of a
    matrix with at least as many rows as columns, otherwise of each column (Li et al. 2025)."""
    adaptive_muon_beta2: float = setting(0.95, r.BELOW_1, when=read_by("adaptive_muon_beta2", "adaptive_muon"))
    """Decay rate of the second moment, for --optimizer adaptive_muon."""
    adaptive_muon_eps: float = setting(1e-8, r.POSITIVE, when=read_by("adaptive_muon_eps", "adaptive_muon"))
    """Added to the root of the second moment (adamuon), or its least value (normuon), for --optimizer adaptive_muon."""
    soap_shampoo_beta: float = setting(0.95, r.BELOW_1, when=read_by("soap_shampoo_beta", "soap"))
    """Decay rate of the factors, the running means of G G^T and G^T G, for --optimizer soap."""
    soap_precondition_frequency: int = setting(1, r.COUNT, when=read_by("soap_precondition_frequency", "soap"))
    """Number of steps between two updates of the bases, for --optimizer soap; 10 in the paper."""
    soap_max_precondition_dim: int = setting(10_000, r.COUNT, when=read_by("soap_max_precondition_dim", "soap"))
    """Largest dimension of a matrix with a factor and a basis, for --optimizer soap; a larger one is not rotated."""
    soap_split_qkv: bool = setting(True, when=read_by("soap_split_qkv", "soap"))
    """Factors of their own for queries, keys and values, for --optimizer soap; --no-soap-split-qkv: of the whole fused
    matrix."""
    soap_split_gate_up: bool = setting(False, when=read_by("soap_split_gate_up", "soap"))
    """Factors of their own for the gate and the up projection of gated MLPs and experts, for --optimizer soap."""
    soap_scalar_optimizer: Literal["adam", "lion"] = setting("adam", when=read_by("soap_scalar_optimizer", "soap"))
    """Optimizer of embeddings, output layer, norms and biases, for --optimizer soap."""
    use_layer_wise_param_layout: bool = setting(True, when=MATRICES_ZERO_1, resume=Resume.FREE)
    """For --optimizer muon, adaptive_muon or soap with ZeRO stage 1: shards consist of whole matrices, each updated by
    one rank; --no-use-layer-wise-param-layout: shards cut matrices, and ranks exchange the parts in every step."""

    def bucket_rule(self, zero_stage: int) -> str | None:
        """Shards of whole matrices only below stage 2: buckets there join several units, and so contain enough matrices
        to fill every shard."""
        for_matrices = self.kind_of(hidden=True).scalar_optimizer is not None
        if for_matrices and self.use_layer_wise_param_layout and zero_stage == 1:
            return "megatron_core.features.matrix_optimizers.whole_shards:whole_matrices"
        return super().bucket_rule(zero_stage)
