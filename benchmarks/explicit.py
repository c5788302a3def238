"""Times explicit solutions against the dense formula and gradient training: python -m benchmarks.explicit

Language model (3 million random tokens with Zipf frequencies, vocabulary 4,098, contexts of K tokens): the explicit
solution for K = 1 and 4, the dense formula H^T Y for K = 1, and an epoch of Adagrad for K = 1, in this project and in
PyTorch. The dense formula multiplies the features H, transposed, with the one-hot targets Y, in NumPy. PyTorch trains
one model in three forms, without the noise that the paper adds to the inputs: one-hot inputs, an embedding, and an
embedding with sparse gradients.

Digit classifier (60,000 random images of MNIST's shape): the explicit solution, the same solution in NumPy, and
scikit-learn's naive Bayes.

The dense formula and the epochs of the language model are timed on a part of the text and scaled to the whole text.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

from common.arguments import int_arg
from common.runtime import program

VOCABULARY = 4098
DENSE = "dense H^T Y K=1"
EPOCH = "epoch K=1"

TARGETS = {
    ("solution K=1", DENSE): 1 / 1000,
    ("solution K=1", f"torch sparse {EPOCH}"): 1 / 100,
    (f"ours {EPOCH}", f"torch sparse {EPOCH}"): 1.0,
    (f"ours {EPOCH}", f"torch one-hot {EPOCH}"): 1 / 10,
    ("digits solution", "digits MultinomialNB"): 1 / 4,
    ("digits solution", "digits NumPy"): None,
}
"""{(case, baseline): upper bound of (time of the case) / (time of the baseline); None without a target}."""

TOKENS_PER_SECOND = 5e6  # target: the solution with K = 4 is at least this fast


def random_text(tokens: int) -> np.ndarray:
    """Returns random tokens with Zipf frequencies. Token 0, the padding, does not occur."""
    ranks = np.arange(1, VOCABULARY)
    share = 1 / (ranks + 2.7)
    drawn = np.random.default_rng(0).choice(ranks, tokens, p=share / share.sum())
    return drawn.astype(np.int32)


def random_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns random features (60000, 784), from 1/256 to 1, and random labels (60000,), from 0 to 9."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, 60_000)
    ink = generator.uniform(size=(10, 784)) < 0.2
    pixels = generator.integers(0, 256, (60_000, 784)) * ink[labels]
    return ((pixels + 1) / 256).astype(np.float32), labels


def make_solution(context: int, tokens: int) -> Callable[[], None]:
    """Returns a function that computes the explicit solution, with `context` previous tokens, for a random text."""
    import jax

    from common import sharding
    from common.data.corpus import TokenizedCorpus
    from explicit_opt.counts import Noise, language_solution
    from explicit_opt.language import Windows, count_windows

    # A corpus has four special ids, the model has two: adding 2 to the model's ids gives the corpus's ids.
    corpus = TokenizedCorpus(random_text(tokens) + 2, np.array([0, tokens]))
    windows = Windows(corpus.tokens, corpus.lengths, context)
    mesh = sharding.make_mesh({"data": -1})

    def solve() -> None:
        targets_V = np.bincount(windows.tokens_L, minlength=VOCABULARY)
        counts = count_windows(windows, VOCABULARY, mesh)
        noise = Noise.of(targets_V)
        jax.block_until_ready(language_solution(counts, noise, targets_V, concatenate=True))

    return solve


def make_dense(tokens: int) -> Callable[[], None]:
    """Returns a function that computes H^T Y for `tokens` tokens.

    H has a row for each token: the noisy embedding of the previous token (`explicit_opt.counts.Noise`). Y has the
    one-hot targets.
    """
    text = random_text(tokens + 1)
    targets_V = np.bincount(text, minlength=VOCABULARY)
    keep_V = targets_V / (targets_V + 1)
    uniform_V = (1 - targets_V / targets_V.sum()) / (VOCABULARY - 1)
    one = np.eye(VOCABULARY, dtype=np.float32)
    noisy_VV = (keep_V[:, None] * one + np.outer(1 - keep_V, uniform_V)).astype(np.float32)
    features, targets = noisy_VV[text[:-1]], one[text[1:]]

    def multiply() -> None:
        features.T @ targets

    return multiply


def make_epoch(side: str, steps: int, batch: int) -> Callable[[], None]:
    """Returns a function that runs `steps` steps of Adagrad. `side` is "ours" or a form in `peers.softmax_torch`."""
    text = random_text((steps + 1) * batch + 1)
    if side == "ours":
        from benchmarks.ours import next_token_step

        step = next_token_step(1, VOCABULARY, batch, text)
    else:
        from benchmarks.peers import softmax_torch

        step = softmax_torch.make_step(side, VOCABULARY, batch, text)

    def run() -> None:
        for _ in range(steps):
            step()

    return run


def make_digits(side: str) -> Callable[[], None]:
    """Returns a function that fits a digit classifier by the method `side`: "solution", "MultinomialNB" or "NumPy"."""
    features, labels = random_digits()
    match side:
        case "NumPy":

            def fit() -> None:
                counts = features.T @ np.eye(10, dtype=np.float32)[labels]
                norm = features.sum(1).mean()
                np.log(counts) - (norm - 1) / norm * np.log(counts.sum(0))

        case "MultinomialNB":
            from sklearn.naive_bayes import MultinomialNB

            def fit() -> None:
                MultinomialNB().fit(features, labels)

        case _:
            from explicit_opt.solution import explicit_solution

            def fit() -> None:
                explicit_solution(features, labels).block_until_ready()

    return fit


def main() -> None:
    from benchmarks.harness import check_installed, compare_isolated, make_parser, report

    parser = make_parser(__doc__, "explicit", rounds=5, peers=True)
    parser.add_argument("--tokens", type=int_arg("--tokens"), default=3_000_000)
    parser.add_argument(
        "--batch", type=int_arg("--batch"), default=1024, help="tokens per step of Adagrad"
    )
    options = parser.parse_args()

    sides = {"ours": 8}
    if not options.without_torch:
        check_installed("torch")
        sides |= {"one-hot": 2, "embedding": 8, "sparse": 32}
    dense = 2048
    # {case: (function that makes the timed function, factor from a call's time to the time of all tokens or digits)}
    cases = {
        "solution K=1": (partial(make_solution, 1, options.tokens), 1),
        "solution K=4": (partial(make_solution, 4, options.tokens), 1),
        DENSE: (partial(make_dense, dense), options.tokens / dense),
    }
    for side in ("solution", "MultinomialNB", "NumPy"):
        cases[f"digits {side}"] = partial(make_digits, side), 1
    for side, steps in sides.items():
        name = f"ours {EPOCH}" if side == "ours" else f"torch {side} {EPOCH}"
        factory = partial(make_epoch, side, steps, options.batch)
        cases[name] = factory, options.tokens / (steps * options.batch)
    factories = {name: factory for name, (factory, _) in cases.items()}
    timings, memory = compare_isolated(factories, rounds=options.rounds, warmup=1)
    memory = {name: round(size / 2**20) for name, size in memory.items()}
    timings = {name: tuple(cases[name][1] * x for x in times) for name, times in timings.items()}
    speed = options.tokens / median(timings["solution K=4"])
    report(
        f"{options.tokens:,} tokens, vocabulary {VOCABULARY}, batches of {options.batch}; 60,000 digits",
        timings,
        {pair: target for pair, target in TARGETS.items() if {*pair} <= timings.keys()},
        options.out,
        {"peak_memory_mib": memory, "solution_K4_tokens_per_second": speed},
    )
    met = "yes" if speed >= TOKENS_PER_SECOND else "no"
    print(f"solution K=4: {speed:,.0f} tokens/s   target >= {TOKENS_PER_SECOND:,.0f}   met {met}")
    for name, size in memory.items():
        print(f"peak memory {name}: {size:,} MiB")


if __name__ == "__main__":
    program.run(main)
