"""Older path of the tokenizers."""
