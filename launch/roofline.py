"""How long a step takes with each part of a chip at its full speed, all of them at once."""

from dataclasses import dataclass

from launch.topology import Chip


@dataclass(frozen=True)
class Bound:
    """Seconds of a step that each part of a chip needs for itself.

    Attributes:
      compute: matrix products, at the peak of their type.
      memory: what the program reads and writes, by the compiler's count; a part of it stays in memory on the chip, so
        that this one may lie above what it takes.
      links: what the chip receives from others, over all of its links.
    """

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.links)

    @property
    def binds(self) -> str:
        """What the others wait for."""
        return max(vars(self), key=lambda part: vars(self)[part])


def bound(chip: Chip, peak: float, flops: float, traffic: float, received: float) -> Bound:
    """Of one chip's share of a step: floating-point operations, bytes of memory traffic, bytes received."""
    return Bound(flops / peak, traffic / chip.bandwidth, received / chip.links)
