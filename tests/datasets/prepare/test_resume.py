"""A run that was killed, or found no room on the disk, goes on and writes the same bytes."""

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_core.datasets.aside import DiskFullError
from megatron_core.datasets.prepare import Limits, prepare
from megatron_core.datasets.prepare.journal import WorkFolder
from megatron_core.datasets.prepare.pool import WorkerDiedError
from megatron_core.errors import DataError
from tests.datasets.prepare.corpora import SMALL, outcome, settings, texts, write_jsonl, write_packed

ROOT = Path(__file__).parents[3]
RUN = """
import sys
from pathlib import Path
from megatron_core.datasets.prepare import Limits, prepare
from tests.datasets.prepare.corpora import settings
prepare(settings(Path(sys.argv[1]), input=(sys.argv[2],), append_eod=True, json_keys=("text", "text2")),
        Limits(part_bytes=4000, batch_bytes=1500, journal_seconds=0.01))
"""


def two_keys(folder: Path, count: int) -> None:
    """A plain and a packed file with two keys, and a broken line now and then."""
    lines = []
    for n, text in enumerate(texts(count)):
        lines.append(f'{{"text": "{n}", "text2": "{len(text)}"}}' if n % 50 else "{")
    for name in ("a.jsonl", "b.jsonl.gz"):
        write_packed(folder / name, "\n".join(lines).encode())


def results(folder: Path) -> dict[str, bytes]:
    """The finished files."""
    return {path.name: path.read_bytes() for path in folder.glob("out_*")}


def start(folder: Path) -> subprocess.Popen:
    """The run in a process of its own."""
    command = [sys.executable, "-c", RUN, str(folder), str(folder / "[ab].*")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_at_twenty_moments_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    two_keys(tmp_path, 12_000)
    begun = time.monotonic()
    whole = start(tmp_path)
    assert whole.wait(60) == 0, whole.stderr.read()
    seconds = time.monotonic() - begun
    expected = results(tmp_path)
    assert len(expected) == 7
    chance, kills, went_on = random.Random(1), 0, 0
    while kills < 20:
        for path in tmp_path.glob("out_*"):
            path.unlink()
        killed_before = kills
        # Until a run comes to its end, each is killed somewhere in its time.
        while True:
            begun = time.monotonic()
            child = start(tmp_path)
            try:
                output = child.communicate(timeout=chance.uniform(0.3, 1.1) * seconds if kills < 20 else 60)
                assert child.returncode == 0, output
                went_on += "going on after" in output[1]
                if kills == killed_before:  # The machine has become faster: the next one is to be hit again.
                    seconds = time.monotonic() - begun
                break
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
                kills += 1
                finished = {name for name in results(tmp_path) if not name.endswith(".partial")}
                assert finished in (set(), set(expected)) or journal_says_publishing(tmp_path)
        assert results(tmp_path) == expected
        assert not (tmp_path / "out.work").exists()
    assert went_on


def journal_says_publishing(folder: Path) -> bool:
    """Whether the run was giving its files their names."""
    return '"publishing": true' in (folder / "out.work" / "journal.json").read_text()


def stopped_after(folder: Path, monkeypatch: pytest.MonkeyPatch, parts: int, **changes: object) -> None:
    """A run that is interrupted from the keyboard when some parts are joined."""
    from megatron_core.datasets.prepare.join import Joiner

    append, count = Joiner.append, [0]

    def interrupted(self: Joiner, path: Path, strict: bool) -> None:
        append(self, path, strict)
        count[0] += 1
        if count[0] == parts:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Joiner, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(folder, **changes), SMALL)


def test_what_is_made_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(200))
    expected = outcome(tmp_path)
    stopped_after(tmp_path, monkeypatch, 30)
    before = set((tmp_path / "out.work").glob("*.part"))
    kept = {path: path.stat().st_mtime_ns for path in before}
    stopped_after(tmp_path, monkeypatch, 1)
    assert all(path.stat().st_mtime_ns == kept[path] for path in before if path.exists())
    capfd.readouterr()
    # Neither the number of workers nor other part sizes matter for going on.
    assert outcome(tmp_path, Limits(), workers=3) == expected
    assert "out.work: going on after" in capfd.readouterr().err


def test_parts_that_nobody_compared_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(200))
    expected = outcome(tmp_path)
    stopped_after(tmp_path, monkeypatch, 1)
    for path in (tmp_path / "out.work").glob("*.part"):
        # What a back end that gives other ids might have left.
        path.write_bytes(path.read_bytes().replace(b"y", b"z"))
    assert outcome(tmp_path, tokenization_backend="tokenizers") == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"append_eod": True}, r"--append-eod False, now True"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 10**6}, r"--tokenizer-type ByteLevelTokenizer, now Null"),
        ({"json_keys": ("text", "n")}, r"--json-keys \['text'\], now \['text', 'n'\]"),
    ],
)
def test_another_run_in_the_same_place_is_told(
    changes: dict, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    expected = outcome(tmp_path)
    stopped_after(tmp_path, monkeypatch, 5)
    with pytest.raises(DataError, match=f"out.work holds an interrupted run with {sentence}.*remove that folder"):
        prepare(settings(tmp_path, **changes), SMALL)
    assert outcome(tmp_path) == expected


def test_changed_input_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(100))
    stopped_after(tmp_path, monkeypatch, 5)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"another state of .*a\.jsonl, which has changed since; give the same again"):
        prepare(settings(tmp_path), SMALL)
    write_jsonl(tmp_path / "b.jsonl", ["x"])
    with pytest.raises(DataError, match=r"other --input files \(number 2 was none, now .*b\.jsonl\)"):
        prepare(settings(tmp_path), SMALL)


def test_a_part_that_is_not_whole_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    expected = outcome(tmp_path)
    stopped_after(tmp_path, monkeypatch, 3)
    work = tmp_path / "out.work"
    (work / "000000-00000010.part").write_bytes(b"")
    (work / "000000-00000011.partial").write_bytes(b"half")
    assert outcome(tmp_path) == expected


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
                prepare(settings(tmp_path, **changes), SMALL)
        assert outcome(tmp_path, **changes) == expected


def test_interrupted_while_the_folder_is_removed_it_says_nothing_of_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    expected = outcome(tmp_path, append_eod=True)
    journals: list[bytes] = []
    remove = WorkFolder.remove

    def remembering(self: WorkFolder) -> None:
        journals.append((self.path / "journal.json").read_bytes())
        remove(self)

    monkeypatch.setattr(WorkFolder, "remove", remembering)
    assert outcome(tmp_path) != expected
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "journal.json").write_bytes(journals[0])
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
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 is no JSON .*\(--strict\)"):
        prepare(settings(tmp_path, strict=True), SMALL)
    # What was done without the flag is not lost by trying it.
    assert (tmp_path / "out.work" / "journal.json").exists()
    assert outcome(tmp_path) == expected


def test_an_output_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(DataError, match=r"--output-prefix .*a\.jsonl/out: .*out\.work cannot be made \(Not a dir"):
        prepare(settings(tmp_path, output_prefix=f"{path}/out"))


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    work = WorkFolder(str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"out\.work is in use by another process"):
        prepare(settings(tmp_path))
    work.close()
    assert outcome(tmp_path)


def test_a_dead_worker_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*texts(100), "kill"])
    expected = outcome(tmp_path)
    tokenize = "megatron_core.tokenizers.byte_level.ByteLevelTokenizer.tokenize"

    def deadly(self: object, text: str) -> list[int]:
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return list(text.encode())

    with monkeypatch.context() as patch:
        patch.setattr(tokenize, deadly)
        # The parent's own look at a sample must not be the end of it.
        patch.setattr("megatron_core.datasets.prepare.job.sample_texts", lambda *_: [])
        with pytest.raises(WorkerDiedError, match=r"a worker process died, perhaps for lack of memory"):
            prepare(settings(tmp_path), SMALL)
    assert outcome(tmp_path) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    two_keys(tmp_path, 30_000)
    child = start(tmp_path)
    workers: list[int] = []
    deadline = time.monotonic() + 20
    while len(workers) < 2 and time.monotonic() < deadline:
        first = children(child.pid)
        workers = first + [pid for parent in first for pid in children(parent)]
    assert len(workers) == 2
    child.kill()
    child.communicate()
    while time.monotonic() < deadline and any(alive(pid) for pid in workers):
        time.sleep(0.01)
    assert not any(alive(pid) for pid in workers)


def children(pid: int) -> list[int]:
    """The processes that a process has forked."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pid: int) -> bool:
    """Whether a process runs (one that nobody waits for any more does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("most", [300, 5_000, 20_000])
def test_a_full_disk_is_named_and_the_run_goes_on(most: int, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(600))
    expected = outcome(tmp_path)
    for path in tmp_path.glob("out_*"):
        path.unlink()
    pid = os.fork()
    if pid == 0:
        # Python ignores SIGXFSZ: writing on gives EFBIG.
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        code = 1
        try:
            prepare(settings(tmp_path), SMALL)
        except DiskFullError as error:
            found = str(error).split(":")
            named = Path(found[0]).name.endswith(".partial")
            code = 0 if named and "at byte" in str(error) and "the same command again: it goes on" in str(error) else 2
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
            prepare(settings(tmp_path), SMALL)
    assert outcome(tmp_path) == expected
