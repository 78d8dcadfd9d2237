"""Our messages against those of the client, and the losses against their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.errors import DataError
from megatron_core.post_training.tinker_server import messages
from megatron_core.post_training.tinker_server.bodies import SampleBody, checked_name, checked_path, read_body
from megatron_core.post_training.tinker_server.losses import LOSSES, LossCall, joint_objective

tinker = pytest.importorskip("tinker", reason="tinker needs Python 3.11")


def _request(loss_fn: str = "ppo", **inputs: list[float]) -> dict[str, Any]:
    values = {"target_tokens": [2, 3, 9], "logprobs": [-1.0, -0.5, -2.0], "advantages": [1.0, -1.0, 0.0], **inputs}
    return {"loss_fn": loss_fn, "loss_fn_config": {}, "data": [{"tokens": [1, 2, 3], "inputs": values}]}


def _sent(**loss: Any) -> bytes:
    """A request as the client sends it."""
    from tinker.proto.request_conv import forward_backward_request_to_proto

    data = [
        tinker.Datum(
            model_input=tinker.ModelInput(
                chunks=[tinker.EncodedTextChunk(tokens=[5, 6]), tinker.EncodedTextChunk(tokens=[7])]
            ),
            loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [0.0, 0.5, 1.0]},
        )
    ]
    content = tinker.types.ForwardBackwardInput(data=data, loss_fn="ppo", **loss)
    request = tinker.types.ForwardBackwardRequest(forward_backward_input=content, model_id="m", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


def test_a_request_of_the_client_is_read() -> None:
    assert messages.forward_request(_sent(loss_fn_config={"clip_low_threshold": 0.75, "mode": "x"})) == {
        "model_id": "m",
        "seq_id": 3,
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_low_threshold": 0.75, "mode": "x"},
        "forward_only": False,
        "data": [{"tokens": [5, 6, 7], "inputs": {"target_tokens": [6, 7, 8], "weights": [0.0, 0.5, 1.0]}}],
    }


def test_answers_are_read_by_the_client() -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    rows = {"logprobs": [[-1.5, -2.5], [-0.25]]}
    output = deserialize_forward_backward_output(messages.forward_output(rows, {"loss:sum": 4.25}))
    assert output.metrics == {"loss:sum": 4.25}
    assert [datum["logprobs"].tolist() for datum in output.loss_fn_outputs] == rows["logprobs"]
    sequence = {"tokens": [4, 5], "logprobs": [-1.0, -2.0], "stop_reason": "stop", "top": [[(4, -1.0)], [(7, -0.5)]]}
    answer = {"sequences": [sequence], "prompt_logprobs": [None, -3.0], "prompt_top": [[], [(1, -3.0), (2, -4.0)]]}
    sampled = deserialize_sample_response(messages.sample_output(answer))
    assert sampled.prompt_logprobs == [None, -3.0]
    assert sampled.topk_prompt_logprobs_np.token_ids.tolist() == [[0, 0], [1, 2]]
    (first,) = sampled.sequences
    assert (list(first.tokens), list(first.logprobs), first.stop_reason) == ([4, 5], [-1.0, -2.0], "stop")
    assert first.topk_logprobs_np.token_ids.tolist() == [[4], [7]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xff", "not a protobuf message"),
        (b"\xf8\x07\x01", r"fields that this server does not know, with the numbers \[127\]"),
    ],
)
def test_other_bytes_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        messages.forward_request(body)


def test_images_and_sparse_tensors_are_refused() -> None:
    request = messages.MESSAGES["ForwardBackwardRequest"]()
    datum = request.data.add()
    datum.model_input.add().image.SetInParent()
    with pytest.raises(DataError, match="datum 0: model_input has image"):
        messages.forward_request(request.SerializeToString())
    datum.ClearField("model_input")
    entry = datum.loss_fn_inputs.add(key="weights").value
    entry.dtype = messages.FLOAT32
    entry.shape.extend([2, 3])
    rows = entry.sparse_csr
    rows.values = np.float32([5.0, 6.0]).tobytes()
    rows.crow_indices = np.int64([0, 1, 2]).tobytes()
    rows.col_indices = np.int64([2, 0]).tobytes()
    (read,) = messages.forward_request(request.SerializeToString())["data"]
    assert read["inputs"]["weights"] == [[0.0, 0.0, 5.0], [6.0, 0.0, 0.0]]
    for field, numbers in (("col_indices", [3, 0]), ("crow_indices", [0, 2, 1])):
        changed = messages.MESSAGES["ForwardBackwardRequest"]()
        changed.CopyFrom(request)
        broken = changed.data[0].loss_fn_inputs[-1].value.sparse_csr
        setattr(broken, field, np.int64(numbers).tobytes())
        with pytest.raises(DataError, match=r"datum 0: weights of the shape \[2, 3\] is not a matrix"):
            messages.forward_request(changed.SerializeToString())
    del entry.shape[:]
    entry.shape.extend([2**40, 2**20])
    with pytest.raises(DataError, match="is not a matrix in compressed rows"):
        messages.forward_request(request.SerializeToString())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_fn": "stable_reinforce"}, "loss_fn='stable_reinforce' is not supported; give one of cross_entropy"),
        ({"loss_fn": "dro"}, "loss_fn_config of dro lacks beta, which has no default here"),
        ({"loss_fn_config": {"beta": 1.0}}, "loss_fn_config of ppo has beta; legal: clip_low_threshold"),
        ({"loss_fn_config": {"clip_low_threshold": "x"}}, "must be a finite number"),
        ({"data": []}, "data is empty"),
        ({"mask": [1.0, 1.0, 1.0]}, "loss_fn_inputs of ppo have mask; remove them"),
        ({"advantages": [1.0]}, "advantages has 1 numbers for 3 tokens"),
        ({"advantages": [1.0, float("nan"), 0.0]}, "advantages has numbers that are not finite"),
        ({"target_tokens": [2, 3, 10]}, "target_tokens has tokens outside of the vocabulary, 0 to 9"),
        ({"target_tokens": [2.0, 3.0, 4.0]}, "target_tokens are float32"),
        ({"target_tokens": [[2, 3]] * 3}, r"have the shape \[3, 2\]; only cross_entropy has several targets"),
    ],
)
def test_illegal_data_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    request = _request()
    for name, value in change.items():
        (request if name in request else request["data"][0]["inputs"])[name] = value
    with pytest.raises(DataError, match=message):
        LossCall.of(request, vocab_size=10, longest=3)


def test_a_longer_datum_than_a_row_is_refused() -> None:
    with pytest.raises(DataError, match="datum 0 has 3 tokens; give 1 to 2"):
        LossCall.of(_request(), vocab_size=10, longest=2)


SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.05},
}


@pytest.mark.parametrize("loss_fn", SETTINGS)
def test_losses_and_their_gradients_are_those_of_the_documentation(loss_fn: str) -> None:
    draw = np.random.RandomState(3)
    log_probs = torch.tensor(draw.normal(-1.0, 0.5, 40), requires_grad=True)
    sampling = torch.tensor(draw.normal(-1.0, 0.5, 40))
    advantages = torch.tensor(draw.normal(0.0, 1.0, 40))
    marked = torch.tensor(draw.randint(0, 2, 40), dtype=torch.float64)
    ratio = torch.exp(log_probs - sampling)
    clipped = torch.clamp(ratio, 0.9, 1.3)
    log_ratio = (log_probs.detach() - sampling)[marked != 0].mean()
    of_sequence = torch.exp(log_ratio + log_probs - log_probs.detach())
    expected = {
        "cross_entropy": -log_probs * advantages,
        "importance_sampling": -(ratio * advantages),
        "ppo": -torch.min(ratio * advantages, clipped * advantages),
        "cispo": -(clipped.detach() * log_probs * advantages),
        "gspo": -torch.min(of_sequence * advantages, torch.clamp(of_sequence, 0.9, 1.3) * advantages),
        "dro": -(log_probs * advantages - 0.5 * 0.05 * (log_probs - sampling) ** 2),
    }[loss_fn]
    of_names = {"weights": advantages, "logprobs": sampling, "advantages": advantages, "sequence_ratio_mask": marked}
    names = LOSSES[loss_fn].inputs
    datum = {"tokens": [0] * 40, "inputs": {name: of_names[name].tolist() for name in names}}
    datum["inputs"]["target_tokens"] = [1] * 40
    request = {"loss_fn": loss_fn, "loss_fn_config": SETTINGS[loss_fn], "data": [datum]}
    call = LossCall.of(request, vocab_size=2, longest=40)
    _, (losses,) = call.losses([log_probs])
    torch.testing.assert_close(losses, expected)
    # Together with another call, whose tokens it does not change.
    other = LossCall.of(
        {"loss_fn": "importance_sampling", "loss_fn_config": {}, "data": [_policy_datum(sampling, advantages)]},
        vocab_size=2,
        longest=40,
    )
    trained = [*call.trained(0), *other.trained(1)]
    values = trained[0].values
    batch: Any = {name: torch.tensor(np.concatenate([entry.row(name) for entry in trained])) for name in values}
    both = joint_objective([call, other])(torch.cat([log_probs, log_probs]), batch)
    torch.testing.assert_close(both[:40], expected)
    (ours,) = torch.autograd.grad(both[:40].sum(), log_probs, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.sum(), log_probs)
    torch.testing.assert_close(ours, theirs)


def _policy_datum(sampling: torch.Tensor, advantages: torch.Tensor) -> dict[str, Any]:
    inputs = {"target_tokens": [1] * 40, "logprobs": sampling.tolist(), "advantages": advantages.tolist()}
    return {"tokens": [0] * 40, "inputs": inputs}


def test_thresholds_may_differ_between_tokens() -> None:
    datum = {"tokens": [0, 0], "inputs": {"target_tokens": [1, 1], "logprobs": [0.0, 0.0], "advantages": [1.0, 1.0]}}
    datum["inputs"]["clip_high_threshold"] = [1.5, 1.1]
    call = LossCall.of({"loss_fn": "ppo", "loss_fn_config": {}, "data": [datum]}, vocab_size=2, longest=2)
    _, (losses,) = call.losses([torch.tensor([1.0, 1.0])])
    torch.testing.assert_close(losses, torch.tensor([-1.5, -1.1]))


def test_unknown_fields_and_wrong_types_are_refused_by_name() -> None:
    body = b'{"prompt": {"chunks": []}, "sampling_params": {"top_p": 2.0, "min_p": 0.1}, "prompt_alt_tokens_k": 3}'
    with pytest.raises(DataError, match=r"top_p: .*less than or equal to 1; .*min_p: is not supported.*alt_tokens_k"):
        read_body(SampleBody, body)


@pytest.mark.parametrize("name", ["", None, "..", ".x", "a/b", "a b", "x" * 129, "a\n"])
def test_names_cannot_leave_the_folder(name: str | None) -> None:
    with pytest.raises(DataError, match="must be a name"):
        checked_name(name)
    with pytest.raises(DataError, match="is not a path of this server"):
        checked_path(f"tinker://ab:train:0/weights/{name}/..")
