"""benchmarks.gmlp: bytes in the batch of a training step, from which the program computes bytes per second."""

import pytest

from benchmarks import gmlp


@pytest.mark.parametrize("kind", gmlp.KINDS)
def test_laptop_step_reads_16_rows_of_128_bytes(kind: str) -> None:
    assert gmlp.laptop_bytes(kind) == 16 * 128
