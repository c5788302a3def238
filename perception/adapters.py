"""What one does with adapters: python -m perception.adapters merge|unmerge|add|export|quantize (each with --help)

An ADAPTER is the folder of a run that was trained with --config.finetune=lora, or what `add` wrote. Weights are folders
of Hugging Face's format (config.json and safetensors). The classifier's head is no part of an adapter; `export` writes
it into a folder of its own.
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

    merge, folder = command("merge", "puts an adapter into its weights")
    merge.add_argument("--adapter", required=True, type=Path, metavar="ADAPTER")
    where = {**folder, "help": "its weights; default: where the run had them from"}
    merge.add_argument("--pretrained", **where)
    merge.add_argument("--out", required=True, **folder)

    unmerge, _ = command("unmerge", "takes an adapter out of merged weights")
    unmerge.add_argument("--adapter", required=True, type=Path, metavar="ADAPTER")
    unmerge.add_argument("--merged", required=True, **folder)
    unmerge.add_argument("--out", required=True, **folder)

    add, _ = command("add", "the weighted sum of adapters of the same weights")
    add.add_argument("--adapters", required=True, nargs="+", metavar="ADAPTER:WEIGHT")
    add.add_argument("--pretrained", **where)
    add.add_argument("--out", required=True, **folder)

    export, _ = command("export", "the encoder of any run as weights, its classifier beside it")
    export.add_argument("--run", required=True, **folder)
    export.add_argument("--pretrained", **where)
    export.add_argument("--out", required=True, **folder)

    quantize, _ = command(
        "quantize", "measures what --config.quantize saves and costs, layer by layer"
    )
    quantize.add_argument("--pretrained", required=True, **folder)
    quantize.add_argument("--kind", choices=KINDS, default=KINDS[-1])
    quantize.add_argument("--out", **folder, help="where to write the table")

    options = parser.parse_args()

    from perception import adapter_commands

    getattr(adapter_commands, options.command)(options)


if __name__ == "__main__":
    program.run(main)
