"""``TransformerConfig.fp32_residual_connection``: layers and pipelines of Megatron Core pass float32 on."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron_core import parallel_state
from megatron_core.models.gpt import model as own
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.test_gpt_model import IDS, LENGTH, VOCABULARY, config, gpt

WIDE = {"params_dtype": torch.bfloat16, "bf16": True, "fp32_residual_connection": True}


def test_the_model_is_that_of_this_package() -> None:
    settings = config(**WIDE)
    theirs = settings.model_config(make_vocab_size_divisible_by=1, untie_embeddings_and_output_weights=True)
    assert theirs.fp32_residual_connection
    model = gpt(settings)
    twin = own.GPTModel(theirs, VOCABULARY, LENGTH, parallel=settings.parallel_options(), seed=7)
    assert torch.equal(model(IDS, labels=IDS), twin(IDS, labels=IDS))


def test_a_layer_alone_widens_its_input() -> None:
    layer = gpt(config(**WIDE)).decoder.layers[0]
    hidden = torch.randn(LENGTH, 2, 16).bfloat16()
    narrow, _ = layer(hidden, attention_mask=None)
    wide, _ = layer(hidden.float(), attention_mask=None)
    assert narrow.dtype == wide.dtype == torch.float32
    torch.testing.assert_close(narrow, wide, rtol=2**-7, atol=2**-7)


def _losses() -> list[float]:
    """The loss of a step in this layout; messages have the dtype of the residual stream, not ``pipeline_dtype``."""
    size = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(1, size)
    settings = config(**WIDE, pipeline_dtype=torch.bfloat16, pipeline_model_parallel_size=size)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    spec = get_gpt_layer_local_spec()
    model = GPTModel(settings, spec, VOCABULARY, LENGTH, pre_process=first, post_process=last)

    def step(iterator, model: GPTModel):
        def report(losses: Tensor) -> tuple[Tensor, dict[str, float]]:
            return losses.mean(), {"loss": losses.mean().item()}

        return model(next(iterator), labels=IDS if last else None), report

    reports = get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter([IDS, IDS.flip(1)]), model=[model], num_microbatches=2,
        seq_length=LENGTH, micro_batch_size=2, forward_only=False,
    )  # fmt: skip
    assert all(parameter.grad is not None for parameter in model.parameters())
    return [report["loss"] for report in reports]


def test_a_pipeline_sends_float32() -> None:
    ((alone,), (before, after)) = run_ranks(1, _losses), run_ranks(2, _losses)
    assert (before, after) == ([], alone) and len(alone) == 2
