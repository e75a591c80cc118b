"""Softmax attention, once as one matrix of scores and once in tiles that never hold it.

Both take queries, keys and values with heads third, `[B,T,H,K]`, and have the same signature. The
first is the definition. The second keeps a running maximum and a running sum for each row while it
walks over the keys, and in the pullback makes each tile of scores again. Several query heads may
share a key head: the absorbed form of MLA has one key for all.
"""
import numpy as np

from k3np.ops import check_floats, check_shapes, differentiable


@differentiable
def attention_slow(q, k, v, scale, causal=True, block=None, pad=None):
    """Softmax attention with the whole matrix of scores: o_i = sum_j softmax_j(s <q_i, k_j>) v_j.

    Args, Returns, Raises: as `attention`; block is not used.
    """
    pad = _check(q, k, v, causal, pad)
    group, shape = q.shape[2] // k.shape[2], k.shape
    k, v = (np.repeat(a, group, axis=2).swapaxes(1, 2) for a in (k, v))  # [B,H,S,K], [B,H,S,V]
    q = q.swapaxes(1, 2)
    scores = q @ k.swapaxes(-1, -2) * scale                              # [B,H,T,S]
    (T, S), seen = scores.shape[2:], np.arange(k.shape[2]) >= pad[:, None]
    seen = seen[:, None, None] & (_allowed(0, 0, T, S, (T, S)) if causal else True)
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(scores.max(axis=-1, keepdims=True), np.finfo(q.dtype).min)
    p = np.exp(scores - top)
    p = p / np.maximum(p.sum(axis=-1, keepdims=True), 1)                 # a row of none: zeros

    def shared(ct):                                                      # [B,H,S,.] -> [B,S,G,.]
        return ct.swapaxes(1, 2).reshape(*shape[:3], group, -1).sum(axis=3)

    def pullback(ct):
        ct = ct.swapaxes(1, 2)
        ct_p = ct @ v.swapaxes(-1, -2)
        ct_scores = p * (ct_p - (p * ct_p).sum(axis=-1, keepdims=True)) * scale
        return ((ct_scores @ k).swapaxes(1, 2), shared(ct_scores.swapaxes(-1, -2) @ q),
                shared(p.swapaxes(-1, -2) @ ct), None, None, None, None)
    return (p @ v).swapaxes(1, 2), pullback


@differentiable
def attention(q, k, v, scale, causal=True, block=256, pad=None):
    """Softmax attention in tiles: o_i = sum_j softmax_j(scale <q_i, k_j>) v_j.

    Keeps o and one number a row; a tile of B * G * block² scores is all that is held besides.

    Args: q [B,T,H,K]; k [B,S,G,K]; v [B,S,G,V], G a divisor of H: head h reads k and v of head
        h // (H / G); scale of the scores; causal: query i, the last of which stands at the last
        key, sees keys up to i + S - T; block, rows of a tile (heads that share keys side by side)
        and its keys (more, where the rows are fewer); pad [B], how many keys at the start are
        padding and not seen (None: none). A query that sees no key gives 0.
    Returns: o [B,T,H,V].
    Raises: ValueError for shapes or dtypes that do not agree, for causal with T > S, for a pad
        outside 0..S.
    Source: online softmax (Milakov and Gimelshein 2018) and its use in FlashAttention.
    """
    pad = _check(q, k, v, causal, pad)
    (B, T, H, _), (S, G) = q.shape, k.shape[1:3]
    step = min(T, max(1, block * G // H))                                # queries of a block
    width = max(block, block * block * G // (step * H))                  # keys of a tile
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)                            # [B,G,S,.], views
    o, lse = np.empty((B, T, H, v.shape[-1]), q.dtype), np.empty((B, T, H, 1), q.dtype)
    lowest = np.finfo(q.dtype).min / 4                                   # below any score

    def rows(x, i):                                                      # -> [B,G,step*H/G,.]
        x = x[:, i:i + step].reshape(B, -1, G, H // G, x.shape[-1])
        return x.swapaxes(1, 2).reshape(B, G, -1, x.shape[-1])

    def put(x, i, values):                                               # and back
        values = values.reshape(B, G, -1, H // G, values.shape[-1]).swapaxes(1, 2)
        x[:, i:i + step] = values.reshape(B, -1, H, values.shape[-1])

    def tiles(i, q_i):
        """Slices of keys that the rows of block i see, and their scores."""
        stop = min(S, i + step + S - T) if causal else S
        for j in range(int(pad.min()), stop, width):
            keys = slice(j, min(j + width, stop))
            scores = q_i @ k[:, :, keys].swapaxes(-1, -2)
            if causal and keys.stop > i + S - T + 1:                     # the diagonal is inside
                allowed = _allowed(i, j, T, S, (scores.shape[2] * G // H, scores.shape[3]))
                scores[..., ~np.repeat(allowed, H // G, axis=0)] = -np.inf
            if j < pad.max():
                hidden = np.arange(j, keys.stop) < pad[:, None]
                scores += np.where(hidden, -np.inf, 0).astype(q.dtype)[:, None, None]
            yield keys, scores

    scale = q.dtype.type(scale)
    for i in range(0, T, step):
        q_i = rows(q, i) * scale
        top = np.full((*q_i.shape[:3], 1), lowest, q.dtype)
        total, mixed = np.zeros_like(top), np.zeros((*q_i.shape[:3], v.shape[-1]), q.dtype)
        for keys, scores in tiles(i, q_i):
            new = np.maximum(top, scores.max(axis=-1, keepdims=True))
            scores -= new
            p, shrink = np.exp(scores, out=scores), np.exp(top - new)
            total = total * shrink + p.sum(axis=-1, keepdims=True)
            mixed = mixed * shrink + p @ v[:, :, keys]
            top = new
        total = np.maximum(total, 1)                                     # 0 when no key is seen
        put(o, i, mixed / total)
        put(lse, i, top + np.log(total))

    def pullback(ct):
        along = (ct * o).sum(axis=-1, keepdims=True)                     # [B,T,H,1]
        ct_q, ct_k, ct_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for i in range(0, T, step):
            q_i, ct_i, lse_i, along_i = (rows(x, i) for x in (q, ct, lse, along))
            q_i, ct_q_i = q_i * scale, np.zeros(q_i.shape, q.dtype)
            for keys, scores in tiles(i, q_i):
                scores -= lse_i
                p = np.exp(scores, out=scores)
                ct_v[:, :, keys] += p.swapaxes(-1, -2) @ ct_i
                ct_scores = ct_i @ v[:, :, keys].swapaxes(-1, -2)
                ct_scores -= along_i
                ct_scores *= p
                ct_q_i += ct_scores @ k[:, :, keys]
                ct_k[:, :, keys] += ct_scores.swapaxes(-1, -2) @ q_i
            put(ct_q, i, ct_q_i * scale)
        return (ct_q, ct_k.swapaxes(1, 2), ct_v.swapaxes(1, 2), None, None, None, None)
    return o, pullback


def _check(q, k, v, causal, pad):
    """Hold the arguments against one another; give pad as whole numbers [B]."""
    sizes = check_shapes(q=(q, "B T H K"), k=(k, "B S G K"), v=(v, "B S G V"))
    check_floats(q=q, k=k, v=v)
    if not sizes["S"] or causal and sizes["T"] > sizes["S"]:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; causal attention needs at least "
                         "as many keys as queries, and any attention needs one")
    if not sizes["T"] or not sizes["G"] or sizes["H"] % sizes["G"]:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; expected one query or more, and "
                         "heads of k that divide those of q")
    if pad is None:
        return np.zeros(sizes["B"], np.int64)
    pad = np.asarray(pad)
    if pad.shape != (sizes["B"],) or pad.dtype.kind not in "iu" or (
            pad.size and not 0 <= pad.min() <= pad.max() <= sizes["S"]):
        raise ValueError(f"pad is {pad.tolist()}; expected for each of {sizes['B']} rows how many "
                         f"keys are padding, 0..{sizes['S']}")
    return pad


def _allowed(i, j, T, S, shape):
    """Whether query i + row may see key j + column, for a tile of the given shape."""
    rows, columns = np.arange(shape[0])[:, None], np.arange(shape[1])
    return columns + j <= rows + i + S - T
