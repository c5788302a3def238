"""How long a step takes with each part of a chip at its full speed, all of them at once."""

from dataclasses import dataclass

from launch.topology import Chip


@dataclass(frozen=True)
class Bound:
    """Seconds of a step that each part of a chip needs for itself.

    Attributes:
      compute: matrix products, at the peak of their type.
      memory: what the program reads and writes, by the compiler's count; a part of it stays in memory on the chip, so
        that this one may lie above what it takes; None where the program is another compiler's.
      links: what the chip receives from others, over all of its links.
    """

    compute: float
    memory: float | None
    links: float

    @property
    def parts(self) -> dict[str, float]:
        """Those that are known, by name."""
        return {part: seconds for part, seconds in vars(self).items() if seconds is not None}

    @property
    def seconds(self) -> float:
        return max(self.parts.values())

    @property
    def binds(self) -> str:
        """What the others wait for."""
        return max(self.parts, key=self.parts.__getitem__)


def bound(chip: Chip, peak: float, flops: float, traffic: float | None, received: float) -> Bound:
    """Of one chip's share of a step: floating-point operations, bytes of memory traffic, bytes received."""
    memory = None if traffic is None else traffic / chip.bandwidth
    return Bound(flops / peak, memory, received / chip.links)
