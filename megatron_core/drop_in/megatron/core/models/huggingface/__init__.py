"""Models of transformers inside Megatron's, which are not supported."""
