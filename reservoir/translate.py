"""Translates lines with a trained run: python -m reservoir.translate --workdir=RUN < text"""

import errno
import sys
from contextlib import nullcontext
from pathlib import Path

from common.errors import UserError
from common.runtime import program
from common.storage.addresses import shown


def _read(path: Path | None) -> list[str]:
    from common.arguments import check_file
    from common.data.files import ADVICE, decoded_lines, read_lines

    if path is not None:
        check_file("--input", path)
        return read_lines(path)
    return list(decoded_lines(sys.stdin.buffer, "standard input", hint=ADVICE))


def _write(path: Path | None, text: str, mode: str = "w") -> None:
    if path is None:
        sys.stdout.write(text)
        return
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        remedy = "free space" if error.errno == errno.ENOSPC else "choose another file"
        raise UserError(
            f"cannot write --output={shown(path)}: {error.strerror}; {remedy}"
        ) from error


def main() -> None:
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
        "--output", type=open_file, metavar="FILE", help="output file (default: standard output)"
    )
    options = parser.parse_args()
    lines = _read(options.input)
    _write(options.output, "", "a")  # if the path cannot be written, fail now, before translating
    run = loading.load(options)
    result = run.translate(lines)
    with output(options.output) if options.output else nullcontext():
        _write(options.output, "".join(f"{line}\n" for line in result))


if __name__ == "__main__":
    program.run(main)
