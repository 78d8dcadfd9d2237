"""Log probabilities of generation with --layout-invariant: those of training, to the bit, whatever else is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_core.features.equal_bits import fixed_products
from megatron_core.features.equal_bits.attention import InvariantAttention
from megatron_core.inference import Engine, Generator, Request, paged_attention
from megatron_core.inference import engine as engine_module
from megatron_core.inference.sampling import log_probabilities
from megatron_core.inference.settings import InferenceConfig
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.training.setup import Run
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

LENGTH = 64
ROPE = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True,
    "group_query_attention": True, "num_query_groups": 2,
}  # fmt: skip
MODELS = {
    "gpt2": {},
    "llama": ROPE,
    "window, qk norm, untied": ROPE
    | {"window_size": (16, 0), "qk_layernorm": True, "untie_embeddings_and_output_weights": True},
    "gates, soft caps": ROPE
    | {
        "attention_output_gate": True,
        "num_query_groups": 4,
        "attn_logit_softcapping": 30.0,
        "final_logit_softcapping": 20.0,
    },
    "wide heads, one group": ROPE
    | {"hidden_size": 96, "num_attention_heads": 2, "kv_channels": 48, "num_query_groups": 1, "vocab_size": 1003},
    "experts": ROPE | {"num_experts": 4, "moe_router_topk": 2},
}
SMALL_STEPS = InferenceConfig(
    inference_dynamic_batching_block_size=4,
    inference_dynamic_batching_max_tokens=11,
    inference_dynamic_batching_buffer_size_gb=1e-2,
)
LARGE_STEPS = InferenceConfig(inference_dynamic_batching_block_size=8, inference_dynamic_batching_buffer_size_gb=1e-2)
Text = tuple[tuple[int, ...], list[float]]
"""Tokens, and the log probabilities of the last ones."""


def trained(dtype: str, **settings: object) -> Run:
    """An untrained model with weights of a size that matters."""
    return tiny_run(seq_length=LENGTH, layout_invariant=True, bf16=dtype == "bfloat16", init_method_std=0.3, **settings)


def prompts(vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of several lengths, one of them with the beginning of another."""
    random = torch.Generator().manual_seed(5)
    lengths = (1, 30, 13, 47, 8)
    found = [tuple(torch.randint(vocab_size, (n,), generator=random).tolist()) for n in lengths]
    return [*found, (*found[1][:24], 3, 4, 5)]


def generator_of(run: Run) -> Generator:
    """A generator with the weights of the run."""
    for stage in run.stages.values():
        stage.eval()
    return Generator(run.config, run.groups, run.stages, len(run.layers), run.vocab_size, run.world.device)


def generated(
    generator: Generator, texts: Sequence[tuple[int, ...]], config: InferenceConfig, batch: int
) -> list[Text]:
    """Continuations of all ``texts``; in every second one the prompt is scored, too."""
    engine = Engine(generator, max_batch_size=batch, max_length=LENGTH, config=config)
    tokens = {engine.submit(_request(number, text)): list(text) for number, text in enumerate(texts)}
    scores: dict[int, list[float]] = {number: [] for number in tokens}
    while engine.busy:
        for each in engine.step():
            assert each.error is None
            scores[each.number] += [score.logprob for score in each.prompt_scores]
            if each.token is not None and each.score is not None:
                tokens[each.number].append(each.token)
                scores[each.number].append(each.score.logprob)
                assert each.score.alternatives[0][1] == each.score.logprob  # of the most likely token
    return [(tuple(tokens[number]), scores[number]) for number in tokens]


def _request(number: int, text: tuple[int, ...]) -> Request:
    return Request(prompt=text, max_new_tokens=5 + 3 * number, logprobs=1, score_prompt=number % 2 == 0)


@torch.no_grad()
def in_training(run: Run, tokens: Sequence[int]) -> list[float]:
    """Log probabilities of all tokens after the first: the negative losses of the model in training."""
    row = torch.zeros(2, LENGTH, dtype=torch.int64)
    row[1, : len(tokens)] = torch.tensor(tokens)
    losses: Tensor = run.stages[0](row, labels=row.roll(-1, 1), sequences=SequenceDetails(sample_index=torch.arange(2)))
    return (-losses[1, : len(tokens) - 1]).tolist()


def differing(run: Run, texts: Sequence[Text]) -> int:
    """Number of log probabilities that differ from those of training."""
    pairs = [(ours, theirs) for tokens, scores in texts for ours, theirs in _pairs(scores, in_training(run, tokens))]
    assert len(pairs) > 80
    return sum(ours != theirs for ours, theirs in pairs)


def _pairs(scores: list[float], whole: list[float]) -> list[tuple[float, float]]:
    return list(zip(scores, whole[len(whole) - len(scores) :], strict=True))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_those_of_training(model: str, dtype: str) -> None:
    """Prefill in chunks and at once, decoding, and shared prefixes, alone and next to other texts."""
    run = trained(dtype, **MODELS[model])
    generator, texts = generator_of(run), prompts(run.vocab_size)
    first = generated(generator, texts, SMALL_STEPS, batch=4)
    assert differing(run, first) == 0
    assert generated(generator, texts, LARGE_STEPS, batch=1) == first


def split(settings: dict, dtype: str) -> list[Text]:
    """The texts that a split model generates."""
    run = trained(dtype, **settings)
    return generated(generator_of(run), prompts(run.vocab_size), SMALL_STEPS, batch=4)


TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize("model", ["gpt2", "llama", "wide heads, one group", "experts"])
@pytest.mark.parametrize("layout", [TP, PP], ids=["tp2", "pp2"])
def test_layouts_generate_the_same_bits(layout: dict, model: str) -> None:
    expected = split(MODELS[model], "bfloat16")
    assert run_ranks(2, split, MODELS[model] | layout, "bfloat16") == [expected, expected]


def _in_larger_chunks(self: InvariantAttention, *args: Tensor, original: Callable[..., Tensor]) -> Tensor:
    chunks = self.invariance
    with patch.object(self, "invariance", type(chunks)(**{**vars(chunks), "chunks": chunks.chunks // 2})):
        return original(self, *args)


DEFECTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "single tokens attend by another kernel": lambda: patch.object(
        InvariantAttention, "attend_cached", paged_attention.attend_cached
    ),
    "whole prompts attend by another kernel": lambda: patch.object(
        InvariantAttention, "attend_fresh", paged_attention.attend_fresh
    ),
    "chunks of another size": lambda: patch.object(
        InvariantAttention,
        "_attend_last",
        lambda self, *args, original=InvariantAttention._attend_last: _in_larger_chunks(self, *args, original=original),
    ),
    "torch's products of few rows": lambda: patch.multiple(
        fixed_products, is_native=lambda x: False, filled=lambda block, *_: block
    ),
    "log softmax in float64": lambda: patch.object(
        engine_module, "log_probabilities", lambda logits, tokens, most, losses: log_probabilities(logits, tokens, most)
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_found(defect: str) -> None:
    run = trained("float32", **ROPE)
    generator = generator_of(run)
    with DEFECTS[defect]():
        texts = generated(generator, prompts(run.vocab_size), LARGE_STEPS, batch=4)
    assert (differing(run, texts) > 0) == (defect != "none")
