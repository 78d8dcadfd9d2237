"""Modules of other libraries, implemented by the engine."""
