"""A server of texts with the interface of Megatron-LM's."""

from megatron.core.inference.text_generation_server.text_generation_server import MegatronServer
