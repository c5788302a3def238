"""How a run is getting on: a bar on a terminal, a line now and then in a log file."""

import os
import re
import sys
import time
from typing import Any, TextIO

# Seconds between refreshes of the bar, and between lines where there is no terminal.
_BAR_INTERVAL = 0.5
_LINE_INTERVAL = 30.0

# FLOP/s of dense 16-bit matrix products, per JAX device, from the makers' data sheets. A device of
# TPU v2 and v3 is one of the two cores of a chip. First match wins.
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
    """The peak of one device, for model FLOPs utilisation (MFU).

    V100 and T4 reach theirs in float16 only; with bfloat16 their MFU is against a peak out of
    reach.

    Args:
      device_kind: `jax.Device.device_kind`.
      dtype: what matrices are multiplied in, by name or as a dtype.

    Returns:
      Dense FLOP/s, or None: not a 16-bit dtype (what float32 reaches depends on the precision
      flag), a CPU, a slice of a GPU (MIG), or a device not in the table.
    """
    import numpy as np

    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in ("bfloat16", "float16") or "MIG" in device_kind:
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_kind)), None)


class Progress:
    """Shows step, loss, speed, time left and, where the peak is known, MFU.

    On a terminal this is a bar at the bottom of the screen; elsewhere a plain line every half
    minute. Rates are of the time since the last refresh; the time left is from the mean pace since
    the first update, so that compilation, which precedes it, does not count.
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
        """Opens the bar; rates appear after the first update.

        Args:
          total_steps: where the run ends.
          initial_step: steps done before, by the run that is resumed.
          unit: what is counted, for the speed.
          enabled: False (every process but the first) shows nothing at all.
          peak_flops: FLOP/s of all devices together; None leaves MFU out.
          stream: where to write; None is stderr.
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
        """Tells of steps done since the last update.

        Args:
          step: steps done, from the beginning of the run.
          loss: of the last of them.
          count: units processed since the last update, on all devices.
          flops: spent since the last update, on all devices.
          left: seconds that the run may still take, if it has a limit.
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
        """Prints a line, above the bar if there is one."""
        if not self._enabled:
            return
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)

    def close(self) -> None:
        """Shows the last update and leaves the bar."""
        if not self._enabled:
            return
        if self._first is not None and self._step != self._shown_step:
            self._show(time.monotonic())
        if self._bar is not None:
            self._bar.close()

    def _restart(self, now: float) -> None:
        """Begins a new stretch of time to take rates over."""
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
    """Whether a bar can be drawn: on a terminal, unless it says that it has no lines.

    Some containers hand out such terminals; tqdm shows nothing at all there.
    """
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).lines > 0
    except OSError:  # No file descriptor to ask.
        return True
