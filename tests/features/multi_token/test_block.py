"""Multi-token prediction against its formula with shifts of whole sequences, as in Megatron-LM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_core.config import ModelConfig
from megatron_core.models import GPTModel
from megatron_core.parallel.micro_batch import MicroBatch, SequenceDetails, SequenceSplit
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses
from megatron_core.transformer.context import ForwardState, SequenceContext

VOCABULARY, LENGTH, BATCH, DEPTHS, FACTOR = 31, 12, 3, 2, 0.7


def _model(**settings: object) -> GPTModel:
    config = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        position_embedding_type="rope",
        mtp_num_layers=DEPTHS,
        mtp_loss_scaling_factor=FACTOR,
        **settings,
    )
    return GPTModel(config, VOCABULARY, LENGTH, parallel=ModelParallelConfig(params_dtype=torch.float64))


def _batch(**more: Tensor) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=random)
    mask = (torch.rand(BATCH, LENGTH, generator=random) < 0.7).to(torch.float64)
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "sample_index": torch.arange(BATCH), **more}


def _rolled(x: Tensor) -> Tensor:
    x = x.roll(-1, 1)
    x[:, -1] = 0
    return x


def _written_out(model: GPTModel, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The minimised sum and the means of the later losses."""
    ids, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
    embedding, head = model.embedding.word_embeddings.weight, model.output_layer.weight
    head = (embedding if head is None else head)[:VOCABULARY]
    context = SequenceContext(rotary=model._rotary(torch.arange(LENGTH)[None]))
    hidden = model.decoder(embedding[ids].transpose(0, 1), context)
    means: list[Tensor] = []
    for depth in range(DEPTHS + 1):
        if depth:
            layer = model.mtp.layers[depth - 1]
            ids, labels, mask = _rolled(ids), _rolled(labels), _rolled(mask)
            both = torch.cat([layer.enorm(embedding[ids].transpose(0, 1)), layer.hnorm(hidden)], dim=-1)
            hidden = layer.final_layernorm(layer.mtp_model_layer(both @ layer.eh_proj.weight.t(), context))
        losses = cross_entropy((hidden @ head.t()).permute(1, 2, 0), labels, reduction="none")
        means.append((losses * mask).sum() / mask.sum())
    return means[0] + FACTOR / DEPTHS * sum(means[1:]), means


@pytest.mark.parametrize("untied", [False, True])
def test_losses_and_gradients_are_those_written_out(untied: bool) -> None:
    model, batch = _model(untie_embeddings_and_output_weights=untied), _batch()
    total, means = _written_out(model, batch)
    total.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    micro = MicroBatch.of(batch, SequenceSplit(), torch.device("cpu"), later=DEPTHS)
    counts = {f"mtp_{k + 1}_loss": micro.later.masks[k].sum() for k in range(DEPTHS)}
    auxiliary = AuxiliaryLosses(tuple(counts), BATCH, counts=counts)
    losses = model(
        micro.tokens,
        labels=micro.labels,
        sequences=SequenceDetails(loss_mask=micro.loss_mask, later=micro.later),
        state=ForwardState(auxiliary_losses=auxiliary.of_micro_batch(0)),
    )
    loss = (losses * micro.loss_mask).sum() / micro.loss_mask.sum()
    loss.backward()
    torch.testing.assert_close(loss, means[0], rtol=1e-12, atol=0)
    found = auxiliary.means(auxiliary.totals(torch.device("cpu"), owns_loss=True).tolist())
    torch.testing.assert_close(
        torch.tensor([found[name] for name in counts], dtype=torch.float64), torch.stack(means[1:]), rtol=1e-12, atol=0
    )
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-10, atol=1e-12, msg=name)


def test_tokens_of_the_next_document_do_not_count() -> None:  # C45
    lengths = torch.tensor([[5, 7, 0], [12, 0, 0], [1, 3, 8]])
    batch = _batch(document_lengths=lengths)
    batch["loss_mask"] = torch.ones(BATCH, LENGTH)
    masks = MicroBatch.of(batch, SequenceSplit(), torch.device("cpu"), later=2).later.masks
    assert masks.sum(-1).tolist() == [[10, 11, 9], [8, 10, 7]]


def test_evaluation_and_generation_do_without() -> None:
    model, batch = _model(), _batch()
    plain = GPTModel(
        ModelConfig(**{**vars(model.config), "mtp_num_layers": None, "mtp_loss_scaling_factor": 0.1}),
        VOCABULARY,
        LENGTH,
        parallel=model.parallel,
    )
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model.eval()(batch["tokens"]), plain.eval()(batch["tokens"]))
