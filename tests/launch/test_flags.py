"""launch/flags.sh: the compilers accept the recommended flags, and the last value of a flag wins."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.standins import flags_of

ROOT = Path(__file__).parents[2]

UNKNOWN = "--xla_trainless_unknown=1"


def names(flags: str) -> list[str]:
    return [flag.partition("=")[0].removeprefix("--") for flag in flags.split()]


def changed_options(flags: str, folder: Path) -> dict[str, str]:
    """Compiles a program with these XLA_FLAGS; returns {name: value} of the options that differ from their default."""
    program = (
        "import jax; jax.config.update('jax_enable_compilation_cache', False); jax.jit(abs)(1)"
    )
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} --xla_dump_to={folder}"}
    subprocess.run([sys.executable, "-c", program], env=os.environ | settings, check=True)
    text = "\n".join(path.read_text() for path in folder.glob("*debug_options"))
    return dict(line.split(": ", 1) for line in text.splitlines())


@pytest.mark.medium
def test_installed_jax_accepts_flags_and_uses_the_last_value(tmp_path):
    cpu, gpu_flags = flags_of("cpu"), flags_of("gpu")
    found = changed_options(f"{cpu} {gpu_flags}", tmp_path / "ours")
    assert set(names(cpu) + names(gpu_flags)) <= found.keys(), "a flag has the default value"
    timeout, latency = "xla_cpu_collective_call_terminate_timeout_seconds", names(gpu_flags)[0]
    mine = f"{cpu} {gpu_flags} --{timeout}=77 --{latency}=false"
    found = changed_options(mine, tmp_path / "mine")
    assert found[timeout] == "77" and latency not in found


@pytest.mark.medium
def test_installed_jax_refuses_unknown_flags(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        changed_options(UNKNOWN, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_tpu_compiler_accepts_recommended_flags_only():
    program = "from launch import topology; topology.prepare('v5e:2x2'); topology.find('v5e:2x2')"
    for flags, known in ((flags_of("v5litepod-16"), True), (UNKNOWN, False)):
        settings = {"LIBTPU_INIT_ARGS": flags}
        run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | settings)
        assert (run.returncode == 0) == known
