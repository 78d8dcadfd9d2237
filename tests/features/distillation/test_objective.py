"""Distillation: its loss and gradients are those of plain formulas, and every layout trains as one process does."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_core.commands.convert_checkpoint import ConvertFlags, convert_checkpoint
from megatron_core.config import RunConfig
from megatron_core.config.run import aliases
from megatron_core.config.validate import check
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.megatron_flags.tables import FLAGS
from megatron_core.planner.hardware import read_hardware
from megatron_core.planner.search import Search
from megatron_core.reports.dry_run import warnings
from megatron_core.training.compatibility import open_model
from megatron_core.training.setup import set_up
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.ranks import run_ranks, this_world
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from tests.defects.plant import planted
from tests.features.distillation.test_loss import plain_loss
from tests.runs import TINY, tiny_config, tiny_run
from tests.vocabularies.corpus import write_tokenizer_json
from tests.vocabularies.test_compare import swapped

STEPS, WEIGHT, HEAT = 3, 0.7, 2.0
BASE = TINY | {"fp64": True, "position_embedding_type": "rope", "num_layers": 4}
DENSE = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "seed": 7}
EXPERTS = DENSE | {"num_layers": 5, "num_experts": 4, "moe_router_topk": 2}
Row = tuple[float, float, float]


def _save(config: RunConfig) -> None:
    run = set_up(config, this_world())
    run.saver.save(run.state)
    run.saver.close()


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of teachers: checkpoints of this project, one of Megatron-LM, and one of Hugging Face."""
    made = {name: str(tmp_path_factory.mktemp(name)) for name in ("dense", "experts", "megatron", "llama")}
    for name, model in (("dense", DENSE), ("experts", EXPERTS)):
        run_ranks(1, _save, RunConfig.from_flat(BASE | model | {"save": made[name]}))
    convert_checkpoint(ConvertFlags(source="native", to="torch_dist", load=made["dense"], save=made["megatron"]))
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2}
    torch.manual_seed(1)
    llama = LlamaConfig(vocab_size=61, num_hidden_layers=2, max_position_embeddings=32, initializer_range=0.3, **sizes)
    LlamaForCausalLM(llama).double().save_pretrained(made["llama"])
    return made


def _config(teacher: str, **settings: object) -> RunConfig:
    return RunConfig.from_flat(BASE | {"kd_teacher": teacher, "kd_weight": WEIGHT, "kd_temperature": HEAT} | settings)


def _results(config: RunConfig) -> list[Row]:
    run = set_up(config, this_world())
    results = [train_step(run) for _ in range(STEPS)]
    return [(each.loss, each.grad_norm, each.breakdown["kd loss"]) for each in results]


def test_loss_and_gradients_are_those_of_plain_formulas(teachers: dict[str, str]) -> None:
    """With a teacher whose logits are those of ``transformers``: loss, divergence and norm of all gradients."""
    run = set_up(_config(teachers["llama"]), tiny_run().world)
    teacher = LlamaForCausalLM.from_pretrained(teachers["llama"], dtype=torch.float64)
    model, total, divergence, tokens = run.stages[0], torch.zeros(()).double(), 0.0, 0.0
    for at in range(8):
        sample = run.splits.train[at]
        ids, labels, mask = (torch.tensor(sample[key])[None] for key in ("tokens", "labels", "loss_mask"))
        with torch.no_grad():
            theirs = run.objective.teacher.model.stages[0](ids)
            torch.testing.assert_close(theirs, teacher(ids).logits, rtol=1e-4, atol=1e-5)  # its norms are in float32
        losses, own = plain_loss(model(ids), theirs, labels, WEIGHT, HEAT)
        total = total + (losses * mask).sum()
        divergence, tokens = divergence + (own * mask).sum().item(), tokens + mask.sum().item()
    run.data_parallel.zero_grad()
    (total / tokens).backward()
    norm = math.sqrt(sum(each.main_grad.square().sum().item() for each in model.parameters()))
    before = evaluate(run, run.splits.train, 1)
    result = train_step(run)
    found = result.loss, result.breakdown["kd loss"], result.grad_norm
    assert found == pytest.approx((total.item() / tokens, divergence / tokens, norm), rel=1e-9)
    assert result.breakdown["kd loss"] > 0.01
    assert before == pytest.approx(_cross_entropy(teachers["llama"]), rel=1e-12), "evaluation does without the teacher"


def _cross_entropy(teacher: str) -> float:
    """The loss of the first batch with weight 0 for the teacher."""
    run = set_up(_config(teacher, kd_weight=0.0), tiny_run().world)
    return train_step(run).loss


def test_formats_of_teachers_have_equal_losses(teachers: dict[str, str]) -> None:
    dense, theirs = (run_ranks(1, _results, _config(teachers[name]))[0] for name in ("dense", "megatron"))
    assert [row[0] for row in theirs] == pytest.approx([row[0] for row in dense], rel=1e-6)  # float32 in the files


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3},
    "pp2 x 2 chunks": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "zb_v": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_v"},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3, "overlap_param_gather": True, "overlap_grad_reduce": True},
}


@pytest.fixture(scope="module")
def alone(teachers: dict[str, str]) -> list[Row]:
    return run_ranks(1, _results, _config(teachers["experts"]))[0]


def _differences(alone: list[Row], config: RunConfig) -> float:
    found = run_ranks(2, _results, config)
    return max(
        abs(a / b - 1)
        for rows in found
        for row, own in zip(rows, alone, strict=True)
        for a, b in zip(row, own, strict=True)
    )


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_as_one_process(layout: str, alone: list[Row], teachers: dict[str, str]) -> None:
    assert _differences(alone, _config(teachers["experts"], **LAYOUTS[layout])) < 1e-9


def test_a_defect_shows(alone: list[Row], teachers: dict[str, str]) -> None:
    """The student of a micro-batch is compared with the teacher of another one."""
    defect = "features.distillation.objective:logit_losses", "hidden.pop(micro)", "hidden[max(hidden) - micro]"
    with planted(*defect):
        assert _differences(alone, _config(teachers["experts"], zero_stage=1)) > 1e-6


def test_a_dense_teacher_of_a_model_with_experts(teachers: dict[str, str]) -> None:
    model = {"num_experts": 4, "moe_router_topk": 2}
    own = run_ranks(1, _results, _config(teachers["dense"], **model))[0]
    layout = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}
    assert _differences(own, _config(teachers["dense"], **model, **layout)) < 1e-9


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"vocab_size": 59}, CheckpointError, "has a vocabulary of 61 tokens, but this run has vocab_size=59"),
        ({"seq_length": 20}, CheckpointError, "sequences of at most 16 tokens, but this run has seq_length=20"),
    ],
)
def test_other_vocabularies_and_lengths_are_refused(
    settings: dict[str, object], error: type[Exception], message: str, teachers: dict[str, str]
) -> None:
    with pytest.raises(error, match=message):
        set_up(_config(teachers["dense"], **settings), tiny_run().world)


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tokens have each other's ids; without a tokenizer a note says that none are compared."""
    file = write_tokenizer_json(tmp_path)
    size = HuggingFaceTokenizer(file).vocab_size
    llama = LlamaConfig(
        vocab_size=size, num_hidden_layers=1, max_position_embeddings=32, hidden_size=8, intermediate_size=8,
        num_attention_heads=2,
    )  # fmt: skip
    teacher = tmp_path / "teacher"
    LlamaForCausalLM(llama).double().save_pretrained(teacher)
    tokens = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(file), "vocab_size": None}
    config = _config(str(teacher), **tokens)
    set_up(config, tiny_run().world)
    assert f"the tokens of kd_teacher={teacher} are not compared" in capsys.readouterr().out
    shutil.copy(file, teacher)
    set_up(config, tiny_run().world)
    assert "not compared" not in capsys.readouterr().out
    shutil.copy(swapped(file, "a", "b"), teacher)
    with pytest.raises(CheckpointError, match=r"has other tokens at 2 ids: \d+ is 'a' in this run and 'b' there"):
        set_up(config, tiny_run().world)
    # A checkpoint of this project keeps its tokenizer.
    kept = tmp_path / "kept"
    own = {"tokenizer_model": str(swapped(file, "a", "c")), "save": str(kept), "vocab_size": None}
    run_ranks(1, _save, RunConfig.from_flat(BASE | DENSE | tokens | own))
    with pytest.raises(CheckpointError, match="has other tokens at 2 ids"):
        set_up(_config(str(kept), **tokens), tiny_run().world)


def test_a_teacher_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"kd_teacher='{tmp_path}' has no checkpoint and no config\.json"):
        open_model(str(tmp_path), name="kd_teacher")


def _too_many_stages(teacher: str) -> str:
    with pytest.raises(ConfigError) as caught:
        set_up(_config(teacher, pipeline_model_parallel_size=4), this_world())
    return str(caught.value)


def test_a_teacher_with_too_few_layers_is_refused(teachers: dict[str, str]) -> None:
    for message in run_ranks(4, _too_many_stages, teachers["dense"]):
        assert re.search("cannot run in this layout: .*num_layers=3 .*4 x 1 chunks", message, re.DOTALL)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout_invariant": True}, "layout_invariant=True cannot be used with kd_teacher=a"),
        ({"output_z_loss_coeff": 1e-4}, "output_z_loss_coeff=0.0001 cannot be used with kd_teacher=a"),
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}, "stores no logits"),
        ({"kd_temperature": 1e-30}, "kd_temperature=1e-30 is out of range; it must be a number from 0.01 to 100"),
        ({"kd_temperature": 1e4}, "kd_temperature=10000.0 is out of range; it must be a number from 0.01 to 100"),
        ({"kd_teacher": None}, "kd_weight=0.7 has no effect without --kd-teacher"),
    ],
)
def test_settings_without_a_distillation_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(_config("a", **settings), 1)


def test_the_planner_leaves_the_teacher_out() -> None:
    config = tiny_config(kd_teacher="a")
    with pytest.raises(ConfigError, match="the planner does not know the teacher's model"):
        Search(config, 1, read_hardware("h100"), 61).best()
    assert "the bytes are without the weights of kd_teacher=a" in list(warnings(config))


def test_flags_of_megatron() -> None:
    assert aliases()["export_kd_teacher_load"] == "kd_teacher"
    assert "export_kd_cfg" not in FLAGS, "it is read"
