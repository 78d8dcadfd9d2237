"""DeepSpeed's checkpoints give the weights and states that its own programs read, and run no code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.errors import CheckpointError
from megatron_core.hub.deepspeed import is_deepspeed_folder, read_deepspeed_checkpoint
from megatron_core.hub.deepspeed.checkpoint import Joiner, compiled
from megatron_core.hub.deepspeed.plain_states import PlainStates
from megatron_core.hub.deepspeed.shards import Parts, Stored, read_partitions

CHECKPOINTS = Path(__file__).parent / "checkpoints"
NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())
ZERO = [name for name in NAMES if name.startswith("stage") and not name.startswith("stage0")]
MOMENTS = ("exp_avg", "exp_avg_sq")
SHAPES = {
    **{"first.weight": (7, 3), "first.bias": (7,), "frozen.weight": (7, 7), "frozen.bias": (7,)},
    **{"second.weight": (7, 7), "second.bias": (7,), "third.weight": (7, 7), "last.weight": (1, 7), "last.bias": (1,)},
}


def expected_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHECKPOINTS / name.removesuffix("_universal") / "expected.json").read_text())
    return found


@pytest.mark.parametrize("name", ZERO)
def test_weights_and_moments_are_those_of_deepspeeds_own_programs(name: str) -> None:
    found = read_deepspeed_checkpoint(CHECKPOINTS / name)
    assert found.shapes == SHAPES
    weights, compared = found.weights(), 0
    for parameter, values in expected_of(name)["state"].items():
        for kind, numbers in values.items():
            if parameter == "shift":
                own = found.buffers["shift"]
            elif parameter == "third.weight":  # DeepSpeed reads the rounded copy, or nothing
                assert weights["third.weight"] is weights["second.weight"]
                continue
            else:
                own = weights[parameter] if kind == "fp32" else found.state(parameter, kind)
            assert own.flatten().tolist() == numbers, (parameter, kind)
            compared += kind != "fp32"
    assert compared == (0 if name == "stage2_fp32" else 12)
    assert set(found.states) == set(MOMENTS) and all(len(each) == 6 for each in found.states.values())


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("stage")])
def test_counters_schedule_and_client_state(name: str) -> None:
    found = read_deepspeed_checkpoint(CHECKPOINTS / name, "step3")
    if name.startswith("stage0"):
        trained = [n for n in SHAPES if not n.startswith(("frozen", "third"))]
        matrices, vectors = ([n for n in trained if n.endswith(end)] for end in ("weight", "bias"))
        found.name_states([[trained], [vectors, matrices], [matrices, vectors]])
        assert found.state("third.weight", "exp_avg").shape == (7, 7)
    assert found.counters == {"global_steps": 3, "global_samples": 12, "skipped_steps": 0, "micro_steps": 0}
    # Without ZeRO and with 16 bits, DeepSpeed takes a step with gradients of zero at the start.
    assert (found.optimizer_steps, found.release) == (3 + (name == "stage0_bf16"), "0.19.8")
    assert found.client_state == {"epoch": 7, "names": ["a", "b"]}
    assert found.lr_scheduler == {"last_batch_iteration": 2}
    assert [group["weight_decay"] for group in found.param_groups] == [0.1, 0.0]
    scale = {"scale": 256.0, "growth_tracker": 2, "hysteresis_tracker": 2}
    assert found.loss_scale == (scale if "fp16" in name else {})


def test_without_zero_the_main_weights_choose_the_order() -> None:
    found = read_deepspeed_checkpoint(CHECKPOINTS / "stage0_bf16")
    trained = [n for n in SHAPES if not n.startswith(("frozen", "third"))]
    matrices, vectors = ([n for n in trained if n.endswith(end)] for end in ("weight", "bias"))
    rounded = found.weight("second.weight")
    found.name_states([[matrices, [vectors[1], vectors[0], vectors[2]]], [matrices, vectors]])  # equal shapes
    main = found.weight("second.weight")
    assert not torch.equal(main, rounded) and torch.equal(main.bfloat16().float(), rounded)
    assert torch.equal(found.weight("third.weight"), main)
    with pytest.raises(CheckpointError, match="without ZeRO, DeepSpeed stores the optimizer's state by numbers"):
        _ = read_deepspeed_checkpoint(CHECKPOINTS / "stage0_fp32").states


def test_pipeline_has_names_of_layers_and_of_tied_modules() -> None:
    found = read_deepspeed_checkpoint(CHECKPOINTS / "pipeline")
    files = {n: CHECKPOINTS / "pipeline" / "step3" / f"layer_{n:02d}-model_states.pt" for n in (0, 1, 3, 4)}
    for layer, path in files.items():
        for name, tensor in torch.load(path).items():
            assert torch.equal(found.weight(f"{layer}.{name}"), tensor), (layer, name)
            assert found.state(f"{layer}.{name}", "exp_avg").shape == tensor.shape
    assert found.shared == {
        "0.weight": "tied_modules.ends.weight",
        "0.bias": "tied_modules.ends.bias",
        "4.weight": "tied_modules.ends.weight",
    }
    assert not torch.equal(found.state("0.bias", "exp_avg"), found.state("4.bias", "exp_avg"))  # only weights are tied


def test_tensor_parallel_parts_are_joined_by_the_stored_rules() -> None:
    parts = [{n: torch.arange(8.0).view(4, 2) + 10 * rank for n in "abcde"} for rank in (0, 1)]
    info = {
        "universal_checkpoint_version": 0.4,
        "tp_replicated_parameter_patterns": ["^a$"],
        "parameter_to_average_patterns": ["b"],
        "parameter_with_row_parallelism_patterns": [r".*c"],
        "parameter_with_2_sub_params_cat_dim_0": ["d"],
    }
    ranks = [Parts(main={n: Stored.of(t) for n, t in each.items()}) for each in parts]
    found = {name: value.read() for name, value in Joiner(info, 2).parts(ranks).main.items()}
    first, second = parts[0]["a"], parts[1]["a"]
    wanted = {
        "a": first,
        "b": (first + second) / 2,
        "c": torch.cat([first, second], 1),
        "e": torch.cat([first, second]),
    }
    wanted["d"] = torch.cat([first[:2], second[:2], first[2:], second[2:]])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(CheckpointError, match="2 tensor-parallel ranks, but no universal_checkpoint_info"):
        Joiner(None, 2)
    for pattern in ("(a+)+$", "a{9}", ".*" * 9, "[", 7, "a" * 400):
        with pytest.raises(CheckpointError, match="pattern"):
            compiled(pattern)


def test_flat_tensors_of_a_fused_optimizer_without_zero() -> None:
    module = {"a": torch.randn(2, 3).bfloat16(), "b": torch.randn(5).bfloat16(), "c": torch.randn(4).bfloat16()}
    flat = [torch.cat([module[n].float().flatten() for n in names]) for names in ("ab", "c")]
    state = {n: {"exp_avg": each * 2, "exp_avg_sq": each * 3} for n, each in enumerate(flat)}
    groups = [{"params": [n], "lr": 0.1, "step": 6} for n in (0, 1)]
    content = {"fp32_groups_flat": flat, "optimizer_state_dict": {"state": state, "param_groups": groups}}
    found = PlainStates(content, module).named([[["a", "b", "c"]], [["b", "a"], ["c"]], [["a", "b"], ["c"]]])
    assert found.steps == {6} and found.groups[0] == {"lr": 0.1}
    for name, tensor in module.items():
        assert torch.equal(found.main[name].read(), tensor.float())
        assert torch.equal(found.states["exp_avg_sq"][name].read(), tensor.float() * 3)


def test_elastic_state_and_paddings_between_parameters() -> None:
    whole = torch.arange(12.0)  # a has 5 elements and a gap of 1, b has 4 and padding at the end
    ranks = [
        {
            "single_partition_of_fp32_groups": [part],
            "base_optimizer_state": [{"exp_avg": part * 2}],
            "base_optimizer_state_step": 9,
            "param_alignment_paddings": [[1, 0]],
            "partition_count": [2],
        }
        for part in (whole[:6], whole[6:10])
    ]
    found = read_partitions(ranks, [{"a": (5,), "b": (2, 2)}])
    assert found.main["a"].read().tolist() == [0, 1, 2, 3, 4] and found.steps == {9}
    assert found.states["exp_avg"]["b"].read().tolist() == [[12, 14], [16, 18]]


# Hostile files.


class Hostile:
    """An object whose unpickling creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def plant(path: Path, content: Any) -> None:
    """Replace the pickle of a file of torch.save."""
    source = path.with_suffix(".before")
    path.rename(source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for record in old.infolist():
            data = old.read(record)
            new.writestr(record.filename, pickle.dumps(content, 2) if record.filename.endswith("data.pkl") else data)
    source.unlink()


FILES = [
    ("stage0_fp32", "step3/mp_rank_00_model_states.pt"),
    ("stage1_fp32", "step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("stage2_bf16", "step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("stage3_fp32", "step3/zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ("pipeline", "step3/layer_03-model_states.pt"),
    ("stage1_fp32_universal", "step3/zero/first.weight/fp32.pt"),
    ("stage1_fp32_universal", "step3/zero/first.weight/step.pt"),
    ("stage1_fp32_universal", "step3/zero/optimizer_state.pt"),
]


@pytest.mark.parametrize(("name", "file"), FILES)
def test_no_pickled_code_is_run(tmp_path: Path, name: str, file: str) -> None:
    folder = tmp_path / name
    shutil.copytree(CHECKPOINTS / name, folder)
    marker = tmp_path / "executed"
    plant(folder / file, {"module": {}, "param": Hostile(marker)})
    torch.load(folder / file, weights_only=False)  # the planted code works
    assert marker.is_dir()
    marker.rmdir()
    with pytest.raises(CheckpointError, match=r"names the Python object posix.mkdir, which is not allowed"):
        read_deepspeed_checkpoint(folder)
    assert not marker.exists()


# Damaged and mixed files.


def damaged(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    shutil.copytree(CHECKPOINTS / name, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("stage1_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "run with 2 ranks, but there are files of 1"),
        ("stage1_fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "has no optimizer file of data-parallel rank 0"),
        ("stage1_fp32", "mp_rank_00_model_states.pt", "has no mp_rank_00_model_states.pt"),
        ("stage3_fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt", "1 .* and 2 .* of ZeRO 3: a file is missing"),
        ("stage3_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "2 .* and 1 .* of ZeRO 3: a file is missing"),
        ("pipeline", "mp_rank_01_model_states.pt", "of 1 model-parallel ranks and .* of 2"),
        ("stage1_fp32_universal", "zero/last.bias/fp32.pt", "has no last.bias/fp32.pt"),
        ("stage1_fp32_universal", "zero/optimizer_state.pt", "optimizer_state.pt cannot be read"),
    ],
)
def test_missing_file(tmp_path: Path, name: str, file: str, text: str) -> None:
    folder = damaged(tmp_path, name)
    (folder / "step3" / file).unlink()
    with pytest.raises(CheckpointError, match=text):
        read_deepspeed_checkpoint(folder)


def test_all_optimizer_files_are_missing(tmp_path: Path) -> None:
    folder = damaged(tmp_path, "stage1_fp32")
    for path in folder.rglob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no \*_optim_states.pt, which have the weights of ZeRO"):
        read_deepspeed_checkpoint(folder)


def rewrite(path: Path, **changes: Any) -> None:
    """Change entries of a model file, by ``None`` for a removed one."""
    content = torch.load(path)
    content.update(changes)
    torch.save({name: value for name, value in content.items() if value is not ...}, path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"global_steps": 4}, "global_steps=3 and .* global_steps=4: files of two saves are mixed"),
        ({"global_steps": "many"}, "global_steps is 'many'; it must be a number"),
        ({"module": [1]}, "module is a list; it must be a dict"),
        ({"param_shapes": [{"first.weight": torch.Size([70, 3])}]}, "files of two runs are mixed"),
        ({"param_shapes": [{"first.weight": [-7, 3]}]}, r"shape of first.weight is \[-7, 3\]"),
        ({"universal_checkpoint_info": {"universal_checkpoint_version": 0.9}}, "version is 0.9; versions up to 0.4"),
        ({"num_experts": [8]}, "mixture of experts are not supported"),
    ],
)
def test_mixed_newer_and_invalid_entries(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    folder = damaged(tmp_path, "stage3_fp32")
    rewrite(folder / "step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt", **changes)
    with pytest.raises(CheckpointError, match=text):
        read_deepspeed_checkpoint(folder)


def test_files_of_another_structure(tmp_path: Path) -> None:
    folder = damaged(tmp_path, "stage1_fp32")
    path = folder / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"new_format": 1}}, path)
    with pytest.raises(CheckpointError, match="single_partition_of_fp32_groups"):
        read_deepspeed_checkpoint(folder)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="contains a list; it must contain a dict"):
        read_deepspeed_checkpoint(folder)


def test_flipped_bytes_and_cut_files_are_found_before_reading(tmp_path: Path) -> None:
    folder = damaged(tmp_path, "stage2_bf16")
    path = folder / "step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    whole = path.read_bytes()
    values = read_deepspeed_checkpoint(folder).weight("second.weight").numpy().tobytes()
    at = whole.index(values[:40])
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CheckpointError, match=r"rank_0_mp_rank_00_optim_states.pt is damaged: Bad CRC-32"):
        read_deepspeed_checkpoint(folder)
    assert read_deepspeed_checkpoint(folder, verify=False).weight("second.weight").numel() == 49
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        read_deepspeed_checkpoint(folder)


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert not is_deepspeed_folder(tmp_path) and is_deepspeed_folder(CHECKPOINTS / "stage1_fp32_universal")
    with pytest.raises(CheckpointError, match="not a checkpoint of DeepSpeed"):
        read_deepspeed_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="must be the name of a folder next to it"):
        read_deepspeed_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match=r"gone has no \*_states.pt"):
        read_deepspeed_checkpoint(tmp_path)


def test_view_of_another_parameter_is_not_its_second_name(tmp_path: Path) -> None:
    """A transposed parameter and an expanded row share memory and shape with a parameter of other values."""
    shutil.copytree(CHECKPOINTS / "stage0_fp32", tmp_path / "checkpoint")
    path = next((tmp_path / "checkpoint").glob("*/mp_rank_00_model_states.pt"))
    content = torch.load(path, weights_only=False)
    square = content["module"]["frozen.weight"]
    content["module"] |= {"turned": square.t(), "row": square[0].expand(7, 7)}
    torch.save(content, path)
    weights = read_deepspeed_checkpoint(tmp_path / "checkpoint").weights()
    assert torch.equal(weights["turned"], square.t())
    assert torch.equal(weights["row"], square[0].expand(7, 7))
    assert weights["third.weight"] is weights["second.weight"]
