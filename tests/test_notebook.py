"""demo.ipynb: it is kept without outputs; in short, it runs on the CPU, up to what needs a GPU."""

import json
import os

import pytest
from documents import ROOT

NOTEBOOK = json.loads((ROOT / "demo.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def on_gpu(cell):
    return "gpu" in cell["metadata"].get("tags", [])


def test_it_is_kept_without_outputs_and_ends_with_what_needs_a_gpu():
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CODE)
    assert [on_gpu(cell) for cell in CODE] == sorted(map(on_gpu, CODE)) and on_gpu(CODE[-1])


@pytest.mark.long
def test_its_cells_run(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for path in ROOT.iterdir():  # so that its runs/ is not ours
        if path.name not in ("runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = json.dumps(NOTEBOOK | {"cells": [cell for cell in CODE if not on_gpu(cell)]})
    short = {
        "STEPS=50": "STEPS=2 EVAL_QUESTIONS=8 PROMPTS_PER_STEP=2",
        "} demo.py": "} demo.py STEPS=4 WARM_STEPS=20",
    }
    for long, words in short.items():
        text = text.replace(long, words)
    notebook = nbformat.reads(text, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    limits = {"timeout": 900, "startup_timeout": 900}
    nbclient.NotebookClient(notebook, **limits, resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "advantage" in printed and "Traceback" not in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert os.path.exists(tmp_path / "runs/two.png")
