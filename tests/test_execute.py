"""tools/execute.py: a second run changes no byte, and a failure leaves the old file."""
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.book

PRINTS = "import sys\nprint('one'); sys.stdout.flush(); print('two')"
FIGURE = """from IPython.display import display
display({"image/png": "iVBORw0KGgo=", "text/plain": "Figure: a line that rises"}, raw=True)"""
TIMING = "import time; print(time.perf_counter_ns())"


def notebook(path, *sources, tags=(), ids=True):
    """Write an unexecuted notebook of code cells; `tags` go to its last cell."""
    cells = [{"cell_type": "code", "metadata": {"execution": {"iopub.status.busy": "2026"}},
              "execution_count": None, "outputs": [], "source": source} for source in sources]
    if ids:
        for i, cell in enumerate(cells):
            cell["id"] = f"mine-{i}"
    cells[-1]["metadata"]["tags"] = list(tags)
    kernel = {"display_name": "My Python", "language": "python", "name": "python3"}
    path.write_text(json.dumps({"cells": cells, "metadata": {"kernelspec": kernel},
                                "nbformat": 4, "nbformat_minor": 5 if ids else 4}))
    return path


def execute(*args):
    return subprocess.run([sys.executable, ROOT / "tools" / "execute.py", *args],
                          capture_output=True, text=True, timeout=120)


def test_second_run_changes_no_byte(tmp_path):
    path = notebook(tmp_path / "a.ipynb", PRINTS, FIGURE, TIMING, tags=["nbval-ignore-output"],
                    ids=False)
    assert execute(path).returncode == 0
    first = path.read_bytes()
    again = execute("--check", path)
    assert again.returncode == 0 and "unchanged" in again.stdout
    stored = json.loads(first)
    a, b, c = stored["cells"]
    assert [cell["id"] for cell in (a, b, c)] == ["cell-000", "cell-001", "cell-002"]
    assert len(a["outputs"]) == 1 and "".join(a["outputs"][0]["text"]) == "one\ntwo\n"
    assert b["metadata"] == {"mystnb": {"image": {"alt": "a line that rises"}}}
    assert all("execution" not in cell["metadata"] for cell in (a, b, c))
    assert stored["metadata"]["kernelspec"]["display_name"] == "Python 3"
    assert stored["metadata"]["language_info"] == {"name": "python"}
    # A changed line above a timing makes the stored timing stale.
    a["source"] = PRINTS.splitlines(True) + ["\n", "\n"]
    path.write_text(json.dumps(stored))
    again = execute("--check", path)
    assert again.returncode == 1 and "DIFFERS" in again.stdout


def test_failure_names_the_cell_and_keeps_the_old_file(tmp_path):
    good = notebook(tmp_path / "good.ipynb", "print(1)")
    bad = notebook(tmp_path / "bad.ipynb", "print(1)", "x = 1 / 0", "print(2)")
    before = bad.read_bytes()
    done = execute(good, bad)
    assert done.returncode == 1
    assert "bad.ipynb: cell 1 (mine-1) raised ZeroDivisionError: division by zero" in done.stderr
    assert bad.read_bytes() == before
    assert '"text": [\n      "1\\n"' in good.read_text()    # the other one was stored
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.ipynb", "good.ipynb"]


def test_two_figures_in_a_cell_and_a_missing_file_are_refused(tmp_path):
    two = notebook(tmp_path / "two.ipynb", FIGURE + "\n" + FIGURE.splitlines()[1])
    done = execute(two)
    assert done.returncode == 1 and "2 figures in one cell" in done.stderr
    assert execute(tmp_path / "none.ipynb").returncode == 2
