"""The former name of the engine of batches that start and end together."""

from megatron.core.inference.engines.static_engine import StaticInferenceEngine as MCoreEngine
