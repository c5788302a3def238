"""Measures the bits per byte of a trained model on a text: python -m gmlp_lm.evaluate --workdir=RUN --text=FILE"""

import math

from common.runtime import program


def main() -> None:
    from common.arguments import check_file, int_arg
    from common.config import parser_for
    from common.errors import check
    from common.storage.addresses import shown
    from common.storage.folders import open_file, open_folder

    parser = parser_for("gmlp_lm.evaluate", __doc__)
    parser.add_argument(
        "--workdir", required=True, type=open_folder, metavar="RUN", help="folder of the run"
    )
    parser.add_argument(
        "--text",
        required=True,
        type=open_file,
        metavar="FILE",
        help="text file to score; .gz and .zip are unpacked",
    )
    parser.add_argument(
        "--stride",
        type=int_arg("--stride"),
        help="bytes (or subwords) scored per window; a smaller stride gives more context and takes longer"
        " (default: the stride in the run's configuration)",
    )
    options = parser.parse_args()

    import jax
    import numpy as np

    from common.data.files import read_bytes
    from common.sharding import make_mesh
    from common.tasks.language_modelling import WindowLosses, words
    from gmlp_lm.loading import load_run

    check_file("--text", options.text)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    run = load_run(options.workdir, mesh=mesh, option="--workdir")
    config, tokenizer = run.config, run.tokenizer
    unit = "subwords" if tokenizer.name else "bytes"
    text = read_bytes(options.text)
    tokens = tokenizer.encode(text)
    check(
        len(tokens) > 1,
        f"--text={shown(options.text)} must have at least 2 {unit}, because the first is not scored, got {len(tokens)}:"
        " give a longer text",
    )
    stride, length = options.stride or config.eval.stride, config.model.length
    check(
        stride <= length,
        f"--stride={stride} must be at most the run's window length, {length} {unit}",
    )
    losses = WindowLosses(config, tokenizer)(run.values, tokens, stride)
    bits, scored = losses.nats_E.sum() / math.log(2), int(losses.weights_E.sum(dtype=np.float64))
    print(
        f"{shown(options.text)}: {bits / scored:.4f} bits per byte of {scored:,} byte{'s' * (scored != 1)}"
    )
    if count := words(text):
        per_word = bits / count
        perplexity = f"{2**per_word:,.6g}" if per_word < 1000 else "above 1e300"
        print(
            f"{per_word:.4f} bits per word of {count:,} word{'s' * (count != 1)}, counting line ends as words"
            f" (perplexity {perplexity})"
        )
    print(
        f"stride {stride} in windows of {length} {unit}: {length - stride + 1} to {length} {unit} of context,"
        " fewer at the start of the text"
    )


if __name__ == "__main__":
    program.run(main)
