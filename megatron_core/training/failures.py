"""Progress for the watchdog, and a log of failures, so that restarts do not repeat one failure endlessly."""

import hashlib
import json
import os
import re
from dataclasses import replace
from typing import Any

from megatron_core.errors import ConfigError, MegatronError
from megatron_core.output_file import json_lines, no_follow, refuse_other_file
from megatron_core.parallel.launch import RESTART, explained
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run

FILE = "failures.jsonl"
_LINES = json_lines("list of failures", b'{"begins": "', b'{"iteration": ')


class Heartbeat(Callback):
    """Tells the watchdog which step starts; the watchdog reports a rank that makes no progress."""

    priority = 800

    def __init__(self, run: Run) -> None:
        self.run = run

    def before_step(self) -> None:
        """Report the start of the next step."""
        if self.run.world.watchdog is not None:
            self.run.world.watchdog.beat(self.run.state.iteration + 1)

    def close(self) -> None:
        """Stop the timer: no more steps follow."""
        if self.run.world.watchdog is not None:
            self.run.world.watchdog.rest()


class FailureLog(Callback):
    """``SAVE/failures.jsonl``: one line at the start of each attempt and one for each rank that fails in it.

    If two consecutive attempts with equal settings have the same failure at the same iteration, the run ends and a
    third attempt is refused. The file is removed when an attempt completes that iteration.
    """

    priority = 900

    def __init__(self, run: Run) -> None:
        self.run, config = run, run.config
        folder = config.checkpoint.run_folder
        self._path = folder / FILE if folder is not None else None
        settings = replace(config, checkpoint=config.checkpoint.for_resume()).flat()
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self._attempts = self._read()
        self._iteration = 0
        """Number of the current step."""

    def before_run(self) -> None:
        """Start an attempt; rank 0 records it in the file, which all ranks have read before.

        Errors: ``MegatronError`` if the last two attempts had the same failure.
        """
        repeated = self._repeated(self._attempts)
        if repeated is not None:
            raise MegatronError(self._sentence(*repeated))
        if self.run.world.rank == 0 and self._path is not None and self._path.parent.is_dir():
            named = f"save={str(self._path.parent)!r}"
            refuse_other_file(named, self._path, _LINES)
            if self._path.is_symlink():
                raise ConfigError(f"{named}: {self._path} is a link, which is not followed; remove it")
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
        at, text, found = self._iteration, _kind(error), explained(error)
        if self._path is None or not self._path.parent.is_dir() or (found and found[0] == RESTART):
            return
        self._append({"iteration": at, "error": text, "rank": self.run.world.rank})
        if self._attempts and (at, text) in self._attempts[-1]:
            raise MegatronError(self._sentence(at, text)) from error

    def _forget_passed(self) -> None:
        """Remove the log if all recorded failures are at or before the current iteration."""
        iteration = self.run.state.iteration
        if (
            self._attempts
            and self._path is not None
            and all(at <= iteration for each in self._attempts for at, _ in each)
        ):
            self._attempts = []
            if self.run.world.rank == 0:
                self._path.unlink(missing_ok=True)

    def _sentence(self, at: int, text: str) -> str:
        return (
            f"the same failure twice in iteration {at}: {text}. A restart would repeat it, so this run ends here; "
            f"change what causes it (data, settings, code, hardware), then remove {self._path}"
        )

    def _repeated(self, attempts: list[set[tuple[int, str]]]) -> tuple[int, str] | None:
        """The first common failure of the last two attempts, or None."""
        common = attempts[-1] & attempts[-2] if len(attempts) > 1 else set()
        return min(common, default=None)

    def _read(self) -> list[set[tuple[int, str]]]:
        """Failures (iteration, kind) of each failed attempt since the settings last changed."""
        attempts: list[set[tuple[int, str]]] = [set()]
        if self._path is None or not self._path.is_file():
            return []
        for line in self._path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
                if "begins" in record:
                    attempts = [*attempts, set()] if record["begins"] == self._digest else [set()]
                else:
                    attempts[-1].add((int(record["iteration"]), str(record["error"])))
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # an incomplete line: the writing process was killed
        return [each for each in attempts if each]

    def _append(self, record: dict[str, Any]) -> None:
        """Append one line with a single write, because several ranks append to the same file."""
        assert self._path is not None
        try:
            descriptor = no_follow(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(descriptor, (json.dumps(record) + "\n").encode())
            finally:
                os.close(descriptor)
        except OSError:
            return  # a full disk is reported when a checkpoint is saved


def _kind(error: Exception) -> str:
    """Key for comparing failures: the error's type and the first line of its message, with numbers replaced by N."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {re.sub('[0-9]+', 'N', first)[:200]}"
