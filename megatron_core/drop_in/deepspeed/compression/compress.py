"""Compression of models is not available."""

from deepspeed.unavailable import refused

INSTEAD = "train first, and use a library for quantization of the weights afterwards"
init_compression = refused("deepspeed.compression.init_compression", INSTEAD)
redundancy_clean = refused("deepspeed.compression.redundancy_clean", INSTEAD)
