"""A local S3 server for tests: moto's, in a process of its own, because s3fs blocks the threads of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import urlopen

from megatron_core.storage import paths
from tests.programs import free_port

BUCKET = "training"


@contextmanager
def s3_server() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A running server with the bucket ``BUCKET``, and the environment variables for its clients."""
    port = free_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_server(environment["AWS_ENDPOINT_URL"], process)
        make = "import s3fs; s3fs.S3FileSystem().mkdir('training')"
        subprocess.run([sys.executable, "-c", make], env=os.environ | environment, check=True, timeout=60)
        forget_clients()
        yield process, environment
    finally:
        process.kill()
        process.wait()


def forget_clients() -> None:
    """Make this process read the environment variables again: its clients keep the address of an earlier server."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    paths._file_system.cache_clear()


def wait_for_server(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server has ended"
        try:
            urlopen(address, timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(address)
