"""Every notebook runs from top to bottom on a tiny checkpoint, and holds no outputs of an earlier run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.tiny import text_checkpoint

import trillion_moe as tm

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_kept(path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch) -> None:
    folder = text_checkpoint(tmp_path / "tiny", packed=True)
    assert tm.load(folder).config.quantization == "mxfp4"
    monkeypatch.setenv("TRILLION_MOE_FOLDER", str(folder))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.name == "stdout"]
    assert "experts mxfp4" in printed[0]
