"""perception.classify: tables in every format, long and empty texts, batches, meshes, and errors."""

import csv
import gzip
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from common.data.labelled import LabelledText
from common.data.manual import python
from common.errors import UserError
from common.sharding import make_mesh
from common.train.command import fit
from configs import perception as recipes
from perception import baseline, classify, load_run, loading
from perception.labelling import Answers, fields_of
from perception.loading import Trained
from perception.subword import Subword
from perception.table_reader import read_tables
from perception.text_tables import open_table
from perception.windows import Windows, batches
from tests.perception.conftest import TUNED

PAIR = [["premise"], ["hypothesis"]]
LONG = "the debugger steps into a function and prints a string, " * 4
TEXTS = ["a string", 'two\nlines, "quoted"', "", LONG, "the types of a module"]


@pytest.fixture(scope="module")
def workdir(make, mesh, tmp_path_factory) -> Path:
    """Returns the workdir of a run with the pretrained weights and a random head."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    fields = {"train.steps": 0, "eval.start": True, "data.buckets": (8, 16)}
    fit(make(**TUNED, **fields), workdir, mesh)
    return workdir


@pytest.fixture(scope="module")
def trained(workdir, mesh) -> Trained:
    return loading.load(workdir, mesh)


@pytest.fixture(scope="module")
def wanted(trained) -> np.ndarray:
    """Returns the probabilities (E, C) of TEXTS, computed one window at a time.

    The logits are averaged over the windows of a text. The empty text has the probabilities of "x".
    """
    values, found = trained.values, []
    model = values.abstract_model.build(values.trainable, values.frozen)
    run = jax.jit(lambda tokens_BL, lengths_B: model(tokens_BL, lengths_B))
    for text in TEXTS:
        rows = trained.windows([text or "x"])[0]
        padded = [np.asarray([row + [0] * (16 - len(row))]) for row in rows]
        logits = [
            run(row_1L, np.asarray([len(row)]))[0] for row, row_1L in zip(rows, padded, strict=True)
        ]
        found.append(jax.nn.softmax(np.mean(logits, axis=0)))
    return np.asarray(found)


@pytest.fixture
def call(workdir, monkeypatch) -> Callable[..., None]:
    """Returns a function that runs perception.classify with options.

    The function adds --run with the fixture `workdir`, unless the options name a run.
    """

    def call(*options: object, stdin: bytes = b"") -> None:
        named = any(str(option).startswith(("--run", "--workdir")) for option in options)
        default = [] if named else [f"--run={workdir}"]
        monkeypatch.setattr(sys, "argv", ["classify", *default, *map(str, options)])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        classify.main()

    return call


@pytest.fixture
def refused(call) -> Callable[..., str]:
    def refused(*options: object) -> str:
        with pytest.raises(UserError) as caught:
            call(*options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refused


def test_windows_cover_a_long_text_with_special_tokens() -> None:
    words = {word: i for i, word in enumerate(["[CLS]", "[SEP]", "x", *map(str, range(30))])}
    plain = Tokenizer(models.WordLevel(words, "x"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    windows = Windows(Subword(plain.to_str()), 8)
    short, exact, long = windows(["7 [SEP]", "1 2 3 4 5 6", " ".join(map(str, range(14)))])
    assert short == [[0, words["7"], 1, 1]]
    assert exact == [[0, *(words[str(i)] for i in range(1, 7)), 1]]
    assert [len(window) for window in long] == [7, 7, 6]
    assert all(window[0] == 0 and window[-1] == 1 for window in long)
    inner = [number for window in long for number in window[1:-1]]
    assert inner == [words[str(i)] for i in range(14)]


def test_batches_hold_every_window_once_in_few_shapes() -> None:
    """Padding rows have the weight 0, and the weights of each text's windows sum to 1."""
    generator = np.random.default_rng(0)
    windows = [
        [[text + 1] * generator.integers(1, 17) for _ in range(1 + text % 3)] for text in range(50)
    ]
    found = list(batches(windows, buckets=(4, 8, 16), rows=14, multiple=4, pad=99))
    total, kept = np.zeros(50), []
    for batch in found:
        tokens_BL, lengths_B = batch.inputs["tokens"], batch.inputs["lengths"]
        np.add.at(total, batch.texts_B, batch.weights_B)
        assert ((lengths_B == 0) == (batch.weights_B == 0)).all()
        for text, row, length in zip(batch.texts_B, tokens_BL, lengths_B, strict=True):
            assert (row[:length] == text + 1).all() and (row[length:] == 99).all()
            kept += [row[:length].tolist()] if length else []
    np.testing.assert_allclose(total, 1)
    assert sorted(kept) == sorted(window for text in windows for window in text)
    shapes = [batch.inputs["tokens"].shape for batch in found]
    assert {rows for rows, _ in shapes} <= {4, 16} and {length for _, length in shapes} == {
        4,
        8,
        16,
    }
    assert [length for _, length in shapes] == sorted((n for _, n in shapes), reverse=True)


@pytest.mark.medium
def test_one_text_is_not_padded_to_a_whole_batch(trained) -> None:
    for count, rows in ((1, 1), (3, 4), (9, 16), (17, 64), (64, 64)):
        (batch,) = trained.batches([[[5, 6]]] * count, rows=64)
        assert batch.inputs["tokens"].shape == (rows, 8)


def test_mean_of_logits_of_windows(trained, wanted) -> None:
    assert len(trained.windows([LONG])[0]) > 2
    found = trained.probabilities_of(trained.windows([t or "x" for t in TEXTS]), rows=3)
    there = [i for i, text in enumerate(TEXTS) if text]
    np.testing.assert_allclose(found[there], wanted[there], atol=1e-5)
    # The result differs from `probabilities`, which truncates a long text, because the windows cover the whole text.
    assert abs(found[3] - trained.probabilities([LONG])[0]).max() > 1e-3


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def table_bytes(ending: str, rows: list[dict]) -> bytes:
    """Returns the content of a table file, in the format that the file's ending selects."""
    if ending.endswith(".gz"):
        return gzip.compress(table_bytes(ending.removesuffix(".gz"), rows))
    if ending == "parquet":
        from pyarrow import Table, parquet

        file = io.BytesIO()
        parquet.write_table(Table.from_pylist(rows), file)
        return file.getvalue()
    if ending == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t" if ending == "tsv" else ",")
    writer.writerows([rows[0].keys(), *(row.values() for row in rows)])
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def write(path: Path) -> list[dict]:
    """Writes TEXTS with two other columns, in the format that the file's ending selects.

    Returns the rows as `read` will read them.
    """
    ending = path.name.partition(".")[2]
    rows = [{"id": i, "text": text, "Ö": "ä"} for i, text in enumerate(TEXTS)]
    if ending == "parquet":
        rows = [row | {"text": row["text"] or None, "Ö": [row["id"]]} for row in rows]
    elif ending == "jsonl":
        rows = [row | {"Ö": {"x": [1.5, "\ud800"]}} for row in rows]
    else:
        rows = [{key: str(value) for key, value in row.items()} for row in rows]
    put(path, table_bytes(ending, rows))
    return rows


def read(path: Path) -> list[dict]:
    name = path.name.removesuffix(".gz")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if name.endswith("parquet"):
        from pyarrow import parquet

        return parquet.read_table(io.BytesIO(content)).to_pylist()
    if name.endswith("jsonl"):
        return list(map(json.loads, content.decode().splitlines()))
    delimiter = "\t" if name.endswith("tsv") else ","
    return list(csv.DictReader(io.StringIO(content.decode(), newline=""), delimiter=delimiter))


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv", "jsonl", "parquet"])
def test_table_keeps_its_columns_and_gains_labels(
    ending: str, call, trained, wanted, tmp_path, capsys, monkeypatch
) -> None:
    """The table has line breaks, quotes and umlauts, and needs two blocks of rows. The empty text gets no label."""
    monkeypatch.setattr(classify, "BLOCK", 3)
    given, out = tmp_path / f"new.{ending}", tmp_path / f"labelled.{ending}"
    rows = write(given)
    call(f"--input={given}", f"--output={out}")
    said, found = capsys.readouterr(), read(out)
    assert "empty texts without a label: 1 of 5" in said.err
    windows = len(trained.windows([LONG])[0])
    assert f"longer than 16 tokens: 1 of 5, read in {windows} windows whose logits are" in said.err
    assert said.out == f"written: {out}, 5 texts\n"
    assert len(found) == len(rows) and not [p for p in tmp_path.iterdir() if p not in (given, out)]
    for before, after, text, chances in zip(rows, found, TEXTS, wanted, strict=True):
        assert {name: after.pop(name) for name in before} == before
        label, probability, *every = after.values()
        assert list(after) == [
            *("label", "probability"),
            *(f"probability_{name}" for name in trained.classes),
        ]
        if not text:
            assert label == "" and not any([probability, *every])
            continue
        assert label == trained.classes[chances.argmax()]
        np.testing.assert_allclose([float(x) for x in every], chances, atol=1e-5)
        assert float(probability) == pytest.approx(chances.max(), abs=1e-5)


def test_top_ranks_classes_in_named_columns(call, workdir, tmp_path, trained, wanted) -> None:
    """--top ranks the classes. As in training, --config.data.fields and --config.data.label name the columns."""
    given, out = tmp_path / "new.csv", tmp_path / "labelled.csv"
    given.write_text("body,label\na string,old\n")
    names = ("--config.data.fields=title|body", "--config.data.label=topic")
    call(f"--input={given}", f"--output={out}", "--top=2", *names)
    (row,) = read(out)
    first, second = np.argsort(-wanted[0])[:2]
    assert list(row) == ["body", "label", "topic", "probability", "topic_2", "probability_2"]
    assert (row["topic"], row["topic_2"]) == (trained.classes[first], trained.classes[second])
    assert float(row["probability_2"]) == pytest.approx(wanted[0, second], abs=1e-5)


def test_pairs_of_texts_are_joined_as_in_training(make, tmp_path) -> None:
    """A row that lacks one of the two texts of a pair counts as empty.

    An empty line is ignored in a table with two columns, and is an empty row in a table with one column.
    """
    (tmp_path / "a.csv").write_text("premise,hypothesis\nIt rains,I am wet\nIt rains, \n\n")
    (block,) = open_table(tmp_path / "a.csv", pair=True).blocks(9, PAIR, {})
    assert block.texts == [("It rains", "I am wet"), ()]
    (tmp_path / "b.csv").write_text("text\none\n\ntwo\n")
    assert [b.texts for b in open_table(tmp_path / "b.csv").blocks(2, [["text"]], {})] == [
        [("one",), ()],
        [("two",)],
    ]
    pairs = make(dataset="snli", **{"data.source": "files:x", "data.label": "gold|label"})
    assert fields_of(pairs) == (PAIR, "gold")
    pairs.data.premise_only = True
    assert fields_of(pairs) == (PAIR[:1], "gold")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_one_of_two_text_columns_may_be_blank(ending: str, tmp_path) -> None:
    """Without pairs, a row is empty if all its text columns are blank. With pairs, one blank column is enough."""
    from pyarrow import Table, parquet

    path = tmp_path / f"new.{ending}"
    rows = [("hello", ""), (" ", "world"), ("hello", "world"), ("", " ")]
    named = [{"title": title, "body": body} for title, body in rows]
    if ending == "parquet":
        parquet.write_table(Table.from_pylist(named), path)
    elif ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in named))
    else:
        path.write_text("title,body\n" + "".join(f"{a},{b}\n" for a, b in rows))
    (block,) = open_table(path).blocks(9, [["title"], ["body"]], {})
    assert block.texts == [("hello",), ("world",), ("hello", "world"), ()]
    (block,) = open_table(path, pair=True).blocks(9, [["title"], ["body"]], {})
    assert block.texts == [(), (), ("hello", "world"), ()]


def test_blank_column_does_not_change_the_class(call, trained, wanted, tmp_path, capsys) -> None:
    (tmp_path / "new.csv").write_text("title,body\na string,\n")
    call(f"--input={tmp_path / 'new.csv'}", "--config.data.fields=title body", "--top=1")
    said = capsys.readouterr()
    label = said.out.splitlines()[1].split(",")[2]
    assert label == trained.classes[wanted[0].argmax()] and "empty" not in said.err


def test_each_input_line_gives_one_output_line(call, trained, wanted, tmp_path, capsys) -> None:
    call("--top=1", "--batch=2", stdin=b"a string\r\n \nthe types of a module")
    first, empty, last = capsys.readouterr().out.splitlines()
    best = wanted.argmax(1)
    assert first == f"{trained.classes[best[0]]}\t{wanted[0].max():.4f}" and empty == ""
    assert last.split("\t")[0] == trained.classes[best[4]]
    (tmp_path / "in.txt").write_text("a string\n")
    call("--top=1", f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out.txt'}")
    assert (tmp_path / "out.txt").read_text() == first + "\n"


def test_label_column_of_the_run_is_ignored_for_lines(call, monkeypatch, capsys) -> None:
    columns = classify._columns
    monkeypatch.setattr(classify, "_columns", lambda *given: (columns(*given)[0], "probability"))
    call("--top=1", stdin=b"a string")
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    "option", ["--text=a", "--label=a", "--config.data.fields=a", "--config.data.label=a"]
)
def test_options_for_columns_are_refused_for_lines(refused, tmp_path, option: str) -> None:
    name = option.partition("=")[0]
    assert refused(option) == (
        f"{name} names a column, but standard input is lines of text without columns: remove {name}"
    )
    (tmp_path / "in.txt").write_text("a string\n")
    assert f"in.txt is lines of text without columns: remove {name}" in refused(
        option, f"--input={tmp_path / 'in.txt'}"
    )


def test_mesh_need_not_divide_the_number_of_texts(workdir, wanted) -> None:
    """Eight devices give three texts the same probabilities as one device."""
    wide = loading.load(workdir, make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    found = wide.probabilities_of(wide.windows(["a string", LONG, "the types of a module"]))
    np.testing.assert_allclose(found, wanted[[0, 3, 4]], atol=1e-5)


def test_mesh_follows_options(call, monkeypatch, refused) -> None:
    seen = []

    def load(workdir, mesh, *weights):
        seen.append(dict(mesh.shape))
        raise UserError("stop")

    monkeypatch.setattr(loading, "load", load)
    assert refused("--config.mesh.fsdp=2", "--config.mesh.tensor=2") == "stop"
    assert seen == [{"data": 2, "fsdp": 2, "tensor": 2}]
    assert "needs 3 devices, but there are 8" in refused("--config.mesh.data=3")
    assert "unknown option --config.mesh.date; did you mean" in refused("--config.mesh.date=2")


def test_invalid_table_leaves_no_output_file(refused, tmp_path, monkeypatch) -> None:
    # The program must check the table before it loads the model.
    monkeypatch.setattr(loading, "load", None)
    given, out = tmp_path / "new.csv", tmp_path / "out.csv"
    given.write_bytes(b"text,x\none,1\ntwo\n")
    told = refused(f"--input={given}", f"--output={out}")
    assert "new.csv line 3 has a different number of columns than line 1" in told
    assert [*tmp_path.iterdir()] == [given]


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("probability", {}),
        ("probability_b", {}),
        ("probability_b", {"thresholds": (0.5, 0.5)}),
        ("probability", {"top": 2}),
        ("probability", {"ranked": True}),
    ],
)
def test_label_column_may_not_overwrite_a_probability(label, options) -> None:
    with pytest.raises(UserError, match=f"because the label column is named {label}:"):
        Answers(label, ("a", "b"), **options)
    assert "label" in Answers("label", ("a", "b"), **options).columns


def test_label_option_may_not_name_an_added_column(refused, tmp_path) -> None:
    (tmp_path / "new.csv").write_text("text\na string\n")
    assert (
        "two columns of the output would have the same name (probability), because the label column is"
        in refused(f"--input={tmp_path / 'new.csv'}", "--config.data.label=probability")
    )


def test_parquet_with_repeated_column_is_refused(refused, tmp_path) -> None:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_arrays([["a"], ["b"]], ["text", "text"]), tmp_path / "a.parquet")
    assert "a.parquet repeats the column 'text'" in refused(f"--input={tmp_path / 'a.parquet'}")


def test_existing_output_needs_overwrite(call, refused, tmp_path) -> None:
    given, out = tmp_path / "new.csv", tmp_path / "out.csv"
    given.write_text("text\na string\n")
    out.write_text("precious")
    assert "out.csv exists: add --overwrite" in refused(f"--input={given}", f"--output={out}")
    assert out.read_text() == "precious"
    assert "out.jsonl must end with .csv, like" in refused(
        f"--input={given}", f"--output={tmp_path / 'out.jsonl'}"
    )
    assert "new.csv is the file of --input" in refused(
        f"--input={given}", f"--output={given}", "--overwrite"
    )
    assert given.read_text() == "text\na string\n"
    assert "is not a folder" in refused(f"--input={given}", f"--output={given / 'out.csv'}")
    call(f"--input={given}", f"--output={out}", "--overwrite", "--top=1")
    assert list(read(out)[0]) == ["text", "label", "probability"]


def test_interrupted_run_leaves_no_output_file(refused, tmp_path, monkeypatch) -> None:
    """The prediction of the second block of rows fails. The program leaves no output file."""
    given, out, done = tmp_path / "new.csv", tmp_path / "out.csv", []

    def fails(self: Trained, windows: list, rows: int) -> np.ndarray:
        if done:
            raise UserError("failed")
        done.append(1)
        return np.full((len(windows), len(self.classes)), 1 / len(self.classes))

    monkeypatch.setattr(classify, "BLOCK", 1)
    monkeypatch.setattr(Trained, "probabilities_of", fails)
    given.write_text("text\none\ntwo\n")
    assert refused(f"--input={given}", f"--output={out}") == "failed"
    assert done and [*tmp_path.iterdir()] == [given]


def test_folder_of_several_runs_names_the_best_run(workdir, refused, tmp_path) -> None:
    """The third run has no test results, like a run that only helps to choose the learning rate."""
    for name, best in (("head", 41.5), ("lora_seed1", 77.5), ("lora_seed2", 99.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        for file in ("config.json", "summary.json"):
            (folder / file).write_bytes((workdir / file).read_bytes())
        summary = json.loads((folder / "summary.json").read_text())
        summary["config"]["finetune"] = name.split("_")[0]
        summary["curve"]["points"] = [summary["curve"]["points"][0] | {"value": best}]
        summary["test"] = {} if best == 99 else {"weighted_f1": 50.0}
        (folder / "summary.json").write_text(json.dumps(summary))
    runs = tmp_path / "runs"
    assert refused(f"--workdir={tmp_path}") == (
        f"--workdir={tmp_path} is not a run, but contains runs: set --workdir to one of them, head, lora_seed1,"
        f" lora_seed2 in {runs}; the best run is --workdir={runs / 'lora_seed1'}"
    )
    for summary in runs.glob("*/summary.json"):
        summary.unlink()
    with pytest.raises(
        UserError, match=rf"--run=.* is not a run, but contains runs: .*lora_seed2 in {runs}$"
    ):
        loading.read(tmp_path, "--run")


WORDS = ("good", "poor")


@pytest.fixture(scope="module")
def tfidf_run(tmp_path_factory) -> Path:
    """Returns the workdir of a TF-IDF baseline whose classes are the first words of the texts."""
    texts = [(f"{WORDS[i % 2]} {'abcdefgh'[i % 8]} {'stuvwxyz'[i // 8]}",) for i in range(64)]
    examples = LabelledText(texts, np.arange(64, dtype=np.int32) % 2)
    workdir = tmp_path_factory.mktemp("tfidf_run")
    baseline.run(recipes.get_config("tiny"), {"train": examples, "test": examples}, WORDS, workdir)
    return workdir


@pytest.mark.parametrize("top", [None, 2])
def test_labels_in_python_equal_the_table_of_the_program(
    call, workdir, tfidf_run, tmp_path, top
) -> None:
    """The folder is a str. A blank text has no label."""
    texts, out = [*TEXTS, " "], tmp_path / "out.jsonl"
    given = put(tmp_path / "new.jsonl", table_bytes("jsonl", [{"text": text} for text in texts]))
    for folder in (workdir, tfidf_run):
        options = [f"--top={top}"] if top else []
        call(f"--run={folder}", f"--input={given}", f"--output={out}", "--overwrite", *options)
        found = load_run(str(folder)).label(texts, top)
        assert [{"text": text} | row for text, row in zip(texts, found, strict=True)] == read(out)
        assert found[0]["label"] and found[0]["probability"] and len(found) == 6
        assert [found[i]["label"] for i in (2, 5)] == ["", ""] and found[5]["probability"] is None


@pytest.mark.parametrize("texts", ["debugger", ["a", None], [("a", "b")], None])
def test_texts_in_python_must_be_a_list_of_texts(tfidf_run, texts) -> None:
    with pytest.raises(UserError, match=r"^texts must be a list of texts, got "):
        load_run(tfidf_run).label(texts)
    assert load_run(tfidf_run).label([]) == load_run(tfidf_run).label(iter([])) == []
    assert len(load_run(tfidf_run).label(text for text in "ab")) == 2


def test_errors_in_python_name_arguments(workdir, tfidf_run, tmp_path) -> None:
    for folder, options, message in (
        (str(tmp_path), {}, f"^folder={tmp_path} holds no run"),
        (workdir, {"batch": 0}, "^batch must be a whole number of at least 1, got 0"),
        (tfidf_run, {"pretrained": "x"}, "^pretrained=x is not used: folder=.*; remove pretrained"),
    ):
        with pytest.raises(UserError, match=message):
            load_run(folder, **options)
    with pytest.raises(UserError, match=r"^pretrained=nowhere is not a readable directory"):
        load_run(workdir, pretrained="nowhere/").label(["a string"])
    with pytest.raises(UserError, match=r"^top must be a whole number of at least 1, got 0"):
        load_run(tfidf_run).label(["good a"], top=0)


@pytest.mark.parametrize("ending", ["csv", "tsv.gz", "jsonl", "jsonl.gz", "parquet", "parquet.gz"])
def test_tf_idf_labels_tables(ending: str, call, tfidf_run, tmp_path, capsys) -> None:
    """The empty text gets no label, and a message counts it."""
    texts = ["good a", "poor b", "", "good c"]
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    given = put(tmp_path / f"new.{ending}", table_bytes(ending, rows))
    out = tmp_path / f"out.{ending}"
    call(f"--run={tfidf_run}", f"--input={given}", f"--output={out}")
    said, found = capsys.readouterr(), read(out)
    assert [row["label"] for row in found] == ["good", "poor", "", "good"]
    assert [str(row["id"]) for row in found] == ["0", "1", "2", "3"]
    assert said.err == "empty texts without a label: 1 of 4\n"
    model = baseline.Model.load(tfidf_run / baseline.MODEL)
    for row, chances in zip(found, model.probabilities(texts), strict=True):
        if row["text"]:
            every = [float(row[f"probability_{name}"]) for name in WORDS]
            np.testing.assert_allclose(every, chances, atol=1e-6)
    call(f"--run={tfidf_run}", f"--input={given}", f"--output={out}", "--overwrite", "--top=1")
    assert list(read(out)[0]) == ["id", "text", "label", "probability"]


def test_tf_idf_labels_lines(call, tfidf_run, capsys) -> None:
    call(f"--run={tfidf_run}", "--top=1", stdin=b"good a\r\n\r\n \t\npoor b\n")
    said = capsys.readouterr()
    assert [line.split("\t")[0] for line in said.out.splitlines()] == ["good", "", "", "poor"]
    assert said.err == "empty texts without a label: 2 of 4\n"
    call(f"--run={tfidf_run}", stdin=b"")
    assert capsys.readouterr() == ("", "")
    call(f"--run={tfidf_run}", stdin="good a\n".encode("utf-16"))
    assert capsys.readouterr().out.startswith("good\t0.")


def test_options_of_tf_idf_are_checked(refused, tfidf_run, tmp_path) -> None:
    assert "--pretrained=x is not used: --run" in refused(f"--run={tfidf_run}", "--pretrained=x")
    (tmp_path / "summary.json").write_bytes((tfidf_run / "summary.json").read_bytes())
    assert refused(f"--run={tmp_path}").startswith(f"cannot read {tmp_path / 'model.npz'}")
    folder = tmp_path / "all" / "runs"
    shutil.copytree(tfidf_run, folder / "tf_idf")
    assert f"the best run is --run={folder / 'tf_idf'}" in refused(f"--run={tmp_path / 'all'}")


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("semicolon.csv", b"id;the text\n1;good, a\n2;poor b\n", ()),
        ("bar.CSV", b"id|the text\n1|good, a\n2|poor b\n", ()),
        ("utf16.csv", 'id,the text\n1,"good, a"\n2,poor b\n'.encode("utf-16"), ()),
        (
            "latin.csv",
            'id,the text\n1,"good, ä"\n2,poor b\n'.encode("cp1252"),
            ("--encoding=cp1252",),
        ),
        ("mac.csv", b'id,the text\r1,"good, a"\r2,poor b\r', ()),
        ("first.csv", b'\n\nid,the text\n1,"good, a"\n\n2,poor b\n', ()),
        ("blank.jsonl", b'\n{"the text": "good, a"}\n \n{"the text": "poor b"}\n\n', ()),
        ("wide.jsonl", '{"the text": "good, a"}\n{"the text": "poor b"}\n'.encode("utf-16"), ()),
    ],
)
def test_tables_are_read_as_in_worth(name, content, options, call, tfidf_run, tmp_path) -> None:
    """classify reads the same encodings, delimiters, line ends, blank lines and column names as worth."""
    given, out = put(tmp_path / name, content), tmp_path / f"out{Path(name).suffix}"
    call(f"--run={tfidf_run}", f"--input={given}", f"--output={out}", "--text=the text", *options)
    labelled = read_tables(str(out))["all"]
    wanted = read_tables(str(given), options[0].partition("=")[2] if options else "")["all"]
    assert labelled.columns[: len(wanted.columns)] == wanted.columns
    found = [fields for _, fields in labelled.records]
    assert [row["label"] for row in found] == ["good", "poor"]
    for row, (_, fields) in zip(found, wanted.records, strict=True):
        assert fields.items() <= row.items()


def test_encoding_errors_of_tables(refused, tfidf_run, tmp_path) -> None:
    path = put(tmp_path / "a.csv", "text,x\nfür,1\n".encode("cp1252"))
    given = f"--input={path}"
    assert "line 2 is not UTF-8: name the encoding" in refused(f"--run={tfidf_run}", given)
    assert "--encoding=klingon is not the name of a text encoding" in refused(
        f"--run={tfidf_run}", given, "--encoding=klingon"
    )
    twice = ("--text=text", "--config.data.fields=text")
    assert "remove one of the two options" in refused(f"--run={tfidf_run}", given, *twice)


@pytest.mark.parametrize("option", ["--run", "--workdir"])
def test_errors_name_the_option_of_the_run(option, refused, tmp_path) -> None:
    assert refused(f"{option}={tmp_path}").startswith(f"{option}={tmp_path} holds no run")


def test_network_programs_refuse_a_baseline(tmp_path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"config": {"baseline": "tf-idf"}}))
    with pytest.raises(UserError, match=r"--run=.* is a TF-IDF baseline, not a neural network"):
        loading.read(tmp_path, "--run")


def test_paragraphs_of_the_python_manual_are_not_truncated_silently(trained) -> None:
    """No window of a real text is longer than the model's maximum length of 16, and no token is lost."""
    lines = [text for (text,), _ in python("test")][:20]
    for windows, line in zip(trained.windows(lines), lines, strict=True):
        assert max(map(len, windows)) <= 16
        assert sum(map(len, windows)) == len(trained.tokenizer.encode([line], 10**6)[0])
