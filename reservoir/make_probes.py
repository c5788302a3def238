"""Writes probing tasks made from any text: python -m reservoir.make_probes --text=FILE --count=10000 --out=DIR"""

from common.runtime import program

EMBEDDED = "embedded:python"


def main() -> None:
    import numpy as np

    from common.arguments import int_arg
    from common.config import check_choice, parser_for
    from common.data.files import read_lines
    from common.data.text_sources import DOCUMENTS, cut, python_manual
    from common.errors import check
    from common.storage.addresses import shown
    from common.storage.folders import open_file, open_folder, output
    from reservoir.probing.data import task_path, write_task
    from reservoir.probing.text import MAKERS, sentences

    parser = parser_for("reservoir.make_probes", __doc__)
    parser.add_argument(
        "--text",
        required=True,
        action="append",
        metavar="FILE",
        help=f"text file, plain, .gz or .zip; repeat the option for several files; {EMBEDDED} needs no file",
    )
    parser.add_argument(
        "--documents",
        default="line",
        choices=DOCUMENTS,
        help="unit of text that sentences do not cross: line (default), paragraph or file",
    )
    parser.add_argument(
        "--tasks",
        default=",".join(MAKERS),
        metavar="A,B",
        help=f"comma-separated tasks (default {','.join(MAKERS)})",
    )
    parser.add_argument(
        "--count",
        type=int_arg("--count"),
        default=10_000,
        help="training sentences per task (default 10000); the validation split and the test split have about a"
        " tenth of this number each",
    )
    parser.add_argument("--seed", type=int_arg("--seed", 0), default=1, help="random seed")
    parser.add_argument(
        "--out", required=True, type=open_folder, metavar="DIR", help="folder of the tasks' files"
    )
    options = parser.parse_args()
    names = options.tasks.split(",")
    for name in names:
        check_choice("--tasks", name, MAKERS)
    paths = {name: task_path(options.out, name) for name in names}
    for path in paths.values():
        check(
            not path.exists(),
            f"{shown(path)} exists already: remove the file, or choose another --out",
        )

    files = []
    for name in options.text:
        if name == EMBEDDED:
            files += python_manual("train")
            continue
        path = open_file(name)
        check(
            path.exists() and not path.is_dir(),
            f"--text={name} is neither a file nor {EMBEDDED}: give the path of a text file, or {EMBEDDED}",
        )
        files.append(read_lines(path))
    pool = sentences(text for lines in files for text in cut(lines, options.documents))
    made = {
        name: MAKERS[name](pool, options.count, np.random.default_rng(options.seed))
        for name in names
    }
    with output(options.out):
        for name, examples in made.items():
            write_task(paths[name], examples)
    for name, examples in made.items():
        sizes = " / ".join(f"{len(rows):,}" for rows in examples.values())
        labels = len({label for label, _ in examples["train"]})
        print(
            f"{shown(paths[name])}: {labels:,} labels, {sizes} sentences to train, validate and test"
        )


if __name__ == "__main__":
    program.run(main)
