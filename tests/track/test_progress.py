"""The progress line in log files, the progress bar on terminals, and the peak FLOP/s of devices."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import termios

import pytest

from common.track import progress
from common.track.progress import Progress, peak_flops


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock of the progress bar by a clock that the test advances."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    stopped = Clock()
    monkeypatch.setattr(progress, "time", stopped)
    return stopped


def train(bar, clock, steps, seconds=0.125, tokens=50, flops=1e9):
    for step in steps:
        clock.now += seconds
        bar.update(step, 1 / step, tokens, flops)


def test_log_file_gets_a_line_every_half_minute(clock):
    stream = io.StringIO()
    bar = Progress(3001, stream=stream, peak_flops=1.6e10)
    clock.now += 500  # The first step takes 500 s, because it includes compilation.
    train(bar, clock, range(1, 3001))
    bar.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/3001: loss 1"
    assert len(lines) == 14  # the first line, a line for each 30 s of 375 s, and the last line
    assert lines[1] == "step 241/3001: loss 0.004149, 400 tokens/s, ETA 05:45, MFU 50.0%"
    assert lines[-1].startswith("step 3000/3001")


def test_close_does_not_repeat_the_last_line(clock):
    stream = io.StringIO()
    bar = Progress(10, stream=stream)
    bar.update(1, 2.0, 5, 0.0)
    bar.close()
    assert stream.getvalue() == "step 1/10: loss 2\n"


def test_no_mfu_without_peak_flops(clock):
    stream = io.StringIO()
    bar = Progress(1000, stream=stream)
    train(bar, clock, range(1, 500))
    assert "tokens/s" in stream.getvalue() and "MFU" not in stream.getvalue()


def test_throughput_is_since_the_last_refresh(clock):
    stream = io.StringIO()
    bar = Progress(100_000, stream=stream)
    train(bar, clock, range(1, 1000), tokens=50)
    train(bar, clock, range(1000, 2000), tokens=100)
    rates = re.findall(r"([\d.]+) tokens/s", stream.getvalue())
    assert rates[0] == "400" and rates[-1] == "800"


def test_resumed_run_starts_at_its_step(clock):
    stream = io.StringIO()
    bar = Progress(1000, 500, stream=stream)
    train(bar, clock, range(501, 900))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 501/1000")
    assert lines[1].startswith("step 741/1000") and "ETA 00:32" in lines[1]  # 259 steps remain.


def test_compilation_after_the_first_step_is_not_in_the_pace(clock):
    """Step 2 waits 60 s for compilation. Without compilation, a step takes 0.125 s."""
    stream = io.StringIO()
    bar = Progress(1000, stream=stream)
    bar.update(1, 1.0, 50, 0.0, compiling=10.0)
    clock.now += 60
    for step in range(2, 300):
        clock.now += 0.125
        bar.update(step, 1.0, 50, 0.0, compiling=70.0)
    second = stream.getvalue().splitlines()[1]
    assert second.startswith("step 241/1000") and "400 tokens/s, ETA 01:34" in second


def test_eta_respects_the_time_limit(clock):
    """2,000 steps of 0.125 s take 250 s, but the limit leaves 100 s."""
    stream = io.StringIO()
    bar = Progress(2001, stream=stream, unit="examples")
    for step in range(1, 2001):
        clock.now += 0.125
        bar.update(step, 1.0, 50, 1e9, left=100 - 0.125 * step)
    lines = stream.getvalue().splitlines()
    assert "400 examples/s, ETA 01:09" in lines[1]  # printed at 30.125 s, so 69.875 s remain
    assert "ETA 00:00" in lines[-1]


def test_terminal_shows_a_bar(clock):
    stream = Terminal()
    bar = Progress(200, 100, stream=stream, peak_flops=1.6e10)
    train(bar, clock, range(101, 151))
    bar.write("step 150: BLEU 30.1")
    bar.close()
    shown = stream.getvalue()
    last = shown.rstrip().split("\r")[-1]
    assert "150/200" in last and " 75%" in last
    assert "loss 0.006667, 400 tokens/s, ETA 00:06, MFU 50.0%" in last
    assert "\rstep 150: BLEU 30.1\n" in shown
    assert shown.count("tokens/s") < 25  # fewer refreshes than the 50 steps


@pytest.mark.parametrize(("lines", "shown"), [(24, "2/4, loss 0.5"), (0, "step 2/4: loss 0.5")])
def test_terminal_of_any_size_shows_progress(clock, lines, shown):
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 4 * lines, 0, 0))
    with open(follower, "w") as stream:
        bar = Progress(4, stream=stream)
        train(bar, clock, [1, 2])
        bar.close()
        written = ""
        while shown not in written and select.select([leader], [], [], 5)[0]:
            written += os.read(leader, 65536).decode()
    os.close(leader)
    assert shown in written


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-32GB", 112e12),
        ("Tesla T4", 65e12),
        ("NVIDIA T400", None),
        ("TPU v2", 22.5e12),
        ("TPU v3", 61.5e12),
        ("TPU v4", 275e12),
        ("TPU v4 lite", None),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v6e", 918e12),
        ("cpu", None),
    ],
)
def test_peak_flops_by_device(kind, peak):
    assert peak_flops(kind, "bfloat16") == peak
    assert peak_flops(kind, "float16") == peak
    assert peak_flops(kind, "float32") is None
