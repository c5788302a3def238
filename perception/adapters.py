"""Merges, adds and exports LoRA adapters: python -m perception.adapters merge|unmerge|add|export|quantize (--help)

An ADAPTER is a run that was trained with --config.finetune=lora, or the output directory of `add`. Weights are
directories in Hugging Face format (config.json and safetensors). The classification head is not part of an adapter;
`export` writes the head to a subdirectory.
"""

from pathlib import Path

from common.runtime import program


def main() -> None:
    from common import config
    from perception.quantized import KINDS

    parser = config.parser_for("perception.adapters")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> tuple:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        return made, {"type": Path, "metavar": "DIR"}

    merge, folder = command("merge", "merges an adapter into its base weights")
    merge.add_argument("--adapter", required=True, type=Path, metavar="ADAPTER")
    base = {**folder, "help": "the base weights (default: the directory that the run used)"}
    merge.add_argument("--pretrained", **base)
    merge.add_argument("--out", required=True, **folder)

    unmerge, _ = command("unmerge", "subtracts an adapter from merged weights")
    unmerge.add_argument("--adapter", required=True, type=Path, metavar="ADAPTER")
    unmerge.add_argument("--merged", required=True, **folder)
    unmerge.add_argument("--out", required=True, **folder)

    add, _ = command("add", "writes the weighted sum of adapters that share base weights")
    add.add_argument("--adapters", required=True, nargs="+", metavar="ADAPTER:WEIGHT")
    add.add_argument("--pretrained", **base)
    add.add_argument("--out", required=True, **folder)

    export, _ = command("export", "writes the encoder and the classifier of any run")
    export.add_argument("--run", required=True, **folder)
    export.add_argument("--pretrained", **base)
    export.add_argument("--out", required=True, **folder)

    quantize, _ = command(
        "quantize",
        "measures size and error of --config.quantize for each kernel; writes no weights",
    )
    quantize.add_argument("--pretrained", required=True, **folder)
    quantize.add_argument("--kind", choices=KINDS, default=KINDS[-1])
    quantize.add_argument("--out", **folder, help="where to write the table")

    options = parser.parse_args()

    from perception import adapter_commands

    getattr(adapter_commands, options.command)(options)


if __name__ == "__main__":
    program.run(main)
