"""What the paper prints: Table 1 as it was typed, Figure 1's regression."""

import numpy as np
import pytest

from common.report.printed import printed as cells
from perception import printed, richness, tables
from perception.backbones import BACKBONES


def test_numbers_as_the_paper_writes_them() -> None:
    for number, text in ((445_696, "445.7K"), (1_300_480, "1.3M"), (3_134_951_424, "3.13B")):
        assert tables.shortened(number) == text
    assert tables.shortened(999) == "999"


def test_table_1_is_typed_as_printed() -> None:
    """The means that it prints are those of its rows, but for rounding."""
    table = printed.table1()
    assert len(table) == 22 and all(len(row) == 12 for row in table.values())
    assert {name for name, _ in table} == BACKBONES.keys() - {"mistral_7b"} - {
        name for name in BACKBONES if name.startswith("tiny_")
    }
    for key, row in cells("perception", "table1").items():
        assert abs(np.mean(list(table[key].values())) - float(row[-1])) <= 0.0501
    assert table["arctic_l", "full"]["emot."] == 17.9 and table["phi_2", "lora"]["yelp"] == 42.4


def test_the_regression_is_the_textbooks() -> None:
    """Against NumPy's own, and on points of a known line."""
    tokens, gaps = [1e3, 1e4, 1e6, 2e7], [3.0, 5.0, -1.0, 0.5]
    found = richness.fit(list(zip(tokens, gaps, strict=True)))
    wanted = np.polyfit(np.log(tokens), gaps, 1)
    np.testing.assert_allclose((found.slope, found.intercept), wanted)
    assert found.r_squared == pytest.approx(np.corrcoef(np.log(tokens), gaps)[0, 1] ** 2)
    line = richness.fit([(np.e**x, 7 - 2 * x) for x in range(5)])
    assert line.gap(np.e**10) == pytest.approx(-13) and line.r_squared == pytest.approx(1)


def test_prediction_intervals_are_the_textbooks() -> None:
    """Least squares by the normal equations, with Student's t of n - 2 degrees of freedom (2.776 for n = 6)."""
    tokens = np.array([1e3, 1e4, 3e4, 1e5, 1e6, 2e7])
    gaps = np.array([3.0, 5.0, 2.5, 4.0, -1.0, 0.5])
    line = richness.fit(list(zip(tokens, gaps, strict=True)))
    design = np.stack([np.ones(6), np.log(tokens)], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    residuals = gaps - design @ (inverse @ design.T @ gaps)
    at = np.array([1, np.log(5e4)])
    wanted = 2.776 * np.sqrt(residuals @ residuals / 4 * (1 + at @ inverse @ at))
    assert line.margin(5e4) == pytest.approx(wanted, rel=1e-3)
    assert richness.fit([(1e3, 1.0), (1e4, 2.0)]).margin(1e3) == np.inf


def test_the_expectation_leaves_artefacts_out_and_has_an_interval() -> None:
    """Neither the collapsed training nor SNLI; intervals that hold 0."""
    line = richness.expectation()
    found = {
        name: (line.gap(size.tokens), line.margin(size.tokens))
        for name, size in richness.SIZES.items()
    }
    assert found["rotten"] == pytest.approx((3.6, 6.8), abs=0.05)
    assert found["sst2"] == pytest.approx((2.5, 6.6), abs=0.05)


def test_figure_1_is_near_the_papers() -> None:
    """Its R^2 of 0.342 is of numbers of tokens that it does not print; with ours it is 0.37."""
    line = richness.fit(richness.points(richness.means(richness.gaps(printed.table1()))))
    assert line.slope < 0  # the richer, the less pretraining is worth
    assert abs(line.r_squared - printed.R_SQUARED) < 0.05
    found = richness.gaps(printed.table1())
    assert len(found) == 11 * 12
    assert found["openelm_3b", "sst2"] == pytest.approx(96.9 - 80.6)
    kept = richness.without_artefacts(found)
    assert len(kept) == 10 * 11
    assert richness.means(found)["w-tox"] == pytest.approx(0.05, abs=0.05)
    # A cell that was not measured is left out, not 0.
    assert richness.gaps({("a", "lora"): {"x": 1.0, "y": 2.0}, ("a", "full"): {"y": 5.0}}) == {
        ("a", "y"): -3.0
    }


def test_lora_is_ahead_in_every_printed_cell_of_openelm() -> None:
    """By seven points on the average: the backbones that were pretrained by next-token prediction, and whose tables the
    authors' program does not draw anew."""
    found = richness.gaps(printed.table1())
    own = [gap for (backbone, _), gap in found.items() if backbone.startswith("openelm")]
    assert len(own) == 4 * 12 and min(own) > 0 and np.mean(own) == pytest.approx(6.8, abs=0.05)
    assert sum(gap < 0 for gap in found.values()) == 42  # of all 132 cells


def test_no_printed_cell_of_snli_is_above_chance() -> None:
    """Of three classes of about one size; where one is always chosen weighted F1 is 17.5."""
    cells = [row["snli"] for row in printed.table1().values()]
    assert max(cells) < 100 / 3 + 0.3 and cells.count(17.5) == 4


def test_rank_32_is_a_quarter_to_five_percent_of_a_backbone() -> None:
    """The paper says about 1 %."""
    shares = {}
    for name in BACKBONES:
        if not name.startswith("tiny_"):
            size, one = tables.parameters(name)
            shares[name] = 100 * 32 * one / size
    assert (
        min(shares.values()) == pytest.approx(shares["mistral_7b"]) == pytest.approx(0.27, abs=5e-3)
    )
    assert (
        max(shares.values()) == pytest.approx(shares["arctic_s"]) == pytest.approx(5.33, abs=5e-3)
    )
    assert sum(0.75 <= share <= 1.25 for share in shares.values()) == 3
