"""Older path of the functions of tokenizers."""
