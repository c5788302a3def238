"""Measures the BLEU of a trained run: python -m reservoir.evaluate --workdir=RUN --split=test"""

from common.runtime import program


def main() -> None:
    from common.arguments import check_file
    from common.errors import check
    from common.metrics.translations import bleu_metric
    from common.storage.addresses import shown
    from common.storage.folders import open_file
    from reservoir import loading
    from reservoir.parallel_sources import read_parallel
    from reservoir.parallel_text import load_parallel

    parser = loading.parser("reservoir.evaluate", __doc__)
    parser.add_argument(
        "--split",
        metavar="NAME",
        help="train, valid, test (default), or any other split of the run's data source",
    )
    parser.add_argument(
        "--source", type=open_file, metavar="FILE", help="text file to translate instead of a split"
    )
    parser.add_argument(
        "--reference",
        type=open_file,
        metavar="FILE",
        help="reference translation of --source, line by line",
    )
    options = parser.parse_args()
    files = (options.source, options.reference)
    check(
        not (any(files) and options.split),
        "--split cannot be used with --source and --reference: give --split alone, or --source and --reference",
    )
    check(
        all(files) == any(files),
        "--source and --reference must be given together: add"
        f" {'--reference' if options.source else '--source'}=FILE",
    )
    if any(files):
        check_file("--source", options.source)
        check_file("--reference", options.reference)
    run = loading.load(options)
    split = options.split or "test"
    if any(files):
        sources, references = read_parallel(*files)
    else:
        text = load_parallel(run.config.data, split)
        sources, references = text.source, text.target
    result = run.translate(sources)
    evaluation, search = run.config.eval, run.translator.search
    metric = bleu_metric(evaluation.lowercase, evaluation.tokenize)
    score = metric.corpus_score(result, [references]).score
    name = shown(options.source) if options.source else split
    print(f"{name}: BLEU {score:.2f} on {len(result)} sentences")
    if not any(files) and split == "valid" and 0 < evaluation.sentences < len(result):
        print(
            f"(training evaluates only the first {evaluation.sentences} sentences: --config.eval.sentences)"
        )
    print(
        f"beams {search.beams}, length penalty {search.length_penalty:g}, {metric.get_signature()}"
    )


if __name__ == "__main__":
    program.run(main)
