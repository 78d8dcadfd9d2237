"""Elastic runs: they take the ranks that fit, and end or restart when the number of ranks changes."""

import os
from collections.abc import Iterator

from megatron_core.config import RunConfig
from megatron_core.config.validate import largest_world_size
from megatron_core.errors import RestartNeeded
from megatron_core.parallel import World
from megatron_core.parallel.texts import gather_from_all_ranks, listed
from megatron_core.training.callbacks import Callback
from megatron_core.training.parts import RunPart
from megatron_core.training.pretrain import Job, start_once


def start_elastic(config: RunConfig, world: World, job: Job) -> None:
    """Train with the largest number of ranks that fits layout and batch; the others are spare."""
    world.use(largest_world_size(config, world.size))
    start_once(config, world, job)


class ElasticNotes(RunPart):
    """The note of a run whose launcher lets no node join later."""

    def notes(self) -> Iterator[str]:
        """See ``RunPart.notes``."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            yield (
                "elastic=True: nodes that join later cannot connect to torchrun's store; start torchrun on all nodes "
                "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )


class ElasticEnd(Callback):
    """Ends an elastic run: releases the spare ranks, or restarts the job without the ranks that received SIGTERM."""

    priority = -200

    def after_run(self) -> None:
        """Release the spare ranks, unless the launchers sent SIGTERM to all ranks: they then end the spare ranks, too.

        Errors: ``RestartNeeded`` on all ranks if only some ranks received SIGTERM: the run continues without them.
        """
        run = self.run
        reasons = gather_from_all_ranks(run.stop_reason, run.world.device)
        left = [rank for rank, reason in enumerate(reasons) if reason == "SIGTERM"]
        if run.state.iteration == run.total_iterations or {*reasons} - {""} != {"SIGTERM"}:
            run.world.release_spares()
        elif len(left) < len(reasons):
            raise RestartNeeded(f"SIGTERM reached only rank {listed(left)}; the job restarts with the other ranks")
