"""Generation with a cache equals generation without one, in every layout."""

from __future__ import annotations

import pytest
import torch

from megatron_core.errors import ConfigError
from megatron_core.inference import Generator, Sampling, until_stop
from megatron_core.inference.sampling import candidates
from megatron_core.models.build import build_stages
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

PROMPT, NEW = [5, 11, 17, 23], 8
MODERN = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


def _generator(settings: dict) -> Generator:
    run = tiny_run(fp64=True, num_layers=4, init_method_std=0.3, **settings)
    stages = run.stages
    if run.split.cp_size > 1:  # as ``Generator.load``
        stages = build_stages(run.config, run.groups, run.vocab_size, run.world.device, context_parallel=False)[1]
    for stage in stages.values():
        stage.eval()
    return Generator(run.config, run.groups, stages, len(run.layers), run.world.device)


def _generate(settings: dict, sampling: Sampling) -> list[int]:
    return list(_generator(settings).generate(PROMPT, NEW, sampling))


def _without_cache(settings: dict) -> list[int]:
    model = _generator(settings).stages[0]
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


WINDOW = MODERN | {"window_size": (2, 0), "window_attn_skip_freq": (2,), "rotary_interleaved": True}


EXPERTS = MODERN | {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}


@pytest.mark.parametrize("model", [{}, MODERN, WINDOW, EXPERTS], ids=["gpt2", "llama", "window", "experts"])
def test_cache_changes_nothing(model: dict) -> None:
    assert _generate(model, Sampling()) == _without_cache(model)


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, TP2),
        (2, PP2),
        (2, PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
        (2, PP2 | {"pipeline_model_parallel_layout": "E|ttt||tL"}),
        (4, TP2 | PP2),
        (4, TP2 | {"context_parallel_size": 2}),
    ],
    ids=["tp2", "pp2", "pp2 x 2 chunks", "pp2, stages without layers", "tp2 pp2", "cp2 tp2"],
)
def test_layout_changes_nothing(world_size: int, layout: dict) -> None:
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)
    alone = _generate(MODERN, sampling)
    assert len(set(alone)) > 1
    assert run_ranks(world_size, _generate, MODERN | layout, sampling) == [alone] * world_size


@pytest.mark.parametrize("layout", [TP2, TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}])
def test_a_rank_without_a_token_of_its_own(layout: dict) -> None:
    """Two tensor-parallel ranks divide one new token for the experts: one of them has none."""
    alone = _generate(EXPERTS, Sampling())
    assert run_ranks(2, _generate, EXPERTS | layout, Sampling()) == [alone] * 2


def test_end_token_ends() -> None:
    generator = _generator(MODERN)
    tokens = list(generator.generate(PROMPT, NEW, Sampling()))
    end = tokens[2]
    assert list(generator.generate(PROMPT, NEW, Sampling(), ends={end})) == tokens[: tokens.index(end) + 1]


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()

    def kept(**settings: float) -> list[int]:
        return candidates(logits, Sampling(temperature=1.0, **settings)).isfinite().nonzero().flatten().tolist()

    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.5) == [0]
    assert kept(top_p=0.51) == [0, 1]
    assert kept(top_p=0.01) == [0]
    assert kept() == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_wrong_sampling_names_the_setting(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Sampling(**wrong)


def test_learned_positions_end_the_text() -> None:
    """Sixteen positions: four of the prompt and twelve more; a longer prompt is told so."""
    assert len(list(_generator({}).generate(PROMPT, 50, Sampling()))) == 12
    with pytest.raises(ConfigError, match="prompt's 16 tokens leave no room in the 16 positions"):
        list(_generator({}).generate(PROMPT * 4, 1, Sampling()))


def test_empty_prompt() -> None:
    with pytest.raises(ConfigError, match="prompt"):
        list(_generator({}).generate([], 1, Sampling()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two", ("one two", False)),
        ("one\n\n### two", ("one", True)),
        ("one END", ("one ", True)),
        ("one\n\n##", ("one", False)),  # may become a stop string
        ("one E", ("one ", False)),
        ("one EN two", ("one EN two", False)),
        ("one\n\n\ufffd", ("one", False)),  # part of a character
        ("END one\n\n###", ("", True)),
    ],
)
def test_stop_strings(text: str, expected: tuple[str, bool]) -> None:
    assert until_stop(text, ("\n\n###", "END")) == expected
    assert until_stop("one E", ()) == ("one E", False)
