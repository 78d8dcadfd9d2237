"""Architectures of the Hugging Face hub: each file in this folder registers one family and is found by being here."""
