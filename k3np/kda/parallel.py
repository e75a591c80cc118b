"""Context parallelism for KDA: one sequence over several ranks, and what they must tell each other.

Whatever a segment of tokens does to the state before it is affine: S -> M S + R, with M the product
of (I - beta k k^T) Diag(e^g) over its tokens and R the state that it builds from nothing. Each rank
finds its own (M, R) alone. Two segments in a row compose as affine maps do, which is associative,
so a scan over the ranks gives each the state that enters it. Linear attention without decay or
delta rule has M = I and may add the R of all ranks; here later tokens fade and correct the earlier.
"""
import itertools
from typing import Any, NamedTuple

import numpy as np

from k3np.kda.chunk import kda_chunkwise
from k3np.kda.recurrent import check_kda


class Segment(NamedTuple):
    """What tokens do to the state before them, S -> transition S + state: `transition` [B,H,K,K],
    `state` [B,H,K,V]. However many tokens, K (K + V) numbers a head."""
    transition: Any
    state: Any


def kda_segment(q, k, v, g, beta, chunk_size=64):
    """What a segment does to any state that enters it. The report's Eq. 17.

    One pass: columns of the state evolve apart from one another, so the identity rides beside the
    zero state as K more columns, to which nothing is written.

    Args: as `kda_chunkwise`; q takes no part and is held against the rest only.
    Returns: Segment, of identity and zeros for no tokens.
    Raises: ValueError as `kda_chunkwise`.
    Source: report §5.1.2.
    """
    B, _, H, K, V = check_kda(q, k, v, g, beta)
    start = np.concatenate([np.zeros((B, H, K, V), k.dtype),
                            np.broadcast_to(np.eye(K, dtype=k.dtype), (B, H, K, K))], axis=-1)
    values = np.concatenate([v, np.zeros_like(k)], axis=-1)                  # [B,T,H,V+K]
    _, state = kda_chunkwise(k, k, values, g, beta, start, chunk_size=chunk_size)
    return Segment(state[..., V:], state[..., :V])


def combine(a, b):
    """The segment `a` and after it the segment `b`, as one. Associative, not commutative.

    M = M_b M_a,  R = M_b R_a + R_b.

    Args: a, b, Segments of the same shapes. Returns: Segment.
    Raises: ValueError for shapes that differ.
    """
    a, b = Segment(*a), Segment(*b)
    for name in Segment._fields:
        if np.shape(getattr(a, name)) != np.shape(getattr(b, name)):
            raise ValueError(f"a.{name} has shape {np.shape(getattr(a, name))}, b.{name} "
                             f"{np.shape(getattr(b, name))}; segments of the same heads have one")
    return Segment(b.transition @ a.transition, b.transition @ a.state + b.state)


def reset_gates(g, cu_seqlens):
    """Log-decays that forget everything at the first token of each document.

    Args: g [B,T,H,K]; cu_seqlens, where documents start and the last one ends: 0, ..., T.
    Returns: g with -inf at the first token of each document; a new array.
    Raises: ValueError for boundaries that do not climb from 0 to T.
    """
    g = g.copy()
    g[:, [start for start, _ in documents(cu_seqlens, g.shape[1])]] = -np.inf
    return g


def documents(cu_seqlens, T):
    """(start, stop) of each document packed into T tokens; ValueError unless 0 < ... < T."""
    cuts = np.asarray(cu_seqlens)
    if cuts.ndim != 1 or cuts.dtype.kind not in "iu" or len(cuts) < 2 or cuts[0] != 0 \
            or cuts[-1] != T or (np.diff(cuts.astype(np.int64)) <= 0).any():
        raise ValueError(f"cu_seqlens is {cu_seqlens!r}; expected whole numbers that climb from 0 "
                         f"to T={T}, such as [0, {T}]: no document is empty")
    return [(int(start), int(stop)) for start, stop in itertools.pairwise(cuts)]


def context_parallel(q, k, v, g, beta, ranks, initial_state=None, cu_seqlens=None, chunk_size=64):
    """KDA over one sequence cut among ranks, each of which sees its own tokens only.

    Each rank sums up its segment; the summaries (of fixed size) are gathered; each rank scans those
    before it for the state that enters and runs its tokens from there. Here the ranks take turns.

    Args: q, k, v, g, beta, initial_state, chunk_size, as `kda_chunkwise`; ranks, how many, the
        tokens shared out as evenly as can be, or a list of each rank's tokens, 0 allowed;
        cu_seqlens, boundaries of packed documents (None: one), at which the memory is emptied.
    Returns: (o [B,T,H,V], state [B,H,K,V]), as a single pass gives.
    Raises: ValueError as `kda_chunkwise`; for shares that do not add up to T.
    Source: report §5.1.2. The layer's convolutions need, besides, the last three inputs of the
        rank before.
    """
    B, T, H, K, V = check_kda(q, k, v, g, beta, initial_state)
    g = g if cu_seqlens is None else reset_gates(g, cu_seqlens)
    cuts = _shares(ranks, T)
    pieces = [tuple(x[:, start:stop] for x in (q, k, v, g, beta))
              for start, stop in itertools.pairwise(cuts)]
    summaries = [kda_segment(*piece, chunk_size=chunk_size) for piece in pieces]
    # From here on a rank uses its own tokens and the gathered summaries.
    first = np.zeros((B, H, K, V), q.dtype) if initial_state is None else initial_state
    entering = [first] + [before.transition @ first + before.state
                          for before in itertools.accumulate(summaries[:-1], combine)]
    runs = [kda_chunkwise(*piece, state, chunk_size=chunk_size)
            for piece, state in zip(pieces, entering)]
    return np.concatenate([o for o, _ in runs], axis=1), runs[-1][1]


def _shares(ranks, T):
    """Where the tokens of each rank start, and the end: [0, ..., T]."""
    if isinstance(ranks, (int, np.integer)) and not isinstance(ranks, bool):
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; expected at least one")
        return [T * rank // int(ranks) for rank in range(int(ranks) + 1)]
    shares = np.asarray(ranks)
    if shares.ndim != 1 or shares.dtype.kind not in "iu" or not len(shares) \
            or (shares < 0).any() or shares.sum() != T:
        raise ValueError(f"ranks is {ranks!r}; expected how many ranks, or the tokens of each, "
                         f"whole numbers that add up to T={T}")
    return [0, *(int(n) for n in np.cumsum(shares, dtype=np.int64))]
