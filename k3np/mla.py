"""Gated MLA without positions: softmax attention whose keys and values come from one small latent.

Of each token a layer keeps the normalised latent [R] and one key [P] that all heads share: R + P
numbers, 576 in K3. Keys and values of H heads can be made from the latents before attention (the
expanded form, for many queries at once), or the matrices that make them can be moved to the
queries' and the outputs' side, so that attention runs on the latents themselves (the absorbed form,
for few queries and a long past). The two differ in where the brackets stand.
"""
from typing import Any, NamedTuple

import numpy as np

from k3np.attention import attention
from k3np.kda.parallel import documents
from k3np.ops import check_floats, check_shapes, differentiable, linear, rms_norm, sigmoid

LATENT_EPS = 1e-6                        # of the two latent norms; all others use rms_norm_eps


class MLACache(NamedTuple):
    """What an MLA layer remembers of the tokens so far: `entries` [B,S,R+P], the normalised latent
    of each token and behind it the shared key; `pad` [B], how many of the first entries of a row
    are padding (None: none). `room`, which is no part of the value, may know of spare memory behind
    the entries."""
    entries: Any
    pad: Any = None
    room: Any = None

    @property
    def length(self):
        """Entries of each row, padding included."""
        return self.entries.shape[1]


def init_mla_cache(cfg, batch, dtype=np.float32):
    """The cache of an MLA layer before the first token: no entries.

    Args: cfg, K3Config; batch, sequences. Returns: MLACache.
    """
    return MLACache(np.zeros((batch, 0, cfg.kv_lora_rank + cfg.qk_rope_head_dim), dtype))


def append_entries(cache, new):
    """The cache with more entries behind its own. The given cache stays as it is.

    The entries go into spare room behind the old ones, and the room doubles when it is full, so
    that a step does not copy the past. A second append to the same cache, as when a conversation
    forks, finds the room taken and copies.

    Args: cache, MLACache; new [B,T,R+P]. Returns: MLACache.
    """
    if not cache.length:
        return cache._replace(entries=new, room=None)
    entries = cache.room(cache.entries, new) if cache.room else None
    if entries is not None:
        return cache._replace(entries=entries)
    entries, room = _room(cache.entries, new)
    return cache._replace(entries=entries, room=room)


def _room(entries, new):
    """Put entries and new ones into a buffer twice as long; (the view of both, an append to it)."""
    used = entries.shape[1] + new.shape[1]
    buffer = np.empty((entries.shape[0], max(2 * used, 64), entries.shape[2]), entries.dtype)
    np.concatenate([entries, new], axis=1, out=buffer[:, :used])

    def append(before, new):
        nonlocal used
        start, stop = before.shape[1], before.shape[1] + new.shape[1]
        same = before.__array_interface__ == buffer[:, :start].__array_interface__
        if not same or start != used or stop > buffer.shape[1]:
            return None
        buffer[:, start:stop] = new
        used = stop
        return buffer[:, :stop]
    return buffer[:, :used], append


def mla_shapes(cfg):
    """Shapes of an MLA layer's parameters by released name."""
    d, H, R, P = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    K, V, low = cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.q_lora_rank
    query = {"q_proj": (H * (K + P), d)} if low is None else {
        "q_a_proj": (low, d), "q_a_layernorm": (low,), "q_b_proj": (H * (K + P), low)}
    gate = {"g_proj": (H * V, d)} if cfg.mla_use_output_gate else {}
    return {**query, "kv_a_proj_with_mqa": (R + P, d), "kv_a_layernorm": (R,),
            "kv_b_proj": (H * (K + V), R), **gate, "o_proj": (d, H * V)}


@differentiable
def mla_layer(x, p, cfg, cache=None, absorbed=None, mask=None, cu_seqlens=None):
    """The Gated MLA layer: latent, attention of all heads to it, gate, projection. No positions.

    q = RMS(x Wqa) Wqb; [c | k'] = x Wkva, c = RMS(c); for each head [k | v] = c Wkvb,
    o = softmax(q [k | k']^T (K + P)^-1/2) v; y = [o . sigma(x Wg)] Wo. The report's Eq. 7.

    A plain query projection (q_lora_rank None) and a layer without a gate, as in Kimi Linear,
    follow from the config. Both norms use eps 1e-6. The P numbers that elsewhere carry a rotation
    are here, shared by all heads, and are not rotated.

    Args: x [B,T,d], T >= 1; p, parameters by released name (`mla_shapes`); cfg, K3Config; cache,
        MLACache of the tokens before (None: there are none); absorbed, True or False for one form,
        None for that of fewer multiplications; mask [B,T], 0 at padding, which stands on the left
        and gives y = 0; cu_seqlens, boundaries 0, ..., T of documents packed into one row (B =
        1), each of which has its own row of the cache.
    Returns: (y [B,T,d], MLACache with the new tokens in it; the rows of documents of several
        lengths are padded on the left).
    Raises: ValueError for parameters, cache, mask or boundaries that do not fit, for no tokens.
    Source: KimiMLAAttention of the released code, report §2.1.2.
    Departs: the cache keeps latents. All is computed in x's dtype; there the softmax is float32
        when the rest is bfloat16.
    """
    given = cache
    spans, cache, mask, pad = _check_layer(x, p, cfg, cache, absorbed, mask, cu_seqlens)
    if mask is not None:                     # of zeros the latent is zero and the gated output too
        x = np.where(mask, x, 0)
    q, pull_q = _queries(x, p, cfg)
    new, pull_new = _entries(x, p, cfg)
    packed, outputs, pulls, grown = cu_seqlens is not None, [], [], []
    for n, (start, stop) in enumerate(spans):
        old = MLACache(cache.entries[n:n + 1, pad[n]:]) if packed else cache
        grown.append(append_entries(old, new[:, start:stop]))
        entries, T = grown[-1].entries, stop - start
        short = prefer_absorbed(T, entries.shape[1], cfg) if absorbed is None else absorbed
        o, pull = (_attend_absorbed if short else _attend_expanded)(
            q[:, start:stop], entries, p["kv_b_proj"], cfg, None if packed else pad)
        outputs.append(o)
        pulls.append(pull)
    if packed:
        after = _right_aligned([c.entries for c in grown])
    else:
        after = grown[0]._replace(pad=pad if pad.any() else None)
    y, pull_output = _output(np.concatenate(outputs, axis=1), x, p, cfg)

    def pullback(ct):
        ct_o, ct_x, ct_p = pull_output(np.zeros_like(y) if ct[0] is None else ct[0])
        ct_after = None if ct[1] is None else ct[1][0]
        ct_q, ct_new, ct_w = np.empty_like(q), np.empty_like(new), 0
        ct_old = None if given is None else np.zeros_like(cache.entries)
        for n, ((start, stop), pull) in enumerate(zip(spans, pulls)):
            ct_q[:, start:stop], ct_entries, more_w = pull(ct_o[:, start:stop])
            ct_w = ct_w + more_w
            if ct_after is not None:
                rows = slice(n, n + 1) if packed else slice(None)
                ct_entries = ct_entries + ct_after[rows, after.length - ct_entries.shape[1]:]
            before = ct_entries.shape[1] - (stop - start)
            ct_new[:, start:stop] = ct_entries[:, before:]
            if ct_old is not None:
                ct_old[n:n + 1 if packed else None, cache.length - before:] = ct_entries[:, :before]
        more_x, more_p = pull_q(ct_q)
        last_x, last_p = pull_new(ct_new)
        ct_x = ct_x + more_x + last_x
        return (ct_x if mask is None else np.where(mask, ct_x, 0),
                {**ct_p, **more_p, **last_p, "kv_b_proj": ct_w}, None,
                None if given is None else MLACache(ct_old), None, None, None)
    return (y, after), pullback


def _queries(x, p, cfg):
    """Queries of all heads, x [B,T,d] -> (q [B,T,H,K+P], pullback)."""
    heads = (*x.shape[:2], cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)
    if cfg.q_lora_rank is None:
        q, pull = linear.vjp(x, p["q_proj"])

        def pull_plain(ct):
            ct_x, ct_w = pull(ct.reshape(q.shape))
            return ct_x, {"q_proj": ct_w}
        return q.reshape(heads), pull_plain
    low, pull_low = linear.vjp(x, p["q_a_proj"])
    unit, pull_unit = rms_norm.vjp(low, p["q_a_layernorm"], LATENT_EPS)
    q, pull_q = linear.vjp(unit, p["q_b_proj"])

    def pullback(ct):
        ct_unit, ct_b = pull_q(ct.reshape(q.shape))
        ct_low, ct_norm, _ = pull_unit(ct_unit)
        ct_x, ct_a = pull_low(ct_low)
        return ct_x, {"q_a_proj": ct_a, "q_a_layernorm": ct_norm, "q_b_proj": ct_b}
    return q.reshape(heads), pullback


def _entries(x, p, cfg):
    """What the cache keeps of each token, x [B,T,d] -> ([latent | shared key] [B,T,R+P], ...)."""
    R = cfg.kv_lora_rank
    c, pull_c = linear.vjp(x, p["kv_a_proj_with_mqa"])
    latent, pull_norm = rms_norm.vjp(c[..., :R], p["kv_a_layernorm"], LATENT_EPS)

    def pullback(ct):
        ct_latent, ct_norm, _ = pull_norm(ct[..., :R])
        ct_x, ct_w = pull_c(np.concatenate([ct_latent, ct[..., R:]], axis=-1))
        return ct_x, {"kv_a_proj_with_mqa": ct_w, "kv_a_layernorm": ct_norm}
    return np.concatenate([latent, c[..., R:]], axis=-1), pullback


def prefer_absorbed(T, S, cfg):
    """Whether T queries to S entries cost fewer multiplications in the absorbed form than in the
    expanded one, which makes keys and values of all S entries but then works on narrower heads."""
    R, P, K, V = cfg.kv_lora_rank, cfg.qk_rope_head_dim, cfg.qk_nope_head_dim, cfg.v_head_dim
    return T * R * (K + V) + T * S * (R + P + R) < S * R * (K + V) + T * S * (K + P + V)


def _attend_expanded(q, entries, w, cfg, pad):
    """softmax(q [c Wk | k']^T) (c Wv): keys and values of every head are made first.

    Args: q [B,T,H,K+P]; entries [B,S,R+P]; w, kv_b_proj [H(K+V),R]; pad [B] or None.
    Returns: (o [B,T,H,V], pullback to q, entries and w).
    """
    R, K = cfg.kv_lora_rank, cfg.qk_nope_head_dim
    B, S, H = *entries.shape[:2], q.shape[2]
    kv, pull_kv = linear.vjp(entries[..., :R], w)                            # [B,S,H(K+V)]
    heads = kv.reshape(B, S, H, -1)
    shared = np.broadcast_to(entries[:, :, None, R:], (B, S, H, cfg.qk_rope_head_dim))
    k = np.concatenate([heads[..., :K], shared], axis=-1)                    # [B,S,H,K+P]
    o, pull = attention.vjp(q, k, heads[..., K:], q.shape[-1] ** -0.5, True, pad=pad)

    def pullback(ct):
        ct_q, ct_k, ct_v, *_ = pull(ct)
        ct_heads = np.concatenate([ct_k[..., :K], ct_v], axis=-1)
        ct_latent, ct_w = pull_kv(ct_heads.reshape(kv.shape))
        return ct_q, np.concatenate([ct_latent, ct_k[..., K:].sum(axis=2)], axis=-1), ct_w
    return o, pullback


def _attend_absorbed(q, entries, w, cfg, pad):
    """(softmax([q Wk^T | q'] [c | k']^T) c) Wv: one key and one value, the entry, for all heads.

    Args, Returns: as `_attend_expanded`.
    """
    R, K, H = cfg.kv_lora_rank, cfg.qk_nope_head_dim, q.shape[2]
    by_head = w.reshape(H, -1, R)
    w_k, w_v = by_head[:, :K], by_head[:, K:]                                # [H,K,R], [H,V,R]
    nope = q[..., :K].swapaxes(1, 2)                                         # [B,H,T,K]
    wide = np.concatenate([(nope @ w_k).swapaxes(1, 2), q[..., K:]], axis=-1)    # [B,T,H,R+P]
    key, value = entries[:, :, None], entries[:, :, None, :R]                # [B,S,1,.], views
    mixed, pull = attention.vjp(wide, key, value, q.shape[-1] ** -0.5, True, pad=pad)
    mixed = mixed.swapaxes(1, 2)                                             # [B,H,T,R]

    def pullback(ct):
        ct = ct.swapaxes(1, 2)                                               # [B,H,T,V]
        ct_wide, ct_entries, ct_value, *_ = pull((ct @ w_v).swapaxes(1, 2))
        ct_entries = ct_entries[:, :, 0]
        ct_entries[..., :R] += ct_value[:, :, 0]
        ct_key = ct_wide[..., :R].swapaxes(1, 2)                             # [B,H,T,R]
        ct_w = np.concatenate([(nope.swapaxes(-1, -2) @ ct_key).sum(axis=0),
                               (ct.swapaxes(-1, -2) @ mixed).sum(axis=0)], axis=1)
        ct_q = np.concatenate([(ct_key @ w_k.swapaxes(-1, -2)).swapaxes(1, 2), ct_wide[..., R:]],
                              axis=-1)
        return ct_q, ct_entries, ct_w.reshape(w.shape)
    return (mixed @ w_v.swapaxes(-1, -2)).swapaxes(1, 2), pullback


def _output(o, x, p, cfg):
    """Gate and projection, o [B,T,H,V], x [B,T,d] -> (y [B,T,d], pullback to o, x, parameters)."""
    flat = o.reshape(*o.shape[:2], -1)
    if not cfg.mla_use_output_gate:
        y, pull_y = linear.vjp(flat, p["o_proj"])

        def pull_plain(ct):
            ct_flat, ct_w = pull_y(ct)
            return ct_flat.reshape(o.shape), np.zeros_like(x), {"o_proj": ct_w}
        return y, pull_plain
    logit, pull_logit = linear.vjp(x, p["g_proj"])
    s, pull_s = sigmoid.vjp(logit)
    y, pull_y = linear.vjp(flat * s, p["o_proj"])

    def pullback(ct):
        ct_gated, ct_w = pull_y(ct)
        ct_x, ct_g = pull_logit(*pull_s(ct_gated * flat))
        return (ct_gated * s).reshape(o.shape), ct_x, {"o_proj": ct_w, "g_proj": ct_g}
    return y, pullback


def _right_aligned(rows):
    """Entries [1,S_n,R+P] of several documents as one cache, padded with zeros on the left."""
    longest = max(row.shape[1] for row in rows)
    pad = np.array([longest - row.shape[1] for row in rows])
    entries = [np.pad(row, ((0, 0), (n, 0), (0, 0))) for row, n in zip(rows, pad)]
    return MLACache(np.concatenate(entries), pad if pad.any() else None)


def _check_layer(x, p, cfg, cache, absorbed, mask, cu_seqlens):
    """Hold a layer's arguments against the config; (documents, cache, mask [B,T,1], pad [B])."""
    sizes = check_shapes(x=(x, f"B T {cfg.hidden_size}"))
    B, T = sizes["B"], sizes["T"]
    if T == 0:
        raise ValueError(f"x has shape {x.shape}: no tokens; a layer needs at least one")
    if absorbed not in (None, True, False):
        raise ValueError(f"absorbed is {absorbed!r}; expected True, False, or None to choose")
    shapes = mla_shapes(cfg)
    missing = [name for name in shapes if name not in p]
    if missing:
        raise ValueError(f"p lacks {', '.join(missing)}; it has {', '.join(sorted(p))}")
    check_shapes(**{name: (p[name], " ".join(map(str, shape))) for name, shape in shapes.items()})
    check_floats(x=x, **{name: p[name] for name in shapes})
    spans, sequences = [(0, T)], B
    if cu_seqlens is not None:
        spans = documents(cu_seqlens, T)
        sequences = len(spans)
        if B != 1 or mask is not None:
            raise ValueError(f"cu_seqlens packs documents into one row without padding; x has "
                             f"{B} rows{'' if mask is None else ' and a mask'}")
    if cache is None:
        cache = init_mla_cache(cfg, sequences, x.dtype)
    elif not isinstance(cache, MLACache):
        raise ValueError(f"cache is a {type(cache).__name__}; an MLA layer keeps an MLACache: make "
                         "one with init_mla_cache")
    check_shapes(**{"cache.entries": (
        cache.entries, f"{sequences} S {cfg.kv_lora_rank + cfg.qk_rope_head_dim}")})
    check_floats(x=x, **{"cache.entries": cache.entries})
    pad = np.zeros(sequences, np.int64) if cache.pad is None else np.asarray(cache.pad)
    if pad.shape != (sequences,) or pad.dtype.kind not in "iu" or (
            pad.size and not 0 <= pad.min() <= pad.max() <= cache.length):
        raise ValueError(f"cache.pad is {pad.tolist()}; expected for each of {sequences} rows how "
                         f"many of its {cache.length} entries are padding")
    if mask is None:
        return spans, cache, None, pad
    mask = np.asarray(mask)
    if mask.shape != (B, T) or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"mask has shape {mask.shape}; expected {(B, T)} of 0 (padding) and 1")
    mask = mask.astype(bool)
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("mask has padding after a token; padding belongs on the left")
    if ((pad < cache.length) & ~mask[:, 0]).any():
        raise ValueError("mask has padding in a row whose cache has begun: a sequence's padding "
                         "comes before its first token")
    return spans, cache, mask[..., None], pad + (~mask).sum(axis=1)
