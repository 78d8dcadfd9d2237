"""The failures of a run, kept beside its checkpoints, so that a restart does not repeat the same one for ever."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.output_file import json_lines, no_follow, refuse_other_file
from megatron_core.parallel.launch import RESTART, explained

FILE = "failures.jsonl"
_LINES = json_lines("list of failures", b'{"begins": "', b'{"iteration": ')


class FailureLog:
    """``SAVE/failures.jsonl``: a line when an attempt begins, and one for each rank that fails in it.

    Two attempts in a row with the same settings that fail alike at the same iteration end the run: a third one is
    refused. The file goes when an attempt has passed that iteration.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        save = config.checkpoint.save
        self._path = Path(save) / FILE if save is not None else None
        self._rank = rank
        settings = replace(config, checkpoint=config.checkpoint.for_resume()).flat()
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self._attempts = self._read()
        self.iteration = 0
        """The step that is being taken."""

    def begin(self) -> None:
        """An attempt begins; on rank 0 it is noted, after all ranks have looked at the file.

        Errors: ``MegatronError`` if it would only repeat what has failed twice.
        """
        repeated = self._repeated(self._attempts)
        if repeated is not None:
            raise MegatronError(self._sentence(*repeated))
        if self._rank == 0 and self._path is not None and self._path.parent.is_dir():
            named = f"save={str(self._path.parent)!r}"
            refuse_other_file(named, self._path, _LINES)
            if self._path.is_symlink():
                raise ConfigError(f"{named}: {self._path} is a link, which is not followed; remove it")
            self._append({"begins": self._digest})

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error that ends what is done in here, unless it came from outside: a rank that was killed or hangs.

        Errors: ``MegatronError`` in place of the same failure for the second time.
        """
        try:
            yield
        except Exception as error:
            at, text, found = self.iteration, _kind(error), explained(error)
            if self._path is None or not self._path.parent.is_dir() or (found and found[0] == RESTART):
                raise
            self._append({"iteration": at, "error": text, "rank": self._rank})
            if self._attempts and (at, text) in self._attempts[-1]:
                raise MegatronError(self._sentence(at, text)) from error
            raise

    def passed(self, iteration: int) -> None:
        """Iteration ``iteration`` is done: what failed before it is of no interest any more."""
        if (
            self._attempts
            and self._path is not None
            and all(at <= iteration for each in self._attempts for at, _ in each)
        ):
            self._attempts = []
            if self._rank == 0:
                self._path.unlink(missing_ok=True)

    def _sentence(self, at: int, text: str) -> str:
        return (
            f"the same failure twice in iteration {at}: {text}. A restart would repeat it, so this run ends here; "
            f"change what causes it (data, settings, code, hardware), then remove {self._path}"
        )

    def _repeated(self, attempts: list[set[tuple[int, str]]]) -> tuple[int, str] | None:
        """A failure that the last two attempts have in common."""
        common = attempts[-1] & attempts[-2] if len(attempts) > 1 else set()
        return min(common, default=None)

    def _read(self) -> list[set[tuple[int, str]]]:
        """The failures of each attempt with these settings that had some: iteration and kind."""
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
                continue  # cut off when its writer was killed
        return [each for each in attempts if each]

    def _append(self, record: dict[str, Any]) -> None:
        """One write of one line: ranks write into the same file."""
        assert self._path is not None
        try:
            descriptor = no_follow(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(descriptor, (json.dumps(record) + "\n").encode())
            finally:
                os.close(descriptor)
        except OSError:
            return  # a full disk is reported by what needs it more


def _kind(error: Exception) -> str:
    """What two occurrences of one failure have in common: the error's first line without numbers."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {re.sub('[0-9]+', 'N', first)[:200]}"
