"""Architectures of the Hugging Face hub: each file in this folder registers one family."""
