"""Specifications of models with different layers."""
