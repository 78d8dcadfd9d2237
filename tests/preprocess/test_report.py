"""Messages during a run and at its end."""

import pytest

from megatron_core.preprocess import report
from megatron_core.preprocess.builder import Extent
from megatron_core.preprocess.output import OutputState
from megatron_core.preprocess.report import JobProgress, backend_sentence, summary_lines


def test_without_a_terminal_a_line_every_so_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(report, "LINE_SECONDS", 0.0)
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    progress = JobProgress(total=10_000_000, done=2_000_000, log_interval=1000)
    progress.update(2_000_000, 50, 500)
    now[0] += 4
    progress.update(6_000_000, 1_250, 9_000)
    progress.close()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "60.0%: 1,250 documents, 9,000 tokens, 1.0 MB/s, 300 documents/s, 00:04 left"
    monkeypatch.setattr(report, "LINE_SECONDS", 10.0)
    progress = JobProgress(total=100, done=0, log_interval=1)
    for done in range(100):
        now[0] += 1
        progress.update(done, done, done)
    progress.close()
    assert len(capsys.readouterr().err.splitlines()) == 10


def test_the_summary_counts_everything_once() -> None:
    state = OutputState(
        documents=12,
        broken=3,
        empty=1,
        dropped=2000,
        size=5_000_000,
        extents=[Extent(1000, 11, 12), Extent(500, 12, 12)],
    )
    lines = summary_lines(["a_x_document", "a_y_document"], state, 2.0, 1_000_000, "gigatoken", "a_problems.txt")
    assert lines.pop(3).startswith("2,000 bytes of text omitted: the tokenizer has no token for them")
    assert lines == [
        "a_x_document: 12 documents, 1,000 tokens",
        "a_y_document: 12 documents, 500 tokens",
        "12 documents, 1,500 tokens, 5.0 MB; 4.0 MB in 2 s, 2.0 MB/s, by gigatoken",
        "3 broken documents omitted, 1 empty text kept; all listed in a_problems.txt",
    ]
    assert len(summary_lines(["a"], OutputState(extents=[Extent()]), 1.0, 0, "tokenizers", "")) == 2


def test_the_back_end_and_the_reason_are_said() -> None:
    assert backend_sentence("gigatoken", "", 2) == "tokenization backend: gigatoken, 2 workers"
    assert backend_sentence("tokenizers", "why", 1) == "tokenization backend: tokenizers (why), 1 worker"
