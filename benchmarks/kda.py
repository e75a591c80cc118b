"""KDA: chunks beside the recurrence and beside flash-linear-attention's naive torch functions.

python benchmarks/kda.py      float32, B=1, H=4, K=V=128, one thread, K3-like gates.
"""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import importlib.util
import pathlib
import tracemalloc

import numpy as np
from timing import interleaved

from k3np.kda import kda_chunkwise, kda_recurrent
from k3np.ops import sigmoid


def draw(T, floor=False, H=4, D=128):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, T, H, D), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((1, T, H, D), np.float32)
    g = -5 * sigmoid(rng.standard_normal((1, T, H, D), np.float32) - 2)
    beta = sigmoid(rng.standard_normal((1, T, H), np.float32))
    return q, k, v, np.full_like(g, -5) if floor else g, beta


def torch_functions():
    """flash-linear-attention's naive file, read by its path: the package itself wants a GPU."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "einops", "fla")):
        return None
    import torch
    torch.set_num_threads(1)
    fla = pathlib.Path(importlib.util.find_spec("fla").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("naive", fla / "ops" / "kda" / "naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return torch, module


def forward():
    judges = torch_functions()
    print("forward, ms (median)")
    names = ["recurrence", "chunks of 32", "chunks of 64"] + (
        ["torch recurrent", "torch chunk 64"] if judges else [])
    print("      T " + " ".join(f"{n:>16}" for n in names))
    for T in (512, 1024, 2048, 4096):
        args = draw(T)
        calls = {"recurrence": lambda: kda_recurrent(*args),
                 "chunks of 32": lambda: kda_chunkwise(*args, chunk_size=32),
                 "chunks of 64": lambda: kda_chunkwise(*args)}
        if judges:
            torch, naive = judges
            theirs = [torch.from_numpy(x) for x in args]
            calls["torch recurrent"] = lambda: naive.naive_recurrent_kda(*theirs)
            calls["torch chunk 64"] = lambda: naive.naive_chunk_kda(*theirs)
            gap = np.abs(naive.naive_chunk_kda(*theirs)[0].numpy() - kda_chunkwise(*args)[0]).max()
            assert gap < 1e-5, gap
        s = interleaved(calls, 7)
        print(f"{T:>7} " + " ".join(f"{1e3 * s[n]:>16.1f}" for n in names))
        if T == 2048:
            ratios = s
    fast = ratios["chunks of 64"]
    print(f"T=2048: recurrence / chunks {ratios['recurrence'] / fast:.2f}")
    if judges:
        print(f"T=2048: torch naive chunk / chunks {ratios['torch chunk 64'] / fast:.2f}, torch "
              f"naive recurrent / chunks {ratios['torch recurrent'] / fast:.2f}")
    else:
        print("torch comparison NOT RUN: needs torch, einops and fla-core")


def others():
    short, floor, long = draw(2048), draw(2048, floor=True), draw(65536)
    ct = (short[2], None)
    s = interleaved({"short": lambda: kda_chunkwise(*short),
                     "floor": lambda: kda_chunkwise(*floor),
                     "both": lambda: kda_chunkwise.vjp(*short)[1](ct)}, 7)
    print(f"all gates at -5, T=2048: {1e3 * s['floor']:.1f} ms, beside {1e3 * s['short']:.1f}")
    print(f"forward and backward, T=2048: {1e3 * s['both']:.1f} ms")
    s = interleaved({"short": lambda: kda_chunkwise(*short),
                     "long": lambda: kda_chunkwise(*long)}, 3)
    per_token = s["short"] / 2048, s["long"] / 65536
    print(f"us a token: {1e6 * per_token[0]:.1f} at T=2048, {1e6 * per_token[1]:.1f} at T=65536, "
          f"ratio {per_token[1] / per_token[0]:.2f}")


def memory():
    print("memory beyond the outputs, KiB")
    for T in (1024, 4096, 16384, 65536):
        args = draw(T)
        tracemalloc.start()
        o, _ = kda_chunkwise(*args)
        extra = tracemalloc.get_traced_memory()[1] - o.nbytes
        tracemalloc.stop()
        print(f"{T:>7} {extra / 1024:>10.0f}")


if __name__ == "__main__":
    forward()
    others()
    memory()
