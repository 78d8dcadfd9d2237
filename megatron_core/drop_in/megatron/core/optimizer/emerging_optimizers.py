"""Muon and AdaMuon as optimizers of torch, and the parameters that Muon does not update."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron.core.optimizer.optimizer_config import is_managed_by_layer_wise_optimizer
from megatron_core.errors import ConfigError
from megatron_core.features.matrix_optimizers.muon import COEFFICIENTS, AdaMuon, Muon
from megatron_core.features.matrix_optimizers.settings import MatrixOptimizerConfig
from megatron_core.optimizer.rule import Rates, ShardSlice
from megatron_core.parallel.collectives import gather_channels, gather_from_sequence
from megatron_core.parallel.sharding import Fused

HAVE_EMERGING_OPTIMIZERS = find_spec("emerging_optimizers") is not None
"""Whether NVIDIA's package is installed, from which programs may import more; Muon here does not need it."""


def get_supported_coefficient_types() -> tuple[str, ...]:
    """Return the values of ``muon_coefficient_type``."""
    return tuple(COEFFICIENTS)


def validate_coefficient_type(coefficient_type: str) -> None:
    """Raise ConfigError (a ValueError) for an unknown ``muon_coefficient_type``."""
    if coefficient_type not in COEFFICIENTS:
        raise ConfigError(
            f"Unsupported muon coefficient type {coefficient_type!r}; use one of {get_supported_coefficient_types()}"
        )


def _is_muon_excluded(param: nn.Parameter) -> bool:
    return not is_managed_by_layer_wise_optimizer(param)


def _get_qkv_split_shapes(model_cfg: Any) -> list[int]:
    """Return the rows of the queries (and gates), keys and values of one group of heads."""
    queries = model_cfg.num_attention_heads // model_cfg.num_query_groups * model_cfg.kv_channels
    gates = [queries] if getattr(model_cfg, "attention_output_gate", False) else []
    return [queries, *gates, model_cfg.kv_channels, model_cfg.kv_channels]


class TensorParallelMuon(torch.optim.Optimizer):
    """The engine's ``Muon`` for matrices ``[rows, columns]`` of a program's own.

    A matrix with the attribute ``partition_dim`` is split over ``pg_collection.tp``, or ``expt_tp`` if it has
    ``expert_tp``: it is gathered, and each rank updates its part. With ``split_qkv`` the matrices for which
    ``is_qkv_fn`` returns True are orthogonalized in blocks of ``qkv_split_shapes`` rows. Without
    ``use_decoupled_weight_decay``, the decay is added to the gradient. For models of this package use
    ``get_megatron_optimizer`` with ``optimizer="muon"``. Errors: ConfigError.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: Sequence[int] | None = None,
        fp32_matmul_prec: Literal["medium", "high", "highest"] = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: Any = None,
        tp_mode: Literal["blockwise", "duplicated", "distributed"] = "duplicated",
    ) -> None:
        if num_ns_steps < 1:
            raise ConfigError(f"num_ns_steps must be at least 1, got {num_ns_steps}")
        if split_qkv and (is_qkv_fn is None or not qkv_split_shapes):
            raise ConfigError("split_qkv=True needs is_qkv_fn and qkv_split_shapes")
        validate_coefficient_type(coefficient_type)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.pg_collection, self.tp_mode, self.decoupled = pg_collection, tp_mode, use_decoupled_weight_decay
        self.is_qkv_fn = is_qkv_fn if split_qkv else None
        self.qkv_split_shapes = tuple(qkv_split_shapes or ())
        self._rule: Muon = Muon(
            MatrixOptimizerConfig(
                optimizer="muon",
                muon_momentum=momentum,
                muon_nesterov=nesterov,
                muon_split_qkv=True,
                muon_scale_mode=scale_mode,
                muon_extra_scale_factor=extra_scale_factor,
                muon_num_ns_steps=num_ns_steps,
                muon_coefficient_type=coefficient_type,  # type: ignore[arg-type]
                muon_fp32_matmul_prec=fp32_matmul_prec,
            )
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the matrices from their gradients; return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])
        return loss

    def _update(self, parameter: nn.Parameter, lr: float, decay: float) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        is_new = not state
        if is_new:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        grad = grad.clone() if self.decoupled else grad.add(parameter, alpha=decay)
        part = ShardSlice(grad, parameter, None, state)
        rates = Rates(1, lr, decay if self.decoupled else 0.0, 1.0)

        def transformed(whole: Tensor, fused: Fused | None) -> Tensor:
            if is_new:
                state.update(self._rule.new_state(whole, fused))
            return self._rule.transform(whole, fused, state, rates)

        direction = self._rule.direction(part, rates)
        self._rule.apply(part, self._of_whole(parameter, direction, transformed), rates)

    def orthogonalize(self, p: Tensor, grad: Tensor) -> Tensor:
        """Return the scaled orthogonal matrix of ``grad``, this rank's part of the direction of ``p``."""
        return self._of_whole(p, grad, self._rule.orthogonalized)

    def _of_whole(self, p: Tensor, grad: Tensor, update: Callable[[Tensor, Fused | None], Tensor]) -> Tensor:
        """Return this rank's part of ``update`` of the whole matrix."""
        fused = None
        if self.is_qkv_fn is not None and self.is_qkv_fn(p):
            rows = tuple(getattr(p, "qkv_split_shapes", None) or self.qkv_split_shapes)
            if len(grad) % sum(rows):
                raise ConfigError(f"qkv_split_shapes={rows} do not divide the {len(grad)} rows of a parameter")
            fused = Fused(rows, head_size=1)  # any size marks heads; they are not divided further
        groups, dim = self.pg_collection, getattr(p, "partition_dim", -1)
        group = None if groups is None else groups.expt_tp if getattr(p, "expert_tp", False) else groups.tp
        if group is None or group.size() == 1 or dim not in (0, 1):
            return update(grad, fused)
        if self.tp_mode == "blockwise":
            raise ConfigError(
                "tp_mode=blockwise makes each rank's part orthogonal, so that the update depends on the layout; use "
                "duplicated or distributed"
            )
        whole = gather_from_sequence(grad.contiguous(), group) if dim == 0 else gather_channels(grad, group)
        return update(whole, fused).chunk(group.size(), dim)[group.rank()]


class TensorParallelAdaptiveMuon(TensorParallelMuon):
    """The engine's ``AdaMuon`` for matrices of a program's own.

    The arguments are those of ``TensorParallelMuon`` and, by name, ``moment2_method``, ``beta2`` and ``eps``. Each rank
    has the second moment of whole matrices, so that the update does not depend on the layout. Errors: ConfigError.
    """

    def __init__(
        self,
        *arguments: Any,
        moment2_method: Literal["adamuon", "normuon"] = "adamuon",
        beta2: float = 0.95,
        eps: float = 1e-8,
        **settings: Any,
    ) -> None:
        if moment2_method not in ("adamuon", "normuon"):
            raise ConfigError(f"moment2_method={moment2_method!r} is not supported; use adamuon or normuon")
        super().__init__(*arguments, **settings)
        self._rule = AdaMuon(
            replace(
                self._rule.config,
                optimizer="adaptive_muon",
                adaptive_muon_moment2_method=moment2_method,
                adaptive_muon_beta2=beta2,
                adaptive_muon_eps=eps,
            )
        )
