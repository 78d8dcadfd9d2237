"""A model of Hugging Face continues a text, token by token from its cache, as `transformers` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_core.hub.hugging_face import HuggingFaceReader
from megatron_core.inference.engine import generate
from megatron_core.inference.generator import Generator
from megatron_core.inference.requests import Request
from megatron_core.parallel.groups import ParallelGroups
from tests.hub.hf_models import MODELS, save_model, transformers

PROMPT = [5, 9, 33, 12, 7, 20, 41]
TOKENS = 24
OF_ANOTHER_LENGTH = "phimoe, longrope"
"""transformers chooses the factors of LongRoPE by the length of the text, ours by the longest text."""


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", [name for name in MODELS if name != OF_ANOTHER_LENGTH])
def test_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Greedily, beyond the windows of all layers that have one."""
    save_model(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()
    assert len(expected) == TOKENS
    with HuggingFaceReader(tmp_path) as reader:
        generator = Generator.load(reader, reader.config, ParallelGroups.single(), torch.device("cpu"))
        assert list(generate(generator, Request(prompt=tuple(PROMPT), max_new_tokens=TOKENS))) == expected
