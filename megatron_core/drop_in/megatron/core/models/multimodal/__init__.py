"""Multimodal models, which are not supported."""
