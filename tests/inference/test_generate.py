"""Generation with a cache equals generation without one, in every layout."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from megatron_core.errors import ConfigError
from megatron_core.features.layer_sizes.settings import write_blocks
from megatron_core.inference import Engine, Progress, Request, Sampling, TextStream, generate, until_stop
from megatron_core.inference.sampling import candidate_logits, draw, sample_tokens
from megatron_core.inference.settings import InferenceConfig
from megatron_core.tokenizers import ByteLevelTokenizer, Tokenizer
from megatron_core.verify.ranks import run_ranks
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from tests.inference.fuzz import generator_of
from tests.parity.heterogeneous_rows import BLOCKS
from tests.vocabularies.corpus import write_sentence_piece

PROMPT, NEW = [5, 11, 17, 23], 8
MODERN = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


def _request(prompt: list[int] = PROMPT, new: int = NEW, **settings: object) -> Request:
    return Request(prompt=tuple(prompt), max_new_tokens=new, **settings)


def _generate(settings: dict, sampling: Sampling) -> list[int]:
    return list(generate(generator_of(settings), _request(sampling=sampling)))


def _without_cache(settings: dict) -> list[int]:
    model = generator_of(settings).stages[0]
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


WINDOW = MODERN | {"window_size": (2, 0), "window_attn_skip_freq": (2,), "rotary_interleaved": True}


EXPERTS = MODERN | {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}


LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "softmax_scale": 0.7,
}


GPT_OSS = {
    **{name: value for name, value in EXPERTS.items() if name not in ("swiglu", "disable_bias_linear")},
    "moe_shared_expert_intermediate_size": None,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.3,
    "softmax_type": "learnable",
    "window_size": (2, 0),
    "window_attn_skip_freq": (2,),
}

LLAMA4 = MODERN | {
    "qk_layernorm": False,
    "qk_l2_norm": True,
    "qk_l2_norm_rotary_only": True,
    "no_rope_freq": (2,),
    "attention_chunk_size": 3,
    "query_temperature_scale": 0.3,
    "query_temperature_floor": 2,
}


MINISTRAL3 = MODERN | {
    "qk_layernorm": True,
    "qk_layernorm_after_rotary": True,
    "query_temperature_scale": 0.3,
    "query_temperature_floor": 2,
    "query_temperature_of_rotary": True,
}


BLOOM = MODERN | {"position_embedding_type": "alibi", "embedding_layernorm": True}
BLOOM = {name: value for name, value in BLOOM.items() if "rotary" not in name}


DELTA_NET = MODERN | {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": (2,),
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

MAMBA = {name: value for name, value in MODERN.items() if "rotary" not in name} | {
    "hybrid_layer_pattern": "M-*M",
    "position_embedding_type": "none",
    "mamba_state_dim": 6,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": 8,
    "mamba_dt_min": 0.02,
}

FALCON_H1 = MAMBA | {
    "hybrid_layer_pattern": "H-H-",
    "position_embedding_type": "rope",
    "mamba_output_norm": "none",
    "mamba_multipliers": (1.3, 0.8, 1.2, 0.9, 0.7),
    "parallel_mixer_multipliers": (0.8, 1.7),
}

LFM2 = MODERN | {"hybrid_layer_pattern": "C-*C", "linear_conv_kernel_dim": 3, "qk_layernorm": True}

GRANITE_4 = MAMBA | {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logit_multiplier": 0.25}

KIMI = (
    {name: value for name, value in DELTA_NET.items() if "group" not in name}
    | LATENT
    | {"experimental_attention_variant": "kimi_delta_attention", "linear_num_key_heads": 4, "no_rope_freq": (1,)}
)


DSA = LATENT | {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 6,
    "dsa_indexer_topk": 3,
    "attention_dropout": 0.0,
}


PHIMOE = EXPERTS | {
    "add_qkv_bias": True,
    "add_attention_output_bias": True,
    "add_output_layer_bias": True,
    "moe_router_score_function": "sparsemixer",
}


COHERE2 = MODERN | {
    "normalization": "LayerNorm",
    "disable_bias_layernorm": True,
    "parallel_residual": True,
    "parallel_residual_shared_norm": True,
    "qk_layernorm": True,
    "qk_layernorm_weight_per_head": True,
    "rotary_interleaved": True,
    "window_size": (2, 0),
    "window_attn_skip_freq": (2,),
    "no_rope_freq": (2,),
}


SIZED = MODERN | {"heterogeneous_layers_config_encoded_json": write_blocks((*BLOCKS[:3], BLOCKS[4]))}


@pytest.mark.parametrize(
    "model",
    [
        *({}, MODERN, WINDOW, EXPERTS, LATENT, GPT_OSS, LLAMA4, MINISTRAL3, DELTA_NET, KIMI, MAMBA),
        *(DSA, PHIMOE, COHERE2, FALCON_H1, LFM2, GRANITE_4, BLOOM, SIZED),
    ],
    ids=[
        *("gpt2", "llama", "window", "experts", "latent", "gpt-oss", "llama 4", "ministral 3", "delta net"),
        *("kimi linear", "mamba"),
        *("dsa", "phi-3.5-moe", "cohere 2", "falcon-h1", "lfm2", "granite 4", "bloom", "layers of different sizes"),
    ],
)
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


PROMPTS = [PROMPT, [3], [7, 9, 60, 2, 2, 41, 8], [30, 31], [1, 2, 3, 4, 5]]


def _batch(settings: dict, **engine: Any) -> list[list[Progress]]:
    """The progress of requests for ``PROMPTS``, some of them sampled; one is cancelled, two are added later."""
    running = Engine(generator_of(settings), **engine)
    sampled = {"sampling": Sampling(temperature=0.7, top_k=30, seed=5)}
    requests = [
        _request(prompt, 3 + 2 * i, logprobs=i % 3, **(sampled if i % 2 else {})) for i, prompt in enumerate(PROMPTS)
    ]
    found: list[list[Progress]] = [[] for _ in range(len(PROMPTS) + 1)]
    for request in requests[:3]:
        running.submit(request)
    cancelled = running.submit(_request([9, 9], 50))
    for step in range(100):
        for progress in running.step():
            found[progress.number].append(progress)
        if step == 2:
            running.cancel(cancelled)
            for request in requests[3:]:
                running.submit(request)
        if not running.busy:
            break
    return [row for number, row in enumerate(found) if number != cancelled]


def _scored_alone(settings: dict, prompt: list[int], progress: list[Progress]) -> None:
    """Every token's probability is that of the model without a cache."""
    model = generator_of(settings).stages[0]
    tokens = prompt + [each.token for each in progress]
    with torch.no_grad():
        scores = model(torch.tensor([tokens]))[0].log_softmax(-1)
    for at, each in enumerate(progress, len(prompt)):
        assert each.score.logprob == pytest.approx(scores[at - 1, tokens[at]].item(), abs=1e-11)
        for token, value in each.score.alternatives:
            assert value == pytest.approx(scores[at - 1, token].item(), abs=1e-11)


SHORT_STEPS = InferenceConfig(inference_dynamic_batching_block_size=2, inference_dynamic_batching_max_tokens=3)
LONG_WINDOW = WINDOW | {"window_size": (4, 0), "attn_logit_softcapping": 5.0}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("engine", [{"max_batch_size": 3}, {"config": SHORT_STEPS}], ids=["3 at a time", "short steps"])
@pytest.mark.parametrize(
    "model",
    [{}, WINDOW, LONG_WINDOW, EXPERTS, LATENT, GPT_OSS, LLAMA4, COHERE2],
    ids=["gpt2", "window", "capped", "experts", "latent", "gpt-oss", "llama 4", "cohere 2"],
)
def test_what_else_is_in_the_batch_changes_nothing(model: dict, engine: dict) -> None:
    """Requests of different lengths that join and leave: tokens and probabilities equal those of separate requests."""
    model = model | {"seq_length": 32}
    found = _batch(model, **engine)
    for i, (prompt, progress) in enumerate(zip(PROMPTS, found, strict=True)):
        assert len(progress) == 3 + 2 * i and progress[-1].finished == "length"
        assert all(len(each.score.alternatives) == i % 3 for each in progress)
        _scored_alone(model, prompt, progress)
        if i % 2 == 0:
            alone = list(generate(generator_of(model), _request(prompt, 3 + 2 * i)))
            assert [each.token for each in progress] == alone


@pytest.mark.parametrize(("world_size", "layout"), [(2, TP2), (4, TP2 | PP2)], ids=["tp2", "tp2 pp2"])
def test_batches_in_a_layout(world_size: int, layout: dict) -> None:
    settings = WINDOW | {"seq_length": 32}
    alone = _batch(settings, max_batch_size=3)
    for found in run_ranks(world_size, _batch_of_three, settings | layout):
        for mine, expected in zip(found, alone, strict=True):
            assert [(each.token, each.finished) for each in mine] == [(each.token, each.finished) for each in expected]
            assert all(
                a.score.logprob == pytest.approx(b.score.logprob, abs=1e-10)
                for a, b in zip(mine, expected, strict=True)
            )


def _batch_of_three(settings: dict) -> list[list[Progress]]:
    return _batch(settings, max_batch_size=3)


def test_prompts_are_computed_without_padding_and_tokens_together() -> None:
    """Prompts are concatenated in one row, then one token of every sequence is computed at once."""
    generator, shapes = generator_of(MODERN), []
    generator.stages[0].register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    logits = []
    generator.stages[0].register_forward_hook(lambda _, inputs, output: logits.append(tuple(output.shape[:2])))
    engine = Engine(generator)
    for prompt in PROMPTS:
        engine.submit(_request(prompt, 3))
    while engine.busy:
        engine.step()
    total, count = sum(map(len, PROMPTS)), len(PROMPTS)
    assert shapes == [(1, total), (1, count), (1, count)]
    assert logits == [(1, count)] * 3, "only those that tokens are chosen from"


def test_greedy_rows_beside_sampled_ones() -> None:
    """The first of several largest logits is chosen, in every floating-point type; sampled rows use their
    generators."""
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0], [0.0, 0.0, 60.0]])
    sampled = Sampling(temperature=1.0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        generators = [torch.Generator().manual_seed(0) for _ in range(3)]
        assert sample_tokens(logits.to(dtype), [Sampling(), Sampling(), sampled], generators) == [1, 0, 2]


@pytest.mark.parametrize("new", [0, 2])
def test_the_prompt_is_scored(new: int) -> None:
    engine = Engine(generator_of(WINDOW))
    engine.submit(_request(PROMPTS[2], new, logprobs=1, score_prompt=True))
    engine.submit(_request(PROMPT, 0, logprobs=2, score_prompt=True))
    first, second = engine.step()
    assert (first.token is None, second.token, second.finished) == (new == 0, None, "length")
    assert engine.busy == (new > 0)
    with torch.no_grad():
        scores = generator_of(WINDOW).stages[0](torch.tensor([PROMPTS[2]]))[0].log_softmax(-1)
    assert len(first.prompt_scores) == len(PROMPTS[2]) - 1 and len(second.prompt_scores) == len(PROMPT) - 1
    for at, score in enumerate(first.prompt_scores):
        assert score.logprob == pytest.approx(scores[at, PROMPTS[2][at + 1]].item(), abs=1e-11)
        assert score.alternatives[0] == (scores[at].argmax().item(), pytest.approx(scores[at].max().item(), abs=1e-11))


@pytest.mark.parametrize("layout", [TP2, TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}])
def test_a_rank_without_a_token_of_its_own(layout: dict) -> None:
    """Two tensor-parallel ranks divide one new token for the experts: one of them has none."""
    alone = _generate(EXPERTS, Sampling())
    assert run_ranks(2, _generate, EXPERTS | layout, Sampling()) == [alone] * 2


def test_end_token_ends() -> None:
    generator = generator_of(MODERN)
    tokens = list(generate(generator, _request()))
    end = tokens[2]
    assert list(generate(generator, _request(ends=frozenset({end})))) == tokens[: tokens.index(end) + 1]


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()

    def kept(**settings: float) -> list[int]:
        return candidate_logits(logits, Sampling(temperature=1.0, **settings)).isfinite().nonzero().flatten().tolist()

    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.5) == [0]
    assert kept(top_p=0.51) == [0, 1]
    assert kept(top_p=0.01) == [0]
    assert kept() == [0, 1, 2, 3]


@pytest.mark.parametrize("spread", [0.01, 3.0], ids=["flat", "peaked"])
def test_top_p_of_many_tokens_is_that_of_all_in_order(spread: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * spread
    for top_p in (0.1, 0.5, 0.95):
        ordered, index = logits.double().softmax(-1).sort(descending=True)
        expected = index[: int((ordered.cumsum(-1) < top_p).sum()) + 1]
        found = candidate_logits(logits, Sampling(temperature=1.0, top_p=top_p)).isfinite().nonzero().flatten()
        assert abs(len(found) - len(expected)) <= 1, "at the bound float32 decides"
        assert set(expected[:-1].tolist()) <= set(found.tolist())


def test_drawn_tokens_have_their_probabilities() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    generator = torch.Generator().manual_seed(2)
    counts = torch.bincount(torch.tensor([draw(probabilities, generator) for _ in range(20_000)]), minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    # Five standard deviations of a count.
    torch.testing.assert_close(counts / 20_000, probabilities, atol=5 * 0.5 / 20_000**0.5, rtol=0.0)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_wrong_sampling_names_the_setting(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Sampling(**wrong)


@pytest.mark.parametrize("wrong", [{"max_batch_size": 0}, {"max_length": -5}, {"max_length": 1}])
def test_wrong_bounds_name_the_setting(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}: give"):
        Engine(generator_of({}), **wrong)


def test_learned_positions_end_the_text() -> None:
    """Sixteen positions: four of the prompt and twelve more; a longer prompt is refused."""
    assert len(list(generate(generator_of({}), _request(new=50)))) == 12
    with pytest.raises(ConfigError, match="prompt's 16 tokens leave no room in the 16 positions"):
        list(generate(generator_of({}), _request(PROMPT * 4, 1)))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_request([]), "no token"),
        (_request([61]), "outside of the vocabulary, 0 to 60"),
        (_request(new=-1), "max_new_tokens=-1"),
        (_request(score_prompt=True), "score_prompt needs logprobs"),
    ],
)
def test_wrong_requests_are_one_sentence(request_: Request, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(generator_of({})).submit(request_)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two", ("one two", False)),
        ("one\n\n### two", ("one", True)),
        ("one END", ("one ", True)),
        ("one\n\n##", ("one", False)),  # may become a stop string
        ("one E", ("one ", False)),
        ("one EN two", ("one EN two", False)),
        ("END one\n\n###", ("", True)),
    ],
)
def test_stop_strings(text: str, expected: tuple[str, bool]) -> None:
    assert until_stop(text, ("\n\n###", "END")) == expected
    assert until_stop("one E", ()) == ("one E", False)


@pytest.mark.parametrize("kind", ["bytes", "sentence pieces"])
def test_streamed_text_is_the_whole_text(kind: str, tmp_path: Path) -> None:
    """Characters of several tokens are shown complete; spaces between words of pieces are kept."""
    if kind == "bytes":
        tokenizer: Tokenizer = ByteLevelTokenizer()
    else:
        tokenizer = SentencePieceTokenizer(write_sentence_piece(tmp_path))
    text = "the cat \u4e16\u754c and Gr\u00fc\u00dfe \U0001f642 the"
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.tokenize(text)]
    assert not any("\ufffd" in piece for piece in pieces) and len(set(pieces)) > 8
    assert "".join(pieces) + stream.finish() == stream.text == tokenizer.detokenize(tokenizer.tokenize(text))
    incomplete = TextStream(tokenizer)
    first = tokenizer.tokenize("\u20ac")[:-1]
    assert "".join(map(incomplete.add, first)).strip() == "" and incomplete.finish().endswith("\ufffd")
    stopping = TextStream(tokenizer, ["\u754c and"])
    shown = "".join(stopping.add(token) for token in tokenizer.tokenize(text) if not stopping.stopped)
    assert shown + stopping.finish() == text[: text.index("\u754c")]


def test_bytes_that_are_no_characters() -> None:
    """Random bytes are shown soon, and as the tokenizer decodes them together."""
    tokenizer, random = ByteLevelTokenizer(), Random(0)
    parts = [b"a", b"\x80", b"\xe2", b"\xe2\x82\xac", b"\xf0\x9f\x99\x82", b"\xff", b"\xf0\x9f"]
    for _ in range(300):
        ids = [byte for _ in range(40) for byte in random.choice(parts)]
        stream = TextStream(tokenizer)
        assert "".join(map(stream.add, ids)) + stream.finish() == stream.text == tokenizer.detokenize(ids)
    stream = TextStream(tokenizer)
    assert len("".join(stream.add(0x80) for _ in range(100))) > 80


@pytest.mark.parametrize("stop", ["x" * 1000, "a" * 999 + "b", "a" * 500 + "b" * 500])
def test_a_long_stop_string_costs_little(stop: str) -> None:
    """The time per token depends neither on the preceding text nor on the square of the stop string's length."""
    stream = TextStream(ByteLevelTokenizer(), [stop] * 4)
    start = time.thread_time()
    for _ in range(10_000):
        stream.add(0x61)
    assert time.thread_time() - start < 2.0, "0.1 s on a quiet machine; 100 s with a search through all of the text"
