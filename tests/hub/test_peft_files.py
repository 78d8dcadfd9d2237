"""Adapters of other programs: what is read computes what `peft` computes, everything else is refused with its key."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.adapter_export import export_adapter
from megatron_core.hub.conversion import export_hugging_face
from megatron_core.hub.hugging_face.peft import OFF, ONLY, OTHER_WEIGHTS, TYPES, WITHOUT_EFFECT, adapter_settings
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.hub.hf_models import save_model
from tests.hub.test_peft import _adapter, _config, _loaded, _logits, _run, _stored

peft = pytest.importorskip("peft", reason="peft is not installed (make install-test)")
INITIAL = {
    "true": {},
    "false": {"init_lora_weights": False},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "eva": {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
    "rslora": {"use_rslora": True},
    "regular expression": {"target_modules": r".*\.(q|v)_proj"},
    "a layer by its path": {"target_modules": ["layers.1.self_attn.q_proj", "down_proj"]},
    "layers of a regular expression": {"target_modules": r"model\.layers\.[01]\.(self_attn|mlp)\.(q|o|up)_proj"},
    "layers_to_transform": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "one layer": {"target_modules": ["gate_proj"], "layers_to_transform": 1},
    "a layer that is excluded": {
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": r".*layers\.0\.self_attn\.q.*",
    },
    "excluded modules": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["o_proj"]},
}


def edited(folder: Path, **changes: Any) -> Path:
    """Change keys of adapter_config.json; return the adapter's folder."""
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder / "adapter"


@pytest.mark.every_case
@pytest.mark.parametrize("kind", INITIAL)
def test_merged_weights_compute_what_peft_computes(kind: str, tmp_path: Path) -> None:
    """The file is read, saved by a run, merged and exported; `peft` loads the same file on the same model."""
    settings = {"target_modules": ["q_proj", "v_proj"], "r": 4} | INITIAL[kind]
    later = {key: settings.pop(key) for key in ("init_lora_weights", "eva_config") if settings.get(key) == "eva"}
    _adapter("llama", settings, tmp_path)
    edited(tmp_path, **later)
    theirs = peft.PeftModel.from_pretrained(
        _loaded(tmp_path / "base"), tmp_path / "adapter", autocast_adapter_dtype=False
    )
    run_ranks(1, _stored, _config(tmp_path, save=str(tmp_path / "run")))
    export_hugging_face(tmp_path / "run", tmp_path / "merged", verify=False)
    expected = _logits(theirs)
    assert not torch.allclose(expected, _logits(_loaded(tmp_path / "base")), rtol=1e-3)
    torch.testing.assert_close(_logits(_loaded(tmp_path / "merged")), expected, rtol=0.0, atol=1e-5)


def test_merged_weights_have_the_dtype_of_the_base(tmp_path: Path) -> None:
    """Export compares logits of the merged weights after rounding them to bfloat16, as they are written."""
    _adapter("llama", {"target_modules": ["q_proj", "v_proj"], "r": 4}, tmp_path)
    weights = tmp_path / "base/model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    run_ranks(1, _stored, _config(tmp_path, save=str(tmp_path / "run")))
    assert export_hugging_face(tmp_path / "run", tmp_path / "merged") < 2e-6
    assert {value.dtype for value in load_file(tmp_path / "merged/model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga"])
def test_adapters_of_other_frozen_weights_are_refused(initial: str, tmp_path: Path) -> None:
    _adapter("llama", {"target_modules": ["q_proj"]}, tmp_path)
    with pytest.raises(CheckpointError, match=r"init_lora_weights=.*changed the frozen weights.*merge_and_unload"):
        adapter_settings(edited(tmp_path, init_lora_weights=initial))
    assert initial.lower().startswith(OTHER_WEIGHTS)


def test_pissa_of_peft_replaces_the_frozen_weights(tmp_path: Path) -> None:
    """The reason of the refusal: `peft` changes the frozen weights, so the same A and B compute something else."""
    save_to = {"target_modules": ["q_proj", "v_proj"], "r": 4}
    _adapter("llama", save_to, tmp_path)
    base = _loaded(tmp_path / "base").float()
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights="pissa", task_type="CAUSAL_LM", **save_to))
    frozen = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    stored = load_file(tmp_path / "base" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.allclose(frozen, stored.float(), rtol=1e-2)


def test_every_key_of_peft_is_known() -> None:
    keys = peft.LoraConfig().to_dict().keys()
    assert keys <= {*TYPES, *ONLY, *OFF, *WITHOUT_EFFECT}
    defaults = peft.LoraConfig(r=1).to_dict()
    assert {key for key in OFF if defaults.get(key) not in (None, False, {}, [])} == set()


WRONG: dict[str, list[Any]] = {
    "r": ["8", 4.9, 8.0, True, [8], {"q_proj": 8}, 0, -1, 10**30, float("nan"), float("inf")],
    "lora_alpha": ["16", True, [16], {}, 0, -1.0, 10**400, float("nan"), float("inf")],
    "lora_dropout": ["0.1", True, [0.1], 1.0, -0.1, float("nan")],
    "use_rslora": ["false", "true", 0, 1, 1.0, [True], {}],
    "use_dora": ["false", 1, []],
    "fan_in_fan_out": ["false", 0],
    "peft_type": [3, ["LORA"], "LOHA", "IA3"],
    "bias": [False, 0, "all", "lora_only", ["none"]],
    "target_modules": [7, {"q_proj": 1}, [["q_proj"]], ["q_proj", 3], True],
    "init_lora_weights": [1, 0.5, ["pissa"], {}, "mica", "nonsense"],
    "rank_pattern": ["q_proj", [4], 4, {"q_proj": 4}],
    "alpha_pattern": [{"q_proj": 4}, 7],
    "loftq_config": [{"loftq_bits": 4}, "4", [4]],
    "modules_to_save": [["lm_head"], "lm_head", 1],
    "layers_to_transform": ["0", 1.5, ["0"], True, {"layer": 0}, [[0]]],
    "trainable_token_indices": [[1], {"embed_tokens": [1]}],
    "use_qalora": [True, "false", 1],
    "kasa_config": [{"beta": 1}],
    "a_key_of_a_later_release": [1, True, "x", [0], {"a": 0}],
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    _adapter("llama", {"target_modules": ["q_proj"]}, folder)
    return folder


@pytest.mark.parametrize("key", WRONG)
def test_wrong_values_are_one_sentence_with_the_key(key: str, adapter: Path) -> None:
    path = adapter / "adapter" / "adapter_config.json"
    right = path.read_text()
    try:
        for value in WRONG[key]:
            path.write_text(json.dumps(json.loads(right) | {key: value}))
            with pytest.raises(CheckpointError, match=rf"adapter_config\.json says {key}="):
                adapter_settings(adapter / "adapter")
    finally:
        path.write_text(right)
    assert adapter_settings(adapter / "adapter")["lora_rank"] == 3


def test_null_and_off_are_absent(adapter: Path) -> None:
    path = adapter / "adapter" / "adapter_config.json"
    right = path.read_text()
    try:
        nulls = dict.fromkeys(("use_rslora", "use_dora", "lora_dropout", "bias", "init_lora_weights", *OFF))
        path.write_text(json.dumps(json.loads(right) | nulls | {"a_key_of_a_later_release": False}))
        settings = adapter_settings(adapter / "adapter")
        assert (settings["use_rslora"], settings["use_dora"], settings["lora_dropout"]) == (False, False, 0.0)
        for key in ("r", "lora_alpha"):
            path.write_text(json.dumps(json.loads(right) | {key: None}))
            with pytest.raises(CheckpointError, match=f"has no {key}"):
                adapter_settings(adapter / "adapter")
    finally:
        path.write_text(right)


TENSORS: dict[str, tuple[Any, str]] = {
    "integers": (lambda x: x.to(torch.int32), r"has the dtype I32; weights must be"),
    "Booleans": (lambda x: x > 0, r"has the dtype BOOL; weights must be"),
    "FP8": (lambda x: x.to(torch.float8_e4m3fn), r"has the dtype F8_E4M3; weights must be"),
    "NaN": (lambda x: x * float("nan"), "has values that are NaN or infinite"),
    "infinite": (lambda x: x / 0.0, "has values that are NaN or infinite"),
    "another rank": (lambda x: x[:1].clone(), r"has the shape \[1, 32\]"),
    "one dimension": (lambda x: x.flatten(), r"has the shape \[96\]"),
    "a scalar": (lambda x: x.sum(), r"has the shape \[\]"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", TENSORS)
def test_wrong_tensors_are_one_sentence_with_the_name(kind: str, tmp_path: Path) -> None:
    change, message = TENSORS[kind]
    _adapter("llama", {"target_modules": ["q_proj"]}, tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path)
    with pytest.raises(
        RankFailure, match=rf"CheckpointError: .*layers\.1\.self_attn\.q_proj\.lora_A\.weight {message}"
    ):
        run_ranks(1, _stored, _config(tmp_path))


def test_a_selection_of_layers_is_kept_by_an_export(tmp_path: Path) -> None:
    """`peft` finds all adapters of the exported file, and no others."""
    _adapter("llama", {"target_modules": r"model\.layers\.[02]\.self_attn\.q_proj"}, tmp_path)
    config = _config(tmp_path, save=str(tmp_path / "run"))
    assert config.value("lora_target_modules") == ("*.layers.0.*.q_proj", "*.layers.2.*.q_proj")
    run_ranks(1, _stored, config)
    export_adapter(tmp_path / "run", tmp_path / "exported")
    stored = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "exported")]
    assert stored[0].keys() == stored[1].keys()
    settings = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
    assert settings["target_modules"] == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 2)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model = peft.PeftModel.from_pretrained(_loaded(tmp_path / "base"), tmp_path / "exported")
    assert {name for name in peft.get_peft_model_state_dict(model)} == stored[0].keys()


@pytest.mark.parametrize("target", ["linear_proj", "linear_fc2"])
def test_names_that_other_layers_have_are_exported_as_paths(target: str, tmp_path: Path) -> None:
    """`peft` finds no others: GPT-2 has a c_proj in attention and one in the MLP."""
    save_model("gpt2", tmp_path / "base", torch.float64)
    run_ranks(1, _stored, _config(tmp_path, lora_rank=3, lora_target_modules=(target,), save=str(tmp_path / "run")))
    export_adapter(tmp_path / "run", tmp_path / "exported")
    stored = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        theirs = peft.PeftModel.from_pretrained(_loaded(tmp_path / "base"), tmp_path / "exported")
    assert {name for name in peft.get_peft_model_state_dict(theirs)} == stored.keys()


def test_layers_that_the_run_names_and_the_file_lacks(tmp_path: Path) -> None:
    _adapter("llama", {"target_modules": r"model\.layers\.[01]\.self_attn\.q_proj"}, tmp_path)
    with pytest.raises(
        RankFailure, match=r"CheckpointError: .*q_proj in some layers only.*layers\.2.*name these layers"
    ):
        run_ranks(1, _stored, _config(tmp_path, lora_target_modules=("q_proj",)))


def test_missing_layers_of_a_run_with_more_targets(tmp_path: Path) -> None:
    _adapter("llama", {"target_modules": ["q_proj"]}, tmp_path)
    other = _config(tmp_path, lora_target_modules=("q_proj", "v_proj"))
    with pytest.raises(RankFailure, match=r"CheckpointError: .*has no base_model\.model\..*v_proj\.lora_A\.weight"):
        run_ranks(1, _stored, other)


def test_flags_that_change_the_result_of_a_file_are_refused(tmp_path: Path) -> None:
    _adapter("llama", {"target_modules": ["q_proj"]}, tmp_path)
    trained = {"lora_rank": 3, "lora_alpha": 7.0, "use_rslora": False, "use_dora": False}
    for name, value in {"lora_rank": 4, "lora_alpha": 5.0, "use_rslora": True, "use_dora": True}.items():
        message = f"were trained with {name}={trained[name]}, but this run has {name}={value}; remove"
        with pytest.raises(RankFailure, match=message):
            run_ranks(1, _stored, _config(tmp_path, **{name: value}))


def test_pickled_weights_of_early_releases_are_read(tmp_path: Path) -> None:
    _adapter("llama", {"target_modules": ["q_proj"]}, tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    settings = adapter_settings(tmp_path / "adapter")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"has neither adapter_model\.safetensors nor adapter_model\.bin"):
        adapter_settings(tmp_path / "adapter")
    torch.save(tensors, path.with_suffix(".bin"))
    assert adapter_settings(tmp_path / "adapter") == settings
    run_ranks(1, _stored, _config(tmp_path, save=str(tmp_path / "run")))
    export_adapter(tmp_path / "run", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name].to(exported[name].dtype)) for name in tensors)


def test_our_own_file_is_read(tmp_path: Path) -> None:
    _adapter("llama", {"target_modules": ["q_proj", "v_proj"]}, tmp_path)
    run_ranks(1, _stored, _config(tmp_path, save=str(tmp_path / "run")))
    export_adapter(tmp_path / "run", tmp_path / "exported")
    assert adapter_settings(tmp_path / "exported") == adapter_settings(tmp_path / "adapter")


@pytest.mark.every_case
@pytest.mark.parametrize("block", ["experts", "shared_experts"])
def test_our_own_file_for_experts_is_read(block: str, tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path / "base", torch.float64)
    config = _config(tmp_path, lora_rank=2, lora_target_modules=(f"{block}.linear_fc2",), save=str(tmp_path / "run"))
    run_ranks(1, _stored, config)
    export_adapter(tmp_path / "run", tmp_path / "adapter", verify=False)
    targets = adapter_settings(tmp_path / "adapter")["lora_target_modules"]
    assert targets == tuple(f"*.layers.{n}.*.{block}.down_proj" for n in (1, 2, 3))
    run_ranks(1, _stored, _config(tmp_path, save=str(tmp_path / "again")))
    export_adapter(tmp_path / "again", tmp_path / "exported", verify=False)
    stored = [tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "exported")]
    assert stored[0].read_bytes() == stored[1].read_bytes()


def test_an_export_is_compared_with_peft(tmp_path: Path) -> None:
    """With transformers 5, peft 0.21 does not load adapters of dense layers and shared experts next to experts."""
    dense, experts = tmp_path / "dense", tmp_path / "experts"
    _adapter("llama", {"target_modules": ["q_proj", "down_proj"]}, dense)
    run_ranks(1, _stored, _config(dense, save=str(dense / "run")))
    difference = export_adapter(dense / "run", dense / "exported")
    assert difference is not None and difference < 1e-5
    save_model("deepseek_v3", experts / "base", torch.float64)
    settings = {"lora_rank": 2, "lora_target_modules": ("down_proj",), "save": str(experts / "run")}
    run_ranks(1, _trained_once, _config(experts, **settings))
    with pytest.raises(CheckpointError, match=r"logits of peft .* with these adapters differ by .* --to hf, .*--no-v"):
        export_adapter(experts / "run", experts / "exported")
    assert not (experts / "exported").exists()
    assert export_adapter(experts / "run", experts / "exported", verify=False) is None
    (dense / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"load_hf=.* does not exist, and verifying needs .*--no-verify"):
        export_adapter(dense / "run", dense / "again")


def _trained_once(config: RunConfig) -> None:
    run = _run(config)
    train_step(run)
    run.saver.save(run.state)
    run.saver.close()
