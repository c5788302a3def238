"""Continues a prompt with a trained run: python -m gmlp_lm.sample --workdir=RUN --prompt="The " --length=512"""

import codecs
import sys
from pathlib import Path

from common.runtime import program

CHUNK = 16
"""Bytes per compiled call: enough to amortize the call, few enough to stream the text."""


def main() -> None:
    from common.config import check, float_arg, int_arg, parser_for, positive_int_arg

    parser = parser_for("gmlp_lm.sample")
    parser.add_argument("--workdir", required=True, type=Path, metavar="RUN")
    parser.add_argument("--prompt", default="\n", help="beginning of the text")
    parser.add_argument(
        "--length",
        type=positive_int_arg("--length"),
        help="bytes to write (default: 512, or fewer if the model's length ends before)",
    )
    parser.add_argument(
        "--temperature", type=float_arg("--temperature"), default=0.8, help="0: greedy"
    )
    parser.add_argument("--top_k", type=int_arg("--top_k"), default=0, help="0: all bytes")
    parser.add_argument("--top_p", type=float_arg("--top_p"), default=1.0)
    parser.add_argument("--seed", type=int_arg("--seed"), default=1)
    options = parser.parse_args()

    import jax

    from common.decode.generate import Generator, as_bytes
    from common.decode.sample import Sampling
    from common.sharding import make_mesh
    from gmlp_lm.run import load

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    sampling.validate()
    check(options.seed < 2**32, f"--seed must be below {2**32}, got {options.seed}")
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    config, values = load(options.workdir, mesh)
    prompt = as_bytes(options.prompt)
    length = options.length or max(1, min(512, config.model.length - len(prompt)))
    write = Generator(values.abstract_model, mesh, config.model.length, sampling)
    chunks = write(values, prompt, length, options.seed, chunk=CHUNK)
    # A chunk may end within a character. Invalid UTF-8 becomes a replacement character.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    # A terminal that lacks a character prints a replacement. The streams of notebooks cannot be reconfigured.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(decoder.decode(prompt))
    for chunk in chunks:
        sys.stdout.write(decoder.decode(chunk))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")


if __name__ == "__main__":
    program.run(main)
