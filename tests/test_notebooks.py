"""The notebook of each paper is stored without outputs, runs as in Jupyter, and draws one figure."""

import re

import nbformat
import pytest

from tests.programs import ROOT

PAPERS = ("reservoir", "gmlp_lm", "explicit_opt", "perception")


def read(paper: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{paper}.ipynb", as_version=4)


def shorten(notebook: nbformat.NotebookNode) -> None:
    """Trains for 20 steps instead of the notebook's 100 to 200, because all steps run the same compiled functions."""
    steps = r"(config\.train\.steps, config\.eval\.steps) = \d+, \d+"
    for cell in code(notebook):
        cell.source = re.sub(steps, r"\1 = 20, 10", cell.source)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("paper", PAPERS)
def test_notebook_is_stored_without_outputs_and_names_a_line_to_change(paper):
    notebook = read(paper)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code(notebook))
    titles = [cell.source.splitlines()[0] for cell in notebook.cells if cell not in code(notebook)]
    assert titles[0].startswith("# ") and "## The line to change" in titles


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_notebook_runs(paper, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = read(paper)
    shorten(notebook)
    folder = {"metadata": {"path": str(ROOT / "notebooks")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=folder).execute()
    shown = [output for cell in code(notebook) for output in cell.outputs]
    assert not [output for output in shown if output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 1
