"""The release whose interface these modules implement."""

__version__ = "0.20.0"
