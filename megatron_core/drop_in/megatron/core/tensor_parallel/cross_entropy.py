"""``megatron_core.tensor_parallel.cross_entropy`` at Megatron's path."""

from megatron_core.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy, vocab_parallel_cross_entropy
