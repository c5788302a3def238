"""Settings and fixtures of all tests: eight CPU devices, and a configuration that compiles in seconds."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ml_collections import ConfigDict

from common.runtime.program import keep_compiled
from configs import translation

# JAX reads these variables while it is imported. All tests, and the programs that they start, share one compilation
# cache. The cache stores every program, because tests compile thousands of small programs, and many of them twice.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
keep_compiled(Path(__file__).parents[1] / ".cache")

# The tests and their programs run on the CPU, also on a machine with GPUs.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A test runs a compiled program only a few times, so XLA skips most optimizations, also in subprocesses of tests.
# Set JAX_DISABLE_MOST_OPTIMIZATIONS=0 to run all optimizations.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    # Disable fusions by MLIR, and the split of a program into one LLVM module for each thread. Both together take a
    # third of the compilation time of small programs.
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}"

# Some tests compile for GPUs. Without a GPU, XLA's Triton matrix products have fixed tiles that do not fit all shapes,
# so use cuBLAS.
os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_triton_gemm=false {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402

# The number of CPU devices must be set before JAX creates its devices.
jax.config.update("jax_num_cpu_devices", 8)

# Tracing creates many objects but hardly any reference cycles. With the default thresholds, garbage collection would
# take a tenth of the time.
gc.freeze()
gc.set_threshold(100_000, 20, 20)


LONG = ("test_resume", "test_configs", "test_sharding", "test_experiments", "test_processes")
"""Names of slow test modules. They run first, so that no worker starts a slow module when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_configure() -> None:
    """Restores Python's handlers of signals that are ignored, as in background jobs of shell scripts and below nohup.

    Some tests send these signals.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def _resident() -> list[int]:
    """Returns a list whose first entry is the resident memory of this process in bytes.

    `_release_compiled_programs` appends the resident memory after each release.
    """
    return [psutil.Process().memory_info().rss]


@pytest.fixture(scope="module", autouse=True)
def _release_compiled_programs(_resident: list[int]) -> Iterator[None]:
    """After a test module, frees all compiled programs if the process has grown by 300 MiB.

    The growth is measured from the last release, or from the first test if nothing was released. Later modules hardly
    use these programs. Freeing them after every module would add a minute to the quick tests.
    """
    yield
    if psutil.Process().memory_info().rss < _resident[-1] + (300 << 20):
        return
    jax.clear_caches()
    gc.collect()
    _resident.append(psutil.Process().memory_info().rss)


@pytest.fixture(scope="session", autouse=True)
def _draw_one_curve() -> Iterator[None]:
    """Draws curve.png for the first run only. All other runs get a copy of this file.

    Drawing takes a fifth of the time of a tiny run.
    """
    from common.train import summary

    draw, drawn = summary.plot_curve, []

    def copy(curves: object, path: Path) -> None:
        if drawn:
            path.write_bytes(drawn[0])
        else:
            draw(curves, path)
            drawn.append(path.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "plot_curve", copy)
        yield


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ConfigDict]:
    """Returns a function (reservoir="none", **fields of config.model) -> translation configuration of a tiny model."""

    def make(reservoir: str = "none", **model) -> ConfigDict:
        config = translation.tiny(translation.iwslt(reservoir))
        config.model.width, config.model.hidden, config.model.heads = 16, 24, 2
        config.model.encoder_layers, config.model.decoder_layers = 3, 2
        config.model.max_length = 32
        with config.model.unlocked():  # allows new fields: options of a user's reservoir
            config.model.update(model)
        return config

    return make


@pytest.fixture
def tiny_config(make_config) -> ConfigDict:
    """Returns a translation configuration with a tiny model and an FFN reservoir, which the test may change."""
    return make_config("ffn")
