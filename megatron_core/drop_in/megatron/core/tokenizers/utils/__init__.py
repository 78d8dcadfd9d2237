"""Construction of tokenizers."""
