"""Proof that a model computes in every layout what it computes in one process."""

from megatron_core.config.layout import Layout, every_layout
from megatron_core.verify.gpt import GPTExperiment, fitting_layouts, trace_training
from megatron_core.verify.module import ModuleExperiment, Subject
from megatron_core.verify.proof import Experiment, Proof, Row, prove
from megatron_core.verify.ranks import RankFailure, run_ranks, this_world
from megatron_core.verify.record import Record, Trace, assemble
from megatron_core.verify.shrink import shrunk

__all__ = [
    "Experiment",
    "GPTExperiment",
    "Layout",
    "ModuleExperiment",
    "Proof",
    "RankFailure",
    "Record",
    "Row",
    "Subject",
    "Trace",
    "assemble",
    "every_layout",
    "fitting_layouts",
    "prove",
    "run_ranks",
    "shrunk",
    "this_world",
    "trace_training",
]
