"""The notebook notebooks/runs.ipynb is stored without outputs and runs without errors."""

import pytest

from tests.programs import ROOT

NOTEBOOK = ROOT / "notebooks" / "runs.ipynb"


@pytest.fixture
def notebook():
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_notebook_is_stored_without_outputs(notebook):
    """Stored pictures would depend on the version of fonts. Other tests check the contents of pictures."""
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code(notebook))


@pytest.mark.medium
def test_notebook_runs(notebook, monkeypatch):
    from nbclient import NotebookClient

    # Run as in Jupyter: in the folder of the notebook, and without the sources on PYTHONPATH.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources=folder).execute()
    shown = [output for cell in code(notebook) for output in cell.outputs]
    assert all(output.output_type == "execute_result" for output in shown), (
        shown
    )  # The notebook prints no warnings.
    tables = [o.data["text/markdown"] for o in shown if "text/markdown" in o.data]
    pictures = [o.data["image/png"] for o in shown if "image/png" in o.data]
    assert len(tables) == 9 and len(pictures) == 5 and len(shown) == 14
    areas = next(table for table in tables if "AUCC, BLEU·steps" in table)
    # results/observations.md has these values, divided by 1,000 and rounded.
    assert all(area in areas for area in ("52260", "51791", "52799"))
