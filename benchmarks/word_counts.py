"""Measures time, memory and F1 of `perception.worth` with TF-IDF alone, on many reviews.

    python -m benchmarks.word_counts --data=data/imdb

Writes generated reviews to a JSON lines file and runs `perception.worth --data FILE` with a budget that is too small
for networks. `perception.worth` reads the file, makes splits without near-duplicates, chooses the inverse penalty C,
fits, tests and writes the report. A generated review consists of sentences of random reviews with the same number of
stars, so the generated reviews have about as many different word pairs as real reviews.
"""

import json
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from common.arguments import int_arg
from common.config import parser_for
from common.errors import check
from common.runtime import program

WORDS = 130
"""Mean of the normal distribution of a review's minimum number of words.

A review gets whole sentences until it has its minimum: reviews generated from data/imdb have 143 words on average.
"""


def generate(sentences: dict[int, list[str]], rows: int, seed: int) -> Iterator[dict]:
    """Yields `rows` reviews, each with a text and its stars, made from `sentences`, {stars: sentences}."""
    draw = random.Random(seed)
    stars = sorted(sentences)
    for _ in range(rows):
        label, words = draw.choice(stars), 0
        length = max(5, round(draw.gauss(WORDS, WORDS / 3)))
        picked: list[str] = []
        while words < length:
            picked.append(draw.choice(sentences[label]))
            words += picked[-1].count(" ") + 1
        yield {"text": " ".join(picked), "stars": label}


def sentences_of(folder: Path) -> dict[int, list[str]]:
    """Returns {stars: sentences} of the reviews in train.jsonl.gz."""
    from common.data.files import read_bytes

    found: dict[int, list[str]] = {}
    lines = read_bytes(folder / "train.jsonl.gz").splitlines()
    for number, line in enumerate(lines, start=1):
        review = json.loads(line)
        check(
            {"text", "stars"} <= review.keys(),
            f"--data={folder}: line {number} of train.jsonl.gz lacks the field text or stars: give the folder with the"
            " reviews of IMDb",
        )
        text = review["text"].replace("<br />", " ")
        found.setdefault(review["stars"], []).extend(re.findall(r"[^.!?]+[.!?]+", text))
    return {stars: [" ".join(x.split()) for x in texts] for stars, texts in found.items()}


def main() -> None:
    from benchmarks.harness import machine, peak_bytes, write_json

    parser = parser_for("benchmarks.word_counts", __doc__)
    parser.add_argument("--data", required=True, type=Path, help="folder with train.jsonl.gz")
    parser.add_argument("--rows", type=int_arg("--rows"), default=650_000)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/word_counts.json"))
    options = parser.parse_args()
    check(
        (options.data / "train.jsonl.gz").is_file(),
        f"--data={options.data} has no train.jsonl.gz: give a folder with this file, one JSON object per line, with the"
        " fields text and stars",
    )

    with TemporaryDirectory() as folder:
        reviews, out = Path(folder) / "reviews.jsonl", Path(folder) / "worth"
        with reviews.open("w") as file:
            for review in generate(sentences_of(options.data), options.rows, seed=1):
                file.write(json.dumps(review) + "\n")
        command = [sys.executable, "-m", "perception.worth", "--data", str(reviews)]
        command += ["--label=stars", "--budget=1s", f"--out={out}"]
        start = time.perf_counter()
        code = subprocess.run(command).returncode
        seconds = time.perf_counter() - start
        check(code == 0, f"perception.worth failed with exit code {code}: see its error above")
        # The program is the only child process so far.
        used, peak = (
            resource.getrusage(resource.RUSAGE_CHILDREN),
            peak_bytes(resource.RUSAGE_CHILDREN),
        )
        summary = json.loads(next(out.glob("runs/tf_idf*/summary.json")).read_text())
        megabytes = reviews.stat().st_size / 1e6
    record = {
        "title": "perception.worth with TF-IDF alone, the whole program",
        "machine": machine(),
        "rows": options.rows,
        "megabytes_of_text": megabytes,
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_gib": peak / 2**30,
        "test": summary["test"],
    }
    print(
        f"{options.rows:,} reviews, {megabytes:,.0f} MB: {record['cpu_seconds']:.0f} CPU seconds,"
        f" {seconds:.0f} s, at most {record['peak_gib']:.2f} GiB"
    )
    write_json(options.out, record)


if __name__ == "__main__":
    program.run(main)
