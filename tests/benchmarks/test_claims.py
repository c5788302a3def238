"""The page of the claims of all papers."""

import pytest

from benchmarks import claims
from common.errors import UserError


def test_page_has_tables_and_commands_of_all_papers(tmp_path):
    for paper, scale in (("b", "tiny"), ("a", "tiny"), ("a", "laptop")):
        folder = tmp_path / "results" / paper / scale
        folder.mkdir(parents=True)
        (folder / "claims.md").write_text(f"| {paper} {scale} |\n")
    (tmp_path / "results/a/laptop/about.md").write_text("The data are a stand-in.\n")
    text = claims.page(tmp_path / "results")
    assert "The data are a stand-in.\n\n| a laptop |" in text
    places = [text.index(f"| {name} |") for name in ("a laptop", "a tiny", "b tiny")]
    assert places == sorted(places)
    assert "python -m b.reproduce claims --scale=tiny --kept --out=results/b/tiny" in text
    with pytest.raises(UserError, match=r"has no file PAPER/SCALE/claims\.md"):
        claims.page(tmp_path / "elsewhere")
    (tmp_path / "results" / "a" / "tiny").rename(tmp_path / "results" / "a" / "huge")
    with pytest.raises(
        UserError, match=r"a/huge/claims\.md: name of its folder='huge': choose one of paper"
    ):
        claims.page(tmp_path / "results")
