"""The plans of a run: one for each number of micro-batches that a step of it has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megatron_core.config import RunConfig
from megatron_core.pipeline_parallel.actions import Plan
from megatron_core.pipeline_parallel.checks import check
from megatron_core.pipeline_parallel.executor import Posting
from megatron_core.pipeline_parallel.rendezvous import receives_ahead
from megatron_core.pipeline_parallel.run_plan import plan_of
from megatron_core.pipeline_parallel.schedules import forward_only


@dataclass(frozen=True)
class PostedPlan:
    """A checked plan, and when its receives are posted."""

    plan: Plan
    posting: Posting


class Plans:
    """Plans by the number of micro-batches of a rank, each made and checked when a step first needs it.

    The largest one, of the whole global batch, is made at once, so that a schedule that does not fit is told before
    anything is built. Stages lie on the same ranks in all of them: ``place`` gives the rank of each stage.
    """

    def __init__(self, config: RunConfig, data_parallel_size: int) -> None:
        self._config = config
        self.training, self.evaluation = cache(self._training), cache(self._evaluation)
        batch = config.training.final_batch_size(data_parallel_size)
        self.place = self.training(batch // (config.training.micro_batch_size * data_parallel_size)).plan.place

    def _training(self, num_microbatches: int) -> PostedPlan:
        """The plan of a training step."""
        return self._posted(plan_of(self._config, num_microbatches))

    def _evaluation(self, num_microbatches: int) -> PostedPlan:
        """The plan of a batch that is evaluated."""
        ranks = self._config.parallel.pipeline_model_parallel_size
        chunks = len(self.place) // ranks
        plan = forward_only(ranks, chunks, num_microbatches, place=self.place)
        return self._posted(check(plan, num_microbatches, forward_only=True))

    def _posted(self, plan: Plan) -> PostedPlan:
        """Receives are posted early enough that sends which wait for them cannot lock the ranks."""
        if self._config.parallel.overlap_p2p_communication:
            return PostedPlan(plan, Posting())
        return PostedPlan(plan, Posting(overlap=False, ahead=receives_ahead(plan)))
