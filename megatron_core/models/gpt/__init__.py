"""The GPT model, whole or one pipeline stage of it."""
