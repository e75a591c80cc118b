"""Execute notebooks and store their outputs, so that a second run changes no byte.

    python tools/execute.py notebooks/*.ipynb            store the outputs in place
    python tools/execute.py --check notebooks/*.ipynb    exit 1 if anything would change

What is stored: the outputs, without timing; one stream for each run of prints; fixed cell ids; one
kernelspec, whatever the machine calls its kernel; and, for a figure, its alt text in the cell's
metadata, where the book finds it. A cell tagged `nbval-ignore-output` (a timing) keeps its stored
outputs until the code of the notebook up to it changes. A notebook is replaced whole or not at all.
"""
import argparse
import concurrent.futures
import copy
import hashlib
import os
import pathlib
import sys
import tempfile
import time

# One thread, one hash seed: outputs must not depend on the machine. Kernels inherit this.
FIXED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
         "PYTHONHASHSEED": "0", "JUPYTER_PLATFORM_DIRS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
FIGURE = "Figure: "
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


class NotebookFailed(Exception):
    """A cell raised; the message names the notebook and the cell."""


def join_streams(outputs):
    """One output for each unbroken run of prints: how a kernel splits them is chance."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and output["output_type"] == last["output_type"] == "stream" \
                and output["name"] == last["name"]:
            last["text"] += output["text"]
        else:
            joined.append(output)
    return joined


def alt_text(outputs):
    """The text of the one figure among a cell's outputs, or None."""
    alts = [o["data"].get("text/plain", "") for o in outputs
            if "image/png" in o.get("data", {})]
    alts = [a.removeprefix(FIGURE) for a in alts if a.startswith(FIGURE)]
    if len(alts) > 1:
        raise NotebookFailed(f"{len(alts)} figures in one cell; the book can name only one: split")
    return alts[0] if alts else None


def set_alt(cell):
    """Write the figure's alt text to the cell's metadata, or take an old one away."""
    alt = alt_text(cell["outputs"])
    options = cell["metadata"].get("mystnb", {})
    if alt is None and "alt" not in options.get("image", {}):
        return
    image = {k: v for k, v in options.get("image", {}).items() if k != "alt"}
    if alt is not None:
        image["alt"] = alt
    options = {k: v for k, v in options.items() if k != "image"}
    if image:
        options["image"] = image
    cell["metadata"].pop("mystnb", None)
    if options:
        cell["metadata"]["mystnb"] = options


def set_ids(cells):
    """Keep ids that are there and differ; give `cell-NNN` to the others."""
    taken = set()
    for cell in cells:
        if not cell.get("id") or cell["id"] in taken:
            cell["id"] = None
        taken.add(cell["id"])
    for i, cell in enumerate(cells):
        if cell["id"] is None:
            name = f"cell-{i:03d}"
            while name in taken:
                name += "b"
            cell["id"] = name
            taken.add(name)


def keep_unrepeatable(cells, old_outputs):
    """Put back the stored outputs of timing cells whose code, and all code above, is the same."""
    digest = hashlib.sha256()
    for cell, (old, of) in zip(cells, old_outputs, strict=True):
        if cell["cell_type"] != "code":
            continue
        digest.update(cell["source"].encode() + b"\0")
        cell["metadata"].pop("outputs_of", None)
        if "nbval-ignore-output" in cell["metadata"].get("tags", ()):
            if old and of == digest.hexdigest()[:12]:
                cell["outputs"] = old
            cell["metadata"]["outputs_of"] = digest.hexdigest()[:12]


def executed(path, timeout=300):
    """Run a notebook in a fresh kernel, in its own folder.

    Args: path of the .ipynb; timeout of one cell in seconds.
    Returns: (text, time_s): the notebook with its outputs as text, and the seconds it took.
    Raises: NotebookFailed, naming the notebook and the cell.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    path = pathlib.Path(path)
    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), 4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, AttributeError) as error:
        raise NotebookFailed(f"{path}: not a notebook: {str(error)[:200]}") from None
    set_ids(notebook.cells)
    old_outputs = [(copy.deepcopy(c.get("outputs")), c.metadata.get("outputs_of"))
                   for c in notebook.cells]
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", record_timing=False,
        store_widget_state=False, resources={"metadata": {"path": str(path.resolve().parent)}})
    at = [0]
    client.on_cell_start = lambda cell, cell_index: at.__setitem__(0, cell_index)
    start = time.perf_counter()
    try:
        client.execute()
    except CellExecutionError as error:
        raise NotebookFailed(
            f"{path}: cell {at[0]} ({notebook.cells[at[0]].id}) raised "
            f"{error.ename}: {error.evalue}\n{error}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise NotebookFailed(
            f"{path}: cell {at[0]} ({notebook.cells[at[0]].id}): "
            f"{str(error).splitlines()[0]}") from None
    time_s = time.perf_counter() - start
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = join_streams(cell.outputs)
    keep_unrepeatable(notebook.cells, old_outputs)
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            try:
                set_alt(cell)
            except NotebookFailed as error:
                raise NotebookFailed(f"{path}: cell {i} ({cell.id}): {error}") from None
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n", time_s


def write_whole(path, text):
    """Replace a file by `text` in one step; on failure the old file stays."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _attempt(path):
    """`executed` for a worker process: the failure comes back as a value."""
    try:
        return *executed(path), None
    except NotebookFailed as error:
        return None, 0.0, str(error)


def execute_all(paths, workers):
    """Execute several notebooks at once. Yields (path, text, time_s, error) as they finish."""
    os.environ.update(FIXED)
    if len(paths) < 2 or workers < 2:
        for path in paths:
            yield path, *_attempt(path)
        return
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(paths))) as pool:
        jobs = {pool.submit(_attempt, path): path for path in paths}
        for job in concurrent.futures.as_completed(jobs):
            yield jobs[job], *job.result()


def main(argv=None):
    """Exit status: 0 done or unchanged, 1 a notebook failed or (--check) would change, 2 usage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=pathlib.Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args(argv)
    missing = [str(p) for p in args.notebooks if not p.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    bad = 0
    for path, text, time_s, error in execute_all(args.notebooks, args.workers):
        if error:
            print(f"FAILED   {error}", file=sys.stderr)
            bad += 1
            continue
        changed = text != path.read_text(encoding="utf-8")
        if changed and not args.check:
            write_whole(path, text)
        bad += changed and args.check
        word = "unchanged" if not changed else "DIFFERS" if args.check else "stored"
        print(f"{word:<9} {path}  {time_s:.1f} s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
