"""Backward passes of an engine: ``engine.backward(loss)``, and ``loss.backward()`` of a program."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.any_model.agreement import AgreeingDataParallel
from megatron_core.any_model.arguments import check_positive, is_number
from megatron_core.any_model.context import ContextParallel
from megatron_core.any_model.direct import DirectBackward
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.features.fp8.arithmetic import fp8_of
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.meter import METER
from megatron_core.parallel.rank_local import RankLocal
from megatron_core.schedules.actions import Action

_RUNNING: RankLocal["EngineBackward | None"] = RankLocal(lambda: None)
"""The engine of this rank whose ``backward`` runs; it may reach the modules of other engines."""


class UnscaledLossError(ConfigError, RuntimeError):
    """``loss.backward()`` in fp16 without the loss scale."""


class EngineBackward:
    """Computes and accumulates gradients of micro-batches; a part of ``Engine``."""

    module: nn.Module
    config: RunConfig
    groups: ParallelGroups
    data_parallel: AgreeingDataParallel
    context: ContextParallel | None
    """The split of sequences over ranks; None without context parallelism."""
    micro_step = 0
    """Number of micro-batches since the last optimizer step."""
    ends_step: Callable[[], bool]
    """Return whether the current micro-batch is the last of its optimizer step."""
    _direct: DirectBackward
    _sharded: Optimizer
    _losses: Tensor
    """Sum of the losses of this step's micro-batches, and of their terms."""
    _weighted: bool | None = None
    """Whether losses are given with their numbers of terms; None before the first backward of a step."""
    _backwards = 0
    """Backwards since the last ``step()``."""
    _sync_started = False
    """Whether the last micro-batch of a step has had a backward."""
    _knows_loss = True
    """Whether the losses of all micro-batches are known."""
    _is_scaled = False
    _factor = 1.0
    """Factor on the loss of the running backward."""
    sums_over_ranks = False
    """Whether gradients are sums over data-parallel ranks, of means over micro-batches, instead of means over both."""
    _received_sums = False
    """Whether gradients of a sum of terms have come from the backward of another engine."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a rank in one optimizer step."""
        return self.global_batch_size // (self.config.training.micro_batch_size * self.groups.size("dp"))

    @property
    def global_batch_size(self) -> int:
        """Samples in one optimizer step."""
        return self.config.training.final_batch_size(self.groups.size("dp"))

    @property
    def loss_scale(self) -> float:
        """Factor of the losses of the next backward (fp16); 1 in other dtypes."""
        return self.loss_scaler.scale

    @property
    def loss_scaler(self) -> LossScale:
        """The rule of the loss scale."""
        return self._sharded.loss_scale

    def set_batch_size(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Change the batch between two steps; a loader from ``make_loader`` keeps its own sizes."""
        check_positive(micro_batch_size=micro_batch_size, gradient_accumulation_steps=gradient_accumulation_steps)
        if micro_batches := self.micro_step or self._backwards:
            raise ConfigError(
                f"set_batch_size after {micro_batches} of {self.gradient_accumulation_steps} micro-batches, whose "
                "gradients are divided by that number already; call it after the step"
            )
        samples = micro_batch_size * gradient_accumulation_steps * self.groups.size("dp")
        training = replace(self.config.training, micro_batch_size=micro_batch_size, global_batch_size=samples)
        self.config = replace(self.config, training=training)

    def backward(self, loss: Tensor, num_terms: Tensor | float | None = None, *, retain_graph: bool = False) -> Tensor:
        """Compute and accumulate gradients of ``loss``; return the detached loss.

        Without ``num_terms``, ``loss`` is the mean of a micro-batch, and all micro-batches have equal weight. With
        ``num_terms``, ``loss`` is the sum of that number of terms; give it in all micro-batches or in none.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(f"loss={_shown(loss)} must be a tensor with one element; pass the model's loss")
        if not loss.requires_grad:
            raise ConfigError(
                "loss does not require gradients: compute it from outputs of engine(...) with gradients enabled, "
                "without detach() and no_grad()"
            )
        is_tensor = isinstance(num_terms, Tensor) and num_terms.numel() == 1
        if num_terms is not None and not is_tensor and not is_number(num_terms):
            raise ConfigError(f"num_terms={_shown(num_terms)} must be a number >= 0, or a tensor with one element")
        if self.context is not None:
            self.context.check_loss(loss)
        self._begin_backward(weighted=num_terms is not None)
        self._factor = self.loss_scale / (self._micro_batches if num_terms is None else 1)
        self._direct.is_running = True
        enclosing = _RUNNING()
        _RUNNING.set(self)
        try:
            (loss * self._factor).backward(retain_graph=retain_graph)
        finally:
            self._direct.is_running = False
            _RUNNING.set(enclosing)
        self._end_backward(loss.detach(), 1.0 if num_terms is None else num_terms)
        return loss.detach()

    @property
    def _micro_batches(self) -> int:
        """The number by which gradients of means are divided: micro-batches of all ranks in a step."""
        return self.gradient_accumulation_steps * (1 if self.sums_over_ranks else self.groups.size("dp"))

    def _begin_backward(self, *, weighted: bool) -> None:
        """Check that a backward is possible, and start it."""
        if self._weighted not in (None, weighted):
            raise ConfigError("num_terms is given in some micro-batches of a step only; give it in all or in none")
        overlaps = self._sync_started and self.config.parallel.overlap_grad_reduce
        if overlaps and (layer := _layer_with_own_sums(self.module)):
            raise ConfigError(
                f"overlap_grad_reduce=True: with {layer}, which accumulates its gradients itself, the last micro-batch "
                "of a step can have only one backward, because sums start during it; add the losses, or set "
                "overlap_grad_reduce=False"
            )
        self._weighted = weighted
        self._backwards += 1
        if self.ends_step():
            self._sync_started = True
            self.data_parallel.enable_grad_sync(0)
        METER.switch("backward")
        self.data_parallel.begin_action(Action(0, "B", self.micro_step))

    def _end_backward(self, loss: Tensor, terms: Tensor | float) -> None:
        self.data_parallel.end_action(Action(0, "B", self.micro_step))
        METER.switch("other")
        self._is_scaled = False
        self._losses[0] += loss.double().reshape(())
        # Several losses of a micro-batch are added.
        self._losses[1] += terms if self._weighted or self._backwards == 1 else 0.0

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale, for ``engine.scale(loss).backward()``.

        It is needed with fp16 only: ``loss.backward()`` of a loss that is computed from outputs of ``engine(...)`` is
        as ``engine.backward(loss)``, except that the loss in the report is that among the outputs, NaN without one.
        """
        self._is_scaled = True
        return loss * self.loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients and losses of all backwards since the last ``step()``; all ranks call it together.

        In an accumulation these are the gradients of the current micro-batch. They have been added to those of the
        micro-batches before it, so discarding them is an error if there are any.
        """
        if not self._backwards:
            return
        if self.micro_step:
            raise ConfigError(
                f"zero_grad() after a backward in micro-batch {self.micro_step + 1} of "
                f"{self.gradient_accumulation_steps}: its gradients have been added to those of the micro-batches "
                "before it; set requires_grad_(False) on the parameters during a backward that must not train them, "
                "or discard the whole step with engine.discard_gradients()"
            )
        self._backwards = 0
        self.discard_gradients()
        self.data_parallel.count_discard()

    def discard_gradients(self) -> None:
        """Set the gradients and losses of the current step to zero; its micro-batches count on."""
        self.data_parallel.zero_grad()
        self._losses = torch.zeros_like(self._losses)
        self._weighted = None
        self._sync_started = False
        self._knows_loss = True
        self._received_sums = False

    def _refuse_sums(self) -> None:
        if self._received_sums:
            raise ConfigError(
                "step() after a backward of another engine with num_terms, whose loss is a sum: this engine does not "
                "know the number of terms; call zero_grad(), or give backward() the mean"
            )

    def watch_module(self) -> None:
        """Accept ``loss.backward()`` of losses of ``module``; fp16 gradients that lack the loss scale are scaled."""
        self._direct.begin_unseen = partial(self._begin_direct, may_lack_scale=True)
        self._direct.watch_parameters()

    def _begin_direct(self, *, may_lack_scale: bool = False) -> None:
        running = _RUNNING()
        if running is not None:  # its loss has been scaled and divided
            self._received_sums |= bool(running._weighted)
            self._start_direct(self.loss_scale / self._micro_batches / running._factor)
            return
        missing = 1.0 if self._is_scaled else self.loss_scale
        if missing != 1 and not may_lack_scale:
            raise UnscaledLossError(
                f"Loss scaling is required with fp16=True: loss.backward() without the loss scale {missing:g} loses "
                "small gradients; call engine.backward(loss) or engine.scale(loss).backward()"
            )
        self._start_direct(missing / self._micro_batches)

    def _start_direct(self, factor: float) -> None:
        if factor != 1 and (layer := _layer_with_own_sums(self.module)):
            raise ConfigError(
                f"loss.backward() with {layer}, which accumulates its gradients itself, on {self.groups.size('dp')} "
                f"data-parallel ranks and {self.gradient_accumulation_steps} micro-batches: call engine.backward(loss)"
            )
        self._begin_backward(weighted=False)
        self.data_parallel.grad_factor = factor

    def _end_direct(self, loss: Tensor | None) -> None:
        self.data_parallel.grad_factor = 1.0
        if self.context is not None:
            self.context.check_loss(loss)
        self._knows_loss &= loss is not None
        self._end_backward(torch.tensor(torch.nan) if loss is None else loss, 1.0)


def _shown(value: object) -> str:
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _layer_with_own_sums(module: nn.Module) -> str | None:
    """Name a layer of this project that adds gradients to ``main_grad`` itself."""
    for layer in module.modules():
        sources = [base.__module__ for base in type(layer).__mro__]
        inside = any(s.startswith("megatron_core.") and not s.startswith("megatron_core.training.") for s in sources)
        if inside or fp8_of(layer) is not None:
            return f"{type(layer).__name__}{' in FP8' if not inside else ''}"
    return None
