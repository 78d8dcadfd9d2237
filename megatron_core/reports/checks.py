"""Checks during training: differing replicas end the run; untrained parameters and starved experts are reported."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_core.data_parallel import DataParallel
from megatron_core.errors import MegatronError
from megatron_core.monitor.events import ExpertLoad
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.texts import gather_strings, listed
from megatron_core.reports.metrics import STARVED_SHARE, STARVED_STEPS
from megatron_core.reports.replicas import Replicas
from megatron_core.reports.settings import CheckConfig
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class RunChecks(Callback):
    """The replica check, the untrained-parameter check and the notes on starved experts.

    Errors: ``MegatronError``, the same one on all ranks together, if replicas differ.
    """

    priority = 300

    def __init__(self, run: Run) -> None:
        self.run = run
        self.interval = run.config.section(CheckConfig).replica_check_interval
        named = [pair for stage in run.stages.values() for pair in stage.named_global_parameters()]
        self.replicas = Replicas(named, run.groups, run.world.device)
        self.untrained = UntrainedParameterCheck(run.data_parallel, run.optimizer, run.world.device)
        self._equal_at: int | None = None
        self._initial: Tensor | None = None
        """Hashes of the weights before the first step; None after the comparison."""
        # The gradient of an adapter's A is zero until the first update of B, which starts at zero.
        self._needed_updates = 1 if run.config.optional("lora_rank") is None else 2
        self._updates = 0
        self._noted_gradients = False
        self._starved = StarvedExperts()

    def before_run(self) -> None:
        """Compare the replicas after initialization or loading."""
        if self.interval is not None:
            self._initial = self._compare()

    def after_step(self, result: StepResult) -> None:
        """Run the checks that are due after a step."""
        if not result.skipped:
            if not self._noted_gradients and self._updates >= self._needed_updates - 1:
                self._note(
                    f"parameters without a gradient in step {self.run.state.iteration}, the first one",
                    self.untrained.without_gradient(),
                    "The loss does not depend on them, or an operation in between has no backward: they will not "
                    "train. Fix the model, or freeze them with requires_grad_(False) if this is intended",
                )
                self._noted_gradients = True
            self._updates += result.learning_rate > 0.0
        self._note(
            f"experts with less than {STARVED_SHARE:.0%} of the mean load for {STARVED_STEPS} steps up to iteration "
            f"{self.run.state.iteration}",
            self._starved.after_step(result.expert_load),
            "They are hardly trained. Raise --moe-aux-loss-coeff, or balance with --moe-router-enable-expert-bias",
        )
        if self._is_due():
            self.compare()

    def before_save(self, temporary: bool) -> None:
        """Compare the replicas before they are saved."""
        self.compare()

    def compare(self) -> None:
        """Compare the replicas, unless they were compared since the last step, or local steps let them differ."""
        done = self._equal_at == self.run.state.iteration
        if self.interval is None or done or self.run.optimizer.has_local_changes:
            return
        now = self._compare()
        if self._initial is not None and self._updates >= self._needed_updates:
            self._note(
                f"parameters unchanged at iteration {self.run.state.iteration} since this process started",
                self.untrained.unmoved(self.replicas.named, self._initial, now),
                "They get no gradient, or the optimizer does not update them. Fix the model, or freeze them with "
                "requires_grad_(False) if this is intended. If the learning rate is too small to change them in their "
                "precision, nothing is wrong",
            )
            self._initial = None

    def _is_due(self) -> bool:
        """Whether to compare replicas now: every ``interval`` steps and at the end, if there are replicas."""
        if self.interval is None or (self._initial is None and self.run.world.size == 1):
            return False
        iteration = self.run.state.iteration
        return iteration % self.interval == 0 or iteration == self.run.total_iterations

    def _compare(self) -> Tensor:
        """Return the hashes of all parameters. Errors: ``MegatronError`` if replicas differ."""
        hashes = self.replicas.hashes(self.run.data_parallel.reading)
        iteration = self.run.state.iteration
        differences = self.replicas.differences(hashes)
        if differences:
            raise MegatronError(_sentence(differences, iteration, self._equal_at, self.interval))
        self._equal_at = iteration
        return hashes

    def _note(self, what: str, names: list[str], advice: str) -> None:
        if names and self.run.world.rank == 0:
            print(f"note: {what}: {listed(names)}. {advice}", flush=True)


def _sentence(differences: list[str], iteration: int, equal_at: int | None, interval: int | None) -> str:
    text = "; ".join(differences)
    if equal_at is None:
        return (
            f"replicas differ before the first step, at iteration {iteration}: {text}. These ranks "
            "were initialised from different seeds or read different files; give all ranks the same flags, the same "
            "code and the same --load folder"
        )
    return (
        f"replicas differ at iteration {iteration}: {text}. They were equal at iteration {equal_at}: "
        "load a checkpoint from then or before (--load, --ckpt-step), and test the hardware of these ranks if it "
        f"happens again; replica_check_interval={interval} can be lowered to find the step"
    )


class UntrainedParameterCheck:
    """Finds parameters that do not train. All ranks call a method together and get the names of all stages."""

    def __init__(self, data_parallel: DataParallel, optimizer: Optimizer, device: torch.device) -> None:
        self.buckets = data_parallel.buckets
        self.groups = data_parallel.groups
        self.optimizer = optimizer
        self.device = device
        self.names = [name for bucket in self.buckets for name in bucket.names]
        self.index_of = {p: i for i, p in enumerate(p for bucket in self.buckets for p in bucket.parameters)}

    def without_gradient(self) -> list[str]:
        """Parameters whose gradient in the last step is zero in every element, on every rank.

        Each rank checks its shards, which hold complete sums; the gradient of a tied weight is summed over both stages.
        """
        reached = torch.zeros(len(self.names), dtype=torch.int32, device=self.device)
        for bucket in self.buckets:
            for _, parameter, start, stop, offset in bucket.pieces():
                reached[self.index_of[parameter]] = bucket.grad_shard[offset : offset + stop - start].any()
        return self._names_without(reached)

    def unmoved(self, named: Sequence[tuple[str, nn.Parameter]], before: Tensor, now: Tensor) -> list[str]:
        """Parameters whose hashes (``before`` and ``now``, in the order of ``named``) are unchanged on all ranks."""
        moved = torch.zeros(len(self.names), dtype=torch.int32, device=self.device)
        changed = (before != now).tolist()
        for (_, parameter), has_changed in zip(named, changed, strict=False):  # hashes of shared rows come after
            if has_changed and parameter in self.index_of:
                moved[self.index_of[parameter]] = 1
        for parameter in self._moved_below_rounding():
            moved[self.index_of[parameter]] = 1
        return self._names_without(moved)

    def _moved_below_rounding(self) -> Iterable[nn.Parameter]:
        """16-bit parameters whose main weights changed by less than the rounding of the 16-bit weights."""
        for bucket, tensors in self.optimizer.tensors():
            for _, parameter, start, stop, offset in bucket.pieces() if "main" in tensors else ():
                span = slice(offset, offset + stop - start)
                wide = tensors["main"][span]
                narrow = bucket.weight_shard[span].to(wide.device)
                if torch.equal(wide.to(narrow.dtype), narrow) and not torch.equal(wide, narrow.to(wide.dtype)):
                    yield parameter

    def _names_without(self, flags: Tensor) -> list[str]:
        """Names, of all pipeline stages, whose flag is 0 on all ranks with a part or a copy of the parameter."""
        all_reduce_(flags, self.groups.group("tp-dp-cp"), maximum=True)
        names = [name for name, flag in zip(self.names, flags.tolist(), strict=True) if not flag]
        texts = gather_strings("\n".join(names), self.groups.group(WORLD), self.device)
        return list(dict.fromkeys(name for text in texts for name in text.splitlines()))


class StarvedExperts:
    """Detects experts with almost no tokens in many consecutive steps; each is reported once until it recovers."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], int] = {}

    def after_step(self, loads: Mapping[int, Sequence[int]]) -> list[str]:
        """Return experts that starved for ``STARVED_STEPS`` steps up to this one, as ``layer 3: experts 5, 17``."""
        sentences = []
        for layer, numbers in loads.items():
            load, starved = ExpertLoad.of(numbers), []
            for expert, tokens in enumerate(load.tokens):
                starves = tokens < STARVED_SHARE * load.mean
                self._steps[layer, expert] = self._steps.get((layer, expert), 0) + 1 if starves else 0
                if self._steps[layer, expert] == STARVED_STEPS:
                    starved.append(str(expert))
            if starved:
                sentences.append(f"layer {layer}: expert{'s' * (len(starved) > 1)} {', '.join(starved)}")
        return sentences
