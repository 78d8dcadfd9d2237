"""DPO: its loss is that of the paper, and every layout trains as one process does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError
from megatron_core.training.setup import set_up
from megatron_core.training.step import StepResult, train_step
from megatron_core.verify.ranks import RankFailure, run_ranks, this_world
from tests.runs import TINY, tiny_run

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TEMPLATE = EACH + "{% if add_generation_prompt %}<assistant>{% endif %}"
STEPS = 20


def _config(folder: Path, **settings: object) -> RunConfig:
    (folder / "chat.jinja").write_text(TEMPLATE)
    lines = [{"prompt": f"q{n}", "chosen": "yes" * (n % 3 + 1), "rejected": f"no{n}"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunConfig.from_flat(
        TINY
        | {
            "dpo": True,
            "lora_rank": 2,
            "dpo_label_smoothing": 0.1,
            "dpo_beta": 0.5,
            "chat_template": str(folder / "chat.jinja"),
            "data_path": (str(folder / "pairs.jsonl"),),
            "split": "1,0,0",
            "tokenizer_type": "ByteLevelTokenizer",
            "mock_data": False,
            "vocab_size": None,
            "seq_length": 48,
            "fp64": True,
            "position_embedding_type": "rope",
            "global_batch_size": 4,
            "train_iters": STEPS,
            "lr_decay_style": "constant",
        }
        | settings
    )


def _results(config: RunConfig) -> list[tuple[float, float, float]]:
    run = set_up(config, this_world())
    return [_row(train_step(run)) for _ in range(STEPS)]


def _row(result: StepResult) -> tuple[float, float, float]:
    return result.loss, result.grad_norm, result.breakdown["preference margin"]


def test_loss_is_that_of_the_paper(tmp_path: Path) -> None:
    """Equation 7 with log-probabilities of whole sequences from logits, over 20 steps; the loss starts at log 2."""
    config = _config(tmp_path)
    run = set_up(config, tiny_run().world)
    model = run.stages[0]
    frozen = [p.clone() for n, p in model.named_parameters() if ".adapter." not in n]
    losses = []
    for step in range(STEPS):
        expected = []
        for at in range(4 * step, 4 * step + 4, 2):
            ratios = []
            for sample in (run.splits.train[at], run.splits.train[at + 1]):
                ids, labels, mask = (torch.tensor(sample[key]) for key in ("tokens", "labels", "loss_mask"))
                both = []
                for scale in (1.0, 0.0):
                    with torch.no_grad():
                        for module in model.modules():
                            if hasattr(module, "lora_B"):
                                module.enabled = scale == 1.0
                        length = int(mask.nonzero().max()) + 1  # later tokens are padding
                        logits = model(ids[None, :length])[0].log_softmax(-1)
                    both.append((logits.gather(1, labels[:length, None])[:, 0] * mask[:length]).sum())
                ratios.append(both[0] - both[1])
            margin = 0.5 * (ratios[0] - ratios[1])
            expected.append(-0.9 * torch.log(torch.sigmoid(margin)) - 0.1 * torch.log(torch.sigmoid(-margin)))
        for module in model.modules():
            if hasattr(module, "lora_B"):
                module.enabled = True
        losses.append(train_step(run).loss)
        assert losses[-1] == pytest.approx(torch.stack(expected).mean().item(), rel=1e-9)
    assert losses[0] == pytest.approx(torch.log(torch.tensor(2.0)).item(), rel=1e-6) and losses[-1] < 0.9 * losses[0]
    assert all(map(torch.equal, frozen, [p for n, p in model.named_parameters() if ".adapter." not in n]))


SLOW = 1e-3
"""At ten times this rate the norm of the gradients grows to 64, and differences of rounding grow beyond 1e-9."""
LAYOUTS = {
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float, float]]:
    return run_ranks(1, _results, _config(tmp_path_factory.mktemp("alone"), lr=SLOW))[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_as_one_process(layout: str, alone: list, tmp_path: Path) -> None:
    for found in run_ranks(2, _results, _config(tmp_path, lr=SLOW, **LAYOUTS[layout])):
        for ours, expected in zip(found, alone, strict=True):
            assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)


def _trained(config: RunConfig) -> list[float]:
    """Losses up to the last step; the run is saved if its configuration has a folder for that."""
    run = set_up(config, this_world())
    losses = [train_step(run).loss for _ in range(run.state.iteration, run.total_iterations)]
    if config.checkpoint.save is not None:
        run.saver.save(run.state)
        run.saver.close()
    return losses


def test_a_resumed_run_keeps_its_reference(tmp_path: Path) -> None:
    """Without adapters: six steps from a checkpoint of ours equal three, and three more in another layout."""
    first = {"dpo": False, "sft": True, "data_path": (str(tmp_path / "talks.jsonl"),), "train_iters": 1}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    base = {"lora_rank": None, "lr": SLOW, "dpo_beta": 0.5, "dpo_label_smoothing": 0.1}
    only_sft = base | {"dpo_beta": 0.1, "dpo_label_smoothing": 0.0} | first
    run_ranks(1, _trained, _config(tmp_path, **only_sft, save=str(tmp_path / "tuned")))
    base |= {"pretrained_checkpoint": str(tmp_path / "tuned")}
    (straight,) = run_ranks(1, _trained, _config(tmp_path, **base, train_iters=6))
    assert straight[0] == pytest.approx(math.log(2), rel=1e-12)
    saved = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    (begun,) = run_ranks(1, _trained, _config(tmp_path, **base, **saved, train_iters=3))
    for rest in run_ranks(2, _trained, _config(tmp_path, **base, **saved, train_iters=6, zero_stage=3)):
        assert begun + rest == pytest.approx(straight, rel=1e-9)
    with pytest.raises(RankFailure, match="tuned/iter_0000001 is of a run without it"):
        run_ranks(1, _trained, _config(tmp_path, **base, load=str(tmp_path / "tuned")))


def test_reference_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the weights of its"):
        check(_config(tmp_path, lora_rank=None), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_hf": "a", "pretrained_checkpoint": "b"}, "pretrained_checkpoint=b and load_hf=a exclude one another"),
        (
            {"load_hf": "a", "load": "c", "finetune": True, "lora_rank": None},
            "finetune=True starts dpo=True from load=c",
        ),
    ],
)
def test_weights_and_reference_are_the_same(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check(_config(tmp_path, **settings), 1)


@pytest.mark.parametrize("name", ["zero3_param_cpu_offload", "zero3_param_offload_dir"])
def test_the_reference_is_not_offloaded(name: str, tmp_path: Path) -> None:
    place = {name: str(tmp_path) if name.endswith("dir") else True, "optimizer_cpu_offload": True, "zero_stage": 3}
    check(_config(tmp_path, **place), 1)
    with pytest.raises(ConfigError, match=f"{name}=.* cannot be used with dpo=True: the reference stays"):
        check(_config(tmp_path, **place, lora_rank=None, load_hf="a"), 1)


def test_pairs_stay_in_a_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="micro_batch_size=1 would separate pairs"):
        check(_config(tmp_path, micro_batch_size=1), 1)
