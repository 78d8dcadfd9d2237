"""Checks during training that collectives and messages deliver what was sent (``link_check_interval``)."""

from megatron_core.errors import WrongStepError
from megatron_core.parallel.meter import METER
from megatron_core.resilience.links.compare import wrong_deliveries
from megatron_core.resilience.links.recorder import LINKS
from megatron_core.resilience.settings import LinkCheckConfig
from megatron_core.training.callbacks import Callback, is_due
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class LinkChecks(Callback):
    """Records the checksums of a step's collectives, and compares them before its update.

    Collectives that end later (of the update, and gathers of weights) are compared before the next update, also if
    every step is checked, or at the end of the run.

    Errors: ``WrongStepError``, the same one on all ranks together, if a rank received wrong data.
    """

    priority = 475

    def __init__(self, run: Run) -> None:
        self.run = run
        self._settings = run.config.section(LinkCheckConfig)
        self._has_records = False
        """Whether calls of this step or the one before are recorded."""
        self._suspect = "the start"
        """The first step whose results have not been checked completely."""

    def before_run(self) -> None:
        """Seal the messages between stages, if all are checked."""
        LINKS.forget()
        LINKS.seals_messages = self._settings.check_pipeline_messages

    def before_step(self) -> None:
        """Record the collectives of a step that is due."""
        step = self.run.state.iteration + 1
        LINKS.iteration = step
        if self.run.world.size > 1 and is_due(step, self._settings.link_check_interval):
            LINKS.begin(step)
            self._has_records = True

    def before_update(self) -> None:
        """Compare the recorded checksums before wrong gradients change the weights."""
        if self._has_records or LINKS.seals_messages:
            self._compare()
            self._has_records = LINKS.checking  # calls of the update follow

    def after_step(self, result: StepResult) -> None:
        """End the records of this step."""
        LINKS.end()

    def after_run(self) -> None:
        """Compare the remaining checksums of the last step and the evaluations."""
        if self._has_records or LINKS.seals_messages:
            self.run.data_parallel.finish_param_sync()
            self._compare()

    def close(self) -> None:
        """Record nothing outside a run."""
        LINKS.forget()
        LINKS.seals_messages = False

    def _compare(self) -> None:
        with METER.phase("other", inclusive=True):
            world = self.run.world
            differences = wrong_deliveries(self.run.groups, world.device, world.launcher_rank)
        if differences:
            steps = [int(text.removeprefix("step ").partition(":")[0]) for text in differences]
            raise WrongStepError(
                f"wrong data arrived in {'; '.join(differences)}. Steps from {self._suspect} on may be wrong, too: "
                "load a checkpoint from before (--load, --ckpt-step), and test the links and the memory of these ranks "
                "if it happens again",
                first=min(steps) if self._settings.link_check_interval == 1 else 0,
            )
        self._suspect = f"step {LINKS.iteration}"  # its update is not compared yet
