"""The notation of layouts, and the settings that assign layers to stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.config import ParallelConfig
from megatron_core.config.cli import parse_run_config, write_config
from megatron_core.errors import ConfigError
from megatron_core.features.stage_layouts.settings import ASSIGNING
from megatron_core.features.stage_layouts.spellings import parse_layout
from megatron_core.planner.layout import Layout


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EttL", ["EttL"]),
        ("Ett|tL", ["Ett", "tL"]),
        ("E|t|t|L", ["E", "t", "t", "L"]),
        ("Et||tL", ["Et", "", "tL"]),
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("E(t|t)*2L", ["Et", "tt", "tL"]),
        ("(|tt)*2", ["", "tt", "tt"]),
        ("Et|*3L", ["Et", "", "", "L"]),
        ("E((t*2|)*2t|)*2L", ["Ett", "tt", "t", "tt", "tt", "t", "L"]),
        ("E, t t | t*0 L", ["Ett", "L"]),
        ("", [""]),
    ],
)
def test_layouts(text: str, stages: list[str]) -> None:
    assert list(parse_layout(text)) == stages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ett|xL", "'x' at position 5 is unknown; legal: E (embedding), t (transformer layer), L"),
        ("Et3|L", "'3' at position 3 is unknown"),
        ("E(tt|L", "'(' at position 2 is never closed; add ')'"),
        ("Ett)|L", "')' at position 4 closes nothing"),
        ("*2tL", "'*' at position 1 repeats nothing"),
        ("Et*2*3L", "'*' at position 5 repeats nothing"),
        ("E()*2L", "'*' at position 4 repeats nothing"),
        ("Et*|L", "'*' at position 3 is not followed by a number; add the number"),
        ("Et*100001|L", "'*' at position 3 makes more than 100000 parts; repeat less"),
        ("E((t*1000)*1000)*1000|L", "'*' at position 11 makes more than 100000 parts"),
        ("Et*" + "9" * 5000, "makes more than 100000 parts"),
        ("Et\n|L", "'\\n' at position 3 is unknown"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        parse_layout(text)
    shown = f"{text}: " if len(text) < 200 else text[:90]
    assert str(error.value).startswith(f"pipeline_model_parallel_layout={shown}")


def megatron_reads(text: str) -> list[str]:
    """Megatron-LM's meaning of a layout without nesting: groups are expanded first, then single letters."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text.split("|")


single = st.sampled_from("EtLm|").map(str)
repeated = st.tuples(single, st.integers(0, 12)).map(lambda pair: f"{pair[0]}*{pair[1]},")
simple = st.lists(single | repeated, min_size=1, max_size=5).map("".join)
group = st.tuples(simple.filter(lambda text: "*" not in text), st.integers(0, 5)).map(lambda g: f"({g[0]})*{g[1]},")


@settings(max_examples=200, deadline=None)
@given(text=st.lists(simple | group, max_size=4).map("".join))
def test_layouts_mean_what_megatron_means(text: str) -> None:
    # Without commas Megatron would read "t*2,3" as t*23; here digits are not letters.
    assert list(parse_layout(text)) == megatron_reads(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text("Etm|L(),* 0123x", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        stages = parse_layout(text)
    except ConfigError as error:
        assert ";" in str(error)
    else:
        assert set("".join(stages)) <= set("EtmL")


def test_chunks_follow_from_the_layout() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="E|tt|tt|L")
    assert parallel.num_chunks(4) == 2
    assert str(Layout.of(parallel, 4, 2)) == "pp2 v2"


def test_accounted_layers_count_for_chunks() -> None:
    """126 layers, embedding and loss over 16 ranks, one per stage: 8 chunks."""
    parallel = ParallelConfig(
        pipeline_model_parallel_size=16,
        num_layers_per_virtual_pipeline_stage=1,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert parallel.num_chunks(126) == 8


def test_a_layout_in_words_leaves_the_balance_to_the_cost_model() -> None:
    chosen = Layout(pp=2, chunks=2).settings()
    balanced = ParallelConfig().stage_defaults()
    assert balanced.items() - chosen.items() == {("num_virtual_stages_per_pipeline_rank", None)}
    assert ParallelConfig(**balanced) == ParallelConfig() and ASSIGNING.items() <= balanced.items()


def test_flags_go_through_a_config_file(tmp_path: Path) -> None:
    flags = [
        *("--pipeline-model-parallel-layout", "Et*3|(tt|)*29,m|L"),
        *("--decoder-first-pipeline-num-layers", "3", "--decoder-last-pipeline-num-layers", "2"),
        *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    ]
    config = parse_run_config(flags)
    parallel = config.parallel
    assert parallel.pipeline_model_parallel_layout == "Et*3|(tt|)*29,m|L"
    assert (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers) == (3, 2)
    assert parallel.accounted_layers == 2
    write_config(config, tmp_path / "run.yaml")
    assert parse_run_config(["--config", str(tmp_path / "run.yaml")]) == config
