"""Asynchronous files: the builder by name, and the handle, which is refused."""

from deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder
