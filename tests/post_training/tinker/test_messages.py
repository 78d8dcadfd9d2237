"""Our messages against those of the client, and the losses against their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.errors import DataError
from megatron_core.post_training.tinker_server import messages
from megatron_core.post_training.tinker_server.bodies import SampleBody, checked_name, checked_path, read_body
from megatron_core.post_training.tinker_server.losses import LossCall, joint_objective

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
    datum.loss_fn_inputs.add(key="weights").value.sparse_csr.values = b""
    with pytest.raises(DataError, match="datum 0: weights is sparse"):
        messages.forward_request(request.SerializeToString())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_fn": "dro"}, "loss_fn='dro' is not supported; give one of cross_entropy"),
        ({"loss_fn_config": {"beta": 1.0}}, "loss_fn_config of ppo has beta; legal: clip_low_threshold"),
        ({"loss_fn_config": {"clip_low_threshold": "x"}}, "must be a finite number"),
        ({"data": []}, "data is empty"),
        ({"mask": [1.0, 1.0, 1.0]}, "loss_fn_inputs of ppo have mask; remove them"),
        ({"advantages": [1.0]}, "advantages has 1 numbers for 3 tokens"),
        ({"advantages": [1.0, float("nan"), 0.0]}, "advantages has numbers that are not finite"),
        ({"target_tokens": [2, 3, 10]}, "target_tokens has tokens outside of the vocabulary, 0 to 9"),
        ({"target_tokens": [2.0, 3.0, 4.0]}, "target_tokens are float32"),
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


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_losses_and_their_gradients_are_those_of_the_documentation(loss_fn: str) -> None:
    draw = np.random.RandomState(3)
    log_probs = torch.tensor(draw.normal(-1.0, 0.5, 40), requires_grad=True)
    sampling = torch.tensor(draw.normal(-1.0, 0.5, 40))
    advantages = torch.tensor(draw.normal(0.0, 1.0, 40))
    ratio = torch.exp(log_probs - sampling)
    clipped = torch.clamp(ratio, 0.9, 1.3)
    expected = {
        "cross_entropy": -log_probs * advantages,
        "importance_sampling": -(ratio * advantages),
        "ppo": -torch.min(ratio * advantages, clipped * advantages),
        "cispo": -(clipped.detach() * log_probs * advantages),
    }[loss_fn]
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
    names = ["weights"] if loss_fn == "cross_entropy" else ["logprobs", "advantages"]
    inputs = {"weights": advantages, "logprobs": sampling, "advantages": advantages}
    call = LossCall(
        loss_fn,
        clip if loss_fn in ("ppo", "cispo") else {},
        [{"tokens": [0] * 40, "inputs": {name: inputs[name].tolist() for name in names}}],
    )
    (losses,) = call.losses([log_probs])
    torch.testing.assert_close(losses, expected)
    # Together with another call, whose tokens it does not change.
    other = LossCall("importance_sampling", {}, call.data)
    batch: Any = {name: torch.cat([inputs[name], inputs[name]]) for name in inputs}
    batch["call"] = torch.tensor([0.0] * 40 + [1.0] * 40)
    both = joint_objective([call, other])(torch.cat([log_probs, log_probs]), batch)
    torch.testing.assert_close(both[:40], expected)
    (ours,) = torch.autograd.grad(both[:40].sum(), log_probs, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.sum(), log_probs)
    torch.testing.assert_close(ours, theirs)


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
