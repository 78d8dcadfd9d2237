"""Resuming with the config.yaml in a checkpoint folder, and settings that may differ from a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_core.checkpoint import Box, Save, TensorBox, save_checkpoint, writer
from megatron_core.config import RunConfig
from megatron_core.config.file import read_config
from megatron_core.config.validate import problems
from megatron_core.errors import CheckpointError
from megatron_core.models.gpt import model as gpt
from megatron_core.parallel import World
from megatron_core.training import pretrain, setup
from megatron_core.training.compatibility import check_features, check_same_model
from tests.checkpoint.runs import SMALL, save_run, start, stored
from tests.datasets.files import write_counting
from tests.parity.sparse_rows import INDEXER

ROPE = {"num_layers": 1, "position_embedding_type": "rope", "eval_iters": 0}
NARROW = {"norm_epsilon": 9.999999747378752e-06}  # 1e-5 in float32, as stored by other programs


def run_job(settings: dict) -> None:
    pretrain(RunConfig.from_flat(SMALL | ROPE | settings), World(0, 1, 0, torch.device("cpu")))


@pytest.mark.parametrize("resumes", [True, False])
def test_config_beside_the_checkpoints_goes_on(resumes: bool, tmp_path: Path) -> None:
    """A fine-tuning interrupted at iteration 2 of 4 resumes to bitwise equal weights and moments."""
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    run_job({"save": str(base), "train_iters": 3, "save_interval": 1})
    once = {"finetune": True, "no_load_optim": True, "ckpt_step": 2}
    changed = {"rotary_base": 500.0, "changed_model_settings": ("rotary_base",)}
    run_job({"load": str(base), "save": str(tuned), "train_iters": 4, "save_interval": 2} | once | changed)
    expected = stored(tuned / "iter_0000004")
    shutil.rmtree(tuned / "iter_0000004")
    config = read_config(tuned / "config.yaml")
    if not resumes:
        shutil.rmtree(tuned)
        with pytest.raises(CheckpointError, match="tuned' holds no checkpoint"):
            run_job(config.flat())
        return
    (tuned / "latest_checkpointed_iteration.txt").write_text("2")
    assert list(problems(config, 1)) == []
    run_job(config.flat())
    found = stored(tuned / "iter_0000004")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("finetune", [False, True])
def test_settings_that_change_the_function_are_named(finetune: bool, tmp_path: Path) -> None:
    trained = ROPE | NARROW | {"swiglu": True, "disable_bias_linear": True}
    save_run(start(trained | {"save": str(tmp_path)}))
    load = trained | {"load": str(tmp_path), "finetune": finetune, "norm_epsilon": 1e-5, "hidden_dropout": 0.3}
    start(load)
    other = {"rotary_base": 500.0, "swiglu": False, "geglu": True}
    with pytest.raises(CheckpointError) as error:
        start(load | other)
    assert "  - rotary_base=500.0, but the checkpoint was trained with rotary_base=10000.0\n" in str(error.value)
    assert str(error.value).endswith("add --changed-model-settings swiglu geglu rotary_base")
    with pytest.raises(CheckpointError, match=r"settings swiglu geglu$"):
        start(load | other | {"changed_model_settings": ("rotary_base",)})
    start(load | other | {"changed_model_settings": tuple(other)})


WINDOW = ROPE | {"num_layers": 2, "window_size": (3, 0), "window_attn_skip_freq": (2,)}


@pytest.mark.parametrize("name", ["window_size", "window_attn_skip_freq"])
def test_a_setting_with_an_effect_only_in_the_checkpoint_is_compared(name: str) -> None:
    trained = SMALL | WINDOW
    config = RunConfig.from_flat(trained | {"window_size": None, "window_attn_skip_freq": None})
    with pytest.raises(CheckpointError, match=rf"{name}=None, but the checkpoint was trained with {name}="):
        check_same_model(RunConfig.from_flat(trained).flat(), config)


def test_a_setting_without_effect_in_both_is_not_compared() -> None:
    config = RunConfig.from_flat(SMALL | ROPE)
    assert not config.model.disable_bias_linear, "otherwise the next setting has an effect"
    check_same_model(config.flat() | {"add_qkv_bias": True}, config)


SPARSE = ROPE | INDEXER | {"multi_latent_attention": True, "qk_pos_emb_head_dim": 4}
WARM = {"dsa_indexer_warmup": True}


@pytest.mark.parametrize(
    ("before", "now"), [(WARM, {}), ({}, WARM), ({"dsa_indexer_loss_coeff": 0.0}, {"dsa_indexer_loss_coeff": 0.1})]
)
def test_the_next_stage_of_indexers_needs_new_optimizer_state(before: dict, now: dict) -> None:
    stored = RunConfig.from_flat(SMALL | SPARSE | before).flat()
    same, other = (RunConfig.from_flat(SMALL | SPARSE | settings) for settings in (before, now))
    check_features(stored, same, Path("folder"))
    check_features(stored, RunConfig.from_flat(other.flat() | {"no_load_optim": True}), Path("folder"))
    with pytest.raises(CheckpointError, match=r"folder was trained with dsa_indexer_warmup=.*add --finetune$"):
        check_features(stored, other, Path("folder"))


def test_a_checkpoint_without_indexers_is_not_resumed_with_them() -> None:
    stored = RunConfig.from_flat(SMALL | SPARSE | {"experimental_attention_variant": None}).flat()
    config = RunConfig.from_flat(SMALL | SPARSE | WARM)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no indexers.*add --finetune"):
        check_same_model(stored, config)
    check_same_model(stored, config, only_weights=True)
    untrained = RunConfig.from_flat(config.flat() | {"dsa_indexer_loss_coeff": 0.0, "dsa_indexer_warmup": False})
    with pytest.raises(CheckpointError, match=r"dsa_indexer_loss_coeff=0.0.*choose keys at random"):
        check_same_model(stored, untrained, only_weights=True)
    with pytest.raises(CheckpointError, match="kv_lora_rank"):
        check_same_model(stored | {"kv_lora_rank": 99}, config, only_weights=True)


def _refuse(*args: object, **settings: object) -> None:
    raise AssertionError("this is not needed")


def test_nothing_is_drawn_that_a_checkpoint_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialized memory is NaN here, and rows that pad the vocabulary are still zero."""
    saved = start(ROPE | {"save": str(tmp_path)})
    save_run(saved)
    monkeypatch.setattr(gpt, "initialise_by_name", _refuse)
    try:
        run = start(ROPE | {"load": str(tmp_path), "poison_buffers": True})
    finally:
        torch.use_deterministic_algorithms(False)
    for mine, other in zip(run.stages[0].parameters(), saved.stages[0].parameters(), strict=True):
        assert torch.equal(mine, other)
    assert not run.stages[0].embedding.word_embeddings.weight[101:].any()
    with pytest.raises(AssertionError, match="not needed"):
        start(ROPE | {"load": str(tmp_path / "nowhere"), "save": str(tmp_path / "nowhere")})
    monkeypatch.setattr(setup, "build_stages", _refuse)
    with pytest.raises(CheckpointError, match="nowhere' holds no checkpoint"):
        start(ROPE | {"load": str(tmp_path / "nowhere"), "exit_on_missing_checkpoint": True})


def _peak_growth(work: Callable[[], object]) -> int:
    """Maximal growth of this process's memory in bytes."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current memory
    before = status("VmRSS:")
    work()
    return status("VmHWM:") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of memory")
def test_saving_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part of a matrix split by columns, and of parts of one buffer; safetensors' own reader finds them."""
    monkeypatch.setattr(writer, "PART_BYTES", 2**20)
    wide = torch.arange(2**24, dtype=torch.float32).view(4096, 4096)
    columns, half = wide[:, 1024:3072], torch.ones((), dtype=torch.bfloat16)
    pieces = [
        TensorBox("columns", (4096, 2048), Box((0, 0), (4096, 2048)), columns, owned=True),
        TensorBox("half", (), Box((), ()), half, owned=True),
        TensorBox("rows", (4096, 4096), Box((0, 0), (4096, 4096)), wide, owned=True),
    ]
    write = partial(save_checkpoint, Save(tmp_path, 1, {}), pieces, lambda ok: ok)
    assert _peak_growth(write) < 16 * 2**20
    found = stored(tmp_path / "iter_0000001")
    assert torch.equal(found["columns"], columns) and torch.equal(found["rows"], wide)
    assert found["half"].dtype == torch.bfloat16 and found["half"] == 1.0


def test_changed_data_is_told_on_resume(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The same path with different content gives different samples; the next checkpoint has the new record."""
    files = {"mock_data": False, "split": "1,0,0", "data_path": (write_counting(tmp_path / "a", [9] * 9),)}
    settings = ROPE | files | {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run_job(settings | {"train_iters": 1})
    run_job(settings | {"train_iters": 2})
    assert "the data has changed" not in capsys.readouterr().out
    write_counting(tmp_path / "a", [9] * 11)
    run_job(settings | {"train_iters": 3})
    told = capsys.readouterr().out
    assert "had 9 documents, 9 sequences and 81 tokens, now 11 documents, 11 sequences and 99 tokens: from" in told
    assert "from sample 8 on, samples have new boundaries and a new order" in told
    run_job(settings | {"train_iters": 4})
    assert "the data has changed" not in capsys.readouterr().out


def test_a_record_of_data_that_no_run_wrote_is_refused(tmp_path: Path) -> None:
    run = start(ROPE | {"save": str(tmp_path)})
    run.state.data = [{"use": "all"}]
    save_run(run)
    with pytest.raises(CheckpointError, match=r"manifest\.json: invalid data; load another"):
        start(ROPE | {"load": str(tmp_path)})
