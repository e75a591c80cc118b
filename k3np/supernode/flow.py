"""Messages that share wires: max-min fair rates, and the time at which each message arrives.

A message is a fluid that runs along its path at one rate. Rates are max-min fair: nobody can have
more without somebody slower having less. Between two moments at which a message starts or ends all
rates are constant, so the times are exact. There are no packets.
"""
from typing import Any, NamedTuple

import numpy as np


class Flows(NamedTuple):
    """Result of `simulate`: `finish_s` [F]; `bottleneck` [F], the link that held a flow back when
    it ended (-1 if none did); `time_s`, the last finish; `n_bytes` [L], carried by each link."""
    finish_s: Any
    bottleneck: Any
    time_s: float
    n_bytes: Any


def _check(paths, capacity):
    paths, capacity = np.asarray(paths), np.asarray(capacity, float)
    if paths.ndim != 2 or capacity.ndim != 1:
        raise ValueError(f"paths {paths.shape} and capacity {capacity.shape}: give [F,J] and [L]")
    if paths.size and not (paths.min() >= -1 and paths.max() < len(capacity)):
        raise ValueError(f"paths name links from {paths.min()} to {paths.max()}; capacity has "
                         f"{len(capacity)}, and -1 fills up")
    if not (capacity > 0).all():
        link = int(np.argmin(capacity > 0))
        raise ValueError(f"capacity[{link}]={capacity[link]}: a link without bandwidth delivers "
                         "nothing; leave it out")
    return paths, capacity


def max_min_rates_loop(paths, capacity):
    """Progressive filling, one link at a time: the definition of `max_min_rates`.

    All rates grow together until a link is full. Its flows stop growing, the others go on.

    Args: paths [F,J], link numbers, -1 where a path is shorter; capacity [L], bytes/s, may be
        infinite.
    Returns: (rates [F], bottleneck [F], the link that set each rate, -1 if none did).
    Source: Bertsekas and Gallager, Data Networks, 6.5.2.
    """
    paths, capacity = _check(paths, capacity)
    left = [float(c) for c in capacity]
    paths = [[link for link in path if link >= 0 and left[link] < np.inf] for path in paths]
    rates, bottleneck = np.full(len(paths), np.inf), np.full(len(paths), -1)
    active = {f for f, path in enumerate(paths) if path}
    while active:
        users = {}
        for f in sorted(active):
            for link in paths[f]:
                users.setdefault(link, []).append(f)
        tight = min(users, key=lambda link: left[link] / len(users[link]))
        share = left[tight] / len(users[tight])
        for f in users[tight]:
            rates[f], bottleneck[f] = share, tight
            active.remove(f)
            for link in paths[f]:
                left[link] = max(0.0, left[link] - share)
    return rates, bottleneck


def max_min_rates(paths, capacity):
    """Max-min fair rates: nobody can have more without somebody slower having less.

    Each round freezes every link that is the tightest for all of its flows, not only the tightest
    of all. The answer is the same, since it is unique, and the rounds are fewer.

    Args, Returns: as `max_min_rates_loop`.
    Raises: ValueError for wrong ranks, links that do not exist, or links without capacity.
    """
    paths, capacity = _check(paths, capacity)
    return _rates(_columns(paths, capacity), capacity)


def _columns(paths, capacity):
    """Paths as [J,F], with one link more, which is never full, for padding and infinite links."""
    limits = np.append(np.isfinite(capacity), False)
    return np.ascontiguousarray(np.where(limits[paths], paths, len(capacity)).T)


def _rates(p, capacity):
    """max_min_rates on checked paths in columns [J,F]."""
    n_links, n_flows = len(capacity), p.shape[1]
    left = np.append(capacity, np.inf)
    rates, bottleneck = np.full(n_flows, np.inf), np.full(n_flows, -1)
    active = np.flatnonzero((p < n_links).any(axis=0))
    p = p if len(active) == n_flows else p[:, active]
    while len(active):
        users = np.bincount(p.ravel(), minlength=n_links + 1)
        users[n_links] = 0
        share = np.where(users > 0, left / np.maximum(users, 1), np.inf)
        offered = share[p]                                       # [J,f]
        least = offered.min(axis=0)
        is_least = offered == least
        agree = np.bincount(p[is_least], minlength=n_links + 1)
        at_tight = ((agree == users) & (users > 0))[p] & is_least
        frozen = at_tight.any(axis=0)
        stop, rate, which = p[:, frozen], least[frozen], active[frozen]
        rates[which] = rate
        bottleneck[which] = stop[at_tight[:, frozen].argmax(axis=0), np.arange(len(which))]
        if len(which) == len(active):
            break
        taken = np.bincount(stop.ravel(), np.broadcast_to(rate, stop.shape).ravel(), n_links + 1)
        left[:n_links] = np.maximum(0, left - taken)[:n_links]
        p, active = p[:, ~frozen], active[~frozen]
    return rates, bottleneck


def certificate(paths, capacity, rates, tolerance=1e-9):
    """Proof that rates are max-min fair: no link is overfull, and every flow crosses a full link on
    which nobody is faster.

    Args: paths [F,J]; capacity [L]; rates [F]; tolerance, relative.
    Returns: (overfull, the numbers of the links that carry too much; witness [F], for each flow
        such a full link, -1 where there is none: that flow could be given more).
    """
    paths, capacity = _check(paths, capacity)
    rates, n_links = np.asarray(rates, float), len(capacity)
    p = np.where(paths < 0, n_links, paths)
    on_link = np.repeat(rates, p.shape[1])
    load = np.bincount(p.ravel(), on_link, n_links + 1)[:n_links]
    fastest = np.zeros(n_links + 1)
    np.maximum.at(fastest, p.ravel(), on_link)
    full = np.append(load >= capacity * (1 - tolerance), False)
    proves = full[p] & (rates[:, None] >= fastest[p] * (1 - tolerance))
    witness = np.where(proves.any(axis=1), paths[np.arange(len(p)), proves.argmax(axis=1)], -1)
    return np.flatnonzero(load > capacity * (1 + tolerance)), witness


def simulate(paths, capacity, n_bytes, start_s=0.0, batch=0.0):
    """Let flows share the links until all have arrived.

    Rates are found anew whenever a flow starts or ends. `batch` > 0 joins completions that fall
    within that fraction of the time since 0. That is an approximation: what a finished flow frees
    is given out a little late.

    Args: paths [F,J], link numbers, -1 where a path is shorter; capacity [L], bytes/s; n_bytes [F];
        start_s, when each flow enters, scalar or [F]; batch, 0 for exact.
    Returns: Flows.
    Raises: ValueError for negative sizes, links without capacity, unequal lengths.
    """
    paths, capacity = _check(paths, capacity)
    size = np.asarray(n_bytes, float)
    if size.shape != (len(paths),):
        raise ValueError(f"n_bytes {size.shape} for {len(paths)} paths: give one size each")
    if not (np.isfinite(size).all() and (size >= 0).all()):
        raise ValueError(f"n_bytes[{int(np.argmin(size >= 0))}]: sizes are finite and not negative")
    start = np.array(np.broadcast_to(np.asarray(start_s, float), size.shape))
    if not (np.isfinite(start).all() and (start >= 0).all() and batch >= 0):
        raise ValueError("start_s and batch cannot be negative")
    left, finish, bottleneck = size.copy(), start.copy(), np.full(len(size), -1)
    waiting, columns = np.argsort(start, kind="stable"), _columns(paths, capacity)
    now, running = 0.0, np.empty(0, np.int64)
    while len(waiting) or len(running):
        if not len(running):
            now = start[waiting[0]]
        n_ready = int(np.searchsorted(start[waiting], now, side="right"))
        running, waiting = np.append(running, waiting[:n_ready]), waiting[n_ready:]
        rates, tight = _rates(columns[:, running], capacity)
        until = left[running] / rates
        first = until.min()
        step = first * (1 + 1e-12) + (now + first) * batch       # 1e-12: ties but for rounding
        pause = start[waiting[0]] - now if len(waiting) else np.inf
        done = until <= min(step, pause)
        finish[running[done]] = now + until[done]
        bottleneck[running[done]] = tight[done]
        if pause <= step:
            now, step = start[waiting[0]], pause
        else:
            step = until[done].max()
            now += step
        running, rates = running[~done], rates[~done]
        left[running] = np.maximum(0, left[running] - rates * step)
    used = paths >= 0
    carried = np.bincount(paths[used], np.broadcast_to(size[:, None], paths.shape)[used],
                          len(capacity))
    return Flows(finish, bottleneck, float(finish.max(initial=0.0)), carried)
