"""The histogram of Quantile Balancing beside the exact quantile: time, and memory as tokens grow.

python benchmarks/balance.py      896 experts of which 16, 1,000 bins, float32, one thread.
"""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import statistics
import time
import tracemalloc

import numpy as np

from k3np.balance import (
    expert_loads,
    histogram_bias,
    histogram_counts,
    max_violation,
    quantile_bias,
    route,
)
from k3np.ops import sigmoid

E, K, PART = 896, 16, 4096


def parts(n_tokens):
    """Micro-batches of scores, made when asked for, as training makes them."""
    rng = np.random.default_rng(0)
    popularity = 0.8 * rng.standard_normal(E, np.float32)
    for _ in range(n_tokens // PART):
        yield sigmoid(popularity + rng.standard_normal((PART, E), np.float32))


def peak_bytes(call):
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def memory():
    bias = np.zeros(E, np.float32)
    print("peak memory, MB, scores included")
    print("  tokens  histogram, streamed  exact quantile")
    for n_tokens in (16_384, 65_536, 262_144):
        streamed = peak_bytes(lambda: histogram_counts(parts(n_tokens), bias, K))
        exact = "not run"
        if n_tokens <= 65_536:
            peak = peak_bytes(lambda: quantile_bias(np.concatenate(list(parts(n_tokens))), bias, K))
            exact = f"{peak / 1e6:.0f}"
        print(f"{n_tokens:>8,} {streamed / 1e6:>20.1f} {exact:>15}")


def speed():
    bias = np.zeros(E, np.float32)
    print("one update, ms (median)")
    print("  tokens  histogram  exact  exact / histogram  max violation after: both")
    for n_tokens in (16_384, 65_536):
        scores = np.concatenate(list(parts(n_tokens)))
        calls = {"histogram": lambda: histogram_bias(scores, bias, K),
                 "exact": lambda: quantile_bias(scores, bias, K)}
        seconds = {name: [] for name in calls}
        for _ in range(5):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
        h, x = (statistics.median(seconds[name]) for name in calls)
        after = [max_violation(expert_loads(route(scores, f(scores, bias, K), K)[0], E))
                 for f in (histogram_bias, quantile_bias)]
        print(f"{n_tokens:>8,} {1e3 * h:>10.0f} {1e3 * x:>6.0f} {x / h:>18.2f} "
              f"{after[0]:>20.2f} {after[1]:.2f}")


if __name__ == "__main__":
    speed()
    memory()
