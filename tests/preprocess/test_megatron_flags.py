"""Command lines of Megatron-LM's preprocess_data.py are accepted, or refused with the fix."""

import pytest

from megatron_core.commands.preprocess_data import REFUSED, WITHOUT_EFFECT, translate
from megatron_core.errors import ConfigError

USUAL = ["--input", "a.jsonl", "b.jsonl", "--json-keys", "text", "--append-eod", "--workers", "8"]


def test_flags_of_both_stay_as_they_are(capfd: pytest.CaptureFixture) -> None:
    given = [*USUAL, "--document-separator=--", "--json_keys=a", "--tokenizer-model", "x=y"]
    assert translate(given) == given
    assert translate([]) == [] and translate(["word"]) == ["word"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "words", [["--dataset-impl", "mmap"], ["--dataset_impl=mmap"], ["--lang", "english"], ["--legacy-tokenizer"]]
)
def test_what_changes_nothing_is_left_out_and_named(words: list[str], capfd: pytest.CaptureFixture) -> None:
    assert translate([*words, *USUAL]) == translate([*USUAL, *words]) == USUAL
    assert capfd.readouterr().err.startswith("without effect here: " + " ".join(words).replace("=", " "))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dataset-impl", "lazy"], "--dataset-impl lazy: token files are always memory-mapped; remove it, or"),
        (["--lang=german"], "--lang german: sentences are cut by rules .*; remove it"),
        (["--vocab-extra-ids", "5"], "--vocab-extra-ids 5: .*; remove it, or give 0"),
        (["--find-optimal-num-workers"], "--find-optimal-num-workers: without --workers"),
        (["--workers_to_check", "1", "2"], "--workers_to_check 1 2: without --workers"),
    ],
)
def test_what_would_change_something_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        translate([*USUAL, *words])


def test_every_refusal_names_a_way_out() -> None:
    assert set(WITHOUT_EFFECT) <= set(REFUSED)
    assert all("remove it" in sentence for sentence in REFUSED.values())


def test_other_names_of_older_releases_and_forks():
    given = "--vocab=v.json --json-key text --tokenizer-name-or-path F --tokenizer-type PretrainedFromHF --append-eod"
    found = (
        "--vocab-file v.json --json-keys text --tokenizer-model F --tokenizer-type HuggingFaceTokenizer --append-eod"
    )
    assert translate(given.split()) == found.split()
