"""Records of hashes of a run (``record_hashes``)."""

import time

from megatron_core.monitor.build import metrics_path
from megatron_core.reports.hash_records import HashRecord, HashWriter, hash_file
from megatron_core.reports.settings import HashConfig
from megatron_core.reports.state_hashes import HashedSteps, StateHashes
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class HashRecords(Callback):
    """Writes the records of the steps that are due, on rank 0."""

    priority = 450

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = run.config.section(HashConfig)
        state = StateHashes(run.stages, run.data_parallel, run.optimizer, run.groups)
        self._steps = HashedSteps(state, by_tensor=self.settings.record_hashes_by_tensor)
        self._writer: HashWriter | None = None
        self._began = self._hashing = self._hash_seconds = self._all_seconds = 0.0

    def before_run(self) -> None:
        """Open the file and record the initial state."""
        run = self.run
        metrics = metrics_path(run.config.monitor, run.config.checkpoint.run_folder)
        assert metrics is not None, "validated: there is a file"
        if run.world.rank == 0:
            about = {
                "iteration": run.state.iteration, "layout": run.layout, "world_size": run.world.size,
                "dtype": run.config.training.compute_dtype, "by_tensor": self.settings.record_hashes_by_tensor,
                "interval": self.settings.record_hashes_interval,
            }  # fmt: skip
            self._writer = HashWriter(hash_file(metrics), about)
        self._write(self._steps.initial(run.state.iteration))

    def before_step(self) -> None:
        """Start to measure the step."""
        self._began = time.process_time()
        self._hashing = 0.0

    def before_update(self) -> None:
        """Hash the gradients if the step is due."""
        if self._is_due(self.run.state.iteration + 1):
            began = time.process_time()
            self._steps.before_update(self.run.state.iteration + 1)
            self._hashing += time.process_time() - began

    def after_step(self, result: StepResult) -> None:
        """Hash optimizer state and weights if the step is due, and write its record."""
        if self._is_due(self.run.state.iteration):
            began = time.process_time()
            record = self._steps.after_step(result.loss, result.grad_norm)
            self._hashing += time.process_time() - began
            step_seconds = time.process_time() - self._began - self._hashing
            self._write(record, hash_seconds=round(self._hashing, 6), step_seconds=round(step_seconds, 6))
        self._hash_seconds += self._hashing
        self._all_seconds += time.process_time() - self._began

    def after_run(self) -> None:
        """Report the cost of the records."""
        if self._writer is not None and self._all_seconds:
            share = self._hash_seconds / self._all_seconds
            every = self.settings.record_hashes_interval
            print(f"hashes took {share:.2%} of the processor time of steps (--record-hashes-interval {every})")

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, record: HashRecord, **times: float) -> None:
        if self._writer is not None:
            self._writer.write(record, **times)

    def _is_due(self, iteration: int) -> bool:
        return iteration % self.settings.record_hashes_interval == 0
