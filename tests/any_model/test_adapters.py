"""Adapters of peft on a model whose weights are split by ZeRO 3; expected: torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

import megatron_core
from megatron_core.verify.ranks import RankFailure, run_ranks

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
DENSE = {name: size for name, size in SIZES.items() if "expert" not in name}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANKS, STEPS, RATE = 2, 3, 0.5


def _adapted_experts() -> Any:
    torch.manual_seed(0)
    model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    model.set_experts_implementation("eager")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS, init_lora_weights=False)
    return peft.get_peft_model(model, settings).double()


def _adapted_ranks() -> Any:
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DENSE))
    settings = peft.AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=9, tinit=1, target_modules=["q_proj"]
    )
    return peft.get_peft_model(model, settings).double()


def _tokens(step: int) -> Tensor:
    return torch.randint(0, 32, (RANKS, 7), generator=torch.Generator().manual_seed(step))


def _expected(make: Callable[[], Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=_tokens(step), labels=_tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, peft.get_peft_model_state_dict(model)


def _trained(make: Callable[[], Any], settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {"fp64": True, "global_batch_size": RANKS, "micro_batch_size": 1, "clip_grad": 0.0, **settings}
    engine = megatron_core.initialize(model, config, torch.optim.SGD(trained, lr=RATE)).engine
    losses = []
    for step in range(STEPS):
        rows = _tokens(step)[torch.distributed.get_rank()][None]
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        report = engine.step()
        assert report is not None
        losses.append(report.loss)
    adapters = peft.get_peft_model_state_dict(model, engine.full_state_dict())
    return losses, {name: value.clone() for name, value in adapters.items()}


def test_lora_of_experts_at_stage_3() -> None:
    """peft registers a parametrization of the experts' weights in each forward, which sets their memory again."""
    expected = _expected(_adapted_experts)
    assert any("experts" in name for name in expected[1])
    for kept in (False, True):
        for found in run_ranks(RANKS, _trained, _adapted_experts, {"zero_stage": 3, "zero3_keep_after_forward": kept}):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # attention and loss are in float32


def test_adalora_whose_loss_reads_adapters_outside_of_their_modules() -> None:
    settings = {"zero_stage": 3, "zero3_param_persistence_threshold": 0}
    with pytest.raises(RankFailure, match=r"lora_A.*zero3_param_persistence_threshold .* to its number of elements"):
        run_ranks(RANKS, _trained, _adapted_ranks, settings)
    settings["zero3_param_persistence_threshold"] = 64
    expected = _expected(_adapted_ranks)
    for found in run_ranks(RANKS, _trained, _adapted_ranks, settings):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
