"""Progress of a run: a bar on a terminal, a line every half minute in a log file."""

import os
import re
import sys
import time
from typing import Any, TextIO

# Seconds between refreshes of the bar, and between lines where there is no terminal.
_BAR_INTERVAL = 0.5
_LINE_INTERVAL = 30.0

# Peak FLOP/s of dense 16-bit matrix products per JAX device, from data sheets. A device of TPU v2 and v3 is one of the
# two cores of a chip. The first match wins.
_PEAKS = (
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


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Returns the peak FLOP/s of a device for model FLOPs utilisation (MFU), or None if it is unknown.

    It is unknown for a CPU, a slice of a GPU (MIG), a device that is not in the table, and a dtype without 16 bits (the
    peak of float32 depends on the precision flag). V100 and T4 reach their peak only in float16, not in bfloat16.

    Args:
      device_kind: `jax.Device.device_kind`.
      dtype: dtype of the matrix products, or its name.
    """
    import numpy as np

    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in ("bfloat16", "float16") or "MIG" in device_kind:
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_kind)), None)


class Progress:
    """Shows step, loss, throughput, remaining time and, if the peak FLOP/s is known, MFU.

    Throughput and MFU are measured since the last refresh. The remaining time is estimated from the mean speed since
    the first update, so it does not count compilation.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        *,
        unit: str = "tokens",
        enabled: bool = True,
        peak_flops: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Opens the bar.

        Args:
          total_steps: last step of the run.
          initial_step: step of the checkpoint that the run resumed from.
          unit: unit of the throughput.
          enabled: False shows nothing (all processes but the first).
          peak_flops: peak FLOP/s of all devices together; None for no MFU.
          stream: None for stderr.
        """
        self._total, self._unit = total_steps, unit
        self._enabled = enabled
        self._peak = peak_flops
        self._stream = stream or sys.stderr
        self._bar = None
        self._interval = _LINE_INTERVAL
        if enabled and _is_screen(self._stream):
            from tqdm import tqdm

            self._interval = _BAR_INTERVAL
            self._bar = tqdm(
                total=total_steps,
                initial=initial_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )
        self._step = initial_step
        self._shown_step = -1
        self._loss, self._left = 0.0, None
        self._first: tuple[float, int] | None = None
        self._restart(time.monotonic())

    def update(
        self, step: int, loss: float, count: int, flops: float, left: float | None = None
    ) -> None:
        """Reports a step.

        Args:
          step: number of steps since the start of the run.
          loss: of this step.
          count: units processed on all devices since the last update.
          flops: floating-point operations on all devices since the last update.
          left: remaining seconds of the time limit, if there is one.
        """
        if not self._enabled:
            return
        now = time.monotonic()
        self._step, self._loss, self._left = step, loss, left
        if self._first is None:
            self._first = (now, step)
            self._restart(now)
            self._show(now)
            return
        self._count += count
        self._flops += flops
        if now - self._since >= self._interval:
            self._show(now)
            self._restart(now)

    def write(self, line: str) -> None:
        """Prints a line above the bar."""
        if not self._enabled:
            return
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)

    def close(self) -> None:
        """Shows the last update and closes the bar."""
        if not self._enabled:
            return
        if self._first is not None and self._step != self._shown_step:
            self._show(time.monotonic())
        if self._bar is not None:
            self._bar.close()

    def _restart(self, now: float) -> None:
        """Starts a new interval for throughput and MFU."""
        self._since, self._count, self._flops = now, 0, 0.0

    def _show(self, now: float) -> None:
        """Refreshes the bar or prints a line."""
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
    """Returns whether a stream is a terminal with lines; tqdm is silent on terminals of 0 lines (containers)."""
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).lines > 0
    except OSError:  # The stream has no file descriptor.
        return True
