"""Pairs of texts: tokens and segments, tables, training, classification and export."""

import csv
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from common import variables
from common.errors import UserError
from common.train.command import fit
from perception import adapters, classify, datasets, load_run, loading, run, worth
from perception.encoder_evaluation import EncoderEvaluation
from perception.labelled_table import prepare
from perception.model import PooledClassifier, backbone
from perception.subword import Subword
from perception.table_reader import read_tables
from perception.text_tables import Lines
from tests.perception.helpers import SHAPE

NAMES = ("contradiction", "entailment")
WORDS = ("apple", "river", "stone", "cloud", "music", "table", "green", "quiet")


@pytest.fixture(scope="module")
def bert_like() -> Subword:
    """Returns a word tokenizer that adds [CLS] and [SEP] as BERT's tokenizer does."""
    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdef")
    made = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return Subword(made.to_str())


def test_pair_has_separators_and_segments(bert_like) -> None:
    rows, firsts, cut = bert_like.encode_parts([("a b", "c"), ("a", "d e f")], 9)
    assert rows == [[2, 4, 5, 3, 6, 3], [2, 4, 3, 7, 8, 9, 3]]  # [CLS] a b [SEP] c [SEP]
    assert firsts == [4, 3] and cut == 0
    rows, firsts, cut = bert_like.encode_parts([("a b c d", "e f")], 7)
    assert rows == [[2, 4, 5, 3, 8, 9, 3]] and firsts == [4] and cut == 1
    with pytest.raises(UserError, match="leaves no space for two texts"):
        bert_like.encode_parts([("a", "b")], 4)


def test_encode_parts_of_single_texts_equals_encode(bert_like) -> None:
    rows, firsts, _ = bert_like.encode_parts([("a b",), ("c",)], 9)
    assert (rows, firsts) == (bert_like.encode(["a b", "c"], 9), [4, 3])


def test_tokenizer_without_separators_joins_pairs(bert_like) -> None:
    made = tokenizers.Tokenizer.from_str(bert_like.to_json())
    made.post_processor = processors.ByteLevel()
    plain = Subword(made.to_str())
    rows, firsts, _ = plain.encode_parts([("a b", "c")], 9)
    assert (rows, firsts) == (plain.encode(["a b c"], 9), [3])


def test_only_second_segment_has_type_1() -> None:
    """Segments have no effect if both token types have equal embeddings, or if all tokens are in the first segment.

    Otherwise the second segment changes the logits.
    """
    abstract_model = variables.abstract(
        lambda rngs: PooledClassifier(
            backbone(SHAPE, rngs=rngs), SHAPE.width, 2, "masked", rngs=rngs
        )
    )
    generator = np.random.default_rng(0)
    values = {
        name: jnp.asarray(generator.normal(0, 0.3, v.shape), jnp.float32)
        for name, v in abstract_model.trainable.items()
    }
    tokens_BL, lengths_B = jnp.asarray(generator.integers(1, 300, (2, 6))), jnp.array([6, 5])

    def logits(types: str, firsts_B=None) -> np.ndarray:
        table = values["encoder/embed/types"]
        table = {"equal": table.at[1].set(table[0]), "different": table}[types]
        model = abstract_model.build({**values, "encoder/embed/types": table}, {})
        return np.asarray(model(tokens_BL, lengths_B, None, firsts_B))

    plain, firsts_B = logits("different"), jnp.array([3, 2])
    np.testing.assert_allclose(logits("equal", firsts_B), plain, atol=1e-6)
    np.testing.assert_allclose(logits("different", lengths_B), plain, atol=1e-6)
    assert abs(logits("different", firsts_B) - plain).max() > 0.05


def pairs(count: int) -> list[dict]:
    """Returns `count` rows with a pair of texts. The label selects the half of WORDS for the second text."""
    generator, rows = np.random.default_rng(0), []
    for i in range(count):
        first = generator.permutation(WORDS)[:4]
        second = generator.permutation(WORDS[:4] if i % 2 else WORDS[4:])[:2]
        rows.append({"premise": " ".join(first), "hypothesis": f"{' '.join(second)} {i}"})
        rows[-1]["gold"] = NAMES[i % 2]
    return rows


def write_csv(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_pair_columns_are_recognised_or_named(tmp_path) -> None:
    rows = [*pairs(60), {"premise": "alone", "hypothesis": " ", "gold": NAMES[0]}]
    tables = read_tables(str(write_csv(tmp_path / "a.csv", rows)))
    found = prepare(tables, label=("gold",), pair=True)
    made = {e.texts: e.label for some in found.splits.values() for e in some}
    wanted = {(r["premise"], r["hypothesis"]): r["gold"] for r in rows[:-1]}
    assert made.items() <= wanted.items() and len(made) > 40
    assert any("no text in the column hypothesis" in note for note in found.notes.sentences)
    turned = prepare(tables, ("hypothesis", "premise"), ("gold",), pair=True)
    assert {e.texts[::-1] for some in turned.splits.values() for e in some} <= wanted.keys()
    with pytest.raises(UserError, match="--pair needs two --text columns, got 1"):
        prepare(tables, ("premise",), ("gold",), pair=True)
    other = read_tables(str(write_csv(tmp_path / "b.csv", [{"x": "a", "y": "b", "label": "c"}])))
    with pytest.raises(UserError, match="columns of --pair cannot be recognised"):
        prepare(other, pair=True)
    with pytest.raises(UserError, match="columns of --pair cannot be recognised"):
        prepare(tables, label=("premise",), pair=True)


def call(program, *arguments: object, stdin: bytes = b"") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, arguments)])
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        program.main()


@pytest.fixture(scope="module")
def trained(make, mesh, tmp_path_factory) -> Path:
    """Returns the workdir of full training on pairs, with a tokenizer that the run has trained."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, start, end in (("train", 0, 60), ("validation", 60, 80), ("test", 80, 100)):
        rows = "".join(json.dumps(row) + "\n" for row in pairs(100)[start:end])
        (folder / f"{split}.jsonl").write_text(rows)
    fields = {"source": f"files:{folder}", "fields": "premise hypothesis", "label": "gold"}
    fields = {f"data.{name}": value for name, value in fields.items()} | {"data.pair": True}
    fit(make(**fields, finetune="full"), folder / "run", mesh)
    return folder / "run"


@pytest.mark.medium
def test_probabilities_of_a_trained_model_depend_on_segments(trained, mesh) -> None:
    """The loaded run gives the stored test probabilities, and other probabilities without segments.

    In training batches, the first segment of each row ends with a separator.
    """
    found = loading.load(trained, mesh)
    assert found.tokenizer.separates_pairs
    splits, _ = datasets.load(found.config)
    windows, firsts, _ = found.encode_pairs(splits["test"].texts)
    chances_EC = found.probabilities_of(windows, 8, firsts)
    kept = np.load(trained / "predictions.npz")["probabilities"]
    np.testing.assert_allclose(chances_EC, kept, atol=2e-3)
    assert abs(found.probabilities_of(windows, 8) - chances_EC).max() > 1e-5
    _, task = run.prepare(found.config, mesh)
    batch, _ = next(task.batches(None))
    shapes = {name: (x.shape, x.dtype) for name, x in batch.items()}
    spec = task.batch_spec(1).arrays
    assert shapes == {name: (x.shape, x.dtype) for name, x in spec.items()}
    end = found.tokenizer.encode_parts([("a", "b")], 16)[0][0][1]
    for row_L, first in zip(batch["tokens"], batch["firsts"], strict=True):
        assert row_L[first - 1] == end  # the last token of the first segment is a separator


@pytest.mark.medium
def test_unchanged_encoder_reproduces_the_test_result_on_pairs(trained, mesh) -> None:
    evaluation = EncoderEvaluation(trained, mesh)
    kept = np.load(trained / "predictions.npz")["probabilities"]
    found = evaluation(evaluation.encoder, "test")
    np.testing.assert_allclose(found.probabilities_EC, kept, atol=2e-3)


@pytest.mark.medium
def test_lines_and_tables_of_pairs_are_classified(trained, tmp_path, capsys) -> None:
    rows = pairs(6)
    lines = "".join(f"{row['premise']}\t{row['hypothesis']}\n" for row in rows)
    call(classify, f"--workdir={trained}", "--top=1", stdin=f"{lines}\n".encode())
    *answers, empty = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    given, out = write_csv(tmp_path / "a.csv", rows), tmp_path / "labelled.csv"
    names = ("--config.data.label=found",)
    call(classify, f"--workdir={trained}", f"--input={given}", f"--output={out}", *names)
    with out.open() as file:
        labelled = list(csv.DictReader(file))
    assert [row["found"] for row in labelled] == [name for name, _ in answers]
    for row, (_, chance) in zip(labelled, answers, strict=True):
        assert float(row["probability"]) == pytest.approx(float(chance), abs=1e-4)
    assert empty == [""]
    loaded = load_run(str(trained))
    *found, blank = loaded.label([[r["premise"], r["hypothesis"]] for r in rows] + [("a", " ")])
    assert [str(r["probability"]) for r in found] == [row["probability"] for row in labelled]
    assert [r["label"] for r in found] == [name for name, _ in answers] and not blank["label"]
    assert len(loaded.label(zip("ab", "cd", strict=True))) == 2
    for texts in ("ab", ["ab"], [("a", "b", "c")], None):
        with pytest.raises(UserError, match=r"^texts must be pairs of texts, as in training, got"):
            loaded.label(texts)
    with pytest.raises(UserError, match=r"^each pair must be a list of texts, got \('a', None\)"):
        loaded.label([("a", None)])
    with pytest.raises(UserError, match="standard input line 1 has 0 tabs, but the run classifies"):
        call(classify, f"--workdir={trained}", stdin=b"no tab\n")
    with pytest.raises(UserError, match="classifies pairs of texts"):
        call(classify, f"--workdir={trained}", f"--input={given}", "--text=premise")


def test_blank_half_of_a_pair_has_no_label() -> None:
    (block,) = Lines(io.BytesIO(b"a\tb\n \na\t \n"), pair=True).blocks(9, [], {})
    assert block.texts == [("a", "b"), (), ()]


@pytest.mark.medium
def test_readme_of_an_exported_pair_classifier_encodes_pairs(trained, tmp_path) -> None:
    call(adapters, "export", f"--run={trained}", f"--out={tmp_path / 'out'}")
    text = (tmp_path / "out" / "README.md").read_text()
    assert '"A text.", "Another text.", truncation=True' in text and ", token_type_ids=" in text
    # Without this argument, transformers 5 leaves out the segments.
    assert "return_token_type_ids=True" in text


def test_worth_trains_the_baseline_on_pairs(tmp_path, capsys) -> None:
    """A budget of one second is enough for the baseline only, which joins the two texts."""
    data, out = write_csv(tmp_path / "nli.csv", pairs(200)), tmp_path / "out"
    given = ("--data", data, "--pair", "--label=gold", "--config=configs/perception.py:tiny")
    cache = f"--config.data.cache_dir={tmp_path}"
    call(worth, *given, cache, f"--out={out}", "--budget=1s", "--config.train.steps=1")
    said = capsys.readouterr().out
    assert "Texts are in the columns premise and hypothesis, labels in the column gold." in said
    assert "--output=labelled.csv --text=premise --text=hypothesis --label=gold\n" in said
    row = json.loads((out / "data" / "test.jsonl").read_text().splitlines()[0])
    assert {"text", "text_pair", "label", "row"} == row.keys()
    data = json.loads((out / "runs/tf_idf/summary.json").read_text())["config"]["data"]
    assert data["fields"] == "text text_pair" and data["pair"] is True


def test_pair_needs_two_fields(make) -> None:
    config = make(**{"data.pair": True, "data.fields": "text"})
    with pytest.raises(UserError, match=r"pair=true needs two text fields, .* got 1 \(text\)"):
        datasets.load(config)
    config = make(**{"data.pair": True, "data.premise_only": True, "dataset": "snli"})
    with pytest.raises(UserError, match=r"set --config\.data\.premise_only=false"):
        datasets.load(config)
