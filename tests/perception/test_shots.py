"""Few labels: draws of examples per class, runs for each draw, and the interval over draws."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from common.data.labelled import LabelledText
from common.errors import UserError
from common.metrics.classes import Classes
from common.report.significance import CONFIDENCE
from common.sharding import make_mesh
from configs.perception import get_config
from perception import comparison, datasets
from perception.comparison import ExperimentSuite
from perception.conclusions import draws_interval
from perception.datasets import draw
from perception.ways import BASELINE


def split(*counts: int) -> LabelledText:
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    np.random.default_rng(0).shuffle(labels)
    return LabelledText([(f"text {i} of {k}",) for i, k in enumerate(labels)], labels)


def test_draw_takes_examples_of_each_class() -> None:
    """A class with too few examples gives all of them. Texts keep their labels. Another seed draws other examples."""
    whole = split(50, 30, 3)
    found = draw(whole, 8, 1)
    assert np.bincount(found.labels_E).tolist() == [8, 8, 3]
    assert set(zip(found.texts, found.labels_E, strict=True)) <= set(
        zip(whole.texts, whole.labels_E, strict=True)
    )
    assert draw(whole, 8, 1).fingerprint == found.fingerprint != draw(whole, 8, 2).fingerprint


def write(folder: Path) -> Path:
    """Writes labelled texts to `folder`, and returns it.

    Two words in a text determine its class, but about a fifth of the labels are wrong.
    """
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, count in (("train", 80), ("validation", 40), ("test", 60)):
        labels = generator.integers(2, size=count)
        words = ("river stone", "apple music")
        shown = labels ^ (generator.random(count) < 0.2)
        rows = [
            {"text": f"{words[k]} {' '.join(generator.choice(list('abcdef'), 4))}", "label": int(s)}
            for k, s in zip(labels, shown, strict=True)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_shots_do_not_reduce_the_test_split(tmp_path) -> None:
    config = get_config("tiny")
    config.data.source, config.data.shots = f"files:{write(tmp_path / 'data')}", 8
    sizes = []
    for seed in (1, 2):
        config.seed = seed
        sizes.append({name: len(x) for name, x in datasets.load(config)[0].items()})
    assert sizes == 2 * [{"train": 16, "valid": 16, "test": 60}]
    config.data.shots = -1
    with pytest.raises(UserError, match="shots must be at least 1, or 0 for all examples"):
        datasets.validate(config)


def test_worth_has_a_run_for_each_draw(tmp_path, capsys) -> None:
    """Each seed draws other training examples, and TF-IDF is fitted once per draw. All draws share one test split."""
    data, out = write(tmp_path / "data"), tmp_path / "out"
    fields = [f"--config.data.source=files:{data}", "--config.data.shots=4"]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("", 3, fields, out, mesh, "configs/perception.py:tiny")
    config = suite.configuration("full", 1)
    splits, classes = datasets.load(config)
    found = {"tf_idf": suite.baseline(splits, classes)}
    assert [(run.name, run.seed) for run in found["tf_idf"]] == [
        (f"tf_idf_seed{seed}", seed) for seed in (1, 2, 3)
    ]
    assert len({json.dumps(run.summary["examples"]["train"]) for run in found["tf_idf"]}) == 3
    comparison.publish(suite, found, splits, comparison.About())
    said = capsys.readouterr().out
    assert "over 3 draws of 4 examples per class, on 60 test examples (95% interval" in said
    assert "from draws and test examples" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("field", "heads", "baselines"),
    [("", 1, 1), ("reinitialize=token", 3, 1), ("data.shots=4", 3, 3)],
)
def test_head_has_a_run_for_each_seed_if_the_seed_matters(tmp_path, field, heads, baselines):
    """Reinitialised embedding tables are random. TF-IDF does not read them."""
    fields = [f"--config.{field}"] if field else []
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("", 3, fields, tmp_path, mesh, "configs/perception.py:tiny")
    for way, count in (("head", heads), (BASELINE, baselines)):
        named = [(seed, f"{way}_seed{seed}") for seed in (1, 2, 3)]
        assert suite.draws(way) == (named if count == 3 else [(1, way)])


def test_interval_over_draws_covers_the_mean() -> None:
    """In about 95 % of simulated experiments, the interval contains the true mean.

    Each experiment has five draws, whose classifiers have different true accuracies.
    """
    generator, inside, repeats = np.random.default_rng(0), 0, 60
    for _ in range(repeats):
        labels_E = np.arange(400) % 2
        predicted = []
        for quality in generator.normal(0.8, 0.04, size=5):
            guesses_E = np.where(generator.random(400) < quality, labels_E, 1 - labels_E)
            logs_MN = np.log(np.where(np.eye(2)[guesses_E] == 1, 0.9, 0.1))
            predicted.append(Classes.of_log_probabilities("x", labels_E, logs_MN, ("no", "yes")))
        low, high = draws_interval(predicted)
        inside += low < 80 < high
    assert inside / repeats == pytest.approx(CONFIDENCE, abs=0.06)
