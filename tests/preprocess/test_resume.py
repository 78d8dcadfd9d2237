"""A run that was killed, or found the disk full, resumes and writes the same bytes."""

import errno
import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_core.errors import DataError
from megatron_core.preprocess import Limits, preprocess
from megatron_core.preprocess.atomic_write import DiskFullError
from megatron_core.preprocess.inputs import DamagedFileError
from megatron_core.preprocess.output import TokenOutput, WorkFolder
from megatron_core.preprocess.pool import WorkerDiedError
from megatron_core.preprocess.worker import EncodedPart
from tests.preprocess.corpora import SMALL, outcome, settings, texts, write_jsonl, write_packed
from tests.sample import WHOLE_MATRIX

KILLS = 50 if WHOLE_MATRIX else 6


def two_keys(folder: Path, count: int) -> None:
    """A plain and a compressed file with two keys, and some broken lines."""
    lines = []
    for n, text in enumerate(texts(count)):
        lines.append(f'{{"text": "{n}", "text2": "{len(text)}"}}' if n % 50 else "{")
    for name in ("a.jsonl", "b.jsonl.gz"):
        write_packed(folder / name, "\n".join(lines).encode())


def results(folder: Path) -> dict[str, bytes]:
    """The finished files."""
    return {path.name: path.read_bytes() for path in folder.glob("out_*")}


def start(folder: Path) -> int:
    """The run in a forked process, whose id is returned; it ends with status 0 on success."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            given = settings(folder, input=(f"{folder}/[ab].*",), append_eod=True, json_keys=("text", "text2"))
            preprocess(given, Limits(part_bytes=4000, batch_bytes=1500, save_seconds=0.01))
            code = 0
        finally:
            os._exit(code)
    return pid


def test_killed_at_any_moment_it_continues_to_the_same_bytes(tmp_path: Path) -> None:
    two_keys(tmp_path, 3_000)
    begun = time.monotonic()
    assert os.waitpid(start(tmp_path), 0)[1] == 0
    seconds = time.monotonic() - begun
    expected = results(tmp_path)
    assert len(expected) == 7
    chance, kills, continued = random.Random(1), 0, 0
    while kills < KILLS or not continued:
        for path in tmp_path.glob("out_*"):
            path.unlink()
        # Until a run is complete, each is killed at a random time.
        while True:
            pid = start(tmp_path)
            time.sleep(chance.uniform(0.1, 0.9) * seconds)
            if kills < KILLS or not continued:
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if status == 0:
                seconds *= 0.9  # this run was faster than the first one
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            kills += 1
            assert kills < 20 * KILLS, "no run that was killed had made progress"
            continued += (tmp_path / "out.work" / "progress.json").exists()
            finished = {name for name in results(tmp_path) if not name.endswith(".partial")}
            assert finished in (set(), set(expected)) or is_publishing(tmp_path)
        assert results(tmp_path) == expected
        assert not (tmp_path / "out.work").exists()


def is_publishing(folder: Path) -> bool:
    """Whether the run was renaming its files."""
    return '"publishing": true' in (folder / "out.work" / "progress.json").read_text()


def stopped_after(folder: Path, monkeypatch: pytest.MonkeyPatch, parts: int, **changes: object) -> None:
    """A run that is interrupted from the keyboard after some parts are written."""
    append, count = TokenOutput.append, [0]

    def interrupted(self: TokenOutput, part: EncodedPart) -> None:
        append(self, part)
        count[0] += 1
        if count[0] == parts:
            self.save()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenOutput, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            preprocess(settings(folder, **changes), SMALL)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.txt.gz"])
def test_what_is_written_is_not_read_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    changes = {"input": (str(write_jsonl(tmp_path / name, texts(200))),), "document_separator": "y"}
    expected = outcome(tmp_path, **changes)
    stopped_after(tmp_path, monkeypatch, 30, **changes)
    stopped_after(tmp_path, monkeypatch, 1, **changes)
    position = json.loads((tmp_path / "out.work" / "progress.json").read_text())["position"]
    assert position[0] == 1 or position[1] > 3_000
    (tmp_path / "out.work" / "run.json.partial").write_text("left by a run that was killed")
    capfd.readouterr()
    # The number of workers and other sizes may change between runs.
    assert outcome(tmp_path, Limits(), workers=3, **changes) == expected
    assert "out.work: continuing after" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"append_eod": True}, r"--append-eod False, now True"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 10**6}, r"--tokenizer-type ByteLevelTokenizer, now Null"),
        ({"json_keys": ("text", "n")}, r"--json-keys \['text'\], now \['text', 'n'\]"),
    ],
)
def test_another_run_with_the_same_output_is_an_error(
    changes: dict, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    expected = outcome(tmp_path)
    stopped_after(tmp_path, monkeypatch, 5)
    with pytest.raises(DataError, match=f"out.work has an interrupted run with {sentence}.*remove that folder"):
        preprocess(settings(tmp_path, **changes), SMALL)
    assert outcome(tmp_path) == expected


def test_input_that_changed_after_it_was_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(100))
    stopped_after(tmp_path, monkeypatch, 5)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"a\.jsonl in a different state; use the same settings"):
        preprocess(settings(tmp_path), SMALL)
    write_jsonl(tmp_path / "0.jsonl", ["x"])
    with pytest.raises(DataError, match=r"different --input files \(number 1 was .*a\.jsonl, now .*0\.jsonl\)"):
        preprocess(settings(tmp_path), SMALL)


def test_interrupted_while_names_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    changes = {"json_keys": ("text", "body")}
    rows = [f'{{"text": "{n}", "body": "{n * n}"}}\n' for n in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    expected = outcome(tmp_path, **changes)
    replace = os.replace
    for stop_at in range(4):
        renamed = []

        def stopping(old: Path, new: Path, renamed: list = renamed, stop_at: int = stop_at) -> None:
            if str(new).endswith((".bin", ".idx")):
                renamed.append(new)
                if len(renamed) > stop_at:
                    raise KeyboardInterrupt
            replace(old, new)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stopping)
            with pytest.raises(KeyboardInterrupt):
                preprocess(settings(tmp_path, **changes), SMALL)
        assert outcome(tmp_path, **changes) == expected


def test_interrupted_while_the_folder_is_removed_it_says_nothing_of_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    expected = outcome(tmp_path, append_eod=True)
    journals: list[bytes] = []
    remove = WorkFolder.remove

    def remembering(self: WorkFolder) -> None:
        journals.append((self.path / "progress.json").read_bytes())
        remove(self)

    monkeypatch.setattr(WorkFolder, "remove", remembering)
    assert outcome(tmp_path) != expected
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "progress.json").write_bytes(journals[0])
    assert outcome(tmp_path, append_eod=True) == expected


def test_output_in_the_folder_of_the_input_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    (tmp_path / "b.jsonl").write_text("{\n")
    expected = outcome(tmp_path)
    changes = {"input": (str(tmp_path),)}
    assert outcome(tmp_path, **changes) == expected
    stopped_after(tmp_path, monkeypatch, 5, **changes)
    assert outcome(tmp_path, **changes) == expected


def test_strict_going_on_sees_what_was_broken_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["a", *texts(200)])
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{\n" + path.read_bytes())
    expected = outcome(tmp_path)
    stopped_after(tmp_path, monkeypatch, 30)
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 is not JSON .*\(--strict\)"):
        preprocess(settings(tmp_path, strict=True), SMALL)
    # Trying the flag keeps earlier progress.
    assert (tmp_path / "out.work" / "progress.json").exists()
    assert outcome(tmp_path) == expected


def test_an_output_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(DataError, match=r"--output-prefix .*a\.jsonl/out: .*out\.work cannot be created \(Not a dir"):
        preprocess(settings(tmp_path, output_prefix=f"{path}/out"))


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    work = WorkFolder(str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"out\.work is in use by another process"):
        preprocess(settings(tmp_path))
    work.close()
    assert outcome(tmp_path)


def test_after_the_death_of_a_worker_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*texts(100), "kill"])
    expected = outcome(tmp_path)
    tokenize = "megatron_core.tokenizers.built_in.ByteLevelTokenizer.tokenize"

    def deadly(self: object, text: str) -> list[int]:
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return list(text.encode())

    with monkeypatch.context() as patch:
        patch.setattr(tokenize, deadly)
        with pytest.raises(WorkerDiedError, match=r"a worker process died, perhaps because of insufficient memory"):
            preprocess(settings(tmp_path), SMALL)
    assert outcome(tmp_path) == expected


@pytest.mark.parametrize("most", [600, 10_000])
def test_a_full_disk_is_named_and_the_run_continues(most: int, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(300))
    expected = outcome(tmp_path)
    for path in tmp_path.glob("out_*"):
        path.unlink()
    pid = os.fork()
    if pid == 0:
        # Python ignores SIGXFSZ, so writing further gives EFBIG.
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        code = 1
        try:
            preprocess(settings(tmp_path), SMALL)
        except DiskFullError as error:
            found = str(error).split(":")
            named = Path(found[0]).name.endswith(".partial")
            code = (
                0 if named and "at byte" in str(error) and "the same command again: it continues" in str(error) else 2
            )
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not [path.name for path in tmp_path.glob("out_*") if not path.name.endswith(".partial")]
    assert outcome(tmp_path) == expected


def test_no_space_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    expected = outcome(tmp_path)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"\.partial: the disk is full at byte [\d,]+; free space and run the same"):
            preprocess(settings(tmp_path), SMALL)
    assert outcome(tmp_path) == expected


def corpus_with_damage(folder: Path, kind: str) -> Path:
    """Three files, of which the second is damaged near its end; returns its path."""
    write_jsonl(folder / "a.jsonl", texts(60))
    rows = [{"text": f"row {n} {'z' * 40}"} for n in range(300)]
    path = folder / f"b.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=50, compression="none")
        data = path.read_bytes()
        path.write_bytes(data[:9_000] + b"\xff" * 200 + data[9_200:])
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        data = write_jsonl(folder / "whole.jsonl.gz", [row["text"] for row in rows]).read_bytes()
        (folder / "whole.jsonl.gz").unlink()
        path.write_bytes(data[:-30])
    write_jsonl(folder / "c.jsonl", texts(30))
    return path


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "json"])
def test_a_damaged_file_among_others(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    damaged = corpus_with_damage(tmp_path, kind)
    given = {"input": (str(tmp_path / "[abc].*"),)}
    reason = "is a JSON array" if kind == "json" else "is (truncated|damaged)"
    with pytest.raises(DamagedFileError, match=rf"b\.{kind} {reason}.*repair the file, .*--skip-damaged-files"):
        preprocess(settings(tmp_path, **given), SMALL)
    # The damaged file's output is removed, and the file before it is not read again.
    assert json.loads((tmp_path / "out.work" / "progress.json").read_text())["position"] == [1, 0]
    whole = damaged.read_bytes()
    damaged.unlink()
    expected = outcome(tmp_path, **given)
    assert "continuing after 60 documents" in capfd.readouterr().err
    damaged.write_bytes(whole)
    with_problem = outcome(tmp_path, skip_damaged_files=True, **given)
    (problem,) = (line for line in capfd.readouterr().err.splitlines() if f"b.{kind} " in line)
    after = f"empty: {tmp_path / 'c.jsonl'}"
    problems = expected["_problems.txt"].replace(after.encode(), f"{problem}\n{after}".encode(), 1)
    assert with_problem == {**expected, "_problems.txt": problems}


def test_a_repaired_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = corpus_with_damage(tmp_path, "jsonl.gz")
    given = {"input": (str(tmp_path / "[abc].*"),)}
    with pytest.raises(DamagedFileError):
        preprocess(settings(tmp_path, **given), SMALL)
    write_jsonl(path, ["repaired"] * 50)
    continued = outcome(tmp_path, **given)
    assert continued == outcome(tmp_path, **given)


@pytest.mark.parametrize("name", ["run.json", "progress.json"])
@pytest.mark.parametrize("content", ["", "[1]", "{}", "[" * 100_000])
def test_a_work_folder_that_is_damaged_is_told(name: str, content: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(5))
    (tmp_path / "out.work").mkdir()
    for each in ("run.json", "progress.json"):
        (tmp_path / "out.work" / each).write_text('{"--input": []}')
    (tmp_path / "out.work" / name).write_text(content)
    with pytest.raises(DataError, match=r"out\.work.* (is damaged|has an interrupted run).*remove .* to start over"):
        preprocess(settings(tmp_path))


@pytest.mark.parametrize("change", ["remove", "append"])
def test_published_files_that_another_program_changed_are_told(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted while it renames its files finds them unchanged, or reports a change."""
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    given = settings(tmp_path)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenOutput, "_check_published", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess(given, SMALL)
    tokens = next(tmp_path.glob("out_*.bin"))
    tokens.unlink() if change == "remove" else tokens.write_bytes(tokens.read_bytes() + bytes(2))
    sentence = "is missing" if change == "remove" else "has .* bytes"
    with pytest.raises(DataError, match=rf"\.bin {sentence}, but this run wrote .* bytes: another program"):
        preprocess(given, SMALL)
    preprocess(settings(tmp_path, overwrite=True), SMALL)
    assert tokens.exists() and not (tmp_path / "out.work").exists()
