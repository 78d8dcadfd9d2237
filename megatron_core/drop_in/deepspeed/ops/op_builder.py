"""Not available: builders of kernels."""

from deepspeed.unavailable import refuse

refuse("deepspeed.ops.op_builder", "kernels are built by make install (docs/kernels.md)")
