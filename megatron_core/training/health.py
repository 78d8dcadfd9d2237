"""Run-time checks: copies that drift apart end a run, parameters that do not train are named."""

from __future__ import annotations

from torch import Tensor

from megatron_core.errors import MegatronError
from megatron_core.monitor.replicas import Replicas
from megatron_core.parallel.texts import listed
from megatron_core.training.movement import Movement
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class Health:
    """Watches a run. Every rank calls ``start`` before its first step and ``after_step`` after each.

    Errors: ``MegatronError``, the same one on all ranks together, when copies differ that must be equal.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.interval = run, run.config.monitor.replica_check_interval
        named = [pair for stage in run.stages.values() for pair in stage.named_global_parameters()]
        self.replicas = Replicas(named, run.groups, run.world.device)
        self.movement = Movement(run.data_parallel, run.optimizer, run.world.device)
        self._equal_at: int | None = None
        self._initial: Tensor | None = None
        """Hashes of the weights before the first step; None once they have been compared."""
        self._took_step = self._used_lr = False

    def start(self) -> None:
        """Compare the copies as they were initialised or loaded."""
        if self.interval is not None:
            self._initial = self._compare()

    def after_step(self, result: StepResult) -> None:
        """Look at what is due after a step."""
        if not result.skipped:
            if not self._took_step:
                self._tell_missing_gradients()
            self._took_step = True
            self._used_lr = self._used_lr or result.learning_rate > 0.0
        if self._is_due():
            self.compare()

    def compare(self) -> None:
        """Compare the copies, unless that has been done since the last step: also before a checkpoint is written."""
        if self.interval is None or self._equal_at == self.run.state.iteration:
            return
        now = self._compare()
        if self._initial is not None and self._used_lr:
            self._tell_unmoved(self._initial, now)
            self._initial = None

    def _is_due(self) -> bool:
        """Whether copies are compared now: every ``interval`` steps and at the end, if there is anything to compare."""
        if self.interval is None or (self._initial is None and self.run.world.size == 1):
            return False
        iteration = self.run.state.iteration
        return iteration % self.interval == 0 or iteration == self.run.total_iterations

    def _compare(self) -> Tensor:
        """Hashes of all parameters; an error if copies differ."""
        self.run.data_parallel.finish_gather()
        hashes, iteration = self.replicas.hashes(), self.run.state.iteration
        differences = self.replicas.differences(hashes)
        if differences:
            raise MegatronError(_sentence(differences, iteration, self._equal_at, self.interval))
        self._equal_at = iteration
        return hashes

    def _tell_missing_gradients(self) -> None:
        self._note(
            f"parameters without a gradient in step {self.run.state.iteration}, the first one",
            self.movement.without_gradient(),
            "The loss does not depend on them, or an operation on the way has no backward: they will not learn. Mend "
            "the model, or freeze them with requires_grad_(False) if that is meant",
        )

    def _tell_unmoved(self, before: Tensor, now: Tensor) -> None:
        self._note(
            f"parameters that at iteration {self.run.state.iteration} still are what they were when this process began",
            self.movement.unmoved(self.replicas.named, before, now),
            "They get no gradient, or the optimizer does not reach them. Mend the model, or freeze them with "
            "requires_grad_(False) if that is meant; where the learning rate is too small to show in their precision, "
            "there is nothing to mend",
        )

    def _note(self, what: str, names: list[str], advice: str) -> None:
        if names and self.run.world.rank == 0:
            print(f"note: {what}: {listed(names)}. {advice}", flush=True)


def _sentence(differences: list[str], iteration: int, equal_at: int | None, interval: int | None) -> str:
    found = "; ".join(differences)
    if equal_at is None:
        return (
            f"copies that must be equal differ before the first step, at iteration {iteration}: {found}. These ranks "
            "were initialised from different seeds or read different files; give all ranks the same flags, the same "
            "code and the same --load folder"
        )
    return (
        f"copies that must be equal differ at iteration {iteration}: {found}. They were equal at iteration {equal_at}: "
        "load a checkpoint from then or before (--load, --ckpt-step), and test the hardware of these ranks if it "
        f"happens again; replica_check_interval={interval} can be lowered to find the step"
    )
