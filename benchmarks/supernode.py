"""Who shares the wire: the max-min solver beside loops over flows, and how it grows with flows.

python benchmarks/supernode.py      processor time, one thread; about a minute (the loops).
"""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import statistics
import time

import numpy as np

from k3np.supernode import star, two_tier
from k3np.supernode.flow import max_min_rates, max_min_rates_loop, simulate
from k3np.vectors import golden_json


def careful_loop(paths, capacity):
    """The loop again, with lists of users that are made once: a fairer opponent."""
    left, users = list(map(float, capacity)), [[] for _ in capacity]
    for f, path in enumerate(paths):
        for link in path:
            if link >= 0:
                users[link].append(f)
    count, rates = list(map(len, users)), [None] * len(paths)
    todo = len(paths)
    while todo:
        share, tight = min((left[i] / count[i], i) for i in range(len(left)) if count[i])
        for f in users[tight]:
            if rates[f] is None:
                rates[f], todo = share, todo - 1
                for link in paths[f]:
                    if link >= 0:
                        left[link] -= share
                        count[link] -= 1
    return np.array(rates)


def seconds(call, repeats):
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def pairs(fabric):
    src, dst = np.nonzero(~np.eye(fabric.n_ranks, dtype=bool))
    return fabric.paths[src, dst]


def uniform():
    print("uniform all-to-all on a star, one solve and the whole exchange, ms (median)")
    print("ranks    flows   solve  exchange  the definition's loop  a careful loop  ratio to each")
    for p in (16, 64, 128, 256, 384):
        fabric = star(p, 660e9)
        paths = pairs(fabric)
        size, lists = np.full(len(paths), 1e6), paths.tolist()
        solve = seconds(lambda: max_min_rates(paths, fabric.capacity), 7)
        whole = seconds(lambda: simulate(paths, fabric.capacity, size), 7)
        slow = seconds(lambda: max_min_rates_loop(paths, fabric.capacity), 1)
        fair = seconds(lambda: careful_loop(lists, fabric.capacity), 3)
        print(f"{p:>5} {len(paths):>8,} {1e3 * solve:>7.2f} {1e3 * whole:>9.2f} "
              f"{1e3 * slow:>22.0f} {1e3 * fair:>15.1f}  {slow / solve:.0f}, {fair / solve:.1f}",
              flush=True)


def skewed():
    print("skewed all-to-all on eight nodes, uplinks 2:1: one event for each time of arrival")
    print("ranks   flows  exact, s  batch 1 %, s  makespan off  batch 5 %, s  makespan off")
    rng = np.random.default_rng(0)
    for g in (2, 4, 8):
        fabric = two_tier(8, g, 450e9, 50e9, oversubscription=2)
        size = rng.uniform(0.1e6, 1e6, (8 * g, 8 * g))
        row = []
        for batch in (0.0, 0.01, 0.05):
            start = time.process_time()
            row.append((fabric.exchange(size, batch=batch).time_s, time.process_time() - start))
        exact = row[0][0]
        print(f"{8 * g:>5} {8 * g * (8 * g - 1):>7,} {row[0][1]:>9.2f} "
              + " ".join(f"{t:>13.2f} {100 * (m / exact - 1):>11.2f} %" for m, t in row[1:]))
    case = golden_json("supernode/skew64")
    capacity = np.array([np.inf if c is None else c for c in case["capacity"]])
    finish = np.sort(simulate(case["path"], capacity, case["size"]).finish_s)
    print(f"SimGrid's 64 skewed ranks: largest relative difference of 4,032 arrivals "
          f"{np.abs(finish / case['finish_sorted'] - 1).max():.1e}")


if __name__ == "__main__":
    uniform()
    skewed()
