"""Equal work for every rank whatever the router does: experts are lent, step by step.

A rank whose experts are in little demand computes copies for a rank whose experts are in much. To
do so it needs their weights: each expert it borrows is a *redundant* one, fetched before the step.
The question is how many. Filling shows that ceil(E (R-1) / R^2) always suffice, and the loads of
`worst_loads` need that many.
"""
from typing import Any, NamedTuple

import numpy as np

from k3np.supernode.copies import home_ranks, room_for


class Plan(NamedTuple):
    """Who computes what: `quota` [R,E], how many copies of each expert a rank takes; `redundant`
    [R], how many experts of others it needs for that; `lender` [R], the one rank that it took
    copies from, -1 for none, None where a rank may take from several."""
    quota: Any
    redundant: Any
    lender: Any


def redundant_bound(n_experts, n_ranks):
    """Redundant experts a rank at most needs, and for some loads must have.

    ceil(E (R-1) / R^2), at most E/R.

    Args: n_experts, E; n_ranks, R, a divisor of E. Returns: an integer.
    Raises: ValueError when R does not divide E.
    Source: report §5.2.1 and App. E; the proof in chapter 20 is our own.
    """
    home_ranks(n_experts, n_ranks)
    return -(-n_experts * (n_ranks - 1) // n_ranks ** 2)


def fill(loads, n_ranks):
    """Balance by filling: the emptiest rank is filled up by the fullest, until nobody lacks.

    Each fill takes copies of the lender's experts, those with most copies first, and is exact, so a
    rank is filled once and borrows from one rank only. A lender may fall below its share; it is
    then filled in its turn. There are at most R - 1 fills.

    Args: loads [E], copies of each expert over all ranks, whole numbers; n_ranks, R.
    Returns: Plan. Rows of quota sum to the mean (the first ranks take one more where R does not
        divide the total), columns to loads.
    Raises: ValueError for loads that are negative, not whole or not [E], R that does not divide E.
    Source: report §5.2.1; MoonEP's planner chooses the same pairs of ranks.
    Departs: that planner hands out a lender's experts after all pairs are known. Here the fullest
        experts go at once, which is what the bound's proof uses.
    """
    quota, balance = _start(loads, n_ranks)
    per_rank = quota.shape[1] // n_ranks
    lender = np.full(n_ranks, -1)
    while (balance < 0).any():
        u, o = int(balance.argmin()), int(balance.argmax())
        lack, home = -balance[u], np.arange(o * per_rank, (o + 1) * per_rank)
        order = home[np.argsort(-quota[o, home], kind="stable")]
        up_to = np.minimum(quota[o, order].cumsum(), lack)               # copies given so far
        given = np.diff(up_to, prepend=0)
        quota[u, order] += given
        quota[o, order] -= given
        balance[u], balance[o] = 0, balance[o] - lack
        lender[u] = o
    return Plan(quota, _redundant(quota), lender)


def few(loads, n_ranks):
    """Balance with fewer redundant experts: who lacks most takes the largest piece on offer.

    A piece is what can be had of one expert: its copies, at most what its home has too many. Each
    takes one slot, whichever rank it comes from. If that turns out worse than `fill`, `fill` it is,
    so that its bound holds. The result is near the best, not proven to be it.

    Args, Returns, Raises: as `fill`, with lender None.
    """
    quota, balance = _start(loads, n_ranks)
    home = home_ranks(quota.shape[1], n_ranks)
    left = quota.sum(axis=0)
    while (balance < 0).any():
        offers = np.minimum(left, balance[home])
        e, u = int(offers.argmax()), int(balance.argmin())
        n = min(offers[e], -balance[u])
        quota[u, e] += n
        quota[home[e], e] -= n
        left[e] -= n
        balance[u] += n
        balance[home[e]] -= n
    plan, filled = Plan(quota, _redundant(quota), None), fill(loads, n_ranks)
    cost = [(p.redundant.max(), p.redundant.sum()) for p in (plan, filled)]
    return plan if cost[0] <= cost[1] else filled._replace(lender=None)


def redundant_floor(loads, n_ranks):
    """Redundant experts that some rank needs under every plan: a lower bound for `few`.

    A rank that lacks d copies must borrow at least as many experts as it takes of the largest ones
    to reach d.

    Args: as `fill`. Returns: an integer.
    """
    quota, balance = _start(loads, n_ranks)
    loads, home = quota.sum(axis=0), home_ranks(quota.shape[1], n_ranks)
    need = [0]
    for u in np.flatnonzero(balance < 0):
        largest = -np.sort(-loads[home != u])
        need.append(1 + int(np.searchsorted(largest.cumsum(), -balance[u])))
    return max(need)


def worst_loads(n_experts, n_ranks, copies_per_expert=None):
    """Loads that need `redundant_bound` experts: rank 0's get nothing, all others the same.

    Rank 0 lacks its whole share of 1/R of the copies, and an expert elsewhere has only
    R / (E (R-1)) of them.

    Args: n_experts, E; n_ranks, R; copies_per_expert, of each expert that has any; by default R,
        with which the total divides by R.
    Returns: loads [E].
    """
    home = home_ranks(n_experts, n_ranks)
    per_expert = n_ranks if copies_per_expert is None else copies_per_expert
    return np.where(home == 0, 0, per_expert).astype(np.int64)


def break_even_copies(expert_bytes, copy_bytes):
    """Copies that a rank must be spared for one borrowed expert to pay on the wire.

    Args: expert_bytes, of its weights; copy_bytes, of one copy, out and back. Returns: a float.
    """
    return expert_bytes / copy_bytes


def _start(loads, n_ranks):
    """All copies at home, and by how much each rank has too many: ([R,E], [R])."""
    loads = np.asarray(loads)
    if loads.ndim != 1:
        raise ValueError(f"loads has shape {loads.shape}; expected [E], one number an expert")
    if loads.dtype.kind not in "iu" and not (np.isfinite(loads).all()
                                             and (loads == np.floor(loads)).all()):
        raise ValueError("loads: copies are counted, give whole numbers")
    if loads.size and loads.min() < 0:
        raise ValueError(f"loads[{int(loads.argmin())}]={loads.min()}: a load cannot be negative")
    home = home_ranks(len(loads), n_ranks)
    quota = np.zeros((n_ranks, len(loads)), np.int64)
    quota[home, np.arange(len(loads))] = loads
    return quota, quota.sum(axis=1) - room_for(int(loads.sum()), n_ranks)


def _redundant(quota):
    n_ranks, n_experts = quota.shape
    away = home_ranks(n_experts, n_ranks) != np.arange(n_ranks)[:, None]
    return ((quota > 0) & away).sum(axis=1)
