"""The state of SOAP's and AdaMuon's matrices by formula is that of the optimizer."""

from __future__ import annotations

import pytest

from megatron_core.planner.footprint import Footprint
from megatron_core.planner.memory import matrix_state_elements
from megatron_core.planner.parameters import rank_units
from megatron_core.reports.dry_run import RankEstimate
from tests.planner.test_parameters import CASES
from tests.runs import tiny_config, tiny_run

MODELS = (
    "one rank",
    "gated attention, tp2",
    "kimi delta attention, latents, tp2",
    "pattern of layers, experts, pp2, lora",
    "pattern of layers, sandwich, tp2",
    "experts, tp2 etp1",
    "latent experts, tp2 ep2 etp1",
    "sparse attention, pp2",
    "sparse attention, indexers not trained, tp2",
    "sparse attention, warm-up, zb_v",
    "two tokens ahead, pp2",
    "dora, parts, fewer groups, tp4",
    "lora of parts of delta nets, tp2",
)
OF_LAYOUTS = ("_parallel_size", "_stages_per_pipeline_rank", "sequence_parallel", "pipeline_schedule", "optimizer")


@pytest.mark.parametrize("name", MODELS)
def test_formula_counts_the_state(name: str) -> None:
    settings = {key: value for key, value in CASES[name].items() if not key.endswith(OF_LAYOUTS)}
    soap, adaptive = {"optimizer": "soap", "soap_max_precondition_dim": 100}, {"optimizer": "adaptive_muon"}
    cases = [soap | {"soap_split_gate_up": split, "soap_split_qkv": split} for split in (False, True)]
    for case in (*cases, *(adaptive | {"adaptive_muon_moment2_method": name} for name in ("adamuon", "normuon"))):
        run = tiny_run(**settings, **case)
        found = sum(piece.memory.numel() for piece in run.optimizer.joint_state())
        layers = list(range(run.config.model.num_layers))
        assert found == matrix_state_elements(run.config, layers, has_mtp=True) > 0


def test_ranks_of_a_stage_divide_the_state() -> None:
    config = tiny_config(
        optimizer="soap", num_layers=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, zero_stage=1
    )
    ranks = [RankEstimate.of(config, 8, rank) for rank in range(8)]
    first = ranks[0]
    units = rank_units(first.config, first.layers, first.plan.stage_to_rank, first.vocab_size)
    formula = Footprint.of(first.config, 8, first.plan, first.layers, units, first.vocab_size)
    real = [sum(rank.bytes_by_kind["optimizer"] for rank in ranks if rank.groups.index("pp") == at) for at in (0, 1)]
    for stage, found in enumerate(real):
        expected = 4 * formula.state(stage)["optimizer"]
        assert expected <= found <= 1.02 * expected + 4096
