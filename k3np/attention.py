"""Softmax attention, once as one matrix of scores and once in tiles that never hold it.

Both take queries, keys and values with heads third, `[B,T,H,K]`, and have the same signature. The
first is the definition. The second keeps a running maximum and a running sum for each row while it
walks over the keys, and in the pullback makes each tile of scores again.
"""
import numpy as np

from k3np.ops import check_floats, check_shapes, differentiable, softmax


@differentiable
def attention_slow(q, k, v, scale, causal=True, block=None):
    """Softmax attention with the whole matrix of scores: o_i = sum_j softmax_j(s <q_i, k_j>) v_j.

    Args, Returns, Raises: as `attention`; block is not used.
    """
    q, k, v = _heads_first(q, k, v, causal)                              # [B,H,T,K] ...
    scores = q @ k.swapaxes(-1, -2) * scale                              # [B,H,T,S]
    if causal:
        scores = np.where(_allowed(0, 0, *scores.shape[-2:], scores.shape), scores, -np.inf)
    p, pull = softmax.vjp(scores)

    def pullback(ct):
        ct = ct.swapaxes(1, 2)
        ct_scores = pull(ct @ v.swapaxes(-1, -2))[0] * scale
        cts = ct_scores @ k, ct_scores.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ ct
        return (*(a.swapaxes(1, 2) for a in cts), None, None, None)
    return (p @ v).swapaxes(1, 2), pullback


@differentiable
def attention(q, k, v, scale, causal=True, block=256):
    """Softmax attention in tiles: o_i = sum_j softmax_j(scale <q_i, k_j>) v_j.

    Keeps o and one number a row; a tile of B * H * block² scores is all that is held besides.

    Args: q [B,T,H,K]; k [B,S,H,K]; v [B,S,H,V]; scale of the scores; causal: query i, the last of
        which stands at the last key, sees keys up to i + S - T; block, rows and keys of a tile.
    Returns: o [B,T,H,V].
    Raises: ValueError for shapes or dtypes that do not agree, and for causal with T > S.
    Source: online softmax (Milakov and Gimelshein 2018) and its use in FlashAttention.
    """
    q, k, v = _heads_first(q, k, v, causal)
    q *= q.dtype.type(scale)                                             # a copy, scaled once
    (B, H, T, _), S = q.shape, k.shape[2]
    o, lse = np.empty((B, H, T, v.shape[-1]), q.dtype), np.empty((B, H, T, 1), q.dtype)

    def tiles(i):
        """Slices of keys that the rows of block i see, and their scores."""
        for j in range(0, min(S, i + block + S - T) if causal else S, block):
            scores = q[:, :, i:i + block] @ k[:, :, j:j + block].swapaxes(-1, -2)
            if causal and j + block > i + S - T + 1:                     # the diagonal is inside
                scores[..., ~_allowed(i, j, T, S, scores.shape)] = -np.inf
            yield slice(j, j + block), scores
    for i in range(0, T, block):
        top, total, mixed = -np.inf, 0.0, 0.0
        for keys, scores in tiles(i):
            new = np.maximum(top, scores.max(axis=-1, keepdims=True))    # finite: see tiles
            scores -= new
            p, shrink = np.exp(scores, out=scores), np.exp(top - new)
            total = total * shrink + p.sum(axis=-1, keepdims=True)
            mixed = mixed * shrink + p @ v[:, :, keys]
            top = new
        o[:, :, i:i + block] = mixed / total
        lse[:, :, i:i + block] = top + np.log(total)

    def pullback(ct):
        ct = np.ascontiguousarray(ct.swapaxes(1, 2))
        along = (ct * o).sum(axis=-1, keepdims=True)                     # [B,H,T,1]
        ct_q, ct_k, ct_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for i in range(0, T, block):
            rows = slice(i, i + block)
            for keys, scores in tiles(i):
                scores -= lse[:, :, rows]
                p = np.exp(scores, out=scores)
                ct_v[:, :, keys] += p.swapaxes(-1, -2) @ ct[:, :, rows]
                ct_scores = ct[:, :, rows] @ v[:, :, keys].swapaxes(-1, -2)
                ct_scores -= along[:, :, rows]
                ct_scores *= p
                ct_q[:, :, rows] += ct_scores @ k[:, :, keys]
                ct_k[:, :, keys] += ct_scores.swapaxes(-1, -2) @ q[:, :, rows]
        ct_q *= q.dtype.type(scale)
        return (*(a.swapaxes(1, 2) for a in (ct_q, ct_k, ct_v)), None, None, None)
    return o.swapaxes(1, 2), pullback


def _heads_first(q, k, v, causal):
    sizes = check_shapes(q=(q, "B T H K"), k=(k, "B S H K"), v=(v, "B S H V"))
    check_floats(q=q, k=k, v=v)
    if not sizes["S"] or causal and sizes["T"] > sizes["S"]:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; causal attention needs at least "
                         "as many keys as queries, and any attention needs one")
    return (np.array(a.swapaxes(1, 2), order="C") for a in (q, k, v))    # always copies


def _allowed(i, j, T, S, shape):
    """Whether query i + row may see key j + column, for a tile of the given shape."""
    rows, columns = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    return columns + j <= rows + i + S - T
