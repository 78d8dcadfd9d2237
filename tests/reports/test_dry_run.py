"""A rank on the meta device has the parameters and buffers of training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_core.config.cli import DryRun, parse_command_line
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.planner import state_by_kind
from megatron_core.reports.dry_run import RankEstimate, describe_rank, readable_bytes
from megatron_core.training import read_settings
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_config, tiny_run

ROOT = Path(__file__).resolve().parents[2]
GQA = {"group_query_attention": True, "num_query_groups": 2, "tensor_model_parallel_size": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2, tied": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    "pp2 dp2 zero1, bf16": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "bf16": True},
    "dp4 zero2, bf16": {"zero_stage": 2, "bf16": True},
    "tp2 dp2 zero3, overlap": {"zero_stage": 3, "tensor_model_parallel_size": 2, "overlap_param_gather": True},
    "tp4, shared keys, small buckets": GQA | {"ddp_bucket_size": 1000, "fp16": True},
}


def _allocated(settings: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Parameters of this rank, and the bytes of the storages of its weights, gradients and optimizer state."""
    run = tiny_run(**settings)
    parameters = [p for stage in run.stages.values() for p in stage.parameters()]
    kinds = {
        "weights": [*parameters, *(bucket.weight_shard for bucket in run.data_parallel.buckets)],
        "gradients": [*(p.main_grad for p in parameters), *(bucket.grad_shard for bucket in run.data_parallel.buckets)],
        "optimizer": [tensor for _, named in run.optimizer.tensors() for tensor in named.values()],
    }
    sizes = {}
    for kind, tensors in kinds.items():
        # A weight of ZeRO 3 that is not gathered has the storage of one element in place of its own.
        held = [each.untyped_storage() for each in tensors if each.untyped_storage().nbytes() > each.element_size()]
        storages = {storage.data_ptr(): storage.nbytes() for storage in held}
        sizes[kind] = sum(storages.values())
    return sum(p.numel() for p in parameters), sizes


@pytest.mark.parametrize("settings", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_is_what_training_allocates(settings: dict[str, Any]) -> None:
    real = run_ranks(4, _allocated, settings)
    for rank, (parameters, sizes) in enumerate(real):
        found = RankEstimate.of(tiny_config(**settings), 4, rank)
        assert found.parameters == parameters
        assert {kind: found.bytes_by_kind[kind] for kind in sizes} == sizes
        assert all(p.is_meta for stage in found.stages.values() for p in stage.parameters())
    assert not dist.is_initialized()


def test_parameters_of_the_model_are_those_of_one_process() -> None:
    run = tiny_run()
    padding = (64 - 61) * 32
    counted = sum(p.numel() for p in run.stages[0].parameters()) - padding
    for settings in LAYOUTS.values():
        if "num_query_groups" not in settings:
            assert RankEstimate.of(tiny_config(**settings), 4, 3).model_parameters == counted


def test_a_token_uses_the_chosen_experts_of_layers_that_exist() -> None:
    """A repeated layer of multi-token prediction is one layer, however often it is applied."""
    experts = {"num_experts": 4, "moe_router_topk": 1, "moe_router_score_function": "sigmoid", "moe_latent_size": 8}
    experts |= {"moe_ffn_hidden_size": 16, "disable_bias_linear": True, "position_embedding_type": "rope"}
    experts |= {"mtp_num_layers": 3, "mtp_use_repeated_layer": True}
    config = tiny_config(**experts)
    found = RankEstimate.of(config, 1)
    matrices = 2 * 8 * 16
    assert found.model_parameters - found.active_parameters == 3 * matrices * (config.model.num_layers + 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_are_the_planners_bytes_a_parameter(stage: int) -> None:
    config = tiny_config(bf16=True, zero_stage=stage, hidden_size=64, global_batch_size=16)
    found = RankEstimate.of(config, 8, 5)
    state = sum(found.bytes_by_kind[kind] for kind in ("weights", "gradients", "optimizer"))
    each = sum(state_by_kind("bfloat16", 8, zero_stage=stage).values())
    # two buckets, of matrices and of vectors, each padded to 8 ranks x 8 elements; from stage 2 on in each unit
    padding = 18 * 2 * 8 * 8 * (1 if stage < 2 else 4)
    assert found.parameters * each <= state <= found.parameters * each + padding


def test_rank_of_16384_of_a_405b_model(tmp_path: Path) -> None:
    """Llama 3.1 405B (Grattafiori et al. 2024, table 3): in one process, without data, in little memory."""
    config = tmp_path / "405b.yaml"
    config.write_text(
        "num_layers: 126\nhidden_size: 16384\nnum_attention_heads: 128\ngroup_query_attention: true\n"
        "num_query_groups: 8\nffn_hidden_size: 53248\nswiglu: true\nnormalization: RMSNorm\ndisable_bias_linear: true\n"
        "position_embedding_type: rope\nuntie_embeddings_and_output_weights: true\nvocab_size: 128256\n"
        "hidden_dropout: 0.0\nattention_dropout: 0.0\nseq_length: 8192\nbf16: true\nglobal_batch_size: 2048\n"
        "tensor_model_parallel_size: 8\nsequence_parallel: true\npipeline_model_parallel_size: 16\n"
        "use_distributed_optimizer: true\nkernel_backend: native\n"
    )
    program = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        # Of this process only; getrusage includes the time before exec.
        "    peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]\n"
        "    print(f'peak {peak} KiB')\n"
    )
    arguments = ["--dry-run", "--world-size", "16384", "--rank", "12345", "--config", str(config)]
    starter = f"import sys; sys.argv = ['pretrain_gpt.py', *{arguments!r}]\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", starter],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    layer = (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248) // 8 + 2 * 16384
    assert f"{8 * layer:,} parameters of 405,853,388,800" in text
    assert "groups of rank 12345 of 16384, layout tp8 pp16 dp128 sp zero1 [pp12 dp7 tp1]" in text
    assert "  dp = dp-cp = edp: index 7 of 128: 12289 12297 12305 ... 13305" in text
    assert "  pipeline rank 12: layers 95-102" in text
    weights, optimizer = 2 * 8 * layer, 12 * 8 * layer / 128
    for kind, size in (("weights", weights), ("gradients", 2 * weights), ("optimizer", optimizer)):
        assert f"  {kind:12} {readable_bytes(size):>9}" in text
    assert "by formula, 4 of 16 micro-batches held" in text
    assert int(text.split("peak ")[1].split(" KiB")[0]) < 1_000_000


def test_report_names_what_was_changed_and_groups_of_more_than_one() -> None:
    text = describe_rank(tiny_config(tensor_model_parallel_size=2), 4, 3)
    assert "  tensor_model_parallel_size: 2\n" in text and "pipeline_model_parallel_size" not in text
    assert "  tp = tp-pp = tp-cp = etp = etp-ep = etp-ep-pp: index 1 of 2: 2 3\n" in text
    assert describe_rank(tiny_config(), 1).count("none of more than one rank") == 1
    assert "; the vocabulary is padded by 3 tokens, which are not in the total\n" in describe_rank(tiny_config(), 1)
    assert "padded" not in describe_rank(tiny_config(vocab_size=64), 1)


def test_flags() -> None:
    config, dry = parse_command_line(["--dry-run", "--world-size", "8", "--rank", "3", "--num-layers", "4"])
    assert dry == DryRun(dry_run=True, world_size=8, rank=3) and config.model.num_layers == 4
    assert parse_command_line([])[1] == DryRun()
    with pytest.raises(ConfigError, match="no effect without dry_run; add --dry-run"):
        parse_command_line(["--rank", "3"])


def test_rank_and_layout_that_do_not_exist() -> None:
    with pytest.raises(LayoutError, match="rank=4 is outside a world of 4 ranks; legal: 0 to 3"):
        RankEstimate.of(tiny_config(), 4, 4)
    with pytest.raises(ConfigError, match="world_size=6"):
        RankEstimate.of(tiny_config(tensor_model_parallel_size=4), 6)


def test_three_digits() -> None:
    shown = [readable_bytes(size) for size in (999, 1024, 13.24 * 2**30, 999.6 * 2**20, 250 * 2**40)]
    assert shown == ["999 B", "1.00 KiB", "13.2 GiB", "0.98 GiB", "250 TiB"]


def test_nothing_is_allocated_for_the_model() -> None:
    before = torch.get_rng_state()
    RankEstimate.of(tiny_config(), 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_of_a_split_sequence() -> None:
    layout = {"context_parallel_size": 4, "cp_comm_type": ("p2p", "a2a"), "seq_length": 64, "bf16": True}
    reports = [describe_rank(tiny_config(num_layers=2, **layout), 4, rank).split("\n\n")[-2] for rank in range(4)]
    assert len(set(reports)) == 1
    assert "64 tokens, cp_comm_type=p2p a2a" in reports[0]
    assert "largest rank 1.000 times the mean" in reports[0]
    found = RankEstimate.of(tiny_config(num_layers=2, **layout), 4, 2)
    batch, hidden = found.config.training.micro_batch_size, found.config.model.hidden_size
    block = 2 * 16 * batch * hidden  # keys and values of a rank
    heads = 3 * 4 * 16 * batch * hidden * 2 // 4  # queries, keys, values and outputs, three quarters of them
    sent = readable_bytes(3 * block * 2 + heads), readable_bytes(3 * block * 2 + 4 * block * 4 + heads)
    assert f"sent         {sent[0]} forward, {sent[1]} backward" in reports[0]
    assert found.bytes_by_kind["keys"] == block * (2 * 2 + 2 * 4)  # the block, the next one, two gradients


def test_what_is_absent_on_this_machine_is_a_warning(tmp_path: Path) -> None:
    """Data, tokenizer and checkpoints of a cluster: the launch is validated without them, and each is named."""
    flags = f"--data-path 0.3 {tmp_path}/a 0.7 {tmp_path}/b --load {tmp_path}/saved --train-iters 5 --seq-length 16"
    flags += f" --vocab-file {tmp_path}/v.json --merge-file {tmp_path}/m.txt --dry-run --world-size 2"
    flags += f" --save {tmp_path}/saved"
    config, dry = read_settings("x", flags.split())
    text = describe_rank(config, dry.world_size or 1, dry.rank)
    warnings = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 3
    for line, words in zip(
        warnings, (("50,257 tokens", "v.json"), ("data_path", "a.idx", "b.idx"), ("saved", "scratch")), strict=True
    ):
        assert all(word in line for word in words), line
    for more in (["--exit-on-missing-checkpoint"], ["--save", f"{tmp_path}/other"]):
        config, _ = read_settings("x", [*flags.split(), *more, "--vocab-size", "64"])
        report = describe_rank(config, 2)
        assert "training is an error" in report and "tokens is assumed" not in report


def test_a_launch_with_checkpoint_args_is_judged_without_the_checkpoint(tmp_path: Path) -> None:
    flags = f"--load {tmp_path}/none --use-checkpoint-args --mock-data --vocab-size 64 --train-iters 1"
    assert "no folder" in describe_rank(read_settings("x", [*flags.split(), "--dry-run"])[0], 1)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        read_settings("x", flags.split())


def test_a_launch_of_megatrons_own_tests_passes_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The flags of its GPT cases with TP, PP, distributed optimizer, RoPE, SwiGLU and deterministic checkpoints."""
    flags = """
        --num-layers 12 --hidden-size 512 --num-attention-heads 8 --log-params-norm --log-num-zeros-in-grad
        --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --tensorboard-dir /tb --micro-batch-size 4
        --global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 --train-iters 100
        --timing-log-level 0 --lr-decay-iters 320000 --save /ckpt --load /ckpt --data-path /data/gpt3_text_document
        --vocab-file /data/vocab.json --merge-file /data/merges.txt --split 949,50,1 --distributed-backend nccl
        --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0
        --lr-warmup-fraction .01 --log-interval 1 --save-interval 50 --eval-interval 1000 --eval-iters 10
        --transformer-impl transformer_engine --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel --swiglu
        --position-embedding-type rope --rotary-percent 1.0 --untie-embeddings-and-output-weights
        --use-checkpoint-opt_param-scheduler --deterministic-mode --no-gradient-accumulation-fusion
        --attention-softmax-in-fp32 --use-mcore-models --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable
        --dist-ckpt-strictness log_all --data-cache-path /cache --bf16 --attention-backend unfused --async-save
        --use-persistent-ckpt-worker --log-memory-to-tensorboard
    """
    config, dry = read_settings("x", [*flags.split(), "--dry-run", "--world-size", "8"])
    assert config.training.deterministic_mode and config.data.tokenizer == "GPT2BPETokenizer"
    assert "layout tp2 pp2 dp2 sp zero1 overlap" in describe_rank(config, dry.world_size or 1)
    notes = capsys.readouterr().err
    assert notes.count("note:") == 1 and max(map(len, notes.splitlines())) <= 100
    assert config.monitor.log_params_norm and "--log-params-norm" not in notes
    for flag in ("--async-save", "--transformer-impl", "--dist-ckpt-optim-fully-reshardable"):
        assert flag in notes


def test_offloaded_and_narrow_state_is_counted_where_it_is() -> None:
    settings = {"bf16": True, "zero_stage": 1, "use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bf16"}
    here, away = (
        RankEstimate.of(tiny_config(**settings | own), 2).bytes_by_kind for own in ({}, {"optimizer_cpu_offload": True})
    )
    assert (away["optimizer"], away["elsewhere"]) == (here["elsewhere"], here["optimizer"])
    padded = here["gradients"] // 4
    assert here["optimizer"] == padded // 2 * (4 + 4 + 2)
