"""Flags of ModelOpt."""

from argparse import ArgumentParser


def add_modelopt_args(parser: ArgumentParser) -> ArgumentParser:
    """Return ``parser`` unchanged: the command line knows these flags, and reports those that are not supported."""
    return parser
