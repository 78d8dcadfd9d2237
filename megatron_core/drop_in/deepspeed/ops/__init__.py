"""Optimizers that programs construct themselves."""

from deepspeed.ops import adagrad as adagrad
from deepspeed.ops import adam as adam
from deepspeed.ops import lamb as lamb
from deepspeed.ops import lion as lion
from deepspeed.ops.op_builder import COMPATIBLE_OPS as __compatible_ops__
