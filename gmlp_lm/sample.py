"""Continues prompts with a trained run: python -m gmlp_lm.sample --workdir=RUN --prompt="The " --length=512"""

import codecs
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from common.runtime import program


def main() -> None:
    from common.arguments import float_arg, int_arg
    from common.config import check_seed, parser_for
    from common.storage.folders import open_file, open_folder

    parser = parser_for("gmlp_lm.sample", __doc__)
    parser.add_argument(
        "--workdir", required=True, type=open_folder, metavar="RUN", help="folder of the run"
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", default="\n", help="text to continue (default: a line feed)")
    given.add_argument(
        "--prompts",
        type=open_file,
        metavar="FILE",
        help='file with a prompt per line; in a .jsonl file, the string or the field "prompt" of each line',
    )
    parser.add_argument(
        "--samples", type=int_arg("--samples"), default=1, help="texts per prompt (default: 1)"
    )
    parser.add_argument(
        "--length",
        type=int_arg("--length"),
        default=512,
        help="bytes to generate per text, or subwords if the run has a subword tokenizer (default: 512)",
    )
    parser.add_argument(
        "--temperature",
        type=float_arg("--temperature"),
        default=0.8,
        help="sampling temperature (default: 0.8); 0 decodes greedily",
    )
    parser.add_argument(
        "--top_k",
        type=int_arg("--top_k", 0),
        default=0,
        help="sample from the K likeliest bytes or subwords; 0 (default) samples from all",
    )
    parser.add_argument(
        "--top_p",
        type=float_arg("--top_p"),
        default=1.0,
        help="sample from the fewest bytes or subwords whose probabilities add up to P or more; 1 (default) means all",
    )
    parser.add_argument(
        "--seed", type=int_arg("--seed", 0), default=1, help="seed of the sampling (default: 1)"
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="print several texts while they are generated: JSON lines with the number of a text and its next piece",
    )
    options = parser.parse_args()

    from common.decode.sample import Sampling
    from gmlp_lm.loading import load_run

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    sampling.validate("--")
    check_seed("--seed", options.seed)
    # `surrogateescape` restores bytes of the command-line argument that are not valid UTF-8.
    prompt = options.prompt.encode("utf-8", "surrogateescape")
    prompts = [prompt] if options.prompts is None else read(options.prompts)
    prompts = [prompt for prompt in prompts for _ in range(options.samples)]
    run = load_run(options.workdir, option="--workdir")
    chunks = run.pieces(prompts, options.length, sampling, options.seed)
    # Replace characters that the terminal cannot encode. A notebook's output stream has no `reconfigure`.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if options.prompts is None and options.samples == 1:
        _stream(prompts[0], chunks)
        return
    if options.stream:
        _stream_several(prompts, chunks)
        return
    texts = [b"".join(pieces) for pieces in zip(*chunks, strict=True)]
    for prompt, text in zip(prompts, texts, strict=True):
        pair = {"prompt": prompt, "text": text}
        print(json.dumps({name: x.decode(errors="replace") for name, x in pair.items()}))


def read(path: Path) -> list[bytes]:
    """Reads one prompt from each line of a file.

    In a .jsonl file, each line is a JSON string, or a JSON object with the prompt in the field "prompt". Raises a
    UserError if the file cannot be read, has no prompts, or has a line without a valid, non-empty prompt.
    """
    from common.arguments import check_file
    from common.data.files import read_bytes
    from common.errors import UserError, check, parse_json
    from common.storage.addresses import shown

    check_file("--prompts", path)
    form = 'a JSON string, or a JSON object with a string in the field "prompt"'
    prompts = []
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        where = f"{shown(path)}, line {number}"
        if path.name.removesuffix(".gz").removesuffix(".zip").endswith(".jsonl"):
            try:
                value = parse_json(line)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where} is not UTF-8 ({error}): convert the file to UTF-8"
                ) from error
            except ValueError as error:
                # The message of a JSONDecodeError ends with a position that calls this line "line 1". Take the
                # attribute `msg`, which has no position.
                reason = getattr(error, "msg", error)
                raise UserError(f"{where} is not JSON ({reason}): write {form}") from error
            prompt = value.get("prompt") if isinstance(value, dict) else value
            check(isinstance(prompt, str), f"{where} must be {form}, got {value!r:.80}")
            try:
                line = prompt.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{where} is not Unicode text ({error}): correct or remove the prompt"
                ) from error
        check(bool(line), f"{where} is an empty prompt: remove the line")
        prompts.append(line)
    check(bool(prompts), f"{shown(path)} has no prompts: write a prompt on each line")
    return prompts


def _decoder() -> codecs.IncrementalDecoder:
    """Returns a decoder for pieces that may end within a character. Invalid UTF-8 becomes a replacement character."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _stream(prompt: bytes, chunks: Iterator[Iterable[bytes]]) -> None:
    """Prints the prompt, then its continuation while it is generated."""
    decoder = _decoder()
    sys.stdout.write(decoder.decode(prompt))
    for (text,) in chunks:
        sys.stdout.write(decoder.decode(text))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")


def _stream_several(prompts: Sequence[bytes], chunks: Iterator[Iterable[bytes]]) -> None:
    """Prints JSON lines: first the number and prompt of each text, then the number of a text and its next piece."""

    def write(number: int, **piece: str) -> None:
        if any(piece.values()):
            print(json.dumps({"number": number, **piece}), flush=True)

    decoders = [_decoder() for _ in prompts]
    for number, prompt in enumerate(prompts):
        write(number, prompt=prompt.decode(errors="replace"))
    for pieces in chunks:
        for number, piece in enumerate(pieces):
            write(number, text=decoders[number].decode(piece))
    for number, decoder in enumerate(decoders):
        write(number, text=decoder.decode(b"", final=True))


if __name__ == "__main__":
    program.run(main)
