"""Predictions: their metrics match sacrebleu and scikit-learn, and files round-trip."""

import dataclasses
import io

import numpy as np
import pytest
import sacrebleu
from sklearn.metrics import accuracy_score, f1_score, log_loss

from common.errors import UserError
from common.metrics.classes import Classes
from common.metrics.kinds import load
from common.metrics.losses import Losses
from common.metrics.predictions import TEST_AGAIN, Predictions
from common.metrics.translations import Translations

HYPOTHESES = ("the cat sat on the mat .", "A dog barks", "", "two men are walking in the rain")
REFERENCES = ("the cat is on the mat .", "a dog barked", "one", "two men walk in the rain today")


def classes(count: int = 200, seed: int = 0) -> Classes:
    generator = np.random.default_rng(seed)
    logs_EC = np.log(generator.dirichlet((1.0, 1.0, 1.0, 0.2), count))
    labels_E = generator.integers(0, 3, count)  # the fourth class is predicted, but never correct
    return Classes.of_log_probabilities("examples", labels_E, logs_EC, ("a", "b", "c", "d"))


def translations(lowercase: bool = False, tokenize: str = "13a") -> Translations:
    nats_E, tokens_E = np.array([3.0, 2.0, 1.0, 4.0]), np.array([7.0, 3.0, 1.0, 6.0])
    return Translations("texts", HYPOTHESES, REFERENCES, nats_E, tokens_E, lowercase, tokenize)


def losses() -> Losses:
    nats_E, weights_E = np.array([8.0, 2.0, 0.5]), np.array([4.0, 4.0, 1.0])
    return Losses("windows", nats_E, weights_E, np.zeros(0), np.array([1, 1, 0]), "byte")


def test_classification_metrics_match_scikit_learn():
    made = classes()
    logs_EC = np.log(np.random.default_rng(0).dirichlet((1.0, 1.0, 1.0, 0.2), 200))
    guesses_E = logs_EC.argmax(1)
    found = made.metrics()
    assert found["accuracy"] == pytest.approx(100 * accuracy_score(made.labels_E, guesses_E))
    right = f1_score(made.labels_E, guesses_E, average="weighted", zero_division=0)
    assert found["weighted_f1"] == pytest.approx(100 * right)
    expected = log_loss(made.labels_E, np.exp(logs_EC), labels=range(4))
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_classes_use_small_dtypes():
    made = classes()
    assert made.examples == "examples" and len(made) == 200
    types = [x.dtype for x in (made.labels_E, made.guesses_E, made.nats_E, made.probabilities_EC)]
    assert types == [np.int32, np.int32, np.float32, np.float16]


def test_corpus_bleu_of_sentence_statistics_matches_sacrebleu():
    def corpus_bleu(lowercase: bool, tokenize: str) -> float:
        options = {"lowercase": lowercase, "tokenize": tokenize}
        return sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], **options).score

    found = translations().metrics()
    assert found["bleu"] == pytest.approx(corpus_bleu(False, "13a"))
    assert found["loss"] == pytest.approx(10 / 17)
    assert found["perplexity"] == pytest.approx(np.exp(10 / 17))
    lower = translations(lowercase=True, tokenize="char").metrics()
    assert lower["bleu"] == pytest.approx(corpus_bleu(True, "char"))
    assert lower["bleu"] != found["bleu"]


def test_losses_give_bits_per_byte_and_perplexity_per_word():
    found = losses().metrics()
    assert found["nats_per_byte"] == pytest.approx(10.5 / 9)
    assert found["bits_per_byte"] == pytest.approx(10.5 / 9 / np.log(2))
    assert found["perplexity_per_word"] == pytest.approx(np.exp(10.5 / 2))
    assert "accuracy" not in found


@pytest.mark.parametrize(("words", "expected"), [(0, 2.5), (1, 2.5), (2, 1.25)])
def test_perplexity_per_word_of_few_words_is_finite(words, expected):
    """A bootstrap resample may have no words."""
    made = Losses("w", *np.array([[2.5], [4.0]]), np.zeros(0), np.array([words]), "byte")
    assert made.metrics()["perplexity_per_word"] == pytest.approx(np.exp(expected))


def test_losses_of_masked_tokens_have_accuracy():
    made = Losses(
        "r", np.array([4.0, 2.0]), np.array([3, 1]), np.array([2, 1]), np.zeros(0), "token"
    )
    found = made.metrics()
    assert found == pytest.approx({"perplexity": np.exp(1.5), "loss": 1.5, "accuracy": 75.0})


@pytest.mark.parametrize("make", [classes, translations, losses])
def test_weighted_statistics_match_a_resample(make):
    """The weights (2, 0, 1, 0, 0, ...) of examples give the metrics of a test set with the examples 0, 0 and 2."""
    made: Predictions = make()
    weights_BE = np.zeros((2, len(made)))
    weights_BE[0, 0], weights_BE[0, 2], weights_BE[1, 1] = 2, 1, 3
    found = made.measure(weights_BE @ made.statistics)
    statistics = made.statistics.todense() if make is classes else made.statistics
    for draw, examples in enumerate(([0, 0, 2], [1, 1, 1])):
        expected = made.measure(np.asarray(statistics)[examples].sum(0, keepdims=True))
        assert found.keys() == expected.keys()
        for name, values_B in found.items():
            assert values_B.shape == (2,) and values_B[draw] == pytest.approx(expected[name][0])


@pytest.mark.parametrize("make", [classes, translations, losses])
def test_save_and_load_round_trip(make, tmp_path):
    made = make()
    made.save(tmp_path / "predictions.npz")
    found = load(tmp_path / "predictions.npz")
    assert type(found) is type(made) and found.examples == made.examples
    assert found.metrics() == pytest.approx(made.metrics(), rel=1e-6)
    texts = [name for name in ("names", "hypotheses", "references") if hasattr(made, name)]
    assert all(getattr(found, name) == getattr(made, name) for name in texts)
    assert found.describe(1) == made.describe(1)
    np.testing.assert_array_equal(found.costs_E, made.costs_E)
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.npz"]


def test_older_file_with_shape_letters_in_array_names_is_read(tmp_path):
    path, made = tmp_path / "predictions.npz", classes()
    made.save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    older = {
        "labels": "labels_M",
        "guesses": "guesses_M",
        "nats": "nats_M",
        "probabilities": "probabilities_MN",
    }
    assert set(older) | {"record"} == set(arrays)
    np.savez(path, **{older.get(name, name): x for name, x in arrays.items()})
    assert load(path).metrics() == made.metrics()


def test_describe_returns_label_and_prediction():
    made = Classes.of_log_probabilities("e", np.array([1]), np.log([[0.75, 0.25]]), ("no", "yes"))
    assert made.describe(0) == {"label": "yes", "prediction": "no (0.75)"}
    reference, translation = REFERENCES[1], HYPOTHESES[1]
    assert translations().describe(1) == {"reference": reference, "translation": translation}
    assert losses().describe(0) == {"bytes": "4", "nats each": "2.000"}
    assert losses().describe(2) == {"bytes": "1", "nats each": "0.500"}


def test_translations_without_reference_raise_value_error():
    made = dataclasses.replace(translations(), references=REFERENCES[:3])
    with pytest.raises(ValueError, match="zip"):
        _ = made.costs_E


def test_costs_increase_with_the_error():
    costs_E = translations().costs_E
    assert costs_E.argmax() == 2, "the empty translation"
    assert costs_E[0] == costs_E.min()
    np.testing.assert_allclose(losses().costs_E, [2.0, 0.5, 0.5])


def archive(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (archive(nats_E=np.ones(3)), "is damaged: missing or unknown entry 'record'; correct or"),
        (
            archive(record=np.frombuffer(b'{"kind": "votes"}', np.uint8)),
            "^{path} is damaged: missing or unknown entry 'votes'; correct or restore the file, or {AGAIN}$",
        ),
        (b"", "damaged"),
        (b"PK\x03\x04nothing", "damaged"),
        (
            b"nothing",
            "^{path} is damaged: it is not an .npz file; correct or restore the file, or {AGAIN}$",
        ),
        (
            npy(np.ones(3)),
            "^{path} is damaged: it is not an .npz file; correct or restore the file, or {AGAIN}$",
        ),
        (None, "^cannot read {path}: No such file or directory; correct the path"),
    ],
)
def test_damaged_file_raises_one_line_error(content, fault, tmp_path):
    path = tmp_path / "predictions.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        UserError, match=fault.replace("{path}", str(path)).replace("{AGAIN}", TEST_AGAIN)
    ):
        load(path)


def test_arrays_of_different_lengths_raise_user_error(tmp_path):
    path, made = tmp_path / "predictions.npz", classes(10)
    dataclasses.replace(made, nats_E=made.nats_E[:5]).save(path)
    with pytest.raises(
        UserError, match=r"is damaged: not all of its arrays have 10 entries, .* \(wrong: nats\)"
    ):
        load(path)
    none = np.zeros(0)
    Losses("text", none, none, none, none, "byte").save(path)
    with pytest.raises(UserError, match="is damaged: it contains no examples"):
        load(path)


def test_nan_raises_user_error(tmp_path):
    path, made = tmp_path / "predictions.npz", classes(10)
    nats_E = made.nats_E.copy()
    nats_E[3] = np.nan
    dataclasses.replace(made, nats_E=nats_E).save(path)
    with pytest.raises(UserError, match=r"has NaN in 1 of its arrays \(nats\): the model gave NaN"):
        load(path)
    whole = losses()
    lost = np.full(len(whole), np.nan)
    dataclasses.replace(whole, nats_E=lost, weights_E=lost).save(path)
    with pytest.raises(
        UserError, match=r"has NaN in 2 of its arrays \(nats, weights\): the model gave NaN"
    ):
        load(path)


def test_pickled_file_raises_user_error(tmp_path):
    """A pickle could execute code."""
    path = tmp_path / "predictions.npz"
    np.savez(path, record=np.array([{"kind": "losses"}], object))
    with pytest.raises(UserError, match="is damaged: Object arrays cannot be loaded"):
        load(path)


def test_damaged_file_names_each_array_of_the_wrong_length(tmp_path):
    path, whole = tmp_path / "predictions.npz", losses()
    short = dataclasses.replace(whole, weights_E=np.ones(2), words_E=np.ones(1))
    short.save(path)
    with pytest.raises(
        UserError, match=r"is damaged: not all of its arrays have 3 .* \(wrong: weights, words\)"
    ):
        load(path)
    dataclasses.replace(whole, weights_E=np.zeros(0)).save(path)
    with pytest.raises(
        UserError, match=r"is damaged: not all of its arrays have 3 .* \(wrong: weights\)"
    ):
        load(path)


def test_counts_of_hits_and_words_are_optional(tmp_path):
    path, none = tmp_path / "predictions.npz", np.zeros(0)
    dataclasses.replace(losses(), hits_E=none, words_E=none).save(path)
    assert load(path).metrics().keys() == {"bits_per_byte", "nats_per_byte"}
