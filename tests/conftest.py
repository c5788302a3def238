"""What all tests share: eight devices on the CPU, and a configuration that compiles in seconds."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from common.runtime.program import keep_compiled
from configs import translation

# Before JAX is imported, which reads it from the environment: what one test compiles is there for the others, and for
# the programs that they start. Tests compile thousands of small programs, many of them twice: all are kept.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
keep_compiled(Path(__file__).parents[1] / ".cache")

# What a test compiles it runs once or a few times: XLA leaves most of its optimizations out, here and in the programs
# that the tests start. JAX_DISABLE_MOST_OPTIMIZATIONS=0 leaves them in.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    # Of small programs these take a third of the time: fusions by way of MLIR, and one LLVM module for each thread.
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402

from common import heap  # noqa: E402

# Before anything asks for a device.
jax.config.update("jax_num_cpu_devices", 8)

# Tracing makes many objects and hardly any cycles: a tenth of the time went into looking for them.
gc.freeze()
gc.set_threshold(100_000, 20, 20)


LONG = ("test_resume", "test_configs", "test_sharding", "test_experiments", "test_processes")
"""Modules that take long. A worker takes whole modules, whose tests share what is compiled: these come first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_configure() -> None:
    """Behind nohup, Ctrl-C is ignored, by every program that the tests start too; some tests send it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _release_compiled_programs() -> Iterator[None]:
    """Compiled programs of one test module are of no use to the next, and are hundreds of MiB."""
    yield
    jax.clear_caches()
    gc.collect()
    heap.release_free_memory()


@pytest.fixture(scope="session", autouse=True)
def _draw_one_curve() -> Iterator[None]:
    """A tiny run spends a fifth of its time on the figure of its curve: all but the first take a copy of that one."""
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
    """A function (reservoir, **fields of the model) -> the small experiment with a still smaller model."""

    def make(reservoir: str = "none", **model) -> ConfigDict:
        config = translation.tiny(translation.iwslt(reservoir))
        config.model.width, config.model.hidden, config.model.heads = 16, 24, 2
        config.model.encoder_layers, config.model.decoder_layers = 3, 2
        config.model.max_length = 32
        config.model.update(model)
        return config

    return make


@pytest.fixture
def tiny_config(make_config) -> ConfigDict:
    """One with an FFN reservoir, free to be changed."""
    return make_config("ffn")
