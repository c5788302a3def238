"""Counts the bytes that a device receives to generate one token of every row: python -m launch.decoding --out=DIR

Compiles two versions of decoding for devices that this machine may lack. In the version that translation and sampling
use, all weights are gathered once, and each device decodes its own rows. The bytes of this gather are divided by the
number of tokens of a row (`Traffic.tokens`). In the other version, weights and rows keep the shardings of training, and
the compiler inserts the collectives.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.arguments import check_folder
from common.runtime.program import run

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from launch.collectives import Collectives
    from launch.topology import Topology

MIB = 2**20

RUNS = {
    "WMT, FFN reservoirs": (
        "configs/wmt_ffn_res.py",
        ("model.encoder_layers=2", "model.reservoirs=1"),
    ),
    "enwik8, gMLP": ("configs/enwik8_gmlp.py", ("model.layers=2",)),
}
"""Name of a run -> (configuration, fields to override).

The overrides reduce the number of layers, so that compilation is faster. In decoding by rows
(`common.decode.rows`), the number of layers changes only the bytes of weights.
"""

MESHES = ("fsdp", "data")
"""Mesh axes to compare. Each of these axes in turn has all devices, and all other axes have size 1."""

COLUMNS = (
    "run",
    "mesh",
    "decoding",
    "collectives for a token",
    "MiB received for a token",
    "of which weights",
)


class Traffic(NamedTuple):
    """The collectives of decoding.

    Attributes:
      weights: collectives that gather the weights once, for `tokens` tokens of each row; none if the weights stay
        sharded.
      program: collectives of the decoding program, which generates at most `steps` tokens of each row.
    """

    weights: "Collectives"
    program: "Collectives"
    steps: int
    tokens: int

    @property
    def weights_per_token(self) -> float:
        """Bytes of the gather of all weights that each device receives from other devices of its TPU slice, per token.

        0 if the weights stay sharded: then `program` contains the weights that it gathers.
        """
        return self.weights.received / self.tokens

    @property
    def per_token(self) -> float:
        """Bytes that each device receives from its slice to generate one token per row, weights included."""
        return self.weights_per_token + self.program.received / self.steps

    @property
    def count_per_token(self) -> float:
        """Number of collectives to generate one token in every row, without the collectives that gather the weights."""
        return sum(row.count for row in self.program.rows) / self.steps


def traffic(config: "ConfigDict", topology: "Topology", *, by_rows: bool = True) -> Traffic:
    """Compiles the decoding of a configuration for the devices of a topology; returns its collectives.

    Args:
      by_rows: True compiles decoding as translation and sampling run it: weights are gathered once, and rows are split
        over all devices (`common.decode.rows`). False keeps weights and rows sharded as in training, and lets the
        compiler insert all collectives.

    Raises:
      UserError: `launch.estimate.prepare` fails, the task does not generate text, or the compiler fails.
    """
    import jax
    from jax.sharding import NamedSharding

    from common import sharding, variables
    from common.decode.rows import gather_weights, row_specs
    from common.errors import UserError, check, reason_of
    from launch.collectives import Collectives, read_collectives
    from launch.estimate import prepare

    config, task, mesh = prepare(config, topology)
    replicated, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh)
    with jax.set_mesh(mesh):
        model = variables.abstract(task.build)
        decoding = task.decoding(model)
        check(
            decoding is not None,
            "--decode: the task of --config does not generate text; leave out --decode",
        )
        function, inputs, steps, tokens = decoding.rows, decoding.inputs, *decoding[3:]
        weights = [
            _with_shardings(shapes, sharding.shardings(kind, mesh))
            for shapes, kind in zip(model.shapes(), (model.trainable, model.frozen), strict=True)
        ]
        split = jax.tree.map(lambda x: rows if x.ndim else replicated, inputs)
        gathering = Collectives([], 0)

        def collectives(function: Any, *arguments: Any) -> Collectives:
            try:
                program = function.lower(*arguments).compile().as_text()
            except jax.errors.JaxRuntimeError as error:
                raise UserError(
                    f"decoding cannot be compiled for --topology={topology.name} ({reason_of(error)}): correct the"
                    " cause, or choose another --topology"
                ) from error
            return read_collectives(program, len(topology.devices) // topology.slices, steps)

        if by_rows:
            gather = jax.jit(gather_weights(model, mesh))
            gathering = collectives(gather, *weights)
            gathered = jax.eval_shape(gather, *weights)
            weights = _with_shardings(gathered, jax.tree.map(lambda _: replicated, gathered))
            split = jax.tree.map(lambda spec: NamedSharding(mesh, spec), row_specs(inputs))
            function = decoding.program
        sent = collectives(jax.jit(function), *weights, *_with_shardings(inputs, split))
    return Traffic(gathering, sent, steps, tokens)


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    import jax

    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def table_rows(found: Traffic) -> list[tuple[str, str, str]]:
    """Returns the traffic of decoding as table rows (quantity, value, remark)."""
    parts = {
        "weights": (found.weights, f"gathered for {found.tokens:,} tokens of each row"),
        "decoding": (found.program, f"at most {found.steps:,} tokens of each row"),
    }
    lines = []
    for title, (sent, remark) in parts.items():
        lines.append((title, "", remark))
        lines += [
            (f"  {kind}, each device", f"{count:,} x", f"{received / MIB:,.3f} MiB received")
            for kind, count, received in sent.rows
        ]
    return [
        *lines,
        (
            "collectives for a token",
            f"{found.count_per_token:,.3f}",
            "without the gather of weights",
        ),
        (
            "MiB received for a token",
            f"{found.per_token / MIB:,.3f}",
            "per device, for a token of each row",
        ),
    ]


def main() -> None:
    from common import config

    parser = config.parser_for("launch.decoding", __doc__)
    parser.add_argument(
        "--topology",
        default="v5e:2x4",
        metavar="KIND:SHAPE",
        help="devices, as in launch.plan (default: v5e:2x4)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/launch"),
        metavar="DIR",
        help="folder of the table (default: runs/launch)",
    )
    options = parser.parse_args()
    check_folder("--out", options.out)

    from common.report.table import publish
    from launch import topology

    topology.prepare(options.topology, quick=True)
    devices = topology.find(options.topology)
    rows = []
    for name, (path, fields) in RUNS.items():
        for axis in MESHES:
            for by_rows in (False, True):
                experiment = config.load(path)
                config.override_all(experiment, fields)
                sizes = {"data": 1, "fsdp": 1, "tensor": 1, axis: len(devices.devices)}
                experiment.mesh.update(sizes)
                found = traffic(experiment, devices, by_rows=by_rows)
                how = "by rows" if by_rows else "left to the compiler"
                received = found.per_token / MIB, found.weights_per_token / MIB
                mesh = f"{axis}={sizes[axis]}"
                rows.append((name, mesh, how, found.count_per_token, *received))
                print(*rows[-1], sep="  ", flush=True)
    publish(options.out / "decoding", COLUMNS, rows)


if __name__ == "__main__":
    run(main)
