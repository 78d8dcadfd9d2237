"""Strategies of saving and loading."""
