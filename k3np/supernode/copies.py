"""Which rank computes which copy of a token, and how many rows that sends over the wires.

A token with k chosen experts has k copies. Nothing is moved here, only counted: by formula for even
choices, from the choices themselves, and under placements with redundant experts.
"""
import math
from fractions import Fraction

import numpy as np

DEDUP = ("expert", "rank", "node")


def home_ranks(n_experts, n_ranks):
    """The rank that holds each expert, [E]: consecutive ones together, equally many on each.

    Raises: ValueError when n_ranks does not divide n_experts.
    """
    if n_ranks < 1 or n_experts < 1 or n_experts % n_ranks:
        raise ValueError(f"n_experts={n_experts} cannot be shared out equally over "
                         f"n_ranks={n_ranks}; take a number of ranks that divides the experts")
    return np.repeat(np.arange(n_ranks), n_experts // n_ranks)


def room_for(n_copies, n_ranks):
    """Copies that each rank takes when all are to take the same, [R]; the first take the rest."""
    return n_copies // n_ranks + (np.arange(n_ranks) < n_copies % n_ranks)


def expected_distinct(n_groups, n_experts, top_k):
    """Expected number of groups in which a token's experts lie, when all choices are as likely.

    G (1 - C(E - E/G, k) / C(E, k)): each group is missed with the probability in the fraction.

    Args: n_groups, G, ranks or nodes, a divisor of E; n_experts, E; top_k.
    Returns: a Fraction, exact.
    Raises: ValueError when G does not divide E, or top_k is not within 1 to E.
    Source: DeepEP V2's own traffic model.
    """
    home_ranks(n_experts, n_groups)
    if not 1 <= top_k <= n_experts:
        raise ValueError(f"top_k={top_k} of n_experts={n_experts}: must be within 1 to E")
    missed = Fraction(math.comb(n_experts - n_experts // n_groups, top_k),
                      math.comb(n_experts, top_k))
    return n_groups * (1 - missed)


def draw_choices(popularity, shape, top_k, rng):
    """Choices of top_k different experts for tokens, one after the other by popularity.

    Args: popularity [E], positive weights; shape of the tokens; top_k; rng, a Generator.
    Returns: indices [*shape,k].
    """
    noise = rng.gumbel(size=(*shape, len(popularity)))           # the k largest: a draw of k
    scores = np.log(popularity) + noise
    return np.argpartition(-scores, top_k - 1, axis=-1)[..., :top_k]


def destinations(indices, n_experts, quota=None):
    """The rank that computes each copy.

    Args: indices [R,S,k], experts chosen by each rank's tokens; n_experts, E; quota [R,E], how many
        copies of each expert each rank takes (None: all at home). A rank first serves its own
        tokens, then those of the others in order.
    Returns: dest [R,S,k].
    Raises: ValueError for shapes or experts that do not fit, or a quota that does not add up to the
        loads.
    """
    indices = np.asarray(indices)
    if indices.ndim != 3 or indices.dtype.kind not in "iu":
        raise ValueError(f"indices has shape {indices.shape} and dtype {indices.dtype}; expected "
                         "whole numbers [R,S,k]")
    n_ranks = len(indices)
    home = home_ranks(n_experts, n_ranks)
    if indices.size and not (0 <= indices.min() and indices.max() < n_experts):
        raise ValueError(f"indices go from {indices.min()} to {indices.max()}; there are "
                         f"{n_experts} experts, from 0")
    dest = home[indices]
    if quota is None:
        return dest
    quota, flat = np.asarray(quota), indices.reshape(-1)
    loads = np.bincount(flat, minlength=n_experts)
    if quota.shape != (n_ranks, n_experts) or quota.min() < 0 or (quota.sum(0) != loads).any():
        raise ValueError(f"quota {quota.shape} must be [R,E] = {(n_ranks, n_experts)}, not "
                         "negative, and each column must sum to the copies of its expert")
    source = np.repeat(np.arange(n_ranks), flat.size // n_ranks)
    dest, order = dest.reshape(-1), np.argsort(flat, kind="stable")
    starts = np.concatenate([[0], loads.cumsum()])
    for e in np.flatnonzero((quota > 0).sum(0) - (quota[home, np.arange(n_experts)] > 0)):
        copies = order[starts[e]:starts[e + 1]]
        left, own = quota[:, e].copy(), source[copies]
        first = np.searchsorted(own, np.arange(n_ranks))         # where a rank's own copies start
        stays = np.arange(len(copies)) - first[own] < left[own]
        dest[copies[stays]] = own[stays]
        left -= np.bincount(own[stays], minlength=n_ranks)
        dest[copies[~stays]] = np.repeat(np.arange(n_ranks), left)
    return dest.reshape(indices.shape)


def count_rows(dest, dedup="rank", node=None):
    """Rows that travel from rank to rank, without moving any.

    Args: dest [R,S,k], where each copy is computed; dedup: "expert", a row for each copy; "rank",
        one for each rank that a token needs; "node", one for each node, to the rank there with the
        sender's place in its node, which hands it on to the ranks that need it; node [R], the node
        of each rank, for "node".
    Returns: a list of [R,R], from row to column, a matrix a stage. The diagonal does not travel.
    Raises: ValueError for an unknown dedup, or nodes that are missing or of unequal size.
    """
    n_ranks = len(dest)
    node, relay = relays(n_ranks, dedup, node)
    S = dest.shape[1]
    copies = np.stack([np.bincount((np.arange(S)[:, None] * n_ranks + d).ravel(),
                                   minlength=S * n_ranks).reshape(S, n_ranks) for d in dest])
    if dedup == "expert":
        return [copies.sum(axis=1)]
    needs = copies > 0
    if dedup == "rank":
        return [needs.sum(axis=1)]
    first, second = np.zeros((2, n_ranks, n_ranks), np.int64)
    for s in range(n_ranks):
        for n in range(relay.shape[1]):
            first[s, relay[s, n]] = needs[s][:, node == n].any(axis=1).sum()
        for q in range(n_ranks):
            second[relay[s, node[q]], q] += needs[s, :, q].sum()
    return [first, second]


def relays(n_ranks, dedup, node):
    """The rank in each node that receives for a sender: node [R], relay [R,N]."""
    if dedup not in DEDUP:
        raise ValueError(f"dedup={dedup!r}: choose among {', '.join(DEDUP)}")
    if dedup != "node":
        return None, None
    if np.shape(node) != (n_ranks,):
        raise ValueError(f"node has shape {np.shape(node)}; dedup=\"node\" needs the node of each "
                         f"of {n_ranks} ranks")
    node = np.unique(node, return_inverse=True)[1]
    members = [np.flatnonzero(node == n) for n in range(node.max() + 1)]
    if len({len(m) for m in members}) > 1:
        raise ValueError(f"nodes of {[len(m) for m in members]} ranks: all must have as many")
    place = np.zeros(n_ranks, np.int64)
    for m in members:
        place[m] = np.arange(len(m))
    return node, np.stack(members)[:, place].T


def replicate(loads, n_ranks, n_slots):
    """Place redundant experts once for all, by loads seen before.

    Slots go one by one to the expert that has most copies a replica, and these, the heaviest first,
    to the rank with least to do that has a free slot and not yet this expert.

    Args: loads [E]; n_ranks, R; n_slots, redundant experts on each rank.
    Returns: hosts [R,E], which rank has which experts, homes included.
    """
    loads = np.asarray(loads, float)
    if loads.ndim != 1 or loads.min() < 0 or n_slots < 0:
        raise ValueError(f"loads {loads.shape} and n_slots={n_slots}: give [E], nothing negative")
    home = home_ranks(len(loads), n_ranks)
    n_replicas = np.ones(len(loads), np.int64)
    for _ in range(n_slots * n_ranks):
        share = np.where(n_replicas < n_ranks, loads / n_replicas, -1)
        n_replicas[share.argmax()] += 1
    share, hosts = loads / n_replicas, np.zeros((n_ranks, len(loads)), bool)
    hosts[home, np.arange(len(loads))] = True
    busy, free = np.bincount(home, share, n_ranks), np.full(n_ranks, n_slots)
    for e in np.argsort(-share, kind="stable"):
        for _ in range(n_replicas[e] - 1):
            able = (free > 0) & ~hosts[:, e]
            if able.any():
                r = int(np.where(able, busy, np.inf).argmin())
                hosts[r, e], busy[r], free[r] = True, busy[r] + share[e], free[r] - 1
    return hosts


def split_evenly(loads, hosts):
    """Quota [R,E] when all hosts of an expert share its copies. Args: loads [E]; hosts [R,E]."""
    each, rest = np.divmod(np.asarray(loads), hosts.sum(axis=0))
    return np.where(hosts, each + (hosts.cumsum(axis=0) <= rest), 0)


def row_bytes(width, fmt):
    """Bytes of one row on the wire.

    "mxfp8": one byte a number and one a block of 32, d + d/32; "fp8": the same with four bytes a
    block of 128, as DeepSeek's; "bf16": 2 d; "float32": 4 d. Expert numbers and weights, a few
    dozen bytes a row, are not counted, here or in published tables.

    Args: width, d; fmt. Returns: an integer. Raises: ValueError for an unknown fmt.
    """
    sizes = {"mxfp8": width + -(-width // 32), "fp8": width + 4 * -(-width // 128),
             "bf16": 2 * width, "float32": 4 * width}
    if fmt not in sizes:
        raise ValueError(f"fmt={fmt!r}: choose among {', '.join(sizes)}")
    return sizes[fmt]


def uniform_time(n_tokens, copies, row, bytes_per_s, t0_s=0.0, violation=0.0):
    """Time of an even exchange by hand: t0 + T copies row (1 + violation) / B.

    Args: n_tokens on each rank; copies of a token that leave its rank; row, bytes of one;
        bytes_per_s of a rank; t0_s; violation, how far the fullest rank exceeds the mean.
    Returns: seconds.
    """
    return t0_s + n_tokens * copies * row * (1 + violation) / bytes_per_s
