"""Every fault has an error message with the setting, its value and the remedy."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.config import RunConfig
from megatron_core.config.partition import layers_by_stage
from megatron_core.config.rules_parallel import tensor_parallel_sizes
from megatron_core.config.validate import check, problems
from megatron_core.errors import ConfigError
from tests.config.faults import FAULTS

SOUND = {
    "train_iters": 100,
    "mock_data": True,
    "vocab_size": 128,
    "hidden_size": 120,
    "num_attention_heads": 12,
}


def run_config(**settings: Any) -> RunConfig:
    return RunConfig.from_flat({**SOUND, **settings})


SOUND_CASES = {
    "the defaults": ({}, 1),
    "several copies": ({"global_batch_size": 32, "micro_batch_size": 4}, 8),
    "every split": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
        8,
    ),
    "sequence parallel on one rank does nothing": ({"sequence_parallel": True, "seq_length": 63}, 1),
    "hidden size need not divide by tp": (
        {"hidden_size": 99, "kv_channels": 8, "ffn_hidden_size": 64, "tensor_model_parallel_size": 4},
        4,
    ),
    "fewer groups than ranks": (
        {"group_query_attention": True, "num_query_groups": 2, "tensor_model_parallel_size": 4},
        4,
    ),
    "one group": ({"group_query_attention": True, "tensor_model_parallel_size": 4}, 4),
    "chunks": (
        {"num_layers": 8, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
        2,
    ),
    "uneven chunks": (
        {"num_layers": 7, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3},
        2,
    ),
    "uneven stages": ({"num_layers": 7, "pipeline_model_parallel_size": 3}, 3),
    "a layout": (
        {"num_layers": 4, "pipeline_model_parallel_layout": "E|tt|tt|L", "pipeline_model_parallel_size": 2},
        2,
    ),
    "a layout without a pipeline": ({"num_layers": 4, "pipeline_model_parallel_layout": "Et*4L"}, 1),
    "counts over chunks": (
        {
            "num_layers": 10,
            "pipeline_model_parallel_size": 3,
            "num_virtual_stages_per_pipeline_rank": 2,
            "decoder_first_pipeline_num_layers": 2,
        },
        3,
    ),
    "embedding and loss as layers": (
        {
            "num_layers": 6,
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 1,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        2,
    ),
    "axes of size 1 left out": ({"rank_order": "pp-tp-dp", "tensor_model_parallel_size": 2}, 4),
    "samples with a rest": ({"train_iters": None, "train_samples": 35, "global_batch_size": 8}, 1),
    "WSD": ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20, "lr_warmup_iters": 80}, 1),
    "a warm-up fraction": ({"lr_warmup_fraction": 0.1}, 1),
    "fp16 with a fixed scale": ({"fp16": True, "loss_scale": 128.0}, 1),
    "a blend": ({"mock_data": False, "data_path": ("0.3", "a", "0.7", "b"), "split": "98,2"}, 1),
    "one prefix that is a number": ({"mock_data": False, "data_path": ("7",)}, 1),
    "prefixes without weights": ({"mock_data": False, "data_path": ("a", "b", "c")}, 1),
    "a path for each split": (
        {"mock_data": False, "train_data_path": ("a",), "valid_data_path": ("b",), "vocab_size": 7},
        1,
    ),
    "full recompute": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        1,
    ),
    "checkpoints": ({"save": "out", "save_interval": 5, "load": "out", "ckpt_step": 5, "finetune": True}, 1),
}


@pytest.mark.parametrize("name", SOUND_CASES)
def test_sound_configurations_have_no_problems(name):
    changes, world_size = SOUND_CASES[name]
    assert list(problems(run_config(**changes), world_size)) == []
    check(run_config(**changes), world_size)


@pytest.mark.parametrize(
    "other", [{"cuda_graph_impl": "local"}, {"save": "out", "ckpt_format": "torch_dist"}, {"qk_clip": True}]
)
@pytest.mark.parametrize("pattern", [(0,), (1, 0, 1)])
def test_other_rules_do_not_need_a_sound_pattern_of_recurrent_layers(pattern, other):
    changes = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": pattern, "num_layers": 4}
    found = list(problems(run_config(**changes, **other), 1))
    assert sum("must be one number n >= 1" in sentence for sentence in found) == 1


@pytest.mark.parametrize(("changes", "world_size", "words"), FAULTS, ids=lambda x: str(x)[:60])
def test_each_fault_has_one_sentence_with_the_way_out(changes, world_size, words):  # C19 C34 C56
    found = list(problems(run_config(**changes), world_size))
    matching = [sentence for sentence in found if all(word in sentence for word in words)]
    assert len(matching) == 1, found
    assert len(found) == 1, found  # no second message that only follows from the first fault


def test_faults_come_all_at_once_and_numbered():
    config = run_config(num_layers=0, swiglu=True, geglu=True, bf16=True, fp16=True)
    with pytest.raises(ConfigError) as error:
        check(config, 1)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("3 settings")
    assert [line.split(".")[0].strip() for line in lines[1:]] == ["1", "2", "3"]


sizes = st.integers(-1, 12)
optional_sizes = st.none() | sizes
fractions = st.floats(-0.5, 1.5) | st.just(math.nan)
ANY = {
    "num_layers": sizes,
    "hidden_size": st.integers(-1, 200),
    "num_attention_heads": sizes,
    "kv_channels": optional_sizes,
    "ffn_hidden_size": optional_sizes,
    "group_query_attention": st.booleans(),
    "num_query_groups": optional_sizes,
    "rotary_percent": fractions,
    "position_embedding_type": st.sampled_from(["rope", "none", "learned_absolute"]),
    "max_position_embeddings": optional_sizes,
    "recompute_granularity": st.sampled_from([None, "full", "selective"]),
    "recompute_num_layers": optional_sizes,
    "tensor_model_parallel_size": st.sampled_from([1, 2, 3, 4, 0, -2]),
    "pipeline_model_parallel_size": st.sampled_from([1, 2, 3, 4, 0, -2]),
    "num_layers_per_virtual_pipeline_stage": optional_sizes,
    "num_virtual_stages_per_pipeline_rank": optional_sizes,
    "pipeline_model_parallel_layout": st.none() | st.text("EtmL|(*2)", max_size=8) | st.just("E|tt|tt|L"),
    "decoder_first_pipeline_num_layers": optional_sizes,
    "decoder_last_pipeline_num_layers": optional_sizes,
    "account_for_embedding_in_pipeline_split": st.booleans(),
    "account_for_loss_in_pipeline_split": st.booleans(),
    "sequence_parallel": st.booleans(),
    "micro_batch_size": sizes,
    "global_batch_size": st.none() | st.integers(-4, 64),
    "train_iters": optional_sizes,
    "train_samples": st.none() | st.integers(-4, 100),
    "lr_decay_style": st.sampled_from(["WSD", "linear"]),
    "lr_decay_iters": optional_sizes,
    "lr_warmup_iters": sizes,
    "lr_warmup_fraction": st.none() | fractions,
    "lr_wsd_decay_iters": optional_sizes,
    "seq_length": sizes,
    "data_path": st.lists(st.sampled_from(["a", "1", "nan", "-1"])).map(tuple),
    "split": st.none() | st.text(",0129a-", max_size=5),
}


@settings(max_examples=300, deadline=None)
@given(changes=st.fixed_dictionaries({}, optional=ANY), world_size=st.integers(-1, 16))
def test_no_configuration_makes_the_rules_themselves_fail(changes, world_size):
    for sentence in problems(run_config(**changes), world_size):
        assert "=" in sentence and ";" in sentence


LIKELY_SOUND = {
    "num_layers": st.integers(1, 12),
    "num_attention_heads": st.sampled_from([2, 4, 6, 12]),
    "group_query_attention": st.booleans(),
    "tensor_model_parallel_size": st.sampled_from([1, 2, 3, 4]),
    "pipeline_model_parallel_size": st.sampled_from([1, 2, 3]),
    "num_virtual_stages_per_pipeline_rank": st.none() | st.integers(1, 3),
    "num_layers_per_virtual_pipeline_stage": st.none() | st.integers(1, 3),
    "decoder_first_pipeline_num_layers": st.none() | st.integers(1, 4),
    "decoder_last_pipeline_num_layers": st.none() | st.integers(1, 4),
    "account_for_embedding_in_pipeline_split": st.booleans(),
    "account_for_loss_in_pipeline_split": st.booleans(),
    "sequence_parallel": st.booleans(),
    "seq_length": st.sampled_from([12, 30, 64]),
    "micro_batch_size": st.integers(1, 3),
    "global_batch_size": st.none() | st.sampled_from([12, 24, 36]),
    "lr_warmup_iters": st.integers(0, 120),
}


@settings(max_examples=300, deadline=None)
@given(changes=st.fixed_dictionaries({}, optional=LIKELY_SOUND), world_size=st.integers(1, 16))
def test_configurations_without_problems_have_consistent_arithmetic(changes, world_size):
    config = run_config(**changes)
    if list(problems(config, world_size)):
        return
    model, parallel, training = config.model, config.parallel, config.training
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    copies = parallel.data_parallel_size(world_size)
    assert tp * pp * copies == world_size
    at_once = training.micro_batch_size * copies
    assert training.final_batch_size(copies) >= at_once and training.final_batch_size(copies) % at_once == 0
    assert training.num_iterations(copies, config.data.seq_length) >= 1
    assert model.num_attention_heads % tp == 0 and model.ffn_size % tp == 0
    assert model.num_attention_heads % model.query_groups == 0
    assert model.query_groups % tp == 0 or tp % model.query_groups == 0
    assert not parallel.sequence_parallel or config.data.seq_length % tp == 0
    chunks = parallel.num_chunks(model.num_layers)
    assert model.num_layers + parallel.accounted_layers >= pp * chunks >= 1
    if parallel.num_layers_per_virtual_pipeline_stage:
        counted = model.num_layers + parallel.accounted_layers
        assert parallel.num_layers_per_virtual_pipeline_stage * chunks * pp == counted
    assert [layer for stage in layers_by_stage(config, 128, pp * chunks) for layer in stage] == [
        *range(model.num_layers)
    ]
    assert config.optimizer.lr_warmup_iters < training.num_iterations(copies, config.data.seq_length)


def test_listed_sizes_are_those_that_no_rule_refuses() -> None:
    """Each size by itself, for models of many shapes."""
    random = Random(0)
    for _ in range(60):
        groups, world, pp = random.choice([1, 2, 3, 4]), random.choice([1, 4, 6, 8, 12, 24]), random.choice([1, 2])
        changes = {
            "num_attention_heads": groups * random.choice([1, 2, 3, 4]),
            "kv_channels": 8,
            "group_query_attention": True,
            "num_query_groups": groups,
            "ffn_hidden_size": random.choice([48, 50, 64, 96]),
            "seq_length": random.choice([48, 62, 64]),
            "sequence_parallel": random.choice([True, False]),
            "pipeline_model_parallel_size": pp,
        }
        sound = {
            tp
            for tp in range(1, world // pp + 1)
            if not list(problems(run_config(**changes, tensor_model_parallel_size=tp), world))
        }
        listed = tensor_parallel_sizes(run_config(**changes), world)
        assert set(listed) == sound if sound else world % pp, (changes, world)
