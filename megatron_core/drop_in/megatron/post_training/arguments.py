"""Flags of ModelOpt."""

from argparse import ArgumentParser


def add_modelopt_args(parser: ArgumentParser) -> ArgumentParser:
    """Return ``parser`` unchanged: the command line reports unsupported flags of ModelOpt."""
    return parser
