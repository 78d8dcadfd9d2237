"""No program overwrites its input or a file of another kind; each may overwrite its own output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError
from megatron_core.monitor.sinks import METRICS, JsonLinesSink, LineFile
from megatron_core.output_file import make_folder, no_follow
from megatron_core.prepared_output import json_with, no_follow_new, picture_kind, prepare_output, save_picture
from megatron_core.preprocess.job import preprocess
from megatron_core.preprocess.settings import PreprocessSettings
from megatron_core.reports.metric_sinks import PrometheusSink
from megatron_core.reports.metrics import find_metrics
from megatron_core.reports.trace_files import TraceWriter
from tests.datasets.files import write
from tests.monitor.examples import step
from tests.programs import run_program

TEXT = "own notes\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with inputs of all tools, and files of other programs."""
    sink = JsonLinesSink(tmp_path / "run/metrics.jsonl")
    sink.on_step(step(1))
    sink.close()
    (tmp_path / "c.yaml").write_text("num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\n")
    (tmp_path / "text.jsonl").write_text('{"text": "some words of a text"}\n' * 20)
    (tmp_path / "text.json").write_text('{"text": "some words of a text"}\n')
    write(tmp_path / "tokens", [[1, 2, 3], [4, 5]])
    for name in ("own.txt", "own.json", "own.png"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "mine.json").write_text('{"name": "a package", "version": 1}\n')
    (tmp_path / "mine.html").write_text("<!DOCTYPE html>\n<p>my page</p>\n")
    return tmp_path


TOOLS = {
    "report": "run --out FILE",
    "diagnose": "run --json FILE",
    "plan_layout": "--config c.yaml --gpus 2 --vocab-size 64 --global-batch-size 4 --json FILE",
    "plan_layout picture": "--config c.yaml --gpus 2 --vocab-size 64 --explain-memory --png FILE",
    "plot_metrics": "run/metrics.jsonl --out FILE",
    "show_schedule png": "--png FILE",
    "show_schedule trace": "--trace FILE",
    "show_schedule json": "--json FILE",
    "train_tokenizer": "--input text.jsonl --vocab-size 300 --output FILE",
    "collect_corpus": "--folder . --output FILE",
    "inspect_dataset": "tokens --png FILE",
    "verify_layout json": "--layouts tp2 --json FILE",
    "verify_layout markdown": "--layouts tp2 --markdown FILE",
    "generate_text": "--load run --prompt a --output FILE",
}
FILES = ["own.txt", "own.json", "own.png", "mine.json", "mine.html", "c.yaml", "text.jsonl", "run/metrics.jsonl"]


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_overwrites_no_file_of_another_kind(name: str, place: Path) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    tool = name.split()[0]
    for file in [*FILES, "tokens.bin"]:
        flags = [word.replace("FILE", file) for word in TOOLS[name].split()]
        result = run_program(f"tools/{tool}.py", *flags, cwd=place)
        assert result.returncode, file
        said = result.stderr.splitlines()
        assert len(said) == 1 and said[0].startswith((tool, "error: ")) and file in said[0], (file, result.stderr)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


INPUTS = {
    "report": "run/metrics.jsonl --out run/../run/metrics.jsonl",
    "diagnose": "run/metrics.jsonl --json link",
    "plan_layout": "--config c.yaml --gpus 2 --vocab-size 64 --json ./c.yaml",
    "plan_layout ": "--config=c.yaml --gpus 2 --vocab-size 64 --explain-memory --png c.yaml",
    "train_tokenizer": "--input text.json --vocab-size 300 --output text.json",
    "show_schedule": "--json a.json --trace ./a.json",
    "show_schedule ": "--png a.png --json a.png",
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_tool_overwrites_neither_its_input_nor_its_other_output(name: str, place: Path) -> None:
    (place / "link").symlink_to("run/metrics.jsonl")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    result = run_program(f"tools/{name.strip()}.py", *INPUTS[name].split(), cwd=place)
    assert result.returncode == 1 and "would overwrite" in result.stderr and result.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


AGAIN = ("report", "diagnose", "plot_metrics", "show_schedule png", "show_schedule trace", "show_schedule json")
AGAIN += ("collect_corpus", "inspect_dataset", "plan_layout")


@pytest.mark.parametrize("name", AGAIN)
def test_a_tool_may_write_its_own_output_again(name: str, place: Path) -> None:
    suffixes = {"report": "html", "collect_corpus": "jsonl", "plot_metrics": "png", "inspect_dataset": "svg"}
    suffix = "pdf" if "png" in name else suffixes.get(name, "json")
    (place / f"new.{suffix}").touch()  # an empty file, such as one of mktemp, may be overwritten
    for _ in range(2):
        flags = [word.replace("FILE", f"new.{suffix}") for word in TOOLS[name].split()]
        result = run_program(f"tools/{name.split()[0]}.py", *flags, cwd=place)
        assert result.returncode == 0, result.stderr
        assert (place / f"new.{suffix}").stat().st_size


def test_a_picture_without_a_suffix_is_a_png(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    (tmp_path / "loss.png").write_text(TEXT)
    with pytest.raises(ConfigError, match=r"loss\.png exists and is not a \.png picture"):
        save_picture(Figure(), tmp_path / "loss", dpi=50)
    assert (tmp_path / "loss.png").read_text() == TEXT
    save_picture(Figure(), tmp_path / "new" / "loss", dpi=50)
    assert picture_kind("a.png").accepts((tmp_path / "new/loss.png").read_bytes())


# --- Preprocessing and merging.


@pytest.mark.parametrize(
    "foreign", ["out.work/notes.txt", "out.work/thesis.partial", "out_problems.txt", "out_text_document.idx"]
)
def test_preprocessing_keeps_files_of_others(foreign: str, place: Path) -> None:
    (place / foreign).parent.mkdir(exist_ok=True)
    (place / foreign).write_text(TEXT)
    flags = ["--input", "text.jsonl", "--output-prefix", "out", "--tokenizer-type", "ByteLevelTokenizer"]
    result = run_program("tools/preprocess_data.py", *flags, "--workers", "1", "--overwrite", cwd=place)
    assert result.returncode == 1 and foreign.split("/")[0] in result.stderr and result.stderr.count("\n") == 1
    assert (place / foreign).read_text() == TEXT


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_merging_keeps_files_of_others(suffix: str, place: Path) -> None:
    (place / f"out{suffix}").write_text(TEXT)
    flags = ["--input", "tokens", "--output-prefix", "out", "--overwrite"]
    result = run_program("tools/merge_datasets.py", *flags, cwd=place)
    assert result.returncode == 1 and f"out{suffix}" in result.stderr and result.stderr.count("\n") == 1
    assert (place / f"out{suffix}").read_text() == TEXT


# --- Outputs of a training run.

OPEN: dict[str, Callable[[Path], object]] = {
    "metrics_file": JsonLinesSink,
    "prometheus_file": PrometheusSink,
    "trace_pipeline": lambda path: TraceWriter(path.parent, 0, [0], "1f1b", [0]),
}


@pytest.mark.parametrize("content", [TEXT, '{"text": "a"}\n', "\0\1\2", "load1 0.5\n", "megatron_a 1\nother 1\n"])
@pytest.mark.parametrize("name", OPEN)
def test_a_report_goes_into_no_other_file(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / "rank00000.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"{name}='.*exists and is not a .*; choose another file, or remove it"):
        OPEN[name](path)
    assert path.read_text() == content


def test_a_prometheus_file_is_replaced_and_planted_names_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text(TEXT)
    for _ in range(2):
        (tmp_path / ".run.prom.new").symlink_to("victim")
        sink = PrometheusSink(tmp_path / "run.prom")
        sink.on_step(step(1))
    assert (tmp_path / "victim").read_text() == TEXT and "megatron_lm_loss" in (tmp_path / "run.prom").read_text()


def test_damaged_metrics_are_still_metrics(tmp_path: Path) -> None:
    for content in (b'{"ki', b"\0\0\0\n" + b'{"kind": "step", "iteration": 1}\n', b'{"kind": "step", "itera'):
        (tmp_path / "m.jsonl").write_bytes(content)
        file = LineFile(tmp_path / "m.jsonl", "metrics_file", METRICS)
        file.write("{}")
        file.close()
        assert (tmp_path / "m.jsonl").read_bytes().startswith(content)


def test_a_deleted_file_of_metrics_is_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "m.jsonl"
    file = LineFile(path, "metrics_file", METRICS, first='{"kind": "start"}')
    file.write("1")
    path.unlink()
    file.write("2")
    file.write("3")
    path.rename(tmp_path / "old")
    path.parent.rmdir()
    file.write("4")
    file.close()
    assert (tmp_path / "old").read_text() == '{"kind": "start"}\n2\n3\n'
    assert path.read_text() == '{"kind": "start"}\n4\n'
    assert capsys.readouterr().out == 2 * f"note: {path} was deleted or renamed during training; it is created again\n"


# --- Implementation.


def test_links_to_devices_are_followed_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "victim").write_text(TEXT)
    (tmp_path / "link").symlink_to("victim")
    with open(tmp_path / "null", "w", opener=no_follow) as file:
        file.write("gone")
    for name in ("link", "dangling"):
        if name == "dangling":
            (tmp_path / name).symlink_to("absent")
        with pytest.raises(OSError, match="it is a symbolic link, which is not allowed here"):
            no_follow(tmp_path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(tmp_path / name, "w", opener=no_follow_new) as file:
            file.write("new")
        assert not (tmp_path / name).is_symlink() and (tmp_path / name).read_text() == "new"
    assert (tmp_path / "victim").read_text() == TEXT and not (tmp_path / "absent").exists()
    os.link(tmp_path / "victim", tmp_path / "hard")
    with open(tmp_path / "hard", "w", opener=no_follow_new) as file:
        file.write("new")
    assert (tmp_path / "victim").read_text() == TEXT


def test_a_named_pipe_without_a_reader_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a named pipe without a reader; choose a file"):
        JsonLinesSink(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    sink = JsonLinesSink(tmp_path / "pipe")
    sink.on_step(step(1))
    assert os.read(reader, 16) == b'{"kind": "step",' and os.get_blocking(sink._file._file.fileno())
    sink.close()
    os.close(reader)


def test_the_output_may_be_a_device_but_not_a_folder(tmp_path: Path) -> None:
    kind = json_with("thing", "a")
    prepare_output({"json": "/dev/null", "run": "x"}, "json", kind)
    with pytest.raises(ConfigError, match=r"--json .* cannot be written \(Is a directory\); choose another file"):
        prepare_output({"json": str(tmp_path)}, "json", kind)
    assert not kind.accepts(b"[1]") and not kind.accepts(b"{") and kind.accepts(json.dumps([{"a": 1}]).encode())


def test_urls_are_not_taken_for_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a check, s3://bucket/file would be written to the folder s3: below the present one."""
    monkeypatch.chdir(tmp_path)
    url, kind = "s3://bucket/run/file.jsonl", json_with("diagnosis", "findings")
    settings = PreprocessSettings(input=(str(tmp_path / "a"),), output_prefix=url, tokenizer_type="ByteLevelTokenizer")
    actions = {
        f"--json {url}": lambda: prepare_output({"json": url}, "json", kind),
        f"metrics_file='{url}'": lambda: JsonLinesSink(url),
        f"--output-prefix {url}": lambda: preprocess(settings),
        "s3:/bucket/run": lambda: make_folder(Path(url).parent),
        url: lambda: find_metrics(url),
    }
    (tmp_path / "a").write_text('{"text": "a"}')
    for named, action in actions.items():
        with pytest.raises(ConfigError, match="a URL is not accepted here") as error:
            action()
        assert str(error.value).startswith(f"{named}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
