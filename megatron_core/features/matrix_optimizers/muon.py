"""Muon and AdaMuon: orthogonal updates of whole matrices."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, cycle, islice, repeat

import torch
from torch import Tensor
from torch.nn.functional import normalize

from megatron_core.features.matrix_optimizers.settings import MatrixOptimizerConfig
from megatron_core.features.matrix_optimizers.updates import MatrixAlgorithm, fused_matrix, separated
from megatron_core.optimizer.rule import Rates, ShardSlice
from megatron_core.parallel.sharding import Fused
from megatron_core.text_file import read_table

Coefficients = tuple[float, float, float]

COEFFICIENTS: dict[str, list[Coefficients]] = read_table(__file__)
"""a, b, c of each iteration ``a x + b x x^T x + c (x x^T)^2 x``. simple: Jordan et al. 2024; quintic:
leloykun.github.io/ponder/muon-opt-coeffs; polar_express: Amsel et al. 2025 (arXiv 2505.16932), with its safety factor.
After the last coefficients, polar_express repeats them; the other types start again with the first."""


class Muon(MatrixAlgorithm):
    """m = mu m + g; u = m, with Nesterov g + mu m; w = (1 - lr wd) w - lr scale orthogonal(u).

    Muon updates hidden matrices; another optimizer updates the other parameters. ``newton_schulz`` orthogonalizes each
    matrix as a whole (each expert separately). Of a fused matrix it orthogonalizes the queries, keys and values (and
    gates) of all heads separately with ``muon_split_qkv``, those of each head with ``muon_split_heads``, and gate and
    up projection with ``muon_split_gate_up``. The scale is ``muon_extra_scale_factor`` times sqrt(max(rows, columns))
    (spectral), sqrt(rows / columns) (unit_rms_norm) or sqrt(max(1, rows / columns)) (shape_scaling) of the
    orthogonalized matrix. Megatron-LM's m is a mean, (1 - mu) times this m, so the directions are equal.

    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon) for the iteration, Liu et al. 2025 (arXiv
    2502.16982), section 2.2, for the spectral scale. Defaults, the split of QKV and the constants are from Megatron-LM
    and Emerging-Optimizers.
    """

    config: MatrixOptimizerConfig

    def direction(self, piece: ShardSlice, rates: Rates) -> Tensor:
        """Add the gradient to the momentum; see ``MatrixAlgorithm``."""
        momentum = piece.state["momentum_buffer"]
        grad = piece.grad.mul_(rates.factor).to(momentum.dtype)
        momentum.mul_(self.config.muon_momentum).add_(grad)
        nesterov = self.config.muon_nesterov
        return grad.add(momentum, alpha=self.config.muon_momentum) if nesterov else momentum

    def transform(self, direction: Tensor, fused: Fused | None, state: dict[str, Tensor], rates: Rates) -> Tensor:
        """Return the update of a matrix with this ``direction``; see ``MatrixAlgorithm``."""
        return self.orthogonalized(direction, fused)

    def orthogonalized(self, direction: Tensor, fused: Fused | None) -> Tensor:
        """Return the scaled orthogonal matrix, or those of the matrices of a fused one."""
        has_heads = fused is not None and fused.head_size > 0
        if fused is None or not (self.config.muon_split_qkv if has_heads else self.config.muon_split_gate_up):
            return self._of_part(direction)
        matrices = []
        for matrix in separated(direction, fused):
            if has_heads and self.config.muon_split_heads:
                matrices.append(self._of_part(matrix.unflatten(-2, (-1, fused.head_size))).flatten(-3, -2))
            else:
                matrices.append(self._of_part(matrix))
        return fused_matrix(matrices, fused)

    def _of_part(self, matrix: Tensor) -> Tensor:
        return self._scaled(self._orthogonal(matrix))

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        config = self.config
        with _float32_products(config.muon_fp32_matmul_prec):
            return newton_schulz(
                matrix,
                config.muon_num_ns_steps,
                config.muon_coefficient_type,
                in_bf16=config.muon_fp32_matmul_prec == "medium",
            )

    def _scaled(self, matrix: Tensor) -> Tensor:
        """Multiply ``matrix`` in place by the scale of its shape, and return it."""
        rows, columns = matrix.shape[-2:]
        scale = {
            "spectral": max(rows, columns),
            "unit_rms_norm": rows / columns,
            "shape_scaling": max(1.0, rows / columns),
        }[self.config.muon_scale_mode] ** 0.5
        return matrix.mul_(scale * self.config.muon_extra_scale_factor)


class AdaMuon(Muon):
    """Muon whose orthogonal matrix O is divided by the root of a running mean of its squares, before it is scaled.

    adamuon: v = b v + (1 - b) O^2;  U = O / (sqrt(v) + eps)
    normuon: v = b v + (1 - b) mean(O^2);  U = O / sqrt(max(v, eps));  U = U |O| / |U|
    w = (1 - lr wd) w - lr scale U, with b = ``adaptive_muon_beta2`` and eps = ``adaptive_muon_eps``

    The mean is over the columns of a matrix with at least as many rows as columns, otherwise over the rows; |.| is the
    Frobenius norm. O of a fused matrix consists of the orthogonal matrices of its parts; v, norms and scale are those
    of the fused matrix, and of each expert. The owner of a matrix has v.

    Source: Si et al. 2025 (arXiv 2507.11005) for adamuon, Li et al. 2025 (arXiv 2510.05491) for normuon, in the form of
    ``AdaptiveMuon`` in Emerging-Optimizers 0.3.
    """

    def new_state(self, matrix: Tensor, fused: Fused | None) -> dict[str, Tensor]:
        """Return second moments of zeros, ``[..., rows, 1]`` or ``[..., 1, columns]`` for normuon."""
        like = matrix if self._is_elementwise else matrix.narrow(_averaged(matrix), 0, 1)
        return {"moment2_buffer": torch.zeros_like(like, memory_format=torch.contiguous_format)}

    def transform(self, direction: Tensor, fused: Fused | None, state: dict[str, Tensor], rates: Rates) -> Tensor:
        """Return the update of a matrix with this ``direction``; see ``MatrixAlgorithm``."""
        orthogonal = self.orthogonalized(direction, fused)
        moment = state["moment2_buffer"]
        squares = orthogonal.square()
        if self._is_elementwise:
            moment.lerp_(squares, 1.0 - self.config.adaptive_muon_beta2)
            return self._scaled(orthogonal.div_(moment.sqrt().add_(self.config.adaptive_muon_eps)))
        moment.lerp_(squares.mean(_averaged(squares), keepdim=True), 1.0 - self.config.adaptive_muon_beta2)
        update = orthogonal * moment.clamp_min(self.config.adaptive_muon_eps).rsqrt_()
        before, after = (matrix.square().sum((-2, -1), keepdim=True).sqrt_() for matrix in (orthogonal, update))
        return self._scaled(update.mul_(before.div_(after.clamp_min_(self.config.adaptive_muon_eps))))

    @property
    def _is_elementwise(self) -> bool:
        return self.config.adaptive_muon_moment2_method == "adamuon"

    def _of_part(self, matrix: Tensor) -> Tensor:
        return self._orthogonal(matrix)


def _averaged(matrix: Tensor) -> int:
    """The dimension over which NorMuon averages squares: the shorter one."""
    return -1 if matrix.shape[-2] >= matrix.shape[-1] else -2


def newton_schulz(matrix: Tensor, steps: int, coefficients: str = "quintic", *, in_bf16: bool = False) -> Tensor:
    """Return ``matrix`` ``[..., r, c]`` with singular values close to 1 (0.7 to 1.3 after 5 steps).

    The iteration uses the dtype of ``matrix``; with ``in_bf16``, bfloat16 for a float32 matrix.
    """
    sets = COEFFICIENTS[coefficients]
    endless = chain(sets, repeat(sets[-1])) if coefficients == "polar_express" else cycle(sets)
    add_product = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    x = normalize(x, dim=(-2, -1), eps=1e-15)  # type: ignore[arg-type]
    x = x.bfloat16() if in_bf16 and x.dtype == torch.float32 else x
    for a, b, c in islice(endless, steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrix.shape[-2] > matrix.shape[-1] else x).to(matrix.dtype).contiguous()


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Allow TF32 products of float32 matrices if ``precision`` is ``high``."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
