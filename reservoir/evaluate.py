"""Measures the BLEU of a trained run: python -m reservoir.evaluate --workdir=RUN --split=test"""

from common.runtime import program


def main() -> None:
    from common.data.sources import load_parallel
    from common.metrics.bleu import corpus_bleu
    from reservoir import run

    parser = run.parser("reservoir.evaluate")
    parser.add_argument("--split", default="test", choices=("train", "valid", "test"))
    options = parser.parse_args()
    trained = run.load(options)
    text = load_parallel(trained.config.data, options.split)
    result = trained.translate(text.source)
    metric = trained.config.eval
    bleu = corpus_bleu(result, text.target, metric.lowercase, metric.tokenize)
    search = trained.translator.search
    print(f"{options.split}: BLEU {bleu.score:.2f} on {len(result)} sentences")
    if options.split == "valid" and 0 < metric.sentences < len(result):
        print(f"(training evaluates the first {metric.sentences} only: --config.eval.sentences)")
    print(f"beams {search.beams}, length penalty {search.length_penalty:g}, {bleu.signature}")


if __name__ == "__main__":
    program.run(main)
