"""JAX's cache of compiled programs in a bucket."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.stores import google

# Compiles a program as process number sys.argv[1], and prints the numbers of hits and misses of the cache.
PROGRAM = """
import sys

import jax
from jax._src import distributed

found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
jax.devices()
distributed.global_state.process_id = int(sys.argv[1])
jax.jit(lambda x: x @ x + 1)(jax.numpy.ones((8, 8))).block_until_ready()
print(*(found.count(f"/jax/compilation_cache/cache_{name}") for name in ("hits", "misses")))
"""


@pytest.mark.medium
def test_compiled_programs_in_a_bucket_are_read_by_all_processes(tmp_path: Path) -> None:
    """Process 0 writes the compiled programs. The processes share only the bucket."""
    pytest.importorskip("gcsfs", reason="needs gcsfs")

    def run(process: int) -> list[str]:
        folder = tmp_path / str(process)
        folder.mkdir(exist_ok=True)
        program = [sys.executable, "-c", PROGRAM, str(process)]
        return subprocess.check_output(program, cwd=folder, env=environment, text=True).split()

    with google() as (_, endpoint):
        environment = os.environ | endpoint | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": "gs://train-less/.cache/compiled-cpu",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }  # fmt: skip
        hits, misses = run(0)
        assert hits == "0" and int(misses) > 0
        assert run(1) == [misses, "0"]
