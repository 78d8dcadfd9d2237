"""The release whose interface these modules have, which programs compare with their own."""

__version__ = "0.20.0"
