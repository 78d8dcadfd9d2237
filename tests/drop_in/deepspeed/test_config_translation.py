"""Tests of DeepSpeed's JSON as settings of ``megatron_core.initialize``."""

import json

import pytest

from deepspeed.key_table import key_names
from deepspeed.translation import read_json, translate
from megatron_core.any_model.module import check_engine_settings, read_engine_settings
from megatron_core.errors import ConfigError


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_the_settings_of_every_stage_are_valid_for_the_engine(stage: int, ranks: int) -> None:
    zero = {"stage": stage, "overlap_comm": True, **({"offload_optimizer": {"device": "cpu"}} if stage else {})}
    config = {"train_batch_size": 8, "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    settings = check_engine_settings(read_engine_settings(translate(config, ranks).settings), ranks)
    assert settings.parallel.dp_zero_stage == stage
    assert settings.optimizer.lr == 0.1
    assert settings.optimizer.clip_grad == 1.0


@pytest.mark.parametrize(
    ("given", "expected"),
    (
        ({"train_batch_size": 12}, (12, 6, 1)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, (12, 2, 3)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, (12, 2, 3)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (12, 2, 3)),
        ({"train_micro_batch_size_per_gpu": 2}, (4, 2, 1)),
    ),
)
def test_absent_batch_sizes_follow_from_the_others(given: dict[str, int], expected: tuple[int, int, int]) -> None:
    found = translate(given, 2)
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == expected
    assert found.settings["global_batch_size"] == expected[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    (
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, (8, 2, 2)),
        ({"train_batch_size": 16}, (8, 4, 1)),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, (8, 2, 2)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, (8, 2, 2)),
    ),
)
def test_a_batch_counts_the_ranks_of_autotp_size_as_deepspeed_does(
    given: dict[str, int], expected: tuple[int, int, int]
) -> None:
    """``DeepSpeedConfig.world_size`` of 0.19.8 is that of torch.distributed without an mpu."""
    found = translate({**given, "tensor_parallel": {"autotp_size": 2}}, 4)
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == expected
    assert found.settings["global_batch_size"] == expected[0]
    if "gradient_accumulation_steps" not in given:
        with_mpu = translate({**given, "tensor_parallel": {"autotp_size": 2}}, 4, has_mpu=True)
        assert with_mpu.settings["global_batch_size"] == 16


def test_all_problems_are_in_one_error() -> None:
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "zero_optimisation": {},
        "zero_optimization": {"stage": 4, "offload_optimizer": {"device": "nvme"}},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "gradient_clipping": "auto",
        "comet": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"beta": 1}},
    }
    with pytest.raises(ConfigError) as caught:
        translate(config, 2)
    for part in (
        "zero_optimisation is not a key of DeepSpeed; did you mean zero_optimization?",
        "train_batch_size=8, gradient_accumulation_steps=3 on 2 ranks contradict",
        "zero_optimization.stage=4 must be 0, 1, 2 or 3",
        "needs nvme_path",
        "fp16.enabled and bf16.enabled contradict",
        "gradient_clipping='auto' has no value",
        "comet.enabled=True is not supported",
        "optimizer.params.beta=1 is not a parameter of AdamW",
    ):
        assert part in str(caught.value)


def test_auto_in_zero_optimization_is_the_default() -> None:  # as OpenRLHF's train_config has it
    names = ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "overlap_comm")
    section = {"stage": 3, "offload_param": {"device": "auto"}}
    config = {"train_batch_size": 8, "zero_optimization": section | dict.fromkeys(names, "auto")}
    found, default = translate(config, 2), translate(config | {"zero_optimization": {"stage": 3}}, 2)
    assert found.settings == default.settings
    assert all(f"zero_optimization.{name}" in found.notes[0] for name in (*names, "offload_param.device"))
    with pytest.raises(ConfigError, match=r"bf16.enabled='auto' has no value"):
        translate({"train_batch_size": 8, "bf16": {"enabled": "auto"}}, 2)


def test_names_with_dots_that_trl_writes_are_left_out() -> None:  # trl 1.16, models/utils.py, prepare_deepspeed
    names = ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    found = translate(config | {f"zero_optimization.{name}": 57.6 for name in names}, 2)
    assert found.settings == translate(config, 2).settings
    assert all(name in found.notes[0] for name in names) and "a name with a dot" in found.notes[0]


def test_keys_of_llama_factory_that_deepspeed_does_not_read_are_named() -> None:  # 0.9.5, ds_z2_autotp, ds_z3_fp8
    monitors = {"monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}}}
    found = translate(
        {"train_batch_size": 8, "_comment": "models: ...", "comms_config": {"verbose": False}} | monitors, 1
    )
    shown = " ".join(found.notes)
    assert all(name in shown for name in ("_comment", "comms_config.verbose", "monitor_config.csv_monitor.enabled"))


def test_disabled_sections_are_accepted() -> None:
    config = {"train_batch_size": 1, "flops_profiler": {"enabled": False, "profile_step": 1}, "wandb": None}
    assert translate(config, 1).notes == []


def test_weights_are_offloaded_at_stage_3_only() -> None:
    """A plugin of accelerate may set both; DeepSpeed ignores the section at the other stages."""
    zero = {"stage": 2, "offload_param": {"device": "cpu"}}
    found = translate({"train_batch_size": 1, "zero_optimization": zero}, 1)
    assert "zero3_param_cpu_offload" not in found.settings
    note = "no effect: zero_optimization.offload_param (weights are in shards at zero_optimization.stage 3 only)"
    assert note in found.notes


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ('{"a": {"b": 1, "b": 2}}', "'b' occurs twice"),
    ),
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        translate(path, 1)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^DeepSpeed config='absent.json': no such file"):
        translate("absent.json", 1)


def test_a_file_is_read(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 4}))
    assert read_json(path) == {"train_batch_size": 4}


@pytest.mark.parametrize(
    ("config", "path", "fix"),
    [
        ({"zero_optimization.stage": 3}, "'zero_optimization.stage'", '{"zero_optimization": {"stage": ...}}'),
        ({"bf16.enabled": True}, "'bf16.enabled'", '{"bf16": {"enabled": ...}}'),
        ({"optimizer.params.lr": 0.1}, "'optimizer.params.lr'", '{"optimizer": {"params": {"lr": ...}}}'),
        ({"no.such": 1}, "'no.such'", '{"no": {"such": ...}}'),
        (
            {"zero_optimization": {"offload_param.device": "cpu"}},
            "'zero_optimization.offload_param.device'",
            '{"offload_param": {"device": ...}}',
        ),
    ],
)
def test_names_with_dots_are_not_sections(config: dict[str, object], path: str, fix: str) -> None:
    for ranks in (1, 2):
        with pytest.raises(ConfigError) as caught:
            translate({"train_batch_size": 8, **config}, ranks)
        text = f"{path} has a dot in its name, which DeepSpeed does not read as a section; write {fix}"
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"steps_per_print": "x"}, "steps_per_print='x' must be an integer >= 0"),
        ({"steps_per_print": -1}, "steps_per_print=-1 must be an integer >= 0"),
        ({"dataloader_drop_last": "no"}, "dataloader_drop_last='no' must be true or false"),
        ({"managed_gradient_accumulation": 0}, "managed_gradient_accumulation=0 must be true or false"),
        ({"fp16": {"auto_cast": "false"}}, "fp16.auto_cast='false' must be true or false"),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "false"}},
            "stage3_gather_16bit_weights_on_model_save='false' must be true or false",
        ),
        ({"gradient_allreduce_op": "max"}, "Invalid gradient_allreduce_op='max': it must be 'mean' or 'sum'"),
        (
            {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
            "gradient_allreduce_op='sum' is not supported with ZeRO stage 3; use 'mean'",
        ),
        ({"zero_optimization": {"mics_shard_size": 2}}, "use zero_optimization.zero_hpz_partition_size"),
    ],
)
def test_values_that_the_engine_reads_have_their_type(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate({"train_batch_size": 8, **config}, 1)
    assert message in str(caught.value)


def test_accelerates_infinite_interval_is_legal() -> None:
    config = {"train_batch_size": 8, "steps_per_print": float("inf"), "managed_gradient_accumulation": None}
    assert translate(config, 1) == translate({"train_batch_size": 8}, 1)


def test_any_value_is_translated_or_one_error() -> None:
    """No key raises another error, whatever its value."""
    for path in key_names():
        for value in (
            "x",
            -1,
            2.5,
            True,
            [],
            {},
            [1, "a"],
            {"a": 1},
            None,
            float("nan"),
            float("inf"),
            "auto",
            10**400,
        ):
            config: dict[str, object] = {"train_batch_size": 8}
            *sections, name = path.split(".")
            section = config
            for each in sections:
                section = section.setdefault(each, {})  # type: ignore[assignment]
            section[name] = value
            try:
                translate(config, 2)
            except ConfigError as error:
                assert str(error).startswith("DeepSpeed config: ")
