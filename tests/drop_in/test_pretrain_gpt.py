"""A program with the imports and calls of Megatron-LM's ``pretrain_gpt.py`` trains like this package's own."""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_inference_spec,
)
from megatron.core.parallel_state import get_context_parallel_group, get_hybrid_data_context_parallel_groups
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.post_training.arguments import add_modelopt_args
from megatron.post_training.model_builder import ModelOptModelConfig
from megatron.post_training.utils import maybe_enable_modelopt
from megatron.training import get_args, inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.distillation import LossFuncCallable
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from megatron_core.errors import ConfigError
from megatron_core.parallel import World
from megatron_core.training import pretrain as train_with_launcher
from megatron_core.training import read_settings
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.test_own_parts import Softmax, with_core

COMMON = (
    "program.py --num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 0.01 --lr-decay-style constant --fp64 "
    "--tokenizer-type NullTokenizer --vocab-size 24 --make-vocab-size-divisible-by 8 --split 100,0,0 --eval-iters 0 "
    "--distributed-backend gloo --log-interval 1 --log-format megatron --hidden-dropout 0 --attention-dropout 0 "
    "--position-embedding-type rope --disable-bias-linear --calculate-per-token-loss "
)
EXPERTS = "--num-experts 4 --moe-router-load-balancing-type none "
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp2": "--context-parallel-size 2",
    "pp2 v2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "ep2": EXPERTS + "--expert-model-parallel-size 2",
}
PACKED = ("cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "local_cp_size", "max_seqlen")
KEYS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens", *PACKED)


def has_mtp(vp_stage: int | None) -> bool:
    config = core_transformer_config_from_args(get_args())
    layout, depths = config.pipeline_model_parallel_layout, config.mtp_num_layers
    return mtp_on_this_rank(layout=layout, mtp_num_layers=depths, ignore_virtual=False, vp_stage=vp_stage)


def get_batch(data_iterator: Any, vp_stage: int | None) -> list[Tensor | None]:
    args, batch = get_args(), dict[str, Any]()
    if not is_first_or_last_pipeline_stage(vp_stage) and not has_mtp(vp_stage):
        return [None for _ in KEYS]
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = next(data_iterator)
        found = {key: batch.get(key) for key in KEYS}
        batch = {key: None if x is None else x.cuda(non_blocking=True) for key, x in found.items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=args.sft or args.dataloader_inter_document_masking,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(vp_stage),
    )
    batch = get_batch_on_this_cp_rank(
        flatten_batch_for_packed_sequences(batch),
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=get_context_parallel_group(),
        hybrid_cp_group_func=get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=False,
    )
    return [batch[key] for key in KEYS]


def loss_func(mask: Tensor, output: Tensor, model: Any = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = torch.sum(output.view(-1) * mask.view(-1))
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    given = dict(zip(KEYS, get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage")), strict=True))
    tokens, positions, mask, loss_mask = (
        given[name] for name in ("tokens", "position_ids", "attention_mask", "loss_mask")
    )
    output = model(tokens, positions, mask, labels=given["labels"], loss_mask=loss_mask, packed_seq_params=None)
    return output, partial(loss_func, loss_mask, model=model)


def datasets(sizes: tuple[int, int, int], vp_stage: int | None = None) -> Any:
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )

    def is_built() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, is_built, config).build()


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    args = get_args()
    config = core_transformer_config_from_args(args)
    spec: Any = get_gpt_layer_local_spec(args.num_experts, args.moe_grouped_gemm, args.qk_layernorm)
    if args.spec is not None:
        spec = import_module(args.spec)
    elif args.num_experts:
        spec = get_gpt_decoder_block_spec(config, False, args.normalization, args.qk_l2_norm, vp_stage)
    return GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def job(form: str, more: str) -> str:
    """The output of a run in the format of a release."""
    sys.argv, out = (COMMON + more).split(), StringIO()
    mpu.destroy_model_parallel()
    set_startup_timestamps(program_start=0.0, main_entry=1.0)
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    with redirect_stdout(out):
        if form == "0.16":
            run(
                datasets,
                model_provider,
                ModelType.encoder_or_decoder,
                forward_step,
                extra_args_provider=add_modelopt_args,
                args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
                store=store,
            )
            return out.getvalue()
        args = parse_and_validate_args(extra_args_provider=add_modelopt_args)
        maybe_enable_modelopt(args)
        model = gpt_config_from_args(args)
        assert get_mtp_ranks([3, 4], model.transformer) == []
        if form == "0.18":
            container = pretrain_cfg_container_from_args(args)
            run(container, datasets, model_provider, ModelType.encoder_or_decoder, forward_step, store=store)
        else:
            container = pretrain_cfg_container_from_args(args, model)
            run(container, datasets, ModelType.encoder_or_decoder, forward_step, store=store, get_embedding_ranks=None)
    return out.getvalue()


def steps(text: str) -> np.ndarray:
    """Loss and norm of every step in a log."""
    found = re.findall(r"lm loss: (\S+) \|.*?grad norm: (\S+) \|", text)
    return np.array(found, dtype=float)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flags for a data file of 80 documents."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    builder, rng = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16), np.random.default_rng(0)
    for length in rng.integers(5, 40, size=80):
        builder.add_item(torch.from_numpy(np.append(rng.integers(0, 23, size=length), 23)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return f"--data-path {prefix} --data-cache-path {prefix.parent} --eod-mask-loss "


@pytest.fixture(scope="module")
def expected(data: str) -> dict[bool, np.ndarray]:
    """Losses and norms of this package's own program on one rank, without and with experts."""
    return {experts: steps(run_ranks(1, launcher, data + EXPERTS * experts)[0]) for experts in (False, True)}


def launcher(more: str) -> str:
    """The output of this package's own ``pretrain_gpt.py``."""
    out = StringIO()
    config, _ = read_settings("program.py", [*COMMON.split()[1:], *more.split(), "--data-order", "megatron"])
    with redirect_stdout(out):
        train_with_launcher(config, World.from_environment())
    return out.getvalue()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", ["0.16", "0.18", "0.20"])
def test_forms_of_pretrain(expected: Any, data: str, form: str) -> None:
    found = steps(run_ranks(1, job, form, data)[0])
    assert len(found) == 3
    np.testing.assert_allclose(found, expected[False], rtol=0, atol=2e-3)


class Announced(Softmax):
    """Attention of the program's own, which says that it is built."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.temperature.requires_grad_(False)
        print("attention of the program")


announced_spec = with_core(Announced)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", ["0.16", "0.20"])
def test_spec_builds_layers_of_the_program(expected: Any, data: str, form: str) -> None:
    log = run_ranks(1, job, form, f"{data} --spec {__name__} announced_spec")[0]
    assert log.count("attention of the program") == 4
    np.testing.assert_allclose(steps(log), expected[False], rtol=0, atol=2e-3)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_our_own_launcher(expected: Any, data: str, layout: str) -> None:
    logs = run_ranks(2, job, "0.20", data + LAYOUTS[layout])
    found = steps("".join(logs))
    assert len(found) == 3
    np.testing.assert_allclose(found[:, 0], expected["ep" in layout][:, 0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(found[:, 1], expected["ep" in layout][:, 1], rtol=0, atol=2e-3)


def test_packed_sequences_are_joined() -> None:
    batch = {
        "tokens": torch.arange(8).view(2, 4),
        "cu_seqlens": torch.tensor([[0, 1, 4, 4], [0, 2, 3, 4]], dtype=torch.int32),
        "max_seqlen": torch.tensor([3, 2]),
    }
    joined = flatten_batch_for_packed_sequences(batch)
    assert joined["tokens"].tolist() == [list(range(8))]
    assert joined["cu_seqlens"].tolist() == [[0, 1, 4, 6, 7, 8]]
    assert joined["max_seqlen"].tolist() == [3]


@pytest.mark.parametrize("use", [LossFuncCallable, ModelOptModelConfig, get_gpt_layer_with_inference_spec])
def test_features_that_are_not_supported_are_errors_when_used(use: Any) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        use(**({"transformer": None} if use is ModelOptModelConfig else {}))
