"""Translates lines with a trained run: python -m reservoir.translate --workdir=RUN < text"""

import sys
from pathlib import Path

from common.runtime import program


def _read(path: Path | None) -> list[str]:
    from common.arguments import check_file
    from common.data.files import ADVICE, decoded_lines, read_lines

    if path is not None:
        check_file("--input", path)
        return read_lines(path)
    return list(decoded_lines(sys.stdin.buffer, "standard input", hint=ADVICE))


def main() -> None:
    from common.arguments import check_output
    from common.atomic import write_output
    from common.storage.folders import open_file, output
    from reservoir import loading

    parser = loading.parser("reservoir.translate", __doc__)
    parser.add_argument(
        "--input",
        type=open_file,
        metavar="FILE",
        help="text to translate (default: standard input)",
    )
    parser.add_argument(
        "--output",
        type=open_file,
        metavar="FILE",
        help="file for the translations (default: standard output)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    options = parser.parse_args()
    lines = _read(options.input)
    if options.output:
        check_output(options.output, options.input, options.overwrite)
    result = loading.load(options).translate(lines)
    text = "".join(f"{line}\n" for line in result)
    if not options.output:
        sys.stdout.write(text)
        return
    with output(options.output):
        write_output(options.output, lambda file: file.write(text.encode()))


if __name__ == "__main__":
    program.run(main)
