"""Execute the notebooks afresh and build the book from them. `make book` runs this.

The sources are staged in build/src: the prose as it stands, and every notebook with the outputs of
a fresh run. Nothing is done twice: a notebook runs again when it, the part of the package that it
imports, a golden vector or the environment changed; pages are built again when something staged
changed. A warning is an error.
"""
import argparse
import ast
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import check_site
import execute

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
STAGE = BUILD / "src"
PROSE = ("_config.yml", "book", "CHANGELOG.md", "LICENSE-CC-BY-4.0")
IGNORED = {"__pycache__", ".ipynb_checkpoints", ".DS_Store"}


def files_under(*names):
    """Every file under these names of the repository, sorted, leftovers of tools left out."""
    found = []
    for name in names:
        path = ROOT / name
        found += [path] if path.is_file() else [
            p for p in sorted(path.rglob("*")) if p.is_file() and not IGNORED & set(p.parts)]
    return found


def fingerprint(paths, *more):
    digest = hashlib.sha256(repr(more).encode())
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def imported(code):
    """The files of the package that some code imports, itself or through another of them."""
    found, names = set(), [code]
    while names:
        for node in ast.walk(ast.parse(names.pop())):
            if isinstance(node, ast.Import):
                wanted = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            else:
                continue
            for name in wanted:
                parts = name.split(".")
                for i in range(1, len(parts) + 1):
                    base = ROOT.joinpath(*parts[:i])
                    for path in (base.with_suffix(".py"), base / "__init__.py"):
                        if parts[0] == "k3np" and path.is_file() and path not in found:
                            found.add(path)
                            names.append(path.read_text(encoding="utf-8"))
    return sorted(found)


def code_of(path):
    """The files of the package that a notebook depends on; all of them if it cannot be read."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return imported("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"))
    except (ValueError, KeyError, SyntaxError):
        return files_under("k3np")


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def texts(notebook):
    """A notebook's text outputs, cell by cell: what must be the same on every machine."""
    return [[(o.get("name"), o.get("text"), o.get("data", {}).get("text/plain"))
             for o in cell.get("outputs", ())]
            for cell in notebook["cells"]
            if "nbval-ignore-output" not in cell["metadata"].get("tags", ())]


def put(path, data):
    """Write bytes only if they differ, so that untouched pages are not built again."""
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def stage_notebooks():
    """Execute what changed. Returns False when a notebook failed."""
    record = BUILD / "executed.json"
    done = read_json(record)
    given = files_under("tests/golden", "notebooks/data", "requirements.lock", "tools/execute.py")
    marks, todo = {}, []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        marks[path] = fingerprint([path, *code_of(path), *given], sys.version_info[:3])
        if done.get(path.name) != marks[path] or not (STAGE / "notebooks" / path.name).is_file():
            todo.append(path)
    if todo:
        print(f"Executing {len(todo)} of {len(marks)} notebooks", flush=True)
    good = True
    for path, text, time_s, error in execute.execute_all(todo, os.cpu_count() or 1):
        if error:
            print(f"FAILED  {error}", file=sys.stderr)
            good = False
            continue
        same = texts(json.loads(text)) == texts(json.loads(path.read_text(encoding="utf-8")))
        print(f"  {path.name:<36} {time_s:5.1f} s"
              + ("" if same else "   its stored outputs differ: `make outputs` stores these"),
              flush=True)
        put(STAGE / "notebooks" / path.name, text.encode())
        done[path.name] = marks[path]
        record.write_text(json.dumps(done, indent=1))
    for old in (STAGE / "notebooks").glob("*.ipynb"):
        if old.name not in {p.name for p in marks}:
            old.unlink()
    return good


def stage_prose():
    wanted = set()
    for path in files_under(*(name for name in PROSE if (ROOT / name).exists())):
        target = STAGE / path.relative_to(ROOT)
        wanted.add(target)
        put(target, path.read_bytes())
    for old in (STAGE / "book").rglob("*"):
        if old.is_file() and old not in wanted and "__pycache__" not in old.parts:
            old.unlink()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--html", type=pathlib.Path, default=BUILD / "_build" / "html",
                        help="where the pages lie (fixed by Jupyter Book; only for messages)")
    args = parser.parse_args(argv)
    html = (ROOT / args.html).resolve()
    start = time.perf_counter()
    STAGE.mkdir(parents=True, exist_ok=True)
    stamp = BUILD / "book.json"
    inputs = (*PROSE, "notebooks", "k3np", "tests/golden", "tools", "requirements.lock")
    mark = fingerprint(files_under(*(n for n in inputs if (ROOT / n).exists())),
                       sys.version_info[:3])
    if read_json(stamp).get("mark") == mark and (html / "index.html").is_file():
        print(f"Nothing changed. The book: {html / 'index.html'}")
        return 0
    stamp.unlink(missing_ok=True)
    if not stage_notebooks():
        return 1
    stage_prose()
    print("Building the pages", flush=True)
    log = BUILD / "book.log"
    with log.open("w") as out:
        status = subprocess.run(
            [str(pathlib.Path(sys.executable).parent / "jupyter-book"), "build", str(STAGE),
             "--toc", str(STAGE / "book" / "_toc.yml"), "--path-output", str(BUILD),
             "--all", "-W", "--keep-going"],      # each page shows the titles of all the others
            stdout=out, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    lines = log.read_text(errors="replace").splitlines()
    warnings = [s for s in lines if "WARNING" in s or "ERROR" in s or "CRITICAL" in s]
    problems = [] if status else check_site.problems(html)
    if status or problems:
        # Pages already read would not warn again: forget them, so that the next run does.
        shutil.rmtree(BUILD / "_build" / ".doctrees", ignore_errors=True)
        print("\n".join(warnings or problems or lines[-30:]), file=sys.stderr)
        print(f"The book was not built; a warning is an error. The log: {log}", file=sys.stderr)
        return 1
    stamp.write_text(json.dumps({"mark": mark}))
    print(f"Done in {time.perf_counter() - start:.0f} s. The book: {html / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
