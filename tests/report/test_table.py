"""Tables as text, Markdown and CSV: formats of cells, alignment, and means with deviations."""

import csv

import pytest

from common.report.table import (
    Table,
    digits_for,
    markdown,
    mean_std,
    publish,
    text,
    write_csv,
)
from common.storage import addresses

COLUMNS = ["group", "trainable", "share"]
ROWS = [("encoder|ffn", 1234567, 0.12345), ("total", 89, None)]


def test_text_aligns_numbers_right():
    assert text(COLUMNS, ROWS) == (
        "group        trainable   share\n"
        "-----------  ---------  ------\n"
        "encoder|ffn  1,234,567  0.1235\n"
        "total               89\n"
    )


def test_markdown():
    assert markdown(COLUMNS, ROWS) == (
        "| group        | trainable |  share |\n"
        "| ------------ | --------: | -----: |\n"
        "| encoder\\|ffn | 1,234,567 | 0.1235 |\n"
        "| total        |        89 |        |\n"
    )


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (34.594, "34.59"),
        (-1.5, "-1.50"),
        (0.0, "0.00"),
        (0.00054321, "0.0005432"),
        (1.5e9, "1.5e+09"),
        (-1200, "-1,200"),
        (float("nan"), "nan"),
        (True, "True"),
        ("34.59 ± 0.04", "34.59 ± 0.04"),
        ("two\nlines", "two lines"),
    ],
)
def test_cell_formats(value, cell):
    assert text(["x"], [[value]]).splitlines()[2].strip() == cell


def test_mean_and_deviation_columns_are_right_aligned():
    body = text(["a long header"], [["34.59 ± 0.04"]]).splitlines()[2]
    assert body == " 34.59 ± 0.04"
    assert text(["a long header"], [["1"], ["x"]]).splitlines()[2:] == ["1", "x"]


def test_a_table_without_rows():
    assert text(["a", "b"], []) == "a    b\n---  ---\n"
    assert markdown(["a"], []) == "| a   |\n| --- |\n"


def test_csv_numbers_are_unrounded(tmp_path):
    path = tmp_path / "deep" / "table.csv"
    write_csv(path, COLUMNS, [("a,b", 1234567, 1 / 3), ("total", None, 2.0)])
    with path.open(newline="") as file:
        header, first, second = csv.reader(file)
    assert header == COLUMNS
    assert first[:2] == ["a,b", "1234567"] and float(first[2]) == 1 / 3
    assert second == ["total", "", "2.0"]


@pytest.mark.parametrize("write", [markdown, text])
def test_row_of_wrong_length_raises_value_error(write, tmp_path):
    with pytest.raises(ValueError, match="must have 3 cells, one for each column, got 2"):
        write(COLUMNS, [("a", 1)])
    with pytest.raises(ValueError, match="must have 3 cells, one for each column, got 4"):
        write_csv(tmp_path / "x.csv", COLUMNS, [("a", 1, 2, 3)])
    assert not (tmp_path / "x.csv").exists()


def test_mean_std():
    assert mean_std([34.594], 2) == "34.59"
    assert mean_std([1.0, 2.0, 3.0], 2) == "2.00 ± 1.00"  # the deviation divides by n - 1
    assert mean_std([1.0, 2.0]) == "1.5 ± 0.7"


@pytest.mark.parametrize(
    ("values", "digits"),
    [([2.548, 9.9], 3), ([34.59, 9.0], 2), ([-114.57], 2), ([52260.0], 0), ([float("nan")], 3)],
)
def test_digits_for_matches_the_paper(values, digits):
    assert digits_for(values) == digits


def test_table_unpacks_and_renders_in_jupyter(tmp_path, capsys):
    table = Table(tuple(COLUMNS), ROWS)
    assert table._repr_markdown_() == markdown(COLUMNS, ROWS)
    publish(tmp_path / "deep" / "x", *table)
    assert (tmp_path / "deep" / "x.md").read_text() == markdown(COLUMNS, ROWS)
    assert (tmp_path / "deep" / "x.csv").read_text().startswith("group,trainable,share\n")
    assert text(COLUMNS, ROWS) in capsys.readouterr().out


def test_table_in_a_bucket_is_written_to_an_address(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(addresses, "ROOT", tmp_path)
    publish(addresses.copy_of("gs://lab/report") / "x", COLUMNS, ROWS)
    assert "written: gs://lab/report/x.csv, .md" in capsys.readouterr().out
