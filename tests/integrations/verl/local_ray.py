"""A small Ray of a test's own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import ray


@contextlib.contextmanager
def local_ray(namespace: str, *, cpus: int) -> Iterator[None]:
    """Ray for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:  # Ray's sockets need a short path
        ray.init(
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=100_000_000,
            _temp_dir=directory,
            log_to_driver=False,
            namespace=namespace,
        )
        try:
            yield
        finally:
            ray.shutdown()
