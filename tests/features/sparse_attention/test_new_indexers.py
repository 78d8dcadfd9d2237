"""A run that adds indexers to a dense model has its weights, and the indexers of a model from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_core.errors import CheckpointError
from megatron_core.features.sparse_attention.settings import INDEXER as MARK
from megatron_core.hub.hugging_face.reader import HuggingFaceReader, config_of_folder
from megatron_core.parallel.sharding import spec_of
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.hub.hf_models import save_model
from tests.parity.sparse_rows import INDEXER, LATENT, WARMUP
from tests.runs import TINY, tiny_run

DENSE = LATENT | {"position_embedding_type": "rope", "attention_dropout": 0.0, "hidden_dropout": 0.0}
SPARSE = DENSE | INDEXER | WARMUP


def parts(settings: dict[str, Any], steps: int = 0) -> tuple[dict[str, Tensor], list[float]]:
    """This rank's parts of all weights, NaN elsewhere, and the losses of the next steps."""
    run = tiny_run(**settings)
    found = {}
    for stage in run.stages.values():
        with run.data_parallel.gathered(stage.parameters()):
            for name, parameter in stage.named_global_parameters():
                whole = torch.full(spec_of(parameter).global_shape, torch.nan, dtype=parameter.dtype)
                for part in spec_of(parameter).parts:
                    whole[part.whole.index] = parameter.detach()[part.local.index]
                found[name] = whole
    return found, [float(train_step(run).loss) for _ in range(steps)]


def saved(folder: Path, **settings: Any) -> dict[str, Tensor]:
    run = tiny_run(**DENSE, **settings, save=str(folder))
    train_step(run)
    run.saver.save(run.state)
    return parts(DENSE | settings | {"load": str(folder)})[0]


def check(found: dict[str, Tensor], dense: dict[str, Tensor], fresh: dict[str, Tensor]) -> None:
    for name, weight in found.items():
        held = ~weight.isnan()
        expected = fresh[name] if MARK in name else dense[name]
        assert held.any()
        assert torch.equal(weight[held], expected[held]), name


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
}


@pytest.mark.parametrize("source", ["load", "pretrained_checkpoint"])
def test_only_the_indexers_are_new(source: str, tmp_path: Path) -> None:
    dense, (fresh, _) = saved(tmp_path, fp64=True), parts(SPARSE | {"fp64": True})
    start = SPARSE | {"fp64": True, source: str(tmp_path)} | ({"finetune": True} if source == "load" else {})
    found, losses = parts(start, 2)
    assert {name for name in found if MARK in name} == found.keys() - dense.keys() != set()
    check(found, dense, fresh)
    for layout in LAYOUTS.values():
        for weights, others in run_ranks(2, parts, start | layout, 2):
            check(weights, dense, fresh)
            assert others == pytest.approx(losses, rel=1e-9)


def test_with_main_weights(tmp_path: Path) -> None:
    dense, (fresh, _) = saved(tmp_path, bf16=True), parts(SPARSE | {"bf16": True})
    run = tiny_run(**SPARSE | {"bf16": True, "load": str(tmp_path), "finetune": True, "dsa_indexer_warmup": False})
    for shard in run.optimizer.shards:
        assert torch.equal(shard.main.bfloat16(), shard.bucket.weight_shard)
    check(parts(SPARSE | {"bf16": True, "load": str(tmp_path), "finetune": True})[0], dense, fresh)


def test_a_run_with_new_indexers_resumes_as_any_other(tmp_path: Path) -> None:
    saved(tmp_path / "dense", fp64=True)
    start = SPARSE | {"fp64": True, "pretrained_checkpoint": str(tmp_path / "dense"), "save": str(tmp_path / "run")}
    run = tiny_run(**start)
    losses = [float(train_step(run).loss)]
    run.saver.save(run.state)
    losses.append(float(train_step(run).loss))
    _, again = parts(start | {"load": str(tmp_path / "run")}, 1)
    assert again == losses[1:]
    with pytest.raises(CheckpointError, match=r"the checkpoint has no indexers.*--finetune"):
        tiny_run(**SPARSE, fp64=True, load=str(tmp_path / "dense"))


def test_a_dense_model_of_hugging_face(tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path, torch.float32)
    own = config_of_folder(tmp_path).flat()
    train = {name: TINY[name] for name in ("micro_batch_size", "global_batch_size", "train_iters", "lr", "mock_data")}
    settings = own | train | {"seq_length": 16, "load_hf": str(tmp_path)} | INDEXER | WARMUP
    with HuggingFaceReader(tmp_path) as reader:
        stored = parts(own | train | {"seq_length": 16, "load_hf": str(tmp_path)})[0]
        assert reader.model.experimental_attention_variant is None
    check(parts(settings, 1)[0], stored, parts(settings | {"load_hf": None})[0])
    with pytest.raises(CheckpointError, match="choose keys at random; train them with --dsa-indexer-loss-coeff"):
        tiny_run(**settings | {"dsa_indexer_warmup": False, "dsa_indexer_loss_coeff": 0.0})
