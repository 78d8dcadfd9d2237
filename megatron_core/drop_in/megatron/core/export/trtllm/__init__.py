"""Export to TensorRT-LLM, which is not supported."""
