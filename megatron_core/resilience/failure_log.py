"""A log of failures, which prevents endless restarts with the same failure."""

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron_core.errors import ConfigError, MegatronError
from megatron_core.locations import in_storage, location
from megatron_core.output_file import json_lines, no_follow, refuse_other_file
from megatron_core.parallel.exit_status import RESTART, exit_explanation
from megatron_core.parallel.texts import broadcast_from_rank, raising_on_all_ranks
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run

OF_FAILURES = "failures."
"""Beginning of the names of the log and of its parts."""
FILE = f"{OF_FAILURES}jsonl"
_LINES = json_lines("list of failures", b'{"begins": "', b'{"iteration": ')


class FailureLog(Callback):
    """``SAVE/failures.jsonl``: a line for the start of each attempt and for each rank that fails in it.

    If two consecutive attempts with equal settings have the same failure at the same iteration, the run ends and a
    third attempt is refused. The file is removed when an attempt completes that iteration.

    Only rank 0 reads it and informs the others. Nothing can be appended to an object: in object storage, each rank that
    fails writes ``failures.rank00003.jsonl``, which rank 0 of the next attempt appends to the log.
    """

    priority = 900

    def __init__(self, run: Run) -> None:
        self.run, config = run, run.config
        save = config.checkpoint.save
        self._path = location(save) / FILE if save is not None else None
        settings = replace(config, checkpoint=config.checkpoint.for_resume()).flat()
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self._attempts: list[set[tuple[int, str]]] = []
        self._iteration = 0
        """Number of the current step."""

    def before_run(self) -> None:
        """Start an attempt, which rank 0 records; a collective call.

        Errors: ``MegatronError`` on all ranks if the last two attempts had the same failure, or if the log cannot be
        read.
        """
        if self._path is None:
            return
        text, world = "", self.run.world
        with raising_on_all_ranks(world.device):
            if world.rank == 0:
                text = self._read()
        self._attempts = self._parsed(broadcast_from_rank(0, text, world.device))
        # The first common failure of the last two attempts.
        common = self._attempts[-1] & self._attempts[-2] if len(self._attempts) > 1 else set()
        if (repeated := min(common, default=None)) is not None:
            raise MegatronError(self._sentence(*repeated))
        if world.rank == 0:
            self._append({"begins": self._digest})

    def before_step(self) -> None:
        """The iteration before this step is complete, with its checks, evaluation and checkpoint."""
        self._forget_passed()
        self._iteration = self.run.state.iteration + 1

    def after_run(self) -> None:
        """The last iteration is complete."""
        self._forget_passed()

    def on_failure(self, error: Exception) -> None:
        """Record ``error``, unless its cause is a killed or hanging rank.

        Errors: ``MegatronError`` instead of ``error`` if the previous attempt had the same failure.
        """
        iteration, text, explanation = self._iteration, _kind(error), exit_explanation(error)
        if self._path is None or (explanation and explanation[0] == RESTART):
            return
        self._append({"iteration": iteration, "error": text, "rank": self.run.world.rank})
        if self._attempts and (iteration, text) in self._attempts[-1]:
            raise MegatronError(self._sentence(iteration, text)) from error

    def _forget_passed(self) -> None:
        """Remove the log if all recorded failures are at or before the current iteration."""
        iteration = self.run.state.iteration
        if (
            self._attempts
            and self._path is not None
            and all(failed_at <= iteration for failures in self._attempts for failed_at, _ in failures)
        ):
            self._attempts = []
            if self.run.world.rank == 0:
                with suppress(OSError):  # an old log has no effect on other failures
                    self._path.unlink(missing_ok=True)

    def _sentence(self, iteration: int, text: str) -> str:
        return (
            f"the same failure twice in iteration {iteration}: {text}. A restart would repeat it, so this run ends "
            f"here; change what causes it (data, settings, code, hardware), then remove {self._path}"
        )

    def _read(self) -> str:
        """The content of the log; in object storage, with what ranks have written since, which is appended to it.

        Errors: ``ConfigError`` if it belongs to another program or is a link; ``OSError``.
        """
        assert self._path is not None
        path, named = self._path, f"save={str(self._path.parent)!r}"
        if in_storage(path) is None:
            refuse_other_file(named, path, _LINES)
            if path.is_symlink():
                raise ConfigError(f"{named}: {path} is a link, which is not followed; remove it")
        data = path.read_bytes() if path.is_file() else b""
        logs_of_ranks = [] if in_storage(path) is None else sorted(path.parent.glob(f"{OF_FAILURES}rank*.jsonl"))
        if logs_of_ranks:
            data += b"".join(log.read_bytes() for log in logs_of_ranks)
            path.write_bytes(data)
            for log in logs_of_ranks:
                log.unlink(missing_ok=True)
        return data.decode(errors="replace")

    def _parsed(self, text: str) -> list[set[tuple[int, str]]]:
        """Failures (iteration, kind) of each failed attempt since the settings last changed."""
        attempts: list[set[tuple[int, str]]] = [set()]
        for line in text.splitlines():
            try:
                record = json.loads(line)
                if "begins" in record:
                    attempts = [*attempts, set()] if record["begins"] == self._digest else [set()]
                else:
                    attempts[-1].add((int(record["iteration"]), str(record["error"])))
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # an incomplete line: the writing process was killed
        return [failures for failures in attempts if failures]

    def _append(self, record: dict[str, Any]) -> None:
        """Append one line with a single write, because several ranks append to the same file; in object storage, to
        this rank's own part. Errors are ignored: a full disk is reported when a checkpoint is saved."""
        assert self._path is not None
        line = (json.dumps(record) + "\n").encode()
        with suppress(OSError):
            if in_storage(self._path) is not None:
                name = FILE if "begins" in record else f"{OF_FAILURES}rank{self.run.world.rank:05d}.jsonl"
                log = self._path.with_name(name)
                log.write_bytes((log.read_bytes() if log.is_file() else b"") + line)
                return
            descriptor = no_follow(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)


def _kind(error: Exception) -> str:
    """Key for comparing failures: the error's type and the first line of its message, with numbers replaced by N."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {re.sub('[0-9]+', 'N', first)[:200]}"
