"""SOAP: Adam in the eigenbases of Shampoo's factors, for whole matrices."""

import torch
from torch import Tensor

from megatron_core.features.matrix_optimizers.settings import MatrixOptimizerConfig
from megatron_core.features.matrix_optimizers.updates import MatrixAlgorithm, fused_matrix, separated
from megatron_core.optimizer.rule import NEVER_CORRECTED, Rates, ShardSlice
from megatron_core.parallel.sharding import Fused

DAMPING = 1e-3
"""Multiple of the mean eigenvalue that is added to a factor before an iteration. Factors of few gradients have no full
rank: without it, rounding errors would choose the basis of the null space, differently in each layout. With it they
grow at most by the dimension / DAMPING."""
FIRST_ITERATIONS = 10
"""Iterations after the first gradient, which start from ``scattered``; later updates continue with one each."""
SIDES = ("left", "right")


class SOAP(MatrixAlgorithm):
    """Vyas et al. 2024 (arXiv 2409.11321), algorithm 3, for each hidden matrix with gradient G ``[..., m, n]``:

    m = b1 m + (1 - b1) G;  v = b2 v + (1 - b2) (Ql' G Qr)^2
    w = (1 - lr wd) w - lr Ql ((Ql' m Qr) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)) Qr'
    L = b L + (1 - b) G G';  R = b R + (1 - b) G' G, with b = ``soap_shampoo_beta``

    Then, after the first step and whenever ``soap_precondition_frequency`` divides t, Q = QR((P / mean + d I) Q) for
    P = L, R with the mean of the eigenvalues of P and d = ``DAMPING``; the signs of the columns of Q do not matter.
    The first step is Adam's, with Q = I. Dimensions above ``soap_max_precondition_dim`` keep Q = I without a factor.

    The authors' code instead skips the first step, begins with the eigenvectors of the first factors, sorts them by
    their eigenvalues and does not damp: the bases of null spaces are then a matter of rounding.

    The owner of a matrix has its state; of a fused matrix, that of its parts with ``soap_split_qkv`` and
    ``soap_split_gate_up``. ``v`` has the elements of the rotated matrix at the places of the matrix.
    """

    config: MatrixOptimizerConfig

    def direction(self, piece: ShardSlice, rates: Rates) -> Tensor:
        """Return the gradient; see ``MatrixAlgorithm``."""
        return piece.grad.mul_(rates.factor).to(torch.promote_types(piece.grad.dtype, torch.float32))

    def new_state(self, matrix: Tensor, fused: Fused | None) -> dict[str, Tensor]:
        """Return moments of zeros, factors of zeros and bases of identity matrices; see ``MatrixAlgorithm``."""
        state = {"exp_avg": torch.zeros_like(matrix), "exp_avg_sq": torch.zeros_like(matrix)}
        for number, block in enumerate(self._parts(matrix, fused)):
            for side, size in zip(SIDES, block.shape[-2:], strict=True):
                if size <= self.config.soap_max_precondition_dim:
                    shape = *block.shape[:-2], size, size
                    state[_key(f"{side}_factor", number)] = matrix.new_zeros(shape)
                    basis = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
                    state[_key(f"{side}_basis", number)] = basis.expand(shape).contiguous()
        return state

    def transform(self, direction: Tensor, fused: Fused | None, state: dict[str, Tensor], rates: Rates) -> Tensor:
        """Return the update of a matrix with the gradient ``direction``; see ``MatrixAlgorithm``."""
        beta1, beta2 = rates.betas or (self.config.adam_beta1, self.config.adam_beta2)
        step = rates.step if self.config.adam_bias_correction else NEVER_CORRECTED
        mean = state["exp_avg"]
        variance = state["exp_avg_sq"]
        mean.lerp_(direction, 1.0 - beta1)
        updates = []
        squares = []
        blocks = (self._parts(tensor, fused) for tensor in (direction, mean, variance))
        for number, (grad, momentum, square) in enumerate(zip(*blocks, strict=True)):
            left, right = (state.get(_key(f"{side}_basis", number)) for side in SIDES)
            squares.append(torch.lerp(square, _rotated(grad, left, right).square(), 1.0 - beta2))
            size = squares[-1].div(1.0 - beta2**step).sqrt_().add_(rates.epsilon)
            rotated = _rotated(momentum, left, right).div_(1.0 - beta1**step).div_(size)
            updates.append(_rotated_back(rotated, left, right))
            self._update_bases(grad, number, state, rates)
        if len(squares) > 1:
            assert fused is not None, "only fused matrices have several parts"
            variance.copy_(fused_matrix(squares, fused))
            return fused_matrix(updates, fused)
        variance.copy_(squares[0])
        return updates[0]

    def _parts(self, matrix: Tensor, fused: Fused | None) -> list[Tensor]:
        """Return the matrices that have factors of their own."""
        has_heads = fused is not None and fused.head_size > 0
        if fused is None or not (self.config.soap_split_qkv if has_heads else self.config.soap_split_gate_up):
            return [matrix]
        return separated(matrix, fused)

    def _update_bases(self, grad: Tensor, number: int, state: dict[str, Tensor], rates: Rates) -> None:
        """Add the gradient of part ``number`` to its factors, and update its bases if it is due."""
        iterations = 1 if rates.step % self.config.soap_precondition_frequency == 0 else 0
        iterations = FIRST_ITERATIONS if rates.step == 1 else iterations
        for side, rows in zip(SIDES, (grad, grad.mT), strict=True):
            factor = state.get(_key(f"{side}_factor", number))
            if factor is None:
                continue
            factor.lerp_(rows @ rows.mT, 1.0 - self.config.soap_shampoo_beta)
            basis = state[_key(f"{side}_basis", number)]
            # From Q = I the iteration would begin on a saddle: the columns of a head have no part of the null
            # directions that norms leave to other heads, so that rounding errors grow 1 / DAMPING-fold each time.
            if rates.step == 1:
                is_zero = (factor == 0).flatten(-2).all(-1)[..., None, None]
                basis.copy_(torch.where(is_zero, basis, scattered(basis)))
            for _ in range(iterations):
                basis.copy_(next_basis(factor, basis))


def scattered(basis: Tensor) -> Tensor:
    """Return a random orthogonal matrix of the size of ``basis``, which depends on the size alone."""
    size = basis.shape[-1]
    numbers = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.linalg.qr(numbers.to(basis.device))[0].to(basis.dtype)


def next_basis(factor: Tensor, basis: Tensor) -> Tensor:
    """Return orthogonal matrices closer to the eigenvectors of ``factor`` than ``basis``, all ``[..., n, n]``.

    One iteration of the power method for all columns (Golub and Van Loan, section 8.2.4) on the damped factor. A
    factor of zeros keeps its basis.
    """
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    scaled = factor / mean.clamp_min(torch.finfo(factor.dtype).tiny)
    scaled.diagonal(dim1=-2, dim2=-1).add_(DAMPING)
    return torch.where(mean > 0.0, torch.linalg.qr(scaled @ basis)[0], basis)


def _rotated(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    matrix = matrix if left is None else left.mT @ matrix
    return matrix.clone() if right is None else matrix @ right


def _rotated_back(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right.mT


def _key(name: str, number: int) -> str:
    """Return the name of a part's state: that of the first part has no number."""
    return f"{name}_{number}" if number else name
