"""Merges, adds and exports adapters; quantizes models: python -m perception.adapters COMMAND (--help lists commands)

An ADAPTER is a run that trained LoRA adapters (--config.finetune=lora), or a directory in PEFT's format, such as the
output of `add` and `peft`. --pretrained and --merged name a directory in Hugging Face format (config.json and
safetensors), or a model in the local Hugging Face cache. An adapter does not contain the classification head, which
`peft` and `export` write to a subdirectory.

--config.mesh.data, .fsdp and .tensor set the mesh. By default parameters are sharded over all devices (fsdp).
"""

import sys
from argparse import ArgumentParser
from contextlib import ExitStack

from ml_collections import ConfigDict

from common.runtime import program


def main() -> None:
    from common import config
    from common.storage.addresses import shown
    from common.storage.folders import open_folder, output
    from perception.quantized import KINDS

    parser = config.parser_for("perception.adapters", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    folder = {"type": open_folder, "metavar": "DIR"}

    def command(name: str, text: str) -> ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    merge = command("merge", "merges an adapter into its base weights")
    merge.add_argument("--adapter", required=True, type=open_folder, metavar="ADAPTER")
    base = {
        **folder,
        "help": "the base weights (default: the directory that the run or the adapter names)",
    }
    merge.add_argument("--pretrained", **base)
    merge.add_argument("--out", required=True, **folder)

    unmerge = command("unmerge", "subtracts an adapter from merged weights")
    unmerge.add_argument("--adapter", required=True, type=open_folder, metavar="ADAPTER")
    unmerge.add_argument("--merged", required=True, **folder)
    unmerge.add_argument("--out", required=True, **folder)

    add = command(
        "add", "writes the weighted sum of adapters that share base weights, in PEFT's format"
    )
    add.add_argument("--adapters", required=True, nargs="+", metavar="ADAPTER:WEIGHT")
    add.add_argument("--pretrained", **base)
    add.add_argument("--out", required=True, **folder)

    for name, text in (
        ("peft", "writes the adapter (in PEFT's format) and the classification head of a run"),
        ("export", "writes the encoder (in Hugging Face format) and the head of a run"),
    ):
        written = command(name, text)
        written.add_argument("--run", required=True, **folder)
        written.add_argument("--pretrained", **base)
        written.add_argument("--out", required=True, **folder)

    quantize = command(
        "quantize",
        "measures size and error of each quantized kernel; with --save, also writes the quantized weights",
    )
    quantize.add_argument("--pretrained", required=True, **folder)
    quantize.add_argument("--kind", choices=KINDS, default="4bit")
    quantize.add_argument("--out", **folder, help="directory for the table (default: print only)")
    quantize.add_argument("--save", **folder, help="directory for the quantized weights")

    parser.epilog = "Further options: --config.mesh.data, --config.mesh.fsdp, --config.mesh.tensor"
    fields, rest = config.split_fields(sys.argv[1:])
    options = parser.parse_args(rest)
    settings = ConfigDict({"mesh": {"data": 1, "fsdp": -1, "tensor": 1}})
    config.override_all(settings, fields)

    from common.sharding import make_mesh
    from perception import adapter_commands
    from perception.safetensor_files import require_empty

    options.mesh = make_mesh(settings.mesh)
    writes_model = options.command != "quantize"
    if writes_model:
        require_empty(options.out)

    with ExitStack() as stack:
        for folder in (options.out, vars(options).get("save")):
            if folder:
                stack.enter_context(output(folder))
        getattr(adapter_commands, options.command)(options)
    if writes_model:
        print(f"written: {shown(options.out)}")


if __name__ == "__main__":
    program.run(main)
