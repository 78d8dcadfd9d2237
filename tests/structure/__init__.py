"""Measures of the package's structure: ``python -m tests.structure`` prints them with their aims."""
