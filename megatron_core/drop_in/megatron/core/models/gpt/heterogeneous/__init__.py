"""Specifications of models whose layers differ."""
