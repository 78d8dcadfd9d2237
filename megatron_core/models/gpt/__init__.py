"""The GPT model, whole or as a pipeline stage."""
