"""LongRoPE computes what `transformers` computes for texts below and above the original length, and what the run's
longest text asks for."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_core.checkpoint import parameter_pieces
from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.data import DataConfig
from megatron_core.hub.hugging_face import HuggingFaceReader
from megatron_core.hub.hugging_face.architecture import architecture_of
from megatron_core.inference import Engine, Generator, Request
from megatron_core.models import GPTModel
from megatron_core.models.build import meta_model
from megatron_core.parallel import ParallelGroups
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.rotary import plain_frequencies, rotary_frequencies
from tests.hub.hf_models import MODELS, VOCABULARY, save_model, transformers

SCALED = {"use_rope_scaling": True, "rope_scaling_type": "longrope", "rope_scaling_factor": 32.0}
FACTORS = {"longrope_short_factor": (1.0, 1.5), "longrope_long_factor": (2.0, 40.0)}
NAMES = [name for name in MODELS if "longrope" in name]


def _their_logits(folder: Path, ids: Tensor, original: int) -> Tensor:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    if theirs.config.model_type == "phimoe" and ids.shape[1] > original:
        # Release 5.24 chooses the magnitude, but not the factors, by the length of the text.
        table = theirs.model.rotary_emb
        table.rope_init_fn = partial(table.rope_init_fn, seq_len=ids.shape[1])
    return theirs(input_ids=ids).logits


@pytest.mark.parametrize("longer", [0, 1], ids=["original length", "longer"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_theirs_up_to_the_original_length_and_above(name: str, longer: int, tmp_path: Path) -> None:
    """In float64, in which their table of cosines and sines has the precision of float32."""
    save_model(name, tmp_path)
    with HuggingFaceReader(tmp_path) as reader:
        original = reader.model.original_max_position_embeddings
        assert original is not None
        length = original + longer
        ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(3))
        wanted = _their_logits(tmp_path, ids, original)
        found = {}
        for longest in (length, original + 1 - longer):
            parallel = ModelParallelConfig(params_dtype=torch.float64)
            model = GPTModel(reader.model, VOCABULARY, longest, parallel=parallel).eval()
            reader.fill(parameter_pieces(model.named_global_parameters()))
            found[longest] = model(ids)
    scale = wanted.abs().max().item()
    assert (found[length] - wanted).abs().max().item() < 1e-6 * scale
    assert (found[original + 1 - longer] - wanted).abs().max().item() > 1e-3 * scale, "the other factors differ"


@pytest.mark.parametrize("name", NAMES)
def test_config_json_means_the_same_after_export(name: str) -> None:
    kind, settings = MODELS[name]
    theirs = getattr(transformers, f"{kind}Config")(**deepcopy(settings))
    architecture = architecture_of(theirs.to_dict())
    keys = architecture.config_json(ModelConfig(**architecture.settings(theirs.to_dict())))
    written = set(keys["rope_scaling"])  # transformers adds keys to it
    again = getattr(transformers, f"{kind}Config")(**keys)
    own = {"rope_type", "type"}
    both = ({key: v for key, v in each.rope_parameters.items() if key not in own} for each in (theirs, again))
    assert next(both) == next(both)
    assert again.rope_parameters["rope_type"] == "longrope"
    # The form of published files.
    published = {"type", "short_factor", "long_factor"}
    if kind in ("Phimoe", "MiniCPM3"):
        published.add("original_max_position_embeddings")
    if kind == "Phimoe":
        published |= {"short_mscale", "long_mscale"}
    elif "magnitude" in name:
        published |= {"factor", "attention_factor"}
    assert written == published


def test_early_names_mean_longrope() -> None:
    _, settings = MODELS["phi3, longrope"]
    theirs = transformers.Phi3Config(**deepcopy(settings)).to_dict()
    found = {
        kind: architecture_of(theirs).settings(
            theirs | {"rope_parameters": theirs["rope_parameters"] | {"rope_type": kind}}
        )
        for kind in ("longrope", "su", "yarn")
    }
    assert found["su"] == found["yarn"] == found["longrope"]


@pytest.mark.parametrize(("longest", "factors"), [(64, (1.0, 1.5)), (65, (2.0, 40.0))])
def test_frequencies_and_magnitude_are_those_of_the_formula(longest: int, factors: tuple[float, ...]) -> None:
    config = ModelConfig(**SCALED, **FACTORS, original_max_position_embeddings=64)
    found, magnitude = rotary_frequencies(config, 4, longest)
    plain = plain_frequencies(4, 10_000.0)
    assert found.tolist() == pytest.approx([p / f for p, f in zip(plain.tolist(), factors, strict=True)], rel=1e-15)
    assert magnitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(64)), rel=1e-15)
    given = replace(config, longrope_short_mscale=0.7, longrope_long_mscale=0.9)
    assert rotary_frequencies(given, 4, longest)[1] == (0.7 if longest == 64 else 0.9)
    assert rotary_frequencies(replace(config, rope_scaling_factor=1.0), 4, longest)[1] == 1.0


def _run(**model: Any) -> RunConfig:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "position_embedding_type": "rope"}
    shape = ModelConfig(**sizes, **SCALED, **FACTORS, original_max_position_embeddings=64, **model)
    return RunConfig(model=shape, data=DataConfig(seq_length=64))


def test_a_training_sequence_chooses_not_what_the_model_could_read() -> None:
    """--seq-length 64 of a model for 2048 positions: short factors."""
    assert meta_model(_run(max_position_embeddings=2048), VOCABULARY).max_sequence_length == 64


@pytest.mark.parametrize(("max_length", "longest"), [(64, 64), (65, 65), (None, 2048)])
def test_the_longest_text_of_an_engine_chooses(max_length: int | None, longest: int) -> None:
    run = _run(max_position_embeddings=2048)
    groups, device = ParallelGroups.single(), torch.device("cpu")
    generator = Generator(run, groups, {0: meta_model(run, VOCABULARY)}, 1, VOCABULARY, device)
    Engine(generator, max_batch_size=1, max_length=max_length)
    assert generator.stages[0].max_sequence_length == longest


@torch.no_grad()
def test_tokens_generated_within_the_original_length_are_theirs(tmp_path: Path) -> None:
    """With ``max_length`` 16, the original length; by default the model's 64 positions choose the long factors."""
    save_model("phi3, longrope", tmp_path)
    prompt, new = [5, 9, 2, 60, 7], 11
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None)
    with HuggingFaceReader(tmp_path) as reader:
        groups, device = ParallelGroups.single(), torch.device("cpu")
        generator = Generator.load(reader, reader.config, groups, device)
    found = {}
    for max_length in (16, None):
        engine = Engine(generator, max_batch_size=1, max_length=max_length)
        engine.submit(Request(prompt=tuple(prompt), max_new_tokens=new))
        found[max_length] = [progress.token for _ in range(new) for progress in engine.step()]
    assert found[16] == wanted[0, len(prompt) :].tolist()
    assert found[None] != found[16]
