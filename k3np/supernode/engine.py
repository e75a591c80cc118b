"""One schedule, carried out twice: on real arrays, and on the links of a fabric.

`move` hands the arrays round, so that the result is exact to the bit. `time_schedule` lets the
messages of each round share links and says when each arrives.
"""
from typing import Any, NamedTuple

import numpy as np

from k3np.supernode.fabric import NONE, check_connected
from k3np.supernode.flow import simulate
from k3np.supernode.schedules import SWITCH


class Trace(NamedTuple):
    """Every message: `src`, `dst` [M] (-1: the switch), `round` [M], `start_s`, `finish_s` [M],
    `n_bytes` [M], `bottleneck` [M], the link that held it back (-1: none)."""
    src: Any
    dst: Any
    round: Any
    start_s: Any
    finish_s: Any
    n_bytes: Any
    bottleneck: Any


class Result(NamedTuple):
    """`out`, what each rank holds at the end (None if only sizes were given); `time_s` by the fluid
    engine; `closed_form_s` by the alpha-beta model; `bytes_per_link` [L]; `bottleneck`, the name of
    the link that is busy longest; `trace`."""
    out: Any
    time_s: float
    closed_form_s: float
    bytes_per_link: Any
    bottleneck: str
    trace: Trace


def move(schedule, held):
    """Carry a schedule out. Arrays are never changed in place; a round reads before it writes.

    Args: schedule, a list of rounds; held, for each rank a dict of its parts by key.
    Returns: held, after the last round; the switch's parts under SWITCH, if it was asked.
    """
    held = dict(enumerate(map(dict, held)))
    held[SWITCH] = {}
    for messages in schedule:
        read = [[held[m.src][key] for key in m.keys] for m in messages]
        for m, parts in zip(messages, read):
            own = held[m.dst]
            for key, part in zip(m.keys, parts):
                own[key] = own[key] + part if m.add and key in own else part
    return held


def routes(fabric, src, dst):
    """Paths [F,J] and alpha [F] of messages, the switch as an end among them."""
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    up, down = dst == SWITCH, src == SWITCH
    if not (up | down).any():
        check_connected(fabric, src, dst)
        return fabric.paths[src, dst], fabric.alpha_s[src, dst]
    ranks = np.arange(fabric.n_ranks)
    away, back = fabric.paths[ranks, ranks - 1], fabric.paths[ranks - 1, ranks]
    off = ~np.eye(len(ranks), dtype=bool)                        # each rank's one link out and in
    if fabric.paths.shape[2] != 2 or ((fabric.paths[..., 0] != away[:, None, 0])
                                      | (fabric.paths[..., 1] != back[:, 1]))[off].any():
        raise ValueError(f"{fabric.name} has no switch between all ranks: in_switch needs a whole "
                         "star")
    paths = np.full((len(src), 1), NONE, np.int64)
    paths[up, 0], paths[down, 0] = away[src[up], 0], back[dst[down], 1]
    return paths, np.zeros(len(src))


def time_schedule(fabric, schedule, size_of, pipelined_alpha_s=None):
    """When each message of a schedule starts and ends on a fabric.

    Args: fabric; schedule; size_of, a function from a key to bytes; pipelined_alpha_s, if given all
        rounds run at once after this time, as in a switch that adds while it forwards.
    Returns: (Trace, n_bytes [L]).
    """
    if pipelined_alpha_s is not None:
        schedule = [[m for messages in schedule for m in messages]]
    columns, now, carried = [], 0.0, np.zeros(len(fabric.capacity))
    for i, messages in enumerate(schedule):
        src, dst = (np.array([m[side] for m in messages], np.int64) for side in (0, 1))
        n_bytes = np.array([sum(map(size_of, m.keys)) for m in messages], float)
        paths, alpha = routes(fabric, src, dst)
        alpha = alpha if pipelined_alpha_s is None else np.full(len(src), pipelined_alpha_s)
        flows = simulate(paths, fabric.capacity, n_bytes, alpha)
        columns.append((src, dst, np.full(len(src), i), np.full(len(src), now),
                        now + flows.finish_s, n_bytes, flows.bottleneck))
        carried += flows.n_bytes
        now += flows.time_s
    empty = [np.empty(0, t) for t in (int, int, int, float, float, float, int)]
    return Trace(*map(np.concatenate, zip(empty, *columns))), carried


def result(fabric, out, closed_form_s, trace, carried):
    busy = carried / fabric.capacity
    slowest = fabric.link_names[int(busy.argmax())] if busy.any() else ""
    return Result(out, float(trace.finish_s.max(initial=0.0)), float(closed_form_s), carried,
                  slowest, trace)


def all_at_once(fabric, size, pairs, batch=0.0):
    """One round in which every pair sends, without a list of messages: 384 ranks have 147,072.

    Args: fabric; size [P,P], bytes; pairs [P,P], which of them send; batch, as in `flow.simulate`.
    Returns: (Trace, n_bytes [L]).
    """
    src, dst = np.nonzero(pairs)
    paths, alpha = routes(fabric, src, dst)
    flows = simulate(paths, fabric.capacity, size[src, dst], alpha, batch)
    zero = np.zeros(len(src))
    return Trace(src, dst, zero.astype(int), zero, flows.finish_s, size[src, dst],
                 flows.bottleneck), flows.n_bytes
