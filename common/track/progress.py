"""Shows the progress of a run: a bar on a terminal, a line every half minute in a log file."""

import os
import re
import sys
import time
from contextlib import suppress
from typing import TextIO

_BAR_INTERVAL = 0.5  # seconds between two refreshes of the bar
_LINE_INTERVAL = 30.0  # seconds between two lines in a log file

# (pattern of `jax.Device.device_kind`, peak FLOP/s of dense 16-bit matrix products), from data sheets. The first
# matching pattern is used. On TPU v2 and v3, a JAX device is one of the two cores of a chip.
_PEAKS = (
    (r"\bH200 NVL\b", 835e12),
    (r"\bH200\b", 989e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bL4\b", 121e12),
    (r"\bV100-PCIE\b", 112e12),
    (r"\bV100\b", 125e12),
    (r"\bT4\b", 65e12),
    (r"^TPU v2$", 22.5e12),
    (r"^TPU v3$", 61.5e12),
    (r"^TPU v4$", 275e12),
    (r"^TPU v5( lite|e)$", 197e12),
    (r"^TPU v5p?$", 459e12),
    (r"^TPU v6( lite|e)$", 918e12),
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a `jax.Device.device_kind`, for model FLOPs utilisation (MFU); None if unknown.

    The peak is unknown for CPUs, slices of a GPU (MIG), devices that are not in the table, and dtypes other than
    bfloat16 and float16 (the peak of float32 depends on the precision flag). V100 and T4 reach their peak in float16
    only.
    """
    if dtype not in ("bfloat16", "float16") or "MIG" in device_kind:
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_kind)), None)


class Progress:
    """Shows step, loss, throughput, remaining time and, if the peak FLOP/s is known, MFU. For process 0 only.

    Throughput and MFU are averages since the last refresh. The remaining time is estimated from the mean speed since
    the end of the first step. None of these numbers includes compilation.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        *,
        name: str = "",
        unit: str = "tokens",
        peak_flops: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Opens the bar if `stream` is a terminal.

        Args:
          total_steps: last step of the run.
          initial_step: step at which the run resumes; 0 for a new run.
          name: prefix of every line, for runs that take turns; "" for no prefix.
          unit: unit of the throughput.
          peak_flops: peak FLOP/s of all devices together; None to show no MFU.
          stream: stream to write to; None for stderr.
        """
        self._total, self._unit, self._peak = total_steps, unit, peak_flops
        self._name = f"{name}: " if name else ""
        self._stream = stream or sys.stderr
        self._bar, self._interval = None, _LINE_INTERVAL
        if _is_screen(self._stream):
            from tqdm import tqdm

            self._interval = _BAR_INTERVAL
            self._bar = tqdm(
                desc=name or None,
                total=total_steps,
                initial=initial_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )
        self._shown_step = -1
        self._first: tuple[float, int] | None = None

    def update(
        self,
        step: int,
        loss: float,
        count: int,
        flops: float,
        left: float | None = None,
        compiling: float = 0.0,
    ) -> None:
        """Reports a step.

        Args:
          step: number of steps since the start of the run.
          count: number of units (such as tokens) that all devices have processed since the last update.
          flops: floating-point operations of all devices since the last update.
          left: remaining seconds of the time limit; None without a time limit.
          compiling: seconds that the run has compiled so far.
        """
        # Other batch shapes are compiled after the first step: with the time of their compilation, the first estimates
        # of the remaining time would be far too large.
        now = time.monotonic() - compiling
        self._step, self._loss, self._left, self._now = step, loss, left, now
        if self._first is None:
            self._first, self._since, self._count, self._flops = (now, step), now, 0, 0.0
            self._show(now)
            return
        self._count += count
        self._flops += flops
        if now - self._since >= self._interval:
            self._show(now)
            self._since, self._count, self._flops = now, 0, 0.0

    def write(self, line: str) -> None:
        """Prints a line: above the bar if there is a bar, else to the stream."""
        line = self._name + line
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Shows the last update and closes the bar."""
        if self._first is not None and self._step != self._shown_step:
            self._show(self._now)
        if self._bar is not None:
            self._bar.close()

    def _show(self, now: float) -> None:
        from tqdm import tqdm

        self._shown_step = self._step
        parts = [f"loss {self._loss:.4g}"]
        seconds = now - self._since
        if self._count and seconds > 0:
            parts.append(f"{tqdm.format_sizeof(self._count / seconds)} {self._unit}/s")
        began, first_step = self._first
        if self._step > first_step:
            pace = (now - began) / (self._step - first_step)
            left = pace * (self._total - self._step)
            if self._left is not None:
                left = max(min(left, self._left), 0.0)
            parts.append(f"ETA {tqdm.format_interval(left)}")
        if self._peak and self._flops and seconds > 0:
            parts.append(f"MFU {self._flops / seconds / self._peak:.1%}")
        line = ", ".join(parts)
        if self._bar is None:
            self.write(f"step {self._step}/{self._total}: {line}")
        else:
            self._bar.n = self._step
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.refresh()


def _is_screen(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal with at least one line. With 0 lines, tqdm would print nothing."""
    if not stream.isatty():
        return False
    # The size of a terminal without file descriptor is unknown: assume at least one line.
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).lines > 0
    return True
