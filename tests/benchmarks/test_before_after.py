"""benchmarks.before_after writes its Markdown page from the tables in results/."""

import shutil
from pathlib import Path

import pytest

from benchmarks import before_after


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for folder in ("launch", "benchmarks"):
        shutil.copytree(before_after.RESULTS / folder, tmp_path / folder)
    return tmp_path


def test_kept_page_matches_the_kept_tables(results: Path) -> None:
    page = results / "launch/before_after.md"
    kept = page.read_text()
    before_after.write(results)
    assert page.read_text() == kept


def test_missed_target_is_marked(results: Path) -> None:
    table = results / "launch/decoding.csv"
    table.write_text(table.read_text().replace(",0.7843006344660659,", ",5.1,"))
    met = {row.measure: row.cells()[-2] for row in before_after.decoding(results)}
    assert met.pop("decoding, WMT, FFN reservoirs, fsdp=8, received for a token (MiB)") == "no"
    assert set(met.values()) == {"yes"}


def test_a_case_without_an_older_commit_compares_microbatches(results: Path) -> None:
    rows = {row.measure: row for row in before_after.exchanges(results)}
    row = rows["gradients received, v5e:2x4, data=8, microbatches: 1 and 4 (MiB)"]
    assert row.before == row.after == pytest.approx(294.17, abs=0.01)
    assert row.cells()[-2] == "yes"
    table = results / "launch/exchange.csv"
    lines = table.read_text().replace(
        'v5e:2x4, data=8",4,294.16749382019043', 'v5e:2x4, data=8",4,301.0'
    )
    table.write_text(lines)
    (row,) = (new for new in before_after.exchanges(results) if new.measure == row.measure)
    assert row.cells()[-2] == "no"
