"""Collectives as lists of rounds: who sends which parts to whom, and what the closed form says.

A schedule knows no arrays and no times. A round is a list of messages that travel together; it
starts when the round before has ended everywhere. Each schedule stands beside the time that the
alpha-beta model gives it: a message of n bytes takes a + n / B, and nobody shares a wire.
"""
import itertools
import math
from typing import Any, NamedTuple

SWITCH = -1                              # a rank that is none: the switch, where it can add


class Message(NamedTuple):
    """`src` sends the parts `keys` to `dst`, which keeps them, or adds them to its own (`add`)."""
    src: int
    dst: int
    keys: Any
    add: bool = False


def together(*schedules):
    """Schedules of different ranks side by side: round i of the whole is round i of each."""
    rounds = itertools.zip_longest(*schedules, fillvalue=())
    return [[message for part in parts for message in part] for parts in rounds]


def log2_floor(p):
    return p.bit_length() - 1


def log2_ceil(p):
    return (p - 1).bit_length()


# --- rings ---------------------------------------------------------------------------------------

def ring_reduce_scatter(ranks, parts):
    """Part i travels once round and ends, summed, at ranks[i]. It starts at the rank after."""
    p = len(ranks)
    return [[Message(ranks[i], ranks[(i + 1) % p], parts[(i - 1 - s) % p], True)
             for i in range(p)] for s in range(p - 1)]


def ring_all_gather(ranks, parts):
    """ranks[i] starts with part i; every round each rank hands on what it got last."""
    p = len(ranks)
    return [[Message(ranks[i], ranks[(i + 1) % p], parts[(i - s) % p])
             for i in range(p)] for s in range(p - 1)]


def ring_all_reduce(ranks, parts):
    return ring_reduce_scatter(ranks, parts) + ring_all_gather(ranks, parts)


def ring_half_s(p, n, a, b):
    return (p - 1) * a + (p - 1) / p * n / b


# --- doubling and halving ------------------------------------------------------------------------

def folded(p, keys, inner):
    """Run `inner` on the first 2^q ranks; the others hand in what they hold, and get the result."""
    q = 1 << log2_floor(p)
    extra = range(q, p)
    before = [[Message(r, r - q, keys, True) for r in extra]] if p > q else []
    after = [[Message(r - q, r, keys) for r in extra]] if p > q else []
    return before + inner(q) + after


def recursive_halving(q):
    """Reduce-scatter on 2^k ranks: give half of what is left to a partner at q/2, ..., 2, 1."""
    rounds, d = [], q // 2
    while d:
        firsts = [r // (2 * d) * 2 * d + (0 if r & d else d) for r in range(q)]
        rounds.append([Message(r, r ^ d, tuple(range(first, first + d)), True)
                       for r, first in enumerate(firsts)])
        d //= 2
    return rounds


def doubling_all_gather(q):
    """All-gather on 2^k ranks: swap all there is with a partner, d = 1, 2, ..., q/2."""
    rounds, d = [], 1
    while d < q:
        rounds.append([Message(r, r ^ d, tuple(range(r // d * d, r // d * d + d)))
                       for r in range(q)])
        d *= 2
    return rounds


def recursive_doubling(p):
    """All-reduce: swap everything with the partner at distance 1, 2, 4, ... and add. One part."""
    return folded(p, (0,), lambda q: [[Message(r, r ^ d, (0,), True) for r in range(q)]
                                      for d in (1 << i for i in range(log2_floor(q)))])


def recursive_doubling_s(p, n, a, b):
    return (log2_floor(p) + 2 * (p & (p - 1) > 0)) * (a + n / b)


def halving_doubling(p):
    """All-reduce by halving, then doubling (Rabenseifner). As many parts as ranks in 2^q."""
    keys = tuple(range(1 << log2_floor(p)))
    return folded(p, keys, lambda q: recursive_halving(q) + doubling_all_gather(q))


def halving_doubling_s(p, n, a, b):
    q = 1 << log2_floor(p)
    return 2 * log2_floor(p) * a + 2 * (q - 1) / q * n / b + 2 * (p > q) * (a + n / b)


# --- trees and chains ----------------------------------------------------------------------------

def binomial_broadcast(p, root=0, keys=(0,)):
    """Who has it tells one more each round: 1, 2, 4, ... ranks know."""
    return [[Message((r + root) % p, (r + d + root) % p, keys) for r in range(min(d, p - d))]
            for d in (1 << i for i in range(log2_ceil(p)))]


def binomial_all_reduce(p):
    """The broadcast backwards, adding, to rank 0; then the broadcast."""
    down = binomial_broadcast(p)
    up = [[Message(m.dst, m.src, m.keys, True) for m in messages] for messages in down[::-1]]
    return up + down


def chain_broadcast(p, n_parts, root=0):
    """Parts follow one another from rank to rank, like buckets in a line."""
    return [[Message((r + root) % p, (r + 1 + root) % p, (t - r,))
             for r in range(p - 1) if 0 <= t - r < n_parts]
            for t in range(p - 2 + n_parts)] if p > 1 else []


def chain_s(p, n, a, b, n_parts):
    return (p - 2 + n_parts) * (a + n / (n_parts * b)) if p > 1 else 0.0


def chain_parts(p, n, a, b):
    """The number of parts for which the chain is fastest, to the next integer."""
    return max(1, round(math.sqrt(max(p - 2, 0) * n / (a * b)))) if a > 0 else max(1, 4 * p)


# --- nodes ---------------------------------------------------------------------------------------

def hierarchical(nodes):
    """All-reduce in three stages: scatter inside each node, a ring between nodes on every rail,
    gather inside. Part (i, j) has number i N + j. Args: nodes, N lists of g ranks."""
    n_nodes, g = len(nodes), len(nodes[0])
    rows = [tuple(range(i * n_nodes, (i + 1) * n_nodes)) for i in range(g)]
    inside = [ring_reduce_scatter(ranks, rows) for ranks in nodes]
    rails = [ring_all_reduce([ranks[i] for ranks in nodes], [(key,) for key in rows[i]])
             for i in range(g)]
    back = [ring_all_gather(ranks, rows) for ranks in nodes]
    return together(*inside) + together(*rails) + together(*back)


def in_switch(p):
    """All-reduce by a switch that adds and copies. As many parts as ranks; each rank owns one."""
    every, ranks = tuple(range(p)), range(p)
    return [[Message(r, SWITCH, every, True) for r in ranks],
            [Message(SWITCH, r, (r,)) for r in ranks],
            [Message(r, SWITCH, (r,)) for r in ranks],
            [Message(SWITCH, r, every) for r in ranks]] if p > 1 else []


def in_switch_s(p, n, a, b):
    return 2 * a + (n + n / p) / b if p > 1 else 0.0


# --- all-to-all: a part is (from, to) ------------------------------------------------------------

def direct(p):
    """Everything at once."""
    return [[Message(s, d, ((s, d),)) for s in range(p) for d in range(p) if s != d]]


def pairwise(p):
    """p - 1 rounds; in round s every rank sends to the one s further on."""
    return [[Message(r, (r + s) % p, ((r, (r + s) % p),)) for r in range(p)] for s in range(1, p)]


def bruck(p):
    """Few rounds, more bytes: a part that has k to go moves by the binary digits of k."""
    rounds = []
    for d in (1 << i for i in range(log2_ceil(p))):
        far = [k for k in range(p) if k & d]
        rounds.append([Message(h, (h + d) % p, tuple(
            ((h - k % d) % p, (h - k % d + k) % p) for k in far)) for h in range(p)])
    return rounds


def bruck_s(p, m, a, b):
    return sum(a + sum(k & 1 << i > 0 for k in range(p)) * m / b for i in range(log2_ceil(p)))


def rail(nodes):
    """Two stages: inside the node to the rank of the right index, then along its rail to the node.
    Args: nodes, N lists of g ranks."""
    n_nodes, g = len(nodes), len(nodes[0])
    inside = [[Message(ranks[i], ranks[(i + s) % g], tuple(
        (ranks[i], other[(i + s) % g]) for other in nodes))
        for ranks in nodes for i in range(g)] for s in range(1, g)]
    across = [[Message(nodes[a][i], nodes[(a + s) % n_nodes][i], tuple(
        (sender, nodes[(a + s) % n_nodes][i]) for sender in nodes[a]))
        for a in range(n_nodes) for i in range(g)] for s in range(1, n_nodes)]
    return inside + across
