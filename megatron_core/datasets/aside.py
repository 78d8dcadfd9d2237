"""Files that are either whole or not there: written under another name, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def aside(path: str | Path) -> Path:
    """The name a file has until it is whole."""
    return Path(f"{path}.partial")


def publish(file: BinaryIO, path: str | Path) -> None:
    """Close the file opened at `aside(path)` and give it its name, once its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(aside(path), path)


@contextmanager
def writing_aside(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file to write to, which appears at `path` when the block ends and never if it fails."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = aside(path).open("wb")
    try:
        yield file
        publish(file, path)
    except BaseException:
        file.close()
        aside(path).unlink(missing_ok=True)
        raise
