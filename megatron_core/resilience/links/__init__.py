"""Checks that collectives and messages deliver what was sent.

``recorder``: checksums of a rank's calls, and messages that carry their checksum; ``checksums``: hashes, and sums that
are linear; ``faults``: wrong data for tests. ``resilience.link_checks`` compares the checksums of all ranks.
"""
