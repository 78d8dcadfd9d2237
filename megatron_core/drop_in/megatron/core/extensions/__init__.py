"""Modules of other libraries, by this package's own."""
