"""Low-rank adapters equal those of `peft`: the same losses in training, files that both read, and merged weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.adapter_export import export_adapter
from megatron_core.hub.conversion import export_hugging_face
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.hub.hugging_face.peft import adapter_settings
from megatron_core.training.compatibility import open_model
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step
from megatron_core.verify.gpt import RaggedDataset
from megatron_core.verify.ranks import run_ranks, this_world
from tests.hub.hf_models import RECURRENT, VOCABULARY, save_model
from tests.hub.test_recurrences import compute_in_float64

peft = pytest.importorskip("peft", reason="peft is not installed (make install-test)")
SEPARATE = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LENGTH, BATCH, STEPS = 16, 4, 20
RUN = {
    "seq_length": LENGTH,
    "mock_data": True,
    "micro_batch_size": 1,
    "global_batch_size": BATCH,
    "train_iters": STEPS,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "clip_grad": 0.0,
    "fp64": True,
    "kernel_backend": "reference",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, 1e-9),
    # Their norms are in float32, also in a model in float64.
    "llama": ("llama", {"target_modules": SEPARATE, "use_rslora": True}, 1e-5),
    "llama, DoRA": ("llama", {"target_modules": SEPARATE, "use_dora": True}, 1e-5),
    # Their rotary angles are in float32.
    "gpt_neox": ("gpt_neox", {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}, 1e-7),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}, 1e-5),
    "qwen3_5": (
        "qwen3_5",
        {"target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "v_proj"]},
        1e-9,
    ),
    "qwen3_next, DoRA": (
        "qwen3_next",
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj"], "use_dora": True},
        1e-9,
    ),
    "kimi_linear": (
        "kimi_linear",
        {"target_modules": [f"{name}_proj" for name in ("q", "k", "v", "b", "g_a", "g_b", "o")]},
        1e-9,
    ),
    "lfm2": ("lfm2", {"target_modules": ["in_proj", "out_proj", "v_proj", "w1", "w2"]}, 1e-5),
    "deepseek": (
        "deepseek_v3",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
        1e-5,
    ),
}


def _loaded(folder: Path) -> Any:
    """A model of `transformers` in float64; grouped products of experts do not support it."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)


def _adapter(model: str, settings: dict[str, Any], folder: Path) -> Any:
    """A model of `transformers` and adapters with random A and B of `peft`, both stored below ``folder``."""
    save_model(model, folder / "base", torch.float64)
    base = _loaded(folder / "base")
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "task_type": "CAUSAL_LM"} | settings)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(folder / "adapter")
    return theirs


def _config(folder: Path, **settings: Any) -> RunConfig:
    flat = config_of_folder(folder / "base").flat() | {"load_hf": str(folder / "base")} | RUN
    if (folder / "adapter").exists():
        flat |= adapter_settings(folder / "adapter") | {"lora_load": str(folder / "adapter")}
    return RunConfig.from_flat(flat | {"moe_aux_loss_coeff": 0.0} | settings)


def _run(config: RunConfig) -> Run:
    run = set_up(config, this_world())
    run.train_loader = run.loader(RaggedDataset(VOCABULARY, LENGTH))
    return run


def _losses(config: RunConfig) -> list[float]:
    run = _run(config)
    losses = [train_step(run).loss for _ in range(STEPS)]
    if config.checkpoint.save is not None:
        run.saver.save(run.state)
        run.saver.close()
    return losses


def _their_losses(theirs: Any, config: RunConfig) -> list[float]:
    """Losses of training with torch's AdamW."""
    own, data, losses = config.optimizer, RaggedDataset(VOCABULARY, LENGTH), []
    trained = [p for p in theirs.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if (p.dim() > 1) == decays], "weight_decay": own.weight_decay * decays}
        for decays in (True, False)
    ]
    adam = torch.optim.AdamW(groups, lr=own.lr, betas=(own.adam_beta1, own.adam_beta2), eps=own.adam_eps)
    theirs.eval()  # without dropout
    for step in range(STEPS):
        samples = [data[step * BATCH + i] for i in range(BATCH)]
        tokens, labels, mask = (
            torch.stack([torch.tensor(sample[key]) for sample in samples]) for key in ("tokens", "labels", "loss_mask")
        )
        logits = theirs(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
        each = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
        loss = (each * mask.flatten()).sum() / mask.sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def _logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


@pytest.mark.drawn(1)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_peft(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of 20 steps from the same adapters; the trained adapters in `peft`, and merged, give its logits."""
    model, settings, tolerance = CASES[case]
    if model.startswith(RECURRENT):
        compute_in_float64(monkeypatch)
    theirs = _adapter(model, settings, tmp_path)
    config = _config(tmp_path, save=str(tmp_path / "run"))
    (ours,) = run_ranks(1, _losses, config)
    expected = _their_losses(theirs, config)
    assert ours == pytest.approx(expected, rel=tolerance)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-2)
    # Ours in PEFT's format.
    export_adapter(tmp_path / "run", tmp_path / "exported")
    base = _loaded(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "exported", autocast_adapter_dtype=False)
    wanted = _logits(theirs)
    bound = {"rtol": 0.0, "atol": 10 * max(tolerance, 1e-7) * wanted.abs().max().item()}
    torch.testing.assert_close(_logits(loaded), wanted, **bound)
    # Ours merged with the frozen weights; the export compares its logits with `transformers`, too.
    assert export_hugging_face(tmp_path / "run", tmp_path / "merged") < 1e-4
    merged = _loaded(tmp_path / "merged")
    bound["atol"] = max(bound["atol"], 1e-5 * wanted.abs().max().item())
    torch.testing.assert_close(_logits(merged), wanted, **bound)


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero1": {"use_distributed_optimizer": True},
    "dp2 zero3": {"zero_stage": 3},
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_in_every_layout(layout: str, tmp_path: Path) -> None:
    """From adapters of `peft` and weights of `transformers`, the losses and the saved adapters of one process."""
    _adapter("llama", {"target_modules": SEPARATE, "use_dora": True}, tmp_path)
    (alone,) = run_ranks(1, _losses, _config(tmp_path, save=str(tmp_path / "alone")))
    found = run_ranks(2, _losses, _config(tmp_path, save=str(tmp_path / "split"), **LAYOUTS[layout]))
    assert found[0] == found[1] == pytest.approx(alone, rel=1e-9)
    for name in ("alone", "split"):
        export_adapter(tmp_path / name, tmp_path / f"{name} in peft")
    one, other = (
        peft.load_peft_weights(str(tmp_path / f"{name} in peft"), device="cpu") for name in ("alone", "split")
    )
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-7, atol=1e-9)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_adapters_of_experts_return_from_their_files(model: str, tmp_path: Path) -> None:
    """Adapters of experts, exported, are the ones that a run starts from again, in another layout; `ep2` trains as one
    process does."""
    save_model(model, tmp_path / "base", torch.float64)
    settings = {
        "lora_rank": 2,
        "lora_target_modules": ("q_proj", "v_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2"),
    }
    config = _config(tmp_path, save=str(tmp_path / "run"), **settings)
    (alone,) = run_ranks(1, _losses, config)
    split = {"expert_model_parallel_size": 2, "save": None}
    found = run_ranks(2, _losses, RunConfig.from_flat(config.flat() | split))
    assert found[0] == pytest.approx(alone, rel=1e-9)
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    again = _config(tmp_path, save=str(tmp_path / "again"), train_iters=1, lr=0.0)
    run_ranks(2, _stored, RunConfig.from_flat(again.flat() | {"expert_model_parallel_size": 2}))
    export_adapter(tmp_path / "again", tmp_path / "exported")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "exported")]
    assert files[0].read_bytes() == files[1].read_bytes()


def _stored(config: RunConfig) -> None:
    run = _run(config)
    run.saver.save(run.state)
    run.saver.close()


def test_checkpoint_has_only_adapters_and_resumes(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "base", torch.float64)
    config = _config(tmp_path, lora_rank=2, lora_target_modules=("linear_qkv", "linear_fc2"), use_dora=True)
    (whole,) = run_ranks(1, _losses, config)
    halves = run_ranks(1, _halves, config, str(tmp_path / "run"))[0]
    assert halves == whole
    manifest = json.loads(next((tmp_path / "run").glob("*/manifest.json")).read_text())
    assert manifest["tensors"] and all(".adapter." in name for name in manifest["tensors"])
    with pytest.raises(CheckpointError, match=r"has adapters \(lora_rank=2\) without the weights .*--to hf"):
        open_model(str(tmp_path / "run"))


def _halves(config: RunConfig, folder: str) -> list[float]:
    run = _run(replace(config, checkpoint=replace(config.checkpoint, save=folder)))
    losses = [train_step(run).loss for _ in range(STEPS // 2)]
    run.saver.save(run.state)
    run.saver.close()
    run = _run(replace(config, checkpoint=replace(config.checkpoint, load=folder)))
    return losses + [train_step(run).loss for _ in range(STEPS // 2)]
