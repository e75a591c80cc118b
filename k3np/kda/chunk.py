"""Kimi Delta Attention in chunks: the recurrence turned into matrix products.

Number the tokens of a chunk i = 1..C and write d(i, j) for the product of the decays of the tokens
j+1..i, channel by channel. What token i writes under its key is w_i = beta_i (v_i - what the memory
holds there), and the memory holds the state S before the chunk and the earlier writes:

    w_i + sum_{j<i} [beta_i k_i . d(i,j) k_j] w_j = beta_i v_i - (beta_i k_i . d(i,0)) S
    o_i = (q_i . d(i,0)) S + sum_{j<=i} [q_i . d(i,j) k_j] w_j
    S'  = d(C,0) S + sum_j (d(C,j) k_j) w_j^T

So each token reads twice, with beta k for the correction and with q for the output, and writes
once. The brackets are scores between reads and keys. The first line is a triangular system.
"""
import numpy as np

from k3np.kda.recurrent import check_kda
from k3np.ops import differentiable

MARGIN = 1536           # times the smallest normal number: e^-80 in float32, e^-701 in float64


def _flush(x, size):
    """Set x to 0 in place where its size is below e^-80 (float32): products of such numbers are
    denormals, on which arithmetic can be many times slower."""
    np.multiply(x, size >= MARGIN * np.finfo(x.dtype).tiny, out=x)


def _halves(g):
    """Cut the chunk in halves, the halves in halves, and so on; give the decays across each cut.

    Two tokens of one block of 2 `half` rows, one in either half, are `d(i, cut) d(cut, j)` apart:
    two products of decays, so never above 1, and nothing is divided by. Small blocks come first;
    joining two of them multiplies each decay by that of the neighbour as a whole.

    Args: g [...,C,K], log-decays, C a power of two.
    Yields: half; d(i, cut) of the second halves and d(cut, j) of the first, each
        [..., C/(2 half), half, K], to be used before the next step; last (C, d(i, 0), d(C, j)).
    """
    *lead, C, K = g.shape
    since = np.exp(g)                  # from the start of the row's block through the row
    until = np.ones_like(since)        # after the row to the end of its block
    half = 1
    while half < C:
        since_half = since.reshape(*lead, C // (2 * half), 2, half, K)
        until_half = until.reshape(since_half.shape)
        second, first = since_half[..., 1, :, :], until_half[..., 0, :, :]
        yield half, second, first
        first *= second[..., -1:, :]
        second *= since_half[..., 0, -1:, :]
        _flush(first, first)
        _flush(second, second)
        half *= 2
    yield half, since, until


def _halves_pullback(ct_levels, ct_since, ct_until):
    """Cotangent of g from those of the logarithms of the decays that `_halves` gave.

    Goes back from the whole chunk to single tokens. A joined block's decay was the half's own times
    that of the other half as a whole, which is the last row of its `since`. Sums only, no
    differences: where little passes, a small gradient keeps its digits.

    Args: ct_levels, a list of (second, first) as yielded; ct_since, ct_until [...,C,K], of the last
        step. Both are used up.
    Returns: [...,C,K].
    """
    *lead, C, K = ct_since.shape
    for second, first in reversed(ct_levels):
        n, half = second.shape[-3:-1]
        since = ct_since.reshape(*lead, n, 2, half, K)
        until = ct_until.reshape(since.shape)
        since[..., 0, -1, :] += since[..., 1, :, :].sum(axis=-2)
        since[..., 1, -1, :] += until[..., 0, :, :].sum(axis=-2)
        since[..., 1, :, :] += second
        until[..., 0, :, :] += first
    return ct_since


def _blocks(matrix, half):
    """Blocks of 2 `half` columns along the diagonal, as a view: [...,R,C] -> [...,n,R/n,C/n]."""
    *lead, R, C = matrix.shape
    n = C // (2 * half)
    return np.einsum("...iaib->...iab", matrix.reshape(*lead, n, R // n, n, C // n))


def _pairs(reads, k, half, second, first):
    """Reads of each second half and keys of each first half, both decayed to the cut between:
    [...,C,2,K] -> [...,n,2 half,K] and [...,C,K] -> [...,n,half,K]."""
    *lead, C, K = k.shape
    n = C // (2 * half)
    late = reads.reshape(*lead, n, 2, half, 2, K)[..., 1, :, :, :] * second[..., None, :]
    early = k.reshape(*lead, n, 2, half, K)[..., 0, :, :] * first
    return late.reshape(*lead, n, 2 * half, K), early


@differentiable
def kda_chunk(q, k, v, g, beta, state):
    """One chunk of the recurrence, by matrix products (the equations at the top of the file).

    The inverse of the triangular system grows by blocked forward substitution: a block with halves
    P, R and scores A between them is [[P, 0], [A, R]]; its inverse [[P', 0], [-R' A P', R']].

    Args: q (already scaled), k [...,C,K]; v [...,C,V]; g [...,C,K], log-decays; beta [...,C];
        state [...,K,V]. C is a power of two: fill up with rows of zeros, which do nothing.
    Returns: (o [...,C,V], state [...,K,V]).
    Raises: ValueError for a C that is not a power of two.
    Source: report §2.1 (UT transform); `naive_chunk_kda` of flash-linear-attention.
    Departs: the cut into halves replaces 16-row tiles and works for any decay; the system is
        solved for the writes at once, not for w and u apart.
    """
    *lead, C, K = k.shape
    if C < 1 or C & (C - 1):
        raise ValueError(f"k has shape {k.shape}: {C} rows; a chunk has a power of two of them: "
                         "fill it up with rows of zeros, or call kda_chunkwise")
    q, k, v, g, beta = (np.ascontiguousarray(x) for x in (q, k, v, g, beta))
    weight = beta[..., None]
    reads = np.stack([q, weight * k], axis=-2)                               # [...,C,2,K]
    scores = np.zeros((*lead, 2 * C, C), k.dtype)       # row 2i: query i; row 2i+1: beta k of i
    inverse = np.zeros((*lead, C, C), k.dtype)
    i = np.arange(C)
    scores[..., 2 * i, i] = np.einsum("...k,...k->...", q, k)    # a token reads its own write
    inverse[..., i, i] = 1
    for half, second, first in _halves(g):
        if half == C:
            since, until = second, first
            break
        late, early = _pairs(reads, k, half, second, first)
        across = late @ early.swapaxes(-1, -2)                               # [...,n,2half,half]
        _flush(across, np.abs(across))
        _blocks(scores, half)[..., 2 * half:, :half] = across
        inv = _blocks(inverse, half)
        inv[..., half:, :half] = -(inv[..., half:, half:] @ across[..., 1::2, :]
                                   @ inv[..., :half, :half])
    far_reads = (reads * since[..., None, :]).reshape(*lead, 2 * C, K)
    kept = k * until
    held = far_reads @ state                                                 # [...,2C,V]
    writes = inverse @ (weight * v - held[..., 1::2, :])                     # [...,C,V]
    o = held[..., ::2, :] + scores[..., ::2, :] @ writes
    whole = since[..., -1, :, None]
    after = whole * state + kept.swapaxes(-1, -2) @ writes

    def pullback(ct):
        ct_o = np.zeros_like(o) if ct[0] is None else ct[0]
        ct_after = np.zeros_like(after) if ct[1] is None else ct[1]
        ct_writes = scores[..., ::2, :].swapaxes(-1, -2) @ ct_o + kept @ ct_after
        ct_right = inverse.swapaxes(-1, -2) @ ct_writes                      # of the system
        ct_held = np.stack([ct_o, -ct_right], axis=-2).reshape(held.shape)
        ct_scores = ct_held @ writes.swapaxes(-1, -2)
        ct_state = whole * ct_after + far_reads.swapaxes(-1, -2) @ ct_held
        ct_far_reads = ct_held @ state.swapaxes(-1, -2)
        ct_log_since = (far_reads * ct_far_reads).reshape(reads.shape).sum(axis=-2)
        ct_log_since[..., -1, :] += (whole * state * ct_after).sum(axis=-1)
        ct_reads = ct_far_reads.reshape(reads.shape) * since[..., None, :]
        ct_kept = writes @ ct_after.swapaxes(-1, -2)
        ct_log_until = kept * ct_kept
        ct_k = ct_kept * until
        ct_self = ct_scores[..., 2 * i, i][..., None]
        ct_reads[..., 0, :] += ct_self * k
        ct_k += ct_self * q
        ct_log = []                      # level by level: of log d(i, cut), of log d(cut, j)
        for half, second, first in _halves(g):
            if half == C:
                break
            late, early = _pairs(reads, k, half, second, first)
            n = C // (2 * half)
            ct_across = _blocks(ct_scores, half)[..., 2 * half:, :half]
            ct_late = ct_across @ early                                      # [...,n,2half,K]
            ct_early = ct_across.swapaxes(-1, -2) @ late                     # [...,n,half,K]
            pair = (*lead, n, half, 2, K)
            ct_log.append(((late * ct_late).reshape(pair).sum(axis=-2), early * ct_early))
            ct_reads.reshape(*lead, n, 2, half, 2, K)[..., 1, :, :, :] += (
                ct_late.reshape(pair) * second[..., None, :])
            ct_k.reshape(*lead, n, 2, half, K)[..., 0, :, :] += ct_early * first
        ct_g = _halves_pullback(ct_log, ct_log_since, ct_log_until)
        ct_weighed = ct_reads[..., 1, :]
        ct_beta = (ct_right * v).sum(axis=-1) + (ct_weighed * k).sum(axis=-1)
        return (ct_reads[..., 0, :], ct_k + weight * ct_weighed, weight * ct_right, ct_g, ct_beta,
                ct_state)
    return (o, after), pullback


def _take(x, start, stop, rows):
    """Tokens start..stop with heads first, then rows of zeros: [B,T,H,...] -> [B,H,rows,...]."""
    B, _, H, *rest = x.shape
    piece = np.zeros((B, H, rows, *rest), x.dtype)
    piece[:, :, :stop - start] = x[:, start:stop].swapaxes(1, 2)
    return piece


@differentiable
def kda_chunkwise(q, k, v, g, beta, initial_state=None, scale=None, chunk_size=64):
    """Kimi Delta Attention, a chunk at a time: the same numbers as `kda_recurrent`, sooner.

    Beyond the outputs it holds one chunk. The pullback walks the chunks forwards again, keeps the
    states between them, then recomputes each chunk on the way back.

    Args, Returns, Raises: as `kda_recurrent`; chunk_size, tokens in a chunk, any whole number from
        1 (powers of two waste no rows).
    Source: report §2.1; see `kda_chunk`.
    """
    B, T, H, K, V = check_kda(q, k, v, g, beta, initial_state)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)) \
            or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; expected a whole number of tokens, "
                         "at least 1")
    size, scale = int(chunk_size), float(K ** -0.5 if scale is None else scale)
    starts = range(0, T, size)
    first = np.zeros((B, H, K, V), q.dtype) if initial_state is None else initial_state

    def chunk(start, state):
        stop = min(start + size, T)
        rows = 1 << (stop - start - 1).bit_length()
        q_rows, *others = (_take(x, start, stop, rows) for x in (q, k, v, g, beta))
        return stop, *kda_chunk.vjp(scale * q_rows, *others, state)

    o, state = np.empty_like(v), first.copy()
    for start in starts:
        stop, (o_rows, state), _ = chunk(start, state)
        o[:, start:stop] = o_rows[:, :, :stop - start].swapaxes(1, 2)

    def pullback(ct):
        ct_o = np.zeros_like(o) if ct[0] is None else ct[0]
        ct_state = np.zeros_like(first) if ct[1] is None else ct[1]
        states = [first]
        for start in starts[:-1]:
            states.append(chunk(start, states[-1])[1][1])
        grads = [np.empty_like(x) for x in (q, k, v, g, beta)]
        for start, state in zip(reversed(starts), reversed(states)):
            stop, (o_rows, _), pull = chunk(start, state)
            *pieces, ct_state = pull((_take(ct_o, start, stop, o_rows.shape[2]), ct_state))
            pieces[0] *= scale
            for grad, piece in zip(grads, pieces):
                grad[:, start:stop] = piece[:, :, :stop - start].swapaxes(1, 2)
        return (*grads, None if initial_state is None else ct_state, None, None)
    return (o, state), pullback
