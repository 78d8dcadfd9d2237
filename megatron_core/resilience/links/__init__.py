"""Checks that collectives and messages deliver what was sent.

``recorder``: checksums of a rank's calls; ``checksums``: hashes, and sums that are linear; ``seal``: messages that
carry their checksum; ``compare``: the comparison of all ranks; ``faults``: wrong data for tests.
"""
