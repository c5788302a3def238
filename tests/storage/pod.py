"""Trains the toy task as one of several processes: python -m tests.storage.pod ADDRESS STEPS"""

import sys

import jax

from common.runtime import processes, program
from common.sharding import make_mesh
from common.storage.folders import open_folder
from common.train.loop import fit
from tests.train import toy


def main() -> None:
    folder = open_folder(sys.argv[1])
    processes.initialize()
    fields = {"train__steps": int(sys.argv[2]), "checkpoint__keep_best": 2}
    mesh = make_mesh({"data": 1, "fsdp": jax.device_count()})
    fit(toy.config(**fields), toy.Toy(), folder, mesh)


if __name__ == "__main__":
    program.run(main, joins=True)
