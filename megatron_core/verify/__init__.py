"""Check that a model gives the same results in every layout as in one process."""

from megatron_core.config.comparison import fitting_layouts
from megatron_core.config.layout import Layout, every_layout
from megatron_core.config.shrink import shrunk
from megatron_core.verify.bits import BitsReport, BitsRow, HashedExperiment, check_bits
from megatron_core.verify.gpt import GPTExperiment, trace_training
from megatron_core.verify.module import ModelUnderTest, ModuleExperiment
from megatron_core.verify.parity import Experiment, ParityReport, Row, check_parity
from megatron_core.verify.programs import Comparison, compare
from megatron_core.verify.ranks import RankFailure, run_ranks, this_world
from megatron_core.verify.trace import RankTrace, Trace, assemble
from megatron_core.verify.verify_module import ModuleReport, verify_module
