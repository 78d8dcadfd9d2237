"""Further names of Megatron Core: patterns, trackers of losses, requests to save."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.distributed.finalize_model_grads import _reshard_if_dtensor, _unshard_if_dtensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    get_hybrid_layer_counts,
    get_layer_maps_from_layer_type_list,
    parse_hybrid_pattern,
    pattern_from_ratios,
    select_pipeline_segment,
)
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.rerun_state_machine import (
    RerunErrorInjector,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.utils import local_multi_tensor_l2_norm, to_local_if_dtensor
from megatron_core.errors import ConfigError
from tests.drop_in.test_gpt_model import IDS, config, gpt
from tests.drop_in.test_own_parts import EXPERTS


def test_patterns_of_hybrid_models() -> None:
    parsed = parse_hybrid_pattern("M-M-|M*-/MM/MM")
    assert (parsed.main_pattern, parsed.mtp_pattern, parsed.mtp_num_depths) == ("M-M-|M*-", "MM", 2)
    assert get_hybrid_layer_counts("M-M-|M*-/MM/MM") == {"*": 1, "D": 0, "G": 0, "M": 7, "+": 0, "-": 3, "E": 0}
    assert pattern_from_ratios(8, 0.25, 0.25).count("*") == 2
    assert pattern_from_ratios(3, 1.0) == "***"
    assert select_pipeline_segment("M*|M-", None, 1) == (["M", "-"], 2)
    assert get_layer_maps_from_layer_type_list(["M", "*", "M"])["M"] == {0: 0, 2: 1}
    for wrong in ("MX", "M/M-/MM", "M*+", "M/M|M"):
        with pytest.raises(ConfigError):
            parse_hybrid_pattern(wrong)


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -1.0], requires_grad=True)])
def test_gradients_of_the_router_are_those_of_torch(bias: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(5, 2, 3, generator=generator, requires_grad=True)
    weight = torch.randn(2, 3, generator=generator, requires_grad=True)
    logits = moe_utils.RouterGatingLinearFunction.apply(inputs, weight, bias, torch.float64)
    plain = torch.nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    assert logits.dtype == torch.float64 and logits.equal(plain)
    leaves = [inputs, weight, *([] if bias is None else [bias])]
    found, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in (logits, plain))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_experts_keep_their_capacity() -> None:
    probs = torch.tensor([[0.9, 0.0], [0.6, 0.0], [0.0, 0.7], [0.8, 0.0]])
    kept, chosen = moe_utils.apply_router_token_dropping(probs, probs > 0, 1, 1.0)
    assert chosen.tolist() == [[True, False], [False, False], [False, True], [True, False]]
    assert kept.equal(probs * chosen)
    _, first = moe_utils.apply_router_token_dropping(probs, probs > 0, 1, 1.0, "position")
    assert first[:, 0].tolist() == [True, True, False, False]
    _, padded = moe_utils.apply_router_token_dropping(probs, probs > 0, 1, 1.0, pad_to_capacity=True)
    assert padded.sum(0).tolist() == [2, 2]


def test_losses_of_experts_are_tracked() -> None:
    destroy_moe_metrics_tracker()
    model = gpt(config(**EXPERTS, moe_aux_loss_coeff=0.01), get_gpt_layer_local_spec(num_experts=4))
    for _ in range(2):
        model(IDS, labels=IDS)
    losses = model.auxiliary_losses
    assert losses is not None
    (name,) = moe_utils.get_moe_layer_wise_logging_tracker()
    mean = losses.means(losses.totals(IDS.device, owns_loss=True).tolist())[name]
    values = get_moe_metrics_tracker().metrics[name].values
    assert values.min() > 0
    torch.testing.assert_close(values.sum() / 2, torch.tensor(mean))
    found: dict[str, Any] = {}
    layers = len(values)
    assert moe_utils.track_moe_metrics(0.5, 1, total_loss_dict=found, num_layers=layers) == ""
    assert found.keys() == {name} and values.tolist() == [0.0] * layers
    moe_utils.save_to_aux_losses_tracker("z", torch.tensor(3.0), 1, layers)
    assert "z: 1.500000E+00" in moe_utils.track_moe_metrics(1.0, 1, track_names="z", num_moe_layers=2)
    moe_utils.clear_aux_losses_tracker()
    with pytest.raises(ConfigError, match="at least one MoE layer"):
        moe_utils.track_moe_metrics(1.0, 1, num_moe_layers=0)


def test_requests_to_save_are_carried_out_at_once() -> None:
    calls: list[Any] = []
    queue = AsyncCallsQueue()
    request = AsyncRequest(lambda *args, **kwargs: calls.append((args, kwargs)), (1,), [], {"two": 2})
    request.add_finalize_fn(lambda: calls.append("finalized"))
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(lambda: None)
    assert queue.schedule_async_request(request) == 0 and calls == [((1,), {"two": 2}), "finalized"]
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls() == [0] and queue.maybe_finalize_async_calls() == []


def test_tensors_that_are_not_dtensors_stay() -> None:
    tensor = torch.arange(4.0)
    assert (
        _unshard_if_dtensor(tensor) is tensor is _reshard_if_dtensor(tensor + 1, tensor) is to_local_if_dtensor(tensor)
    )
    norm, _ = local_multi_tensor_l2_norm(1, None, [[tensor], [torch.ones(2)]], False)
    torch.testing.assert_close(norm, torch.tensor([16.0]).sqrt())


def test_machines_that_are_not_needed_say_so() -> None:
    assert PipelineOffloadManager.OFFLOAD_MGR is None
    with pytest.raises(ConfigError, match="offload_modules"):
        PipelineOffloadManager.get_instance()
    before = get_rerun_state_machine()
    initialize_rerun_state_machine(error_injector=RerunErrorInjector())
    assert get_rerun_state_machine() is not before
    with pytest.raises(ConfigError, match="error_injection_rate=3"):
        RerunErrorInjector(error_injection_rate=3)
