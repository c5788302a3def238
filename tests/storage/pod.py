"""Trains the toy task as one of several processes: python -m tests.storage.pod ADDRESS FIELDS [LAST]

FIELDS are the changed fields of the configuration, as JSON. With LAST, every process waits after step LAST, so that a
test can kill it. Each process prints the points of the curve and the test results.
"""

import json
import sys
import time
from collections.abc import Iterator

import jax

from common.runtime import processes, program
from common.sharding import make_mesh
from common.storage import uploads
from common.storage.folders import open_folder
from common.train.loop import fit
from tests.train import toy


class Waiting(toy.Toy):
    """The toy task. Waits after step `last`."""

    def __init__(self, last: int):
        super().__init__()
        self.last = last

    def batches(self, start: dict | None) -> Iterator[tuple]:
        for batch, position in super().batches(start):
            if position["next"] > self.last + 2:  # The loop reads two batches ahead.
                time.sleep(600)
            yield batch, position


def main() -> None:
    uploads.INTERVAL = 0.5
    folder = open_folder(sys.argv[1])
    processes.initialize()
    fields = {"checkpoint__keep_best": 2} | json.loads(sys.argv[2])
    task = Waiting(int(sys.argv[3])) if len(sys.argv) > 3 else toy.Toy()
    mesh = make_mesh({"data": 1, "fsdp": jax.device_count()})
    print(json.dumps(result(fit(toy.config(**fields), task, folder, mesh))))


def result(summary: dict) -> list:
    """Returns the points of the curve and the test results of a run."""
    points = [[point["step"], point["value"]] for point in summary["curve"]["points"]]
    return [points, summary["test"], summary["test_mean_of_best"]]


if __name__ == "__main__":
    program.run(main, joins=True)
