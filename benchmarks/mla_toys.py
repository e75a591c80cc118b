"""The toys of chapter 5 for many seeds: its own code, run again and again, stored for it to read.

python benchmarks/mla_toys.py      writes notebooks/data/05_toys.json; ten minutes, one thread.
"""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEEDS = {"sink": 5, "order": 12}


def definitions():
    """Names of the chapter: what its imports and the cells that define the toys leave behind."""
    cells = json.loads((ROOT / "notebooks" / "05_mla.ipynb").read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    wanted = ("import dataclasses", "def rotate(", "TINY = ", "def errand(", "KEYS, SYMBOLS = ",
              "def twin_vjp(", "def network_vjp(")
    namespace = {}
    for start in wanted:
        source, = (c for c in code if c.startswith(start))
        exec(compile(source, f"chapter 5, the cell that begins {start!r}", "exec"), namespace)
    return namespace


def main():
    chapter = definitions()
    results = {"sink": [], "order": {}}
    for sink in (True, False):
        for gate in (False, True):
            runs = [chapter["run_errands"](gate, sink, seed) for seed in range(SEEDS["sink"])]
            results["sink"].append({"gate": gate, "sink": sink, **{
                key: [round(float(run[key]), 4) for run in runs] for key in runs[0]}})
            print(results["sink"][-1], flush=True)
    for name, (kinds, cfg) in chapter["NETWORKS"].items():
        right, alone = [], []
        for seed in range(SEEDS["order"]):
            p = chapter["train"](kinds, cfg, seed)
            right.append([round(a, 4) for a in chapter["right_answers"](p, kinds, cfg)])
            alone.append(round(chapter["first_layer_alone"](p, kinds, cfg), 4))
            print(name, seed, right[-1], alone[-1], flush=True)
        results["order"][name] = {"right": right, "first_layer_alone": alone}
    path = ROOT / "notebooks" / "data" / "05_toys.json"
    path.parent.mkdir(exist_ok=True)
    text = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]",
                  json.dumps(results, indent=1))             # the innermost lists on one line each
    path.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
