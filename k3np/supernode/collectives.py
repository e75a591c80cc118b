"""Collectives that move real arrays between ranks and say how long it takes.

Each runs one schedule over the arrays, so that the order of additions shows in the result, and over
the fabric, where the messages of a round share links. Beside that stands the closed form of the
alpha-beta model, which knows no sharing. All are methods of `Fabric`.

Times are of wires and fixed costs alone. The addition itself, copies in memory, and the wait for
slower ranks before the start are not counted.
"""
import numpy as np

from k3np.supernode import schedules as sched
from k3np.supernode.engine import all_at_once, move, result, time_schedule
from k3np.supernode.fabric import Fabric, alpha_beta
from k3np.supernode.schedules import SWITCH


def _choose(algorithm, choices):
    if algorithm not in choices:
        raise ValueError(f"algorithm={algorithm!r}: choose among {', '.join(choices)}")
    return choices[algorithm]


def _nodes(fabric):
    """Ranks by node: lists of one length, or an error."""
    nodes = [np.flatnonzero(fabric.node == i).tolist() for i in np.unique(fabric.node)]
    if len({len(ranks) for ranks in nodes}) > 1:
        raise ValueError(f"nodes of {[len(ranks) for ranks in nodes]} ranks: this algorithm needs "
                         "nodes of equal size")
    return nodes


def _vectors(fabric, arrays, n_bytes, equal=True):
    """(arrays or None, bytes of one) after checks at the door."""
    if (arrays is None) == (n_bytes is None):
        raise ValueError("give either arrays, or n_bytes to time a collective without moving any")
    if arrays is None:
        if not n_bytes >= 0:
            raise ValueError(f"n_bytes={n_bytes}: cannot be negative")
        return None, float(n_bytes)
    arrays = [np.asarray(a) for a in arrays]
    if len(arrays) != fabric.n_ranks:
        raise ValueError(f"{len(arrays)} arrays for {fabric.n_ranks} ranks: give one a rank")
    if equal and len({(a.shape, a.dtype) for a in arrays}) > 1:
        r = next(r for r, a in enumerate(arrays)
                 if (a.shape, a.dtype) != (arrays[0].shape, arrays[0].dtype))
        raise ValueError(f"rank 0 has {arrays[0].shape} {arrays[0].dtype}, rank {r} "
                         f"{arrays[r].shape} {arrays[r].dtype}: all ranks must bring one shape")
    return arrays, float(arrays[0].nbytes)


def _split(arrays, n_bytes, n_parts):
    """(for each rank its parts by number, a function from a part to its bytes)."""
    if arrays is None:
        return None, lambda key: n_bytes / n_parts
    parts = [dict(enumerate(np.array_split(a.ravel(), n_parts))) for a in arrays]
    return parts, lambda key: parts[0][key].nbytes


def _join(parts, n_parts, shape):
    return np.concatenate([parts[i] for i in range(n_parts)]).reshape(shape)


def all_reduce(fabric, arrays=None, algorithm="ring", n_bytes=None):
    """Every rank gets the sum of all arrays.

    Args: fabric; arrays, one a rank, of one shape; algorithm, "ring", "recursive_doubling",
        "halving_doubling", "binomial", "hierarchical" (over nodes of equal size) or "in_switch" (a
        star whose switch adds); n_bytes of one array, in place of arrays, to get times alone.
    Returns: Result; out, the sums, which differ in rounding between algorithms.
    Raises: ValueError for unequal shapes, an unknown algorithm, ranks without a route.
    """
    arrays, n = _vectors(fabric, arrays, n_bytes)
    p, (a, b) = fabric.n_ranks, alpha_beta(fabric)
    at_once = None
    _choose(algorithm, dict.fromkeys(("ring", "recursive_doubling", "halving_doubling", "binomial",
                                      "hierarchical", "in_switch")))
    if algorithm == "ring":
        n_parts, closed = p, 2 * sched.ring_half_s(p, n, a, b)
        rounds = sched.ring_all_reduce(range(p), [(i,) for i in range(p)])
    elif algorithm == "recursive_doubling":
        n_parts, rounds = 1, sched.recursive_doubling(p)
        closed = sched.recursive_doubling_s(p, n, a, b)
    elif algorithm == "halving_doubling":
        n_parts, rounds = 1 << sched.log2_floor(p), sched.halving_doubling(p)
        closed = sched.halving_doubling_s(p, n, a, b)
    elif algorithm == "binomial":
        n_parts, rounds = 1, sched.binomial_all_reduce(p)
        closed = 2 * sched.log2_ceil(p) * (a + n / b)
    elif algorithm == "hierarchical":
        nodes, n_parts = _nodes(fabric), p
        rounds, g = sched.hierarchical(nodes), len(nodes[0])
        inside, across = alpha_beta(fabric, True), alpha_beta(fabric, False)
        closed = 2 * (sched.ring_half_s(g, n, *inside)
                      + sched.ring_half_s(len(nodes), n / g, *across))
    else:
        n_parts, rounds, at_once = p, sched.in_switch(p), 2 * a
        closed = sched.in_switch_s(p, n, a, b)
    held, size_of = _split(arrays, n, n_parts)
    trace, carried = time_schedule(fabric, rounds, size_of, at_once)
    out = held and [_join(part, n_parts, arrays[0].shape)
                    for _, part in sorted(move(rounds, held).items()) if _ != SWITCH]
    return result(fabric, out, closed, trace, carried)


def reduce_scatter(fabric, arrays=None, algorithm="ring", n_bytes=None):
    """Rank r gets part r of the sum: the r-th of `np.array_split(sum.ravel(), P)`.

    Args: as `all_reduce`; algorithm, "ring", or "halving" for 2^k ranks.
    Returns: Result; out, one flat part a rank.
    """
    arrays, n = _vectors(fabric, arrays, n_bytes)
    p, (a, b) = fabric.n_ranks, alpha_beta(fabric)
    rounds, closed = _scatter_or_gather(algorithm, p, n, a, b, "halving")
    held, size_of = _split(arrays, n, p)
    trace, carried = time_schedule(fabric, rounds, size_of)
    out = held and [part[r] for r, part in sorted(move(rounds, held).items()) if r != SWITCH]
    return result(fabric, out, closed, trace, carried)


def all_gather(fabric, arrays=None, algorithm="ring", n_bytes=None):
    """Every rank gets the arrays of all, which may have different shapes.

    Args: fabric; arrays, one a rank; algorithm, "ring", or "doubling" for 2^k ranks; n_bytes of all
        arrays together, in place of arrays.
    Returns: Result; out[r], the list of all arrays as rank r has it.
    """
    arrays, n = _vectors(fabric, arrays, n_bytes, equal=False)
    p, (a, b) = fabric.n_ranks, alpha_beta(fabric)
    n = n if arrays is None else float(sum(x.nbytes for x in arrays))
    rounds, closed = _scatter_or_gather(algorithm, p, n, a, b, "doubling")
    trace, carried = time_schedule(
        fabric, rounds, lambda key: n / p if arrays is None else arrays[key].nbytes)
    held = arrays and move(rounds, [{r: x} for r, x in enumerate(arrays)])
    out = arrays and [[held[r][i] for i in range(p)] for r in range(p)]
    return result(fabric, out, closed, trace, carried)


def _scatter_or_gather(algorithm, p, n, a, b, other):
    _choose(algorithm, dict.fromkeys(("ring", other)))
    parts = [(i,) for i in range(p)]
    if algorithm == "ring":
        make = sched.ring_reduce_scatter if other == "halving" else sched.ring_all_gather
        return make(range(p), parts), sched.ring_half_s(p, n, a, b)
    if p & (p - 1):
        raise ValueError(f"algorithm={other!r} needs 2^k ranks, not {p}; use \"ring\"")
    make = sched.recursive_halving if other == "halving" else sched.doubling_all_gather
    return make(p), sched.log2_floor(p) * a + (p - 1) / p * n / b


def broadcast(fabric, array=None, root=0, algorithm="binomial", n_parts=None, n_bytes=None):
    """Every rank gets the array of `root`.

    Args: fabric; array, any shape; root, a rank; algorithm, "binomial" or "chain"; n_parts of the
        chain (default: the best for the slowest pair); n_bytes, in place of array.
    Returns: Result; out, one array a rank.
    """
    p, (a, b) = fabric.n_ranks, alpha_beta(fabric)
    if not 0 <= root < p:
        raise ValueError(f"root={root}: the ranks are 0 to {p - 1}")
    arrays, n = _vectors(fabric, None if array is None else [array] * p, n_bytes)
    _choose(algorithm, dict.fromkeys(("binomial", "chain")))
    if algorithm == "binomial":
        n_parts, rounds = 1, sched.binomial_broadcast(p, root)
        closed = sched.log2_ceil(p) * (a + n / b)
    else:
        n_parts = sched.chain_parts(p, n, a, b) if n_parts is None else n_parts
        rounds, closed = sched.chain_broadcast(p, n_parts, root), sched.chain_s(p, n, a, b, n_parts)
    held, size_of = _split(arrays, n, n_parts)
    trace, carried = time_schedule(fabric, rounds, size_of)
    if held:
        held = move(rounds, [part if r == root else {} for r, part in enumerate(held)])
    out = held and [_join(held[r], n_parts, arrays[0].shape) for r in range(p)]
    return result(fabric, out, closed, trace, carried)


def all_to_all(fabric, blocks=None, algorithm="direct", n_bytes=None):
    """Rank d gets block d of every rank: the transpose of a square of blocks.

    Args: fabric; blocks, P lists of P arrays of any shapes, blocks[src][dst] (or one array with two
        leading axes of P); algorithm, "direct" (all at once), "pairwise", "bruck" (few rounds, more
        bytes) or "rail" (two stages over nodes of equal size); n_bytes in place of blocks: a number
        of bytes for each pair, or [P,P].
    Returns: Result; out[dst][src]. closed_form_s takes the largest block for every pair; for
        "direct" it is the time of the busiest link.
    Raises: ValueError for other than P by P blocks, negative sizes, ranks without a route.
    """
    p, (a, b) = fabric.n_ranks, alpha_beta(fabric)
    if (blocks is None) == (n_bytes is None):
        raise ValueError("give either blocks, or n_bytes to time the exchange without moving any")
    if blocks is not None:
        if len(blocks) != p or any(len(row) != p for row in blocks):
            raise ValueError(f"{len(blocks)} lists of {sorted({len(row) for row in blocks})} "
                             f"blocks for {p} ranks: give {p} lists of {p}")
        blocks = [[np.asarray(x) for x in row] for row in blocks]
        n_bytes = [[x.nbytes for x in row] for row in blocks]
    size = np.array(np.broadcast_to(np.asarray(n_bytes, float), (p, p)))
    if not (size >= 0).all():
        raise ValueError("n_bytes: a block cannot have a negative size")
    make = _choose(algorithm, {"direct": sched.direct, "pairwise": sched.pairwise,
                               "bruck": sched.bruck, "rail": sched.rail})
    off = ~np.eye(p, dtype=bool)
    m = size[off].max(initial=0)
    rounds = None
    if algorithm == "direct":
        trace, carried = all_at_once(fabric, size, off)
        closed = a + (carried / fabric.capacity).max(initial=0) if off.any() else 0.0
    else:
        rounds = make(_nodes(fabric) if algorithm == "rail" else p)
        trace, carried = time_schedule(fabric, rounds, lambda key: size[key])
        closed = (p - 1) * (a + m / b) if algorithm == "pairwise" else sched.bruck_s(p, m, a, b)
    if algorithm == "rail":
        nodes = _nodes(fabric)
        n_nodes, g = len(nodes), len(nodes[0])
        (a_in, b_in), (a_out, b_out) = alpha_beta(fabric, True), alpha_beta(fabric, False)
        closed = (g - 1) * (a_in + n_nodes * m / b_in) + (n_nodes - 1) * (a_out + g * m / b_out)
    out = None
    if blocks is not None:
        held = move(make(p) if rounds is None else rounds,
                    [{(s, d): x for d, x in enumerate(row)} for s, row in enumerate(blocks)])
        out = [[held[d][s, d] for s in range(p)] for d in range(p)]
    return result(fabric, out, closed, trace, carried)


def exchange(fabric, n_bytes, batch=0.0):
    """Send n_bytes[src, dst] between all pairs at once; a pair with nothing to send pays nothing.

    Args: fabric; n_bytes [P,P]; batch, as in `flow.simulate`.
    Returns: Result without out; closed_form_s, the longest fixed time and the busiest link's time.
    """
    size = np.asarray(n_bytes, float)
    if size.shape != (fabric.n_ranks,) * 2 or not (size >= 0).all():
        raise ValueError(f"n_bytes {size.shape}: give [{fabric.n_ranks},{fabric.n_ranks}], none "
                         "negative")
    pairs = (size > 0) & ~np.eye(len(size), dtype=bool)
    trace, carried = all_at_once(fabric, size, pairs, batch)
    closed = fabric.alpha_s[pairs].max(initial=0) + (carried / fabric.capacity).max(initial=0)
    return result(fabric, None, closed, trace, carried)


def send(fabric, array, src, dst, n_bytes=None):
    """One message. Args: fabric; array, or None and n_bytes; src, dst, ranks.
    Returns: Result; out, what dst received."""
    for name, rank in (("src", src), ("dst", dst)):
        if not 0 <= rank < fabric.n_ranks:
            raise ValueError(f"{name}={rank}: the ranks are 0 to {fabric.n_ranks - 1}")
    size = np.zeros((fabric.n_ranks,) * 2)
    size[src, dst] = np.asarray(array).nbytes if n_bytes is None else n_bytes
    return exchange(fabric, size)._replace(out=array)


for _f in (all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, exchange, send):
    setattr(Fabric, _f.__name__, _f)
