"""The groups of replicas as a part of a run: exchanges after steps, state in checkpoints and in copies."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from megatron_core.checkpoint import CheckpointReader, TensorBox
from megatron_core.checkpoint.reader import note
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import RunConfig
from megatron_core.features.outer_steps import state
from megatron_core.features.outer_steps.optimizer import OuterOptimizer
from megatron_core.features.outer_steps.settings import OuterConfig
from megatron_core.training.driver import StepOutcome
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run


def groups_report(config: RunConfig, step: int) -> bool:
    """Whether outer groups hear from one another in ``step``, counted from 1, and act together after it.

    They do before an exchange. A return to a checkpoint after bad steps, and copies for a recovery, need all groups at
    the same step, so that they report in every step.
    """
    together = config.resilience.max_bad_steps > 0 or config.optional("recover") not in (None, "none")
    return together or config.section(OuterConfig).meets_at(step)


class OuterSteps(RunPart):
    """The global weights, which are exchanged between groups, evaluated, and stored as the model."""

    def __init__(self, run: Run) -> None:
        self.run = run
        config = run.config
        self.outer = OuterOptimizer(
            config.section(OuterConfig),
            run.data_parallel,
            run.optimizer,
            run.groups,
            config.model.num_layers,
            keeps_sent=config.optional("recover") not in (None, "none"),
            # In the launcher, whose groups are neighbouring ranks.
            number=run.world.launcher_rank(run.world.rank) // (run.world.size // config.num_groups),
        )

    def notes(self) -> Iterator[str]:
        """See ``RunPart.notes``."""
        steps = self.run.config.section(OuterConfig).outer_steps
        total = self.run.total_iterations
        if total % steps:
            yield (
                f"outer_steps={steps} does not divide the {total} iterations: steps after the last exchange do not "
                "reach the global weights"
            )

    def is_alone(self) -> bool:
        """Whether groups do not report in the next step."""
        return self.run.groups.outer.size() > 1 and not groups_report(self.run.config, self.run.state.iteration + 1)

    def after_step(self, outcome: StepOutcome) -> None:
        """Start and end the exchanges that are due."""
        self.outer.after_step(self.run.state.iteration)

    def evaluated_weights(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Evaluate the global weights instead of those of a group."""
        return {"": self.outer.global_weights}

    @property
    def nbytes(self) -> int:
        """See ``RunPart.nbytes``."""
        return self.outer.nbytes

    def stored_pieces(
        self, updated: Iterable[TensorBox], copied: Iterable[TensorBox], *, weights_only: bool
    ) -> tuple[Iterable[TensorBox], Iterable[TensorBox]]:
        """The global weights as the model, and the state of each group with its own prefix."""
        group = self.run.groups.outer.rank()
        of_group = state.pieces_of_group(updated, self.run.optimizer, group)
        of_first = copied if group == 0 else ()
        of_all = chain(of_first, state.global_pieces(self.outer, weights_only=weights_only))
        return () if weights_only else of_group, of_all

    def stored_values(self) -> dict[str, Any]:
        """See ``RunPart.stored_values``."""
        return {state.IN_FLIGHT: [fragment.number for fragment in self.outer.fragments if fragment.in_flight]}

    def copied_pieces(self, pieces: Iterable[TensorBox]) -> Iterator[TensorBox]:
        """See ``RunPart.copied_pieces``."""
        return state.copied_pieces(pieces, self.run.optimizer, self.outer, self.outer.number)

    def copied_values(self) -> dict[str, Any]:
        """See ``RunPart.copied_values``."""
        sent = [fragment.number for fragment in self.outer.fragments if fragment.sent is not None]
        return self.stored_values() | {state.SENT: sent, state.GROUP: self.outer.number}

    def load(self, config: RunConfig, reader: StateReader) -> bool:
        """Load the state of groups, if ``reader`` has it."""
        data = self.run.data_parallel
        optimizer = self.run.optimizer
        if reader.continues:
            state.load_copy(reader, data, optimizer, self.outer)
            return True
        if not isinstance(reader, CheckpointReader) or _starts(config) or state.IN_FLIGHT not in reader.state:
            return False
        with reader:
            state.load_groups(reader, data, optimizer, self.outer)
        return True

    def after_load(self, config: RunConfig, reader: StateReader) -> None:
        """Start all groups at the loaded weights, which are those of a run without groups."""
        self.outer.start()
        if isinstance(reader, CheckpointReader) and not _starts(config):
            note("the groups start with the weights and the optimizer state of the checkpoint, which has none")


def _starts(config: RunConfig) -> bool:
    """Whether only the weights of a checkpoint are used."""
    return config.checkpoint.finetune or config.checkpoint.no_load_optim
