"""Measures the bits per byte of a trained run on any text: python -m gmlp_lm.evaluate --workdir=RUN --text=FILE"""

import math
from pathlib import Path

from common.runtime import program


def main() -> None:
    from common.config import check, parser_for, positive_int_arg

    parser = parser_for("gmlp_lm.evaluate")
    parser.add_argument("--workdir", required=True, type=Path, metavar="RUN")
    parser.add_argument(
        "--text",
        required=True,
        type=Path,
        metavar="FILE",
        help="any file; .gz and .zip are unpacked",
    )
    parser.add_argument(
        "--stride",
        type=positive_int_arg("--stride"),
        help="bytes scored per window; a smaller stride gives more context and takes longer (default: the run's)",
    )
    options = parser.parse_args()

    import jax
    import numpy as np

    from common.data.files import read_bytes
    from common.sharding import make_mesh
    from common.tasks.language_modelling import WindowLosses, words
    from gmlp_lm.run import load

    text = np.frombuffer(read_bytes(options.text), np.uint8)
    check(
        len(text) > 1,
        f"--text={options.text} has {len(text)} bytes; at least 2 are needed, because the first is not scored",
    )
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    config, values = load(options.workdir, mesh)
    stride, length = options.stride or config.eval.stride, config.model.length
    check(stride <= length, f"--stride={stride} must be at most the run's window length, {length}")
    bits = WindowLosses(config, mesh)(values, text, stride).nats_M.sum() / math.log(2)
    print(f"{options.text}: {bits / (len(text) - 1):.4f} bits per byte of {len(text) - 1:,} bytes")
    if count := words(text):
        print(f"{bits / count:.4f} bits per word of {count:,} words, line ends among them")
    print(
        f"stride {stride} in windows of {length}: {length - stride + 1} to {length} bytes of context"
    )


if __name__ == "__main__":
    program.run(main)
