"""The KDA layer: what stands around the recurrence, and what is kept from call to call."""
from typing import Any, NamedTuple

import numpy as np

from k3np.kda.chunk import kda_chunkwise
from k3np.kda.parallel import documents
from k3np.kda.recurrent import decay_gate, kda_recurrent, softplus_decay_gate
from k3np.ops import (
    causal_conv,
    check_floats,
    check_shapes,
    differentiable,
    l2_norm,
    linear,
    rms_norm,
    sigmoid,
    silu,
)


class KDACache(NamedTuple):
    """What a KDA layer remembers of the tokens so far, however many: the last W-1 inputs of each
    convolution, oldest first [B,W-1,H K], and the state [B,H,K,V]."""
    conv_q: Any
    conv_k: Any
    conv_v: Any
    state: Any


def init_kda_cache(cfg, batch, dtype=np.float32):
    """The cache of a KDA layer before the first token: zeros.

    Args: cfg, K3Config; batch, sequences. Returns: KDACache.
    """
    lac = cfg.linear_attn_config
    H, K = lac.num_heads, lac.head_dim
    conv = (batch, lac.short_conv_kernel_size - 1, H * K)
    return KDACache(*(np.zeros(conv, dtype) for _ in range(3)), np.zeros((batch, H, K, K), dtype))


def kda_shapes(cfg):
    """Shapes of a KDA layer's parameters by released name; A_log may be stored longer."""
    lac, d = cfg.linear_attn_config, cfg.hidden_size
    H, K, P = lac.num_heads, lac.head_dim, lac.num_heads * lac.head_dim
    conv = (P, 1, lac.short_conv_kernel_size)
    gate = {"g_proj": (P, d)} if lac.use_full_rank_gate else {"g_a_proj": (K, d),
                                                              "g_b_proj": (P, K)}
    return {"q_proj": (P, d), "k_proj": (P, d), "v_proj": (P, d), "q_conv1d": conv,
            "k_conv1d": conv, "v_conv1d": conv, "f_a_proj": (K, d), "f_b_proj": (P, K),
            "A_log": (H,), "dt_bias": (P,), "b_proj": (H, d), **gate, "o_norm": (K,),
            "o_proj": (d, P)}


def _check_layer(x, p, cfg, cache, mask, cu_seqlens):
    """Hold a layer's arguments against the config; return (documents, cache, mask [B,T,1])."""
    lac = cfg.linear_attn_config
    sizes = check_shapes(x=(x, f"B T {cfg.hidden_size}"))
    B, T = sizes["B"], sizes["T"]
    if T == 0:
        raise ValueError(f"x has shape {x.shape}: no tokens; a layer needs at least one")
    shapes = kda_shapes(cfg)
    missing = [name for name in shapes if name not in p]
    if missing:
        raise ValueError(f"p lacks {', '.join(missing)}; it has {', '.join(sorted(p))}")
    check_shapes(**{name: (p[name], " ".join(map(str, shape)))
                    for name, shape in shapes.items() if name != "A_log"})
    check_floats(x=x, **{name: p[name] for name in shapes})
    spans, sequences = [(0, T)], B
    if cu_seqlens is not None:
        spans = documents(cu_seqlens, T)
        sequences = len(spans)
        if B != 1 or mask is not None:
            raise ValueError(f"cu_seqlens packs documents into one row without padding; x has "
                             f"{B} rows{'' if mask is None else ' and a mask'}")
    if cache is None:
        cache = init_kda_cache(cfg, sequences, x.dtype)
    elif not isinstance(cache, KDACache):
        raise ValueError(f"cache is a {type(cache).__name__}; a KDA layer keeps a KDACache: make "
                         "one with init_kda_cache")
    else:
        H, K, W = lac.num_heads, lac.head_dim, lac.short_conv_kernel_size
        conv = f"{sequences} {W - 1} {H * K}"
        check_shapes(**{f"cache.{name}": (array, f"{sequences} {H} {K} {K}" if name == "state"
                                          else conv) for name, array in cache._asdict().items()})
        check_floats(x=x, **{f"cache.{name}": array for name, array in cache._asdict().items()})
    if mask is not None:
        mask = _check_mask(mask, (B, T), cache)
    return spans, cache, mask


def _check_mask(mask, shape, cache):
    mask = np.asarray(mask)
    if mask.shape != shape or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"mask has shape {mask.shape}; expected {shape} of 0 (padding) and 1")
    mask = mask.astype(bool)
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("mask has padding after a token; padding belongs on the left")
    begun = np.any([array.reshape(shape[0], -1).any(axis=1) for array in cache], axis=0)
    if (begun & ~mask[:, 0]).any():
        raise ValueError("mask has padding in a row whose cache has begun: a sequence's padding "
                         "comes before its first token")
    return mask[..., None]


@differentiable
def kda_layer(x, p, cfg, cache=None, mask=None, cu_seqlens=None):
    """The KDA layer: project, convolve, recur, normalise, gate, project.

    q, k, v = SiLU(conv(x W)); q, k to length one; g = gate(x Wfa Wfb); beta = sigma(x Wb);
    o = KDA(q, k, v, g, beta); y = [RMS(o; per head) . sigma(x Wg)] Wo. The report's Eq. 2 to 6.

    One token takes the recurrence, more take chunks. Kimi Linear's variant, a softplus gate and an
    output gate of low rank, follows from the config.

    Args: x [B,T,d], T >= 1; p, parameters by released name (`kda_shapes`); cfg, K3Config;
        cache, KDACache of the tokens before (None: there are none); mask [B,T], 0 at padding, which
        stands on the left and gives y = 0; cu_seqlens, boundaries 0, ..., T of documents packed
        into one row (B = 1), each of which has its own row of the cache.
    Returns: (y [B,T,d], KDACache after the last token of each sequence).
    Raises: ValueError for parameters, cache, mask or boundaries that do not fit, for no tokens.
    Source: KimiDeltaAttention of the released code, report §2.1.
    Departs: the cache keeps the W-1 inputs that are needed (there W) and the state as [B,H,K,V]
        (there [B,H,V,K]). All is computed in x's dtype; there beta, the decay and the state are
        float32 when the rest is bfloat16.
    """
    given = cache
    spans, cache, mask = _check_layer(x, p, cfg, cache, mask, cu_seqlens)
    if mask is not None:                  # a zero fills no convolution, writes nothing, gives y = 0
        x = np.where(mask, x, 0)
    token_inputs, pull_inputs = _layer_inputs(x, p, cfg)
    pieces, pulls = [], []
    for n, (start, stop) in enumerate(spans):
        rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
        value, pull = _layer_sequence([u[:, start:stop] for u in token_inputs], p,
                                      KDACache(*(array[rows] for array in cache)))
        pieces.append(value)
        pulls.append(pull)
    after = KDACache(*(np.concatenate(arrays) for arrays in zip(*(c for _, c in pieces))))
    o = np.concatenate([o for o, _ in pieces], axis=1)
    y, pull_output = _layer_output(o, x, p, cfg)

    def pullback(ct):
        ct_y = np.zeros_like(y) if ct[0] is None else ct[0]
        ct_after = ct[1] or (None,) * 4
        ct_o, ct_x, ct_p = pull_output(ct_y)
        ct_inputs, ct_caches = [], []
        for n, ((start, stop), pull) in enumerate(zip(spans, pulls)):
            rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
            ct_u, ct_taps, ct_cache = pull(
                ct_o[:, start:stop], [None if a is None else a[rows] for a in ct_after])
            ct_inputs.append(ct_u)
            ct_caches.append(ct_cache)
            for name, taps in ct_taps.items():
                ct_p[name] = ct_p[name] + taps if name in ct_p else taps
        more_x, more_p = pull_inputs([np.concatenate(u, axis=1) for u in zip(*ct_inputs)])
        ct_cache = None if given is None else KDACache(
            *(np.concatenate(arrays) for arrays in zip(*ct_caches)))
        ct_x = ct_x + more_x if mask is None else np.where(mask, ct_x + more_x, 0)
        return ct_x, {**ct_p, **more_p}, None, ct_cache, None, None
    return (y, after), pullback


def _layer_inputs(x, p, cfg):
    """What a token computes alone, before the memory: ((u_q, u_k, u_v, g, beta), pullback)."""
    lac = cfg.linear_attn_config
    heads = (*x.shape[:2], lac.num_heads, lac.head_dim)
    u, pull_u = zip(*(linear.vjp(x, p[f"{n}_proj"]) for n in "qkv"))         # [B,T,d] -> [B,T,HK]
    low, pull_low = linear.vjp(x, p["f_a_proj"])
    z, pull_z = linear.vjp(low, p["f_b_proj"])
    if lac.gate_lower_bound is None:
        g, pull_g = softplus_decay_gate.vjp(z.reshape(heads), p["A_log"], p["dt_bias"])
    else:
        g, pull_g = decay_gate.vjp(z.reshape(heads), p["A_log"], p["dt_bias"],
                                   lac.gate_lower_bound)
    logit, pull_logit = linear.vjp(x, p["b_proj"])
    beta, pull_beta = sigmoid.vjp(logit)                                     # [B,T,H]

    def pullback(ct):
        ct_p = {}
        ct_z, ct_p["A_log"], ct_p["dt_bias"], *_ = pull_g(ct[3])
        ct_low, ct_p["f_b_proj"] = pull_z(ct_z.reshape(z.shape))
        ct_x, ct_p["f_a_proj"] = pull_low(ct_low)
        more, ct_p["b_proj"] = pull_logit(*pull_beta(ct[4]))
        ct_x = ct_x + more
        for n, pull, ct_u in zip("qkv", pull_u, ct):
            more, ct_p[f"{n}_proj"] = pull(ct_u)
            ct_x = ct_x + more
        return ct_x, ct_p
    return (*u, g, beta), pullback


def _layer_sequence(inputs, p, cache):
    """What runs along the tokens: convolutions with SiLU, then the recurrence.

    Args: inputs (u_q, u_k, u_v [B,T,HK], g [B,T,H,K], beta [B,T,H]).
    Returns: ((o [B,T,H,K], KDACache), pullback to inputs, convolution weights and cache).
    """
    *u, g, beta = inputs
    T = g.shape[1]
    conv, pull_conv = zip(*(causal_conv.vjp(a, p[f"{n}_conv1d"], before)
                            for n, a, before in zip("qkv", u, cache)))
    act, pull_act = zip(*(silu.vjp(a) for a in conv))
    q, k, v = (a.reshape(g.shape) for a in act)                              # -> [B,T,H,K]
    (q, pull_q), (k, pull_k) = l2_norm.vjp(q), l2_norm.vjp(k)
    recur = kda_recurrent if T == 1 else kda_chunkwise
    (o, state), pull_recur = recur.vjp(q, k, v, g, beta, cache.state)
    last = [np.concatenate([before, a], axis=1)[:, T:] for before, a in zip(cache, u)]

    def pullback(ct_o, ct_cache):
        ct_q, ct_k, ct_v, ct_g, ct_beta, ct_state, *_ = pull_recur((ct_o, ct_cache[3]))
        ct_u, ct_taps, ct_before = [], {}, []
        for i, ct_act in enumerate((pull_q(ct_q)[0], pull_k(ct_k)[0], ct_v)):
            ct_conv, = pull_act[i](ct_act.reshape(u[i].shape))
            ct_a, ct_taps["qkv"[i] + "_conv1d"], ct_b = pull_conv[i](ct_conv)
            if ct_cache[i] is not None:
                joined = np.concatenate([ct_b, ct_a], axis=1)
                joined[:, T:] += ct_cache[i]
                ct_b, ct_a = joined[:, :ct_b.shape[1]], joined[:, ct_b.shape[1]:]
            ct_u.append(ct_a)
            ct_before.append(ct_b)
        return (*ct_u, ct_g, ct_beta), ct_taps, KDACache(*ct_before, ct_state)
    return (o, KDACache(*last, state)), pullback


def _layer_output(o, x, p, cfg):
    """Norm by head, gate, projection: o [B,T,H,K], x [B,T,d] -> (y [B,T,d], pullback)."""
    normed, pull_norm = rms_norm.vjp(o, p["o_norm"], cfg.rms_norm_eps)
    if cfg.linear_attn_config.use_full_rank_gate:
        logit, pull_logit = linear.vjp(x, p["g_proj"])
    else:
        low, pull_low = linear.vjp(x, p["g_a_proj"])
        logit, pull_logit = linear.vjp(low, p["g_b_proj"])
    s, pull_s = sigmoid.vjp(logit)                                           # [B,T,HK]
    flat = normed.reshape(s.shape)
    y, pull_y = linear.vjp(flat * s, p["o_proj"])

    def pullback(ct):
        ct_p = {}
        ct_gated, ct_p["o_proj"] = pull_y(ct)
        ct_x, ct_gate = pull_logit(*pull_s(ct_gated * flat))
        if cfg.linear_attn_config.use_full_rank_gate:
            ct_p["g_proj"] = ct_gate
        else:
            ct_p["g_b_proj"] = ct_gate
            ct_x, ct_p["g_a_proj"] = pull_low(ct_x)
        ct_o, ct_p["o_norm"], _ = pull_norm((ct_gated * s).reshape(o.shape))
        return ct_o, ct_x, ct_p
    return y, pullback
