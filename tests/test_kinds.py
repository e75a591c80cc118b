"""The refusal of a run in which a kind of test did not run, tried on a small project."""
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
KINDS = ("property", "grad", "golden", "traps", "errors", "book")
pytestmark = pytest.mark.book


def a_test(kind, body="pass", name=""):
    return f"@pytest.mark.{kind}\ndef test_{kind}{name}():\n    {body}\n\n"


def run(folder, tests, notebook=True, workers="0"):
    """Lay a project out and run it with --all-kinds. Returns (exit status, output)."""
    shutil.copy(HERE / "conftest.py", folder / "conftest.py")
    markers = "".join(f"    {kind}\n" for kind in KINDS)
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}")
    (folder / "test_small.py").write_text("import pytest\n\n" + tests)
    if notebook:
        cell = {"cell_type": "code", "id": "a", "metadata": {}, "execution_count": 1,
                "source": ["print(1)"],
                "outputs": [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]}
        (folder / "01_small.ipynb").write_text(json.dumps(
            {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--all-kinds", "-p", "no:cacheprovider", "-n", workers,
         "--dist", "loadscope", "--nbval", "--nbval-current-env", "."],
        cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def test_accepts_a_run_with_every_kind_and_says_what_was_left_out(tmp_path):
    tests = "".join(map(a_test, KINDS)) + a_test("grad", "pytest.skip('no torch here')", "_skip")
    status, text = run(tmp_path, tests, workers="2")
    assert status == 0, text
    assert "NOT RUN" in text and "no torch here" in text
    assert "REFUSED" not in text
    assert [line.split()[1] for line in text.splitlines() if line.endswith(" passed")
            and line.split()[0] in (*KINDS, "nbval")] == ["1"] * 7


def test_refuses_a_run_without_notebooks(tmp_path):
    status, text = run(tmp_path, "".join(map(a_test, KINDS)), notebook=False)
    assert status == 1
    assert text.count("REFUSED") == 1 and "`nbval`" in text


def test_refuses_a_lost_kind_a_silent_skip_and_a_test_without_a_kind(tmp_path):
    tests = "".join(a_test(kind) for kind in KINDS if kind != "golden")
    tests += "@pytest.mark.skip\n" + a_test("golden", name="_skip") + "def test_bare():\n    pass\n"
    status, text = run(tmp_path, tests, notebook=False)
    assert status == 1
    assert "`golden`" in text
    assert "test_golden_skip was left out without a reason" in text
    assert "1 tests carry no kind" in text
