"""Probing end to end on short runs, and the sentence vectors."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.data.special_ids import BOS, EOS
from common.errors import UserError
from common.sharding import make_mesh
from common.train.command import fit
from common.train.restore import read_config
from configs import masked
from reservoir import make_probes, probe
from reservoir.probing.features import Reader, open_reader

WORDS = ("the", "list", "of", "names", "that", "a", "class", "has", "when", "its", "value", "is")
LINES = ["a list", "the value of a class .", "a class has the list of names that the list has when"]


def make_lines(count: int, seed: int) -> str:
    """Returns sentences of different lengths, one per line."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(4, 28, count)
    return "".join(f"{' '.join(generator.choice(WORDS, size))} .\n" for size in sizes)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1}, jax.devices()[:1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, mesh) -> Path:
    """Returns the workdir of a masked language model with three layers, of which the second is a reservoir."""
    folder = tmp_path_factory.mktemp("masked")
    for seed, split in enumerate(("train", "valid", "test")):
        (folder / f"{split}.txt").write_text(make_lines(100, seed))
    config = masked.tiny(masked.roberta("transformer"))
    config.model.update({"width": 16, "hidden": 24, "heads": 2})
    config.data.update({"source": f"files:{folder}", "documents": "line", "vocab_size": 40})
    config.data.cache_dir = str(folder / "cache")
    config.train.steps, config.eval.steps, config.eval.sequences = 2, 2, 64
    config.wandb.mode = "disabled"
    fit(config, folder / "run", mesh)
    return folder / "run"


@pytest.fixture(scope="module")
def translator(tmp_path_factory, mesh, make_config) -> Path:
    folder = tmp_path_factory.mktemp("translator")
    config = make_config("ffn")
    config.data.update({"vocab_size": 300, "cache_dir": str(folder / "cache")})
    config.train.steps = config.eval.steps = 1
    config.eval.sentences = 8
    config.decode.update({"beams": 1, "ratio": 0.0, "extra": 1})
    config.wandb.mode = "disabled"
    fit(config, folder / "run", mesh)
    return folder / "run"


@pytest.fixture
def call(monkeypatch, tmp_path) -> Callable[..., None]:
    """Returns a function (module of a program, *arguments) that runs the program in this process, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def run(program, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        program.main()

    return run


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(make_lines(900, 3))
    return path


def states(read: Reader, ids: list[int]) -> np.ndarray:
    """Returns the hidden states (P, L, D) of one sentence, computed without padding."""
    values = read.values

    @jax.jit
    def call(tokens_1L):
        model = values.abstract_model.build(values.trainable, values.frozen)
        return jnp.stack(read.hidden(model, tokens_1L, jnp.array([len(ids)])))

    return np.asarray(call(jnp.asarray([ids], jnp.int32)))[:, 0]


@pytest.mark.medium
def test_first_token_pooling_reads_each_layers_state(trained, mesh):
    read = open_reader(trained, mesh, None)
    assert read.layers == ["embeddings", "trained", "reservoir", "trained"]
    found_PED = read(LINES)
    assert found_PED.shape == (4, 3, 16) and found_PED.dtype == np.float32
    for number, ids in enumerate(read.tokenizer.encode(LINES)):
        alone_PLD = states(read, [BOS, *ids, EOS])
        np.testing.assert_allclose(found_PED[:, number], alone_PLD[:, 0], atol=1e-5)
    # In the embedding layer, the first token's state does not depend on the sentence.
    assert np.ptp(found_PED[0], axis=0).max() == 0 < np.ptp(found_PED[1], axis=0).max()
    # A post-norm model has no final norm, so the output of the encoder is the state of the last layer.
    last = Reader(
        read.values,
        lambda whole, *text: [whole.encoder(*text)],
        read.tokenizer,
        "first",
        begin=True,
        longest=64,
    )
    np.testing.assert_allclose(found_PED[-1:], last(LINES), atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("pool", ["first", "mean"])
def test_vectors_are_independent_of_the_batch(trained, mesh, pool):
    read = open_reader(trained, mesh, pool)
    long = " ".join(["list"] * 36)
    together = read([*LINES, long])
    for number, line in enumerate([*LINES, long]):
        np.testing.assert_allclose(read([line])[:, 0], together[:, number], atol=1e-5)
    shared = open_reader(trained, make_mesh({"data": 4}, jax.devices()[:4]), pool)
    np.testing.assert_allclose(shared([*LINES, long]), together, atol=1e-5)


@pytest.mark.slow
def test_translators_are_mean_pooled(translator, mesh):
    read = open_reader(translator, mesh, None)
    assert read.layers == ["embeddings", "trained", "reservoir", "trained"]
    found_PED = read(LINES)
    for number, ids in enumerate(read.tokenizer.encode(LINES)):
        np.testing.assert_allclose(
            found_PED[:, number], states(read, [*ids, EOS]).mean(1), atol=1e-5
        )


@pytest.mark.medium
def test_long_sentences_are_truncated_and_counted(trained, mesh):
    read = open_reader(trained, mesh, None)
    ids = read.tokenizer.encode([" ".join(["the"] * 90)])[0]
    fits, over = (read.tokenizer.decode([ids[:n]])[0] for n in (62, 63))
    assert [len(read.tokenizer.encode([line])[0]) for line in (fits, over)] == [62, 63]
    assert read.cut([fits, over, "a"]) == 1
    np.testing.assert_allclose(read([over]), read([fits]), atol=1e-5)


def table(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))


@pytest.mark.medium
def test_probe_program_writes_table_4(trained, text, call, tmp_path, capsys):
    call(make_probes, f"--text={text}", "--count=120", "--out=tasks")
    assert "sentence_length.txt: 6 labels, 120 / 12 / 12 sentences" in capsys.readouterr().out
    tasks = "--tasks=bigram_shift,sentence_length,word_content"
    arguments = (f"--workdir={trained}", "--data=tasks", tasks)
    call(probe, *arguments, "--out=one")
    output = capsys.readouterr().out
    header, majority, *rows = table(tmp_path / "one" / "probing.csv")
    assert header == ["layer", "kind", "BShift", "SentLen", "WordContent"]
    assert majority == ["", "majority class", "50.00", "16.67", "50.00"]
    assert [row[:2] for row in rows] == [
        ["0", "embeddings"],
        ["1", "trained"],
        ["2", "reservoir"],
        ["3", "trained"],
    ]
    # The first token's embedding is constant and the labels are balanced: accuracy is chance.
    assert rows[0][2:] == majority[2:]
    assert "|     2 | reservoir " in (tmp_path / "one" / "probing.md").read_text()
    assert all(cell in output for row in rows for cell in row)
    choices = table(tmp_path / "one" / "choices.csv")
    assert choices[0][0] == "task" and len(choices) == 1 + 3 * 4
    assert {row[4] for row in choices[1:]} == {
        "50",
        "0",
    }  # The classifier of word content has no hidden layer.
    # Without --out, the results are in RUN/probing. Training must still resume from RUN.
    call(probe, *arguments)
    assert table(trained / "probing" / "probing.csv") == [header, majority, *rows]
    fit(read_config(trained), trained, make_mesh({"data": 1}, jax.devices()[:1]))


@pytest.mark.medium
def test_probe_seeds_report_mean_and_std(trained, text, call, tmp_path):
    call(make_probes, f"--text={text}", "--count=60", "--tasks=sentence_length", "--out=tasks")
    probe_it = (probe, f"--workdir={trained}", "--data=tasks", "--tasks=sentence_length")
    call(*probe_it, "--seeds=2", "--out=two")
    rows = table(tmp_path / "two" / "probing.csv")
    choices = table(tmp_path / "two" / "choices.csv")[1:]
    accuracies = [float(row[-1]) for row in choices if row[1] == "3"]
    assert len(accuracies) == 2
    assert rows[-1][-1] == f"{np.mean(accuracies):.2f} ± {np.std(accuracies, ddof=1):.2f}"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("--tasks='lenght': choose one of sentence_length", ["--tasks=lenght"]),
        ("names a task twice", ["--tasks=tree_depth,tree_depth"]),
        ("--tasks is empty: give a value", ["--tasks="]),
        ("--data=nowhere is not a directory", ["--data=nowhere"]),
        (
            "no sentence_length.txt or sentence_length.txt.gz: choose among its tasks, --tasks=tree_depth",
            [],
        ),
        ("--workdir=nowhere holds no run", ["--tasks=tree_depth", "--workdir=nowhere"]),
        ("cannot write to --out=text.txt: ", ["--tasks=tree_depth", "--out=text.txt"]),
        ("--seeds must be a whole number of at least 1, got '0'", ["--seeds=0"]),
        ("--grid: invalid choice: 'large'", ["--grid=large"]),
        ("--pool: invalid choice: 'last'", ["--pool=last"]),
    ],
)
def test_invalid_probe_arguments_are_rejected(trained, text, call, tmp_path, fault, arguments):
    tree = [f"{p}\t{label}\tOne {n} ." for n, p in enumerate(("tr", "va", "te")) for label in "ab"]
    (tmp_path / "tree_depth.txt").write_text("\n".join(tree))
    with pytest.raises(UserError) as caught:
        call(probe, f"--workdir={trained}", "--data=.", *arguments)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("--tasks='tree_depth': choose one of sentence_length", ["--tasks=tree_depth"]),
        ("--text=none.txt is neither a file nor embedded:python", ["--text=none.txt"]),
        ("--text=embedded:pyhton is neither a file nor", ["--text=embedded:pyhton"]),
        ("--documents: invalid choice: 'page'", ["--documents=page"]),
        ("--count must be a whole number of at least 1, got '-5'", ["--count=-5"]),
        ("--tasks=sentence_length with --count=100000 needs", ["--count=100000"]),
        ("cannot write to text.txt", ["--out=text.txt", "--count=60"]),
        ("--out", ["--out"]),
    ],
)
def test_invalid_make_probes_arguments_are_rejected(text, call, tmp_path, fault, arguments):
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UserError) as caught:
        call(make_probes, f"--text={text}", "--out=tasks", *arguments)
    assert fault in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_documents_paragraph_joins_lines(call, tmp_path):
    whole = "".join(f"So {line}\n" for line in make_lines(1800, 3).splitlines())
    (tmp_path / "text.txt").write_text(whole.replace(" the ", "\nthe "))
    arguments = ("--text=text.txt", "--tasks=sentence_length", "--count=600")
    with pytest.raises(UserError, match="number of sentences for the label"):
        call(make_probes, *arguments, "--out=lines")
    call(make_probes, *arguments, "--out=file", "--documents=file")
    call(make_probes, "--text=embedded:python", "--documents=paragraph", *arguments[1:], "--out=e")
    for folder in ("file", "e"):
        assert len((tmp_path / folder / "sentence_length.txt").read_text().splitlines()) == 720


def test_existing_task_files_are_not_overwritten(text, call, tmp_path):
    (tmp_path / "bigram_shift.txt").write_text("SentEval's own\n")
    with pytest.raises(UserError, match=r"bigram_shift.txt exists already"):
        call(make_probes, f"--text={text}", "--out=.", "--count=60")
    assert (tmp_path / "bigram_shift.txt").read_text() == "SentEval's own\n"
    assert not (tmp_path / "sentence_length.txt").exists()
