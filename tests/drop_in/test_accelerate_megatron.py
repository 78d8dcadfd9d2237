"""accelerate's plugin for Megatron-LM over the drop-in, with ``--cpu``.

One rank is compared with a loop of torch alone: its optimizer, clipping and cross entropy. Layouts are compared with
one rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

import megatron.training.gpt_builders
import megatron.training.training  # noqa: F401
from tests.programs import run_ranks_of

PROGRAM = """
import json
import os
import sys

for name in [name for name in sys.modules if name.split(".")[0] == "accelerate"]:
    del sys.modules[name]  # the test's process may have imported it without the variable
os.environ["ACCELERATE_USE_MEGATRON_LM"] = "true"  # accelerate launch --use_megatron_lm sets it
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import MegatronLMDummyScheduler, MegatronLMPlugin

tp, pp, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
del sys.argv[1:]
plugin = MegatronLMPlugin(
    tp_degree=tp,
    pp_degree=pp,
    num_micro_batches=2,
    gradient_clipping=0.5,
    context_parallel_size=1,
    calculate_per_token_loss=False,
    use_rotary_position_embeddings=ROTARY,
    other_megatron_args={"transformer_impl": "local", "seed": 5, "eos_token_id": 0},
)
accelerator = Accelerator(megatron_lm_plugin=plugin)
data_ranks = accelerator.num_processes // (tp * pp)
config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=64)
model = transformers.GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
scheduler = MegatronLMDummyScheduler(optimizer=optimizer, total_num_steps=20 * data_ranks, warmup_num_steps=0)
tokens = torch.randint(1, 64, (64, 8), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4 // data_ranks)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
REFERENCE
model.train()
losses = []

def train(steps):
    found = []
    for _, batch in zip(range(steps), loader):
        found.append(float(model(**batch).loss))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return found

losses = train(8)
accelerator.save_state(output)
continued = train(3)
accelerator.load_state(output)
resumed = train(3)
model.eval()
with torch.no_grad():
    evaluated = float(model(**next(iter(loader))).loss)
if accelerator.is_main_process:
    plugin = accelerator.state.megatron_lm_plugin
    rate = optimizer.param_groups[0]["lr"]
    result = {"losses": losses, "continued": continued, "resumed": resumed, "evaluated": evaluated, "rate": rate}
    print("RESULT", json.dumps(result | {"batch": plugin.global_batch_size, "reference": reference}))
"""
ALONE = """
from megatron.training import get_args
from megatron.training.gpt_builders import gpt_builder

twin = gpt_builder(get_args(), True, True)
twin.load_state_dict(model.base_model.module.state_dict())
decayed = [weight for weight in twin.parameters() if weight.dim() > 1]
others = [weight for weight in twin.parameters() if weight.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
plain = torch.optim.AdamW(groups, lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 - step / 20)
reference = []
for start in range(0, 64, 8):
    inputs = tokens[start : start + 8]
    labels = torch.cat([inputs[:, 1:], torch.zeros(8, 1, dtype=torch.long)], 1)
    logits = twin(inputs, torch.arange(8).expand(8, -1), torch.ones(1, 1, 8, 8).tril() < 0.5)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    plain.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    plain.step()
    schedule.step()
    reference.append(loss.item())
"""


def _train(folder: Path, ranks: int, tp: int, pp: int, rotary: bool = False) -> dict[str, Any]:
    text = PROGRAM.replace("ROTARY", str(rotary)).replace("REFERENCE", ALONE if ranks == 1 else "reference = None")
    folder.mkdir()
    (folder / "program.py").write_text(text)
    launcher = f"torchrun --nproc-per-node {ranks} -m megatron_core.drop_in --cpu"
    done = run_ranks_of(f"{launcher} {folder / 'program.py'} {tp} {pp} {folder / 'saved'}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _train(tmp_path_factory.mktemp("alone") / "run", 1, 1, 1)


def test_one_rank_trains_as_torch_alone(alone: dict[str, Any]) -> None:
    assert alone["batch"] == 8
    assert alone["losses"] == pytest.approx(alone["reference"], rel=1e-5)
    assert alone["losses"][-1] < alone["losses"][0] - 0.2


def test_a_saved_state_is_loaded(alone: dict[str, Any]) -> None:
    assert alone["resumed"] == pytest.approx(alone["continued"], rel=1e-6)
    assert alone["rate"] == pytest.approx(1e-2 * (1 - 11 / 20))


def test_rotary_positions_of_the_plugin_are_used(tmp_path: Path) -> None:
    result = _train(tmp_path / "run", 1, 1, 1, rotary=True)
    assert result["losses"] == pytest.approx(result["reference"], rel=1e-5)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 1), (1, 2)])
def test_layouts_train_as_one_rank(tp: int, pp: int, alone: dict[str, Any], tmp_path: Path) -> None:
    result = _train(tmp_path / "run", 2, tp, pp)
    for name in ("losses", "continued", "resumed", "evaluated"):
        assert result[name] == pytest.approx(alone[name], rel=1e-4), name
