"""Helpers for files of weights."""
