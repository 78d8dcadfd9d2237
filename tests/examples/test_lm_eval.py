"""The example of lm-eval in process: its log-likelihoods and continuations are those of `transformers`.

lm-eval itself is replaced by empty modules: only its base class has a part in this.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers

from megatron_core.inference import Engine
from megatron_core.inference.generator import GenerationLayout, start_generator
from megatron_core.training.compatibility import open_model
from megatron_core.verify.ranks import run_ranks, this_world
from tests.training.trl_1_16 import inputs

PAIRS = [("red blue", " moon"), ("why", " how river"), ("stone open close ", "no")]


def _answers(folder: Path) -> tuple[list[tuple[float, bool]], list[str], list[float]]:
    stubs = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api.model", "lm_eval.tasks", "lm_eval.utils")}
    stubs["lm_eval.api.model"].TemplateLM = object
    stubs["lm_eval.tasks"].TaskManager = stubs["lm_eval.utils"].make_table = None
    sys.modules |= stubs
    from examples.lm_eval_in_process import MegatronModel

    reader, trained = open_model(str(folder), None)
    generator, tokenizer = start_generator(reader, trained, GenerationLayout(), this_world())
    model = MegatronModel(Engine(generator), tokenizer)
    pairs = [("", model.tok_encode(context), model.tok_encode(choice)) for context, choice in PAIRS]
    until = [SimpleNamespace(args=(context, {"until": ["\n"], "max_gen_toks": 5})) for context, _ in PAIRS]
    rolled = model.loglikelihood_rolling([SimpleNamespace(args=("red blue",))])
    return model._loglikelihood_tokens(pairs), model.generate_until(until), rolled


@torch.no_grad()
def test_answers_are_those_of_transformers(tmp_path: Path) -> None:
    inputs.save_inputs(tmp_path)
    model, tokenizer = inputs.load_model(tmp_path).eval(), transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected, texts = [], []
    for context, choice in PAIRS:
        before, after = tokenizer(context)["input_ids"], tokenizer(choice)["input_ids"]
        scores = model(input_ids=torch.tensor([before + after])).logits[0].log_softmax(-1)[len(before) - 1 : -1]
        greedy = scores.argmax(-1).tolist() == after
        expected.append((scores.gather(1, torch.tensor(after)[:, None]).sum().item(), greedy))
        ids = before
        for _ in range(5):
            ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        texts.append(tokenizer.decode(ids[len(before) :]))
    ids = [tokenizer.eos_token_id, *tokenizer("red blue")["input_ids"]]
    scores = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    whole = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    for found, continued, rolled in run_ranks(1, _answers, tmp_path):
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-6)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert continued == [text.split("\n")[0] for text in texts] and rolled == pytest.approx([whole], rel=1e-6)
