"""Copies that must be equal: none differs in a correct run, and one changed bit is reported on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_core.reports.replicas import Replicas, describe_replicas
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

EMBEDDING = "embedding.word_embeddings.weight"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
NORM = "decoder.layers.0.input_layernorm.weight"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
POSITIONS = "embedding.position_embeddings.weight"
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
ONE_GROUP = {"tensor_model_parallel_size": 4, "group_query_attention": True, "num_query_groups": 1}
ZERO1 = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}


def replicas_of(run: Run) -> Replicas:
    named = [pair for stage in run.stages.values() for pair in stage.named_global_parameters()]
    return Replicas(named, run.groups, run.world.device)


def flip_a_bit(run: Run, name: str, element: int) -> None:
    """Change the lowest bit of one element of a float32 weight, if this rank has it."""
    for stage in run.stages.values():
        weight = dict(stage.named_global_parameters()).get(name)
        if weight is not None:
            weight.data.view(-1).view(torch.int32)[element] ^= 1


def _found(settings: dict, flips: list[tuple[int, str, int]]) -> tuple[list[str], list[str]]:
    """Differences after some steps, and after changing each (rank, name, element) of ``flips``."""
    run = tiny_run(ddp_bucket_size=2000, **settings)
    replicas = replicas_of(run)
    for _ in range(2):
        train_step(run)
    run.data_parallel.finish_param_sync()
    clean = replicas.differences(replicas.hashes())
    for rank, name, element in flips:
        if dist.get_rank() == rank:
            flip_a_bit(run, name, element)
    return clean, replicas.differences(replicas.hashes())


def _check(world: int, settings: dict, flips: list[tuple[int, str, int]], expected: list[str]) -> None:
    """The same answer on every rank, without and with damage."""
    assert run_ranks(world, _found, settings, flips) == [([], expected)] * world


def test_norms_over_tp() -> None:  # C17 C53
    layout = TP2 | {"sequence_parallel": True, "normalization": "RMSNorm", "qk_layernorm": True}
    _check(2, layout, [(1, NORM, 5)], [f"{NORM} over tp: rank 1 differs from rank 0"])


def test_weights_over_dp_with_shards_and_overlap() -> None:  # C59
    _check(2, ZERO1, [(0, FC1, 40)], [f"{FC1} over dp-cp: rank 1 differs from rank 0"])


def test_tied_embedding_over_the_pipeline() -> None:  # C11
    where = "embedding (first and last stage)"
    _check(2, PP2, [(1, EMBEDDING, 3)], [f"{EMBEDDING} over {where}: rank 1 differs from rank 0"])


def test_rows_of_keys_over_their_holders() -> None:  # C19 C53
    """One group of heads of 8 channels: 8 rows of queries on each rank, then the 16 rows that all four hold."""
    queries, keys = 7 * 32, 9 * 32
    found = [f"{QKV} rows 32 to 47 over tp: rank 2 differs from ranks 0, 1, 3"]
    _check(4, ONE_GROUP, [(2, QKV, keys), (1, QKV, queries)], found)


def test_two_faults_in_different_groups() -> None:
    """Data-parallel pairs are 0 and 2, 1 and 3; tensor-parallel pairs 0 and 1, 2 and 3."""
    flips = [(3, FC1, 0), (1, POSITIONS, 0), (3, POSITIONS, 0)]
    over_tp = [f"{POSITIONS} over tp: rank {odd} differs from rank {odd - 1}" for odd in (1, 3)]
    _check(4, TP2, flips, [over_tp[0], f"{FC1} over dp-cp: rank 3 differs from rank 1", over_tp[1]])


def test_middle_stages_take_part() -> None:
    """A rank without anything to compare must neither hang nor end the others' comparison."""
    settings = {"pipeline_model_parallel_size": 3, "num_layers": 3}
    expected = [f"{EMBEDDING} over embedding (first and last stage): rank 2 differs from rank 0"]
    _check(3, settings, [(2, EMBEDDING, 0), (1, FC1, 0)], expected)


def test_many_names_are_one_phrase() -> None:
    lines = [f"dp-cp\tlayer{i}\t0\t" for i in range(6)]
    reports = {rank: [f"{line}{rank == 2}" for line in lines] for rank in range(4)}
    assert describe_replicas(reports) == [
        "layer0, layer1, layer2, layer3 and 2 more over dp-cp: rank 2 differs from ranks 0, 1, 3"
    ]


def test_all_that_differ_from_the_most_are_named() -> None:
    values = {0: "a", 1: "b", 2: "c", 3: "b", 4: "b"}
    reports = {rank: [f"tp\tnorm\t0\t{value}"] for rank, value in values.items()}
    assert describe_replicas(reports) == ["norm over tp: ranks 0, 2 differ from ranks 1, 3, 4"]
