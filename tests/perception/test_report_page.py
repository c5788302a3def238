"""The report of perception.worth: contents, escaping, and its layout in a browser."""

import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from common.metrics.classes import Classes
from common.metrics.curve import Curve, Point
from common.report.table import Table
from perception import report_page
from perception.report_page import Report, calibration

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\u2028]]>"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def predictions(classes: int = 3, examples: int = 60, names: tuple[str, ...] = ()) -> Classes:
    """Returns predictions with random probabilities. The first prediction and every fifth after it are wrong."""
    generator = np.random.default_rng(0)
    labels_E = np.arange(examples) % classes
    guesses_E = np.where(np.arange(examples) % 5, labels_E, (labels_E + 1) % classes)
    chance_M = generator.uniform(0.5, 0.99, examples)
    chances_MN = np.repeat((1 - chance_M)[:, None] / (classes - 1), classes, 1)
    chances_MN[np.arange(examples), guesses_E] = chance_M
    names = names or tuple(f"class {i}" for i in range(classes))
    return Classes.of_log_probabilities("test", labels_E, np.log(chances_MN), names)


def report(found: Classes, text: str = "some words") -> Report:
    curve = Curve("weighted_f1", "max", [Point(s, s, s, 50.0 + s) for s in (10, 20, 30)])
    flat = Curve("weighted_f1", "max", [Point(0, 1.0, 0.0, 60.0)])
    results = Table(("", "weighted F1", "parameters"), [(text, "81.20 ± 0.40", 12_345)] * 5)
    verdicts = Table(("of", "against", "verdict"), [("a", "b", "undecided")])
    return Report(
        text,
        [text, "second line"],
        results,
        verdicts,
        {"LoRA": [curve, curve], text: [flat]},
        text,
        found,
        [f"{text} {i}" for i in range(len(found))],
        [f"{text} line {i}" for i in range(len(found))],
        f"python -m perception.classify --workdir={text}",
        [text],
    )


class Page(HTMLParser):
    """Collects the tags, attributes and texts of an HTML page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def page(path: Path, content: Report) -> Page:
    report_page.write(content, path)
    return Page(path.read_text(encoding="utf-8"))


def test_hostile_texts_are_escaped(tmp_path) -> None:
    found = predictions(names=(HOSTILE, "b", "c"))
    made = page(tmp_path / "report.html", report(found, HOSTILE))
    assert not {"script", "img", "link", "iframe", "object"} & set(made.tags)
    names = {name for name, _ in made.attributes}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "href"}
    shown = HOSTILE.replace("\x00", "\ufffd")
    assert made.texts.count(shown) > 5 and f"{shown} line 0" in made.texts
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in made.attributes


def test_page_has_all_parts(tmp_path) -> None:
    made = page(tmp_path / "report.html", report(predictions()))
    for part in ("Use it", "All training methods", "Differences", "Learning curves", "Classes, some words",
                 "Confusion", "Calibration", "Most confident errors", "Data and limits"):  # fmt: skip
        assert part in made.texts, part
    assert made.tags.count("svg") == 2
    assert made.tags.count("polyline") > 4


def test_ways_without_steps_have_no_learning_curves(tmp_path) -> None:
    whole = report(predictions())
    solved = {
        name: [Curve(one.name, one.mode, one.points[:1]) for one in seeds]
        for name, seeds in whole.curves.items()
    }
    made = page(tmp_path / "report.html", replace(whole, curves=solved))
    assert "Learning curves" not in made.texts and made.tags.count("svg") == 1


def test_errors_are_sorted_by_confidence(tmp_path) -> None:
    found = predictions(examples=200)
    made = page(tmp_path / "report.html", report(found))
    start = made.texts.index("Most confident errors")
    shown = [int(t.removeprefix("some words ")) for t in made.texts[start:] if t.startswith("some words ")
             and " line " not in t]  # fmt: skip
    wrong = np.flatnonzero(found.labels_E != found.guesses_E)
    confidence = found.probabilities_EC.max(1)[wrong]
    assert shown == wrong[np.argsort(-confidence, kind="stable")][:20].tolist()


def test_perfect_classifier_has_no_errors(tmp_path) -> None:
    labels_E = np.arange(20) % 2
    logs_MN = np.log(np.where(np.eye(2)[labels_E] == 1, 0.9, 0.1))
    found = Classes.of_log_probabilities("test", labels_E, logs_MN, ("no", "yes"))
    made = page(tmp_path / "report.html", report(found))
    assert "No test example is classified wrongly." in made.texts


def test_scores_of_classes(tmp_path) -> None:
    """Two of the three examples of class a are found, and one of three predictions of a is wrong.

    Class c is never predicted.
    """
    labels_E, guesses_E = np.int32([0, 0, 0, 1, 2]), np.int32([0, 0, 1, 0, 1])
    logs_MN = np.log(np.where(np.eye(3)[guesses_E] == 1, 0.8, 0.1))
    found = Classes.of_log_probabilities("test", labels_E, logs_MN, ("a", "b", "c"))
    made = page(tmp_path / "report.html", report(found))
    start = made.texts.index("test examples")
    assert made.texts[start + 1 : start + 16] == [
        "a", "66.7 %", "66.7 %", "66.7 %", "3", "b", "0.0 %", "0.0 %", "0.0 %", "1",
        "c", "0.0 %", "0.0 %", "0.0 %", "1",
    ]  # fmt: skip
    start = made.texts.index("Confusion")
    assert made.texts[start + 5 : start + 17] == [
        "a",
        "2",
        "1",
        "0",
        "b",
        "1",
        "0",
        "0",
        "c",
        "0",
        "1",
        "0",
    ]


def test_many_classes_show_most_frequent_confusions(tmp_path) -> None:
    made = page(tmp_path / "report.html", report(predictions(classes=30, examples=90)))
    assert "The most frequent confusions (6)." in made.texts


def test_calibration_error_of_known_bins() -> None:
    """Of ten predictions with probability 0.95, nine are right, and of ten with probability 0.65, four.

    The calibration error is therefore (5 + 25) / 2 points.
    """
    chance_M = np.repeat([0.95, 0.65], 10)
    right_M = np.r_[np.arange(10) < 9, np.arange(10) < 4]
    points, error = calibration(chance_M, right_M)
    np.testing.assert_allclose(points, [(65, 40), (95, 90)], atol=0.05)
    assert error == pytest.approx(15, abs=0.05)


LOOK = """<!DOCTYPE html><title>look</title><iframe id="page" src="report.html" width="360" height="2000"></iframe>
<script>onload = () => {
  const root = document.getElementById("page").contentDocument.documentElement;
  const table = root.querySelector("table");
  document.body.textContent = `width ${root.clientWidth} content ${root.scrollWidth} table ${table.scrollWidth}`;
};</script>"""


@pytest.mark.medium
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_shows_page_without_errors_and_scrolling(tmp_path, scheme) -> None:
    """At a width of 360 px the page does not scroll sideways, although its texts have words of over 300 characters."""
    text = HOSTILE + "w" * 300
    wide = report(predictions(classes=20, names=tuple(f"{text}{i}" for i in range(20))), text)
    report_page.write(wide, tmp_path / "report.html")
    (tmp_path / "look.html").write_text(LOOK)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    flags += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    flags += [
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--hide-scrollbars",
    ]
    done = subprocess.run(
        [CHROMIUM, *flags, (tmp_path / "look.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    words = done.stdout.partition("<body>")[2].split()
    assert words[:4] == ["width", "360", "content", "360"]
