"""Kimi Delta Attention, one token at a time: the gate that makes the decays, and the definition.

One head keeps a matrix S [K,V], a row a key channel. A token first lets each channel fade by its
own decay, then looks up what is stored under its key and corrects it towards its value, then
reads with its query.
"""
import numpy as np

from k3np.ops import check_floats, check_shapes, differentiable, sigmoid, softplus


def _gate_input(z, A_log, dt_bias):
    """Shift z by the bias and spread e^A_log over its head: ([...,H,K], [H,1])."""
    sizes = check_shapes(z=(z, "... H K"))
    H, K = sizes["H"], sizes["K"]
    check_floats(z=z, A_log=A_log, dt_bias=dt_bias)
    if A_log is not None and A_log.size < H:
        raise ValueError(f"A_log has shape {A_log.shape}; expected one number a head, at least "
                         f"H={H} (from z {z.shape}; further ones are padding)")
    if dt_bias is not None and dt_bias.size != H * K:
        raise ValueError(f"dt_bias has shape {dt_bias.shape}; expected [{H * K}], one number a "
                         f"head and channel of z {z.shape}")
    shifted = z if dt_bias is None else z + dt_bias.reshape(H, K)
    rate = np.ones((H, 1), z.dtype) if A_log is None else np.exp(A_log.reshape(-1)[:H, None])
    return shifted, rate


def _gate_cotangents(ct_z, ct_log_rate, A_log, dt_bias):
    """Sum cotangents [...,H,K] down to A_log (zero for its padding) and dt_bias."""
    H, K = ct_z.shape[-2:]
    ct_A_log, ct_bias = None, None
    if A_log is not None:
        ct_A_log = np.zeros(A_log.size, A_log.dtype)
        ct_A_log[:H] = ct_log_rate.reshape(-1, H, K).sum(axis=(0, 2))
        ct_A_log = ct_A_log.reshape(A_log.shape)
    if dt_bias is not None:
        ct_bias = ct_z.reshape(-1, H * K).sum(axis=0).reshape(dt_bias.shape)
    return ct_z, ct_A_log, ct_bias


@differentiable
def decay_gate(z, A_log, dt_bias, lower_bound=-5.0):
    """Log-decay with a floor: g = lower_bound sigmoid(e^A_log (z + dt_bias)), K3's gate.

    Args: z [...,H,K], the decay logit; A_log [H], or longer as stored: what follows the first H
        numbers is padding (None: zeros); dt_bias [H K] (None: zeros); lower_bound < 0.
    Returns: g [...,H,K], log-decays in [lower_bound, 0], natural logarithm.
    Raises: ValueError for sizes or dtypes that do not agree, or a bound that is not negative.
    Source: report §2.1; `naive_kda_lowerbound_gate` of flash-linear-attention.
    """
    if not -np.inf < lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound!r}; a log-decay's floor is negative and "
                         "finite, such as -5.0")
    shifted, rate = _gate_input(z, A_log, dt_bias)
    s, pull_sigmoid = sigmoid.vjp(rate * shifted)

    def pullback(ct):
        ct_logit, = pull_sigmoid(ct * lower_bound)
        return *_gate_cotangents(ct_logit * rate, ct_logit * rate * shifted, A_log, dt_bias), None
    return lower_bound * s, pullback


@differentiable
def softplus_decay_gate(z, A_log, dt_bias):
    """Log-decay without a floor: g = -e^A_log softplus(z + dt_bias), Kimi Linear's gate.

    Args: as `decay_gate`.
    Returns: g [...,H,K], log-decays, at most 0.
    Raises: ValueError for sizes or dtypes that do not agree.
    Source: `naive_kda_gate` of flash-linear-attention.
    """
    shifted, rate = _gate_input(z, A_log, dt_bias)
    g = -rate * softplus(shifted)

    def pullback(ct):
        return _gate_cotangents(-ct * rate * sigmoid(shifted), ct * g, A_log, dt_bias)
    return g, pullback


def check_kda(q, k, v, g, beta, initial_state=None):
    """Hold the arguments of the recurrence against each other; return sizes B, T, H, K, V."""
    sizes = check_shapes(q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T H V"), g=(g, "B T H K"),
                         beta=(beta, "B T H"), initial_state=(initial_state, "B H K V"))
    check_floats(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    top = g.max(initial=-np.inf)
    if not top <= 0:
        what = "NaN" if np.isnan(top) else f"{top:g}"
        raise ValueError(f"g holds {what}; a log-decay is at most 0 (the memory cannot grow): "
                         "make it with decay_gate or softplus_decay_gate")
    for name, array in (("q", q), ("k", k), ("v", v), ("beta", beta)):
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinity; a product over a chunk would spread "
                             "it to the tokens before")
    return tuple(sizes[n] for n in "BTHKV")


@differentiable
def kda_recurrent(q, k, v, g, beta, initial_state=None, scale=None):
    """Kimi Delta Attention, one token at a time: the definition.

    S <- Diag(e^g) S;  S <- S + k beta (v - S^T k)^T;  o = S^T (scale q). The report's Eq. 1.

    Args: q, k [B,T,H,K], of length one where L2-normalised; v [B,T,H,V]; g [B,T,H,K], log-decays,
        at most 0 (-inf forgets all); beta [B,T,H], the share of the error that is corrected;
        initial_state [B,H,K,V] (None: zeros); scale of the query (None: K^-1/2). T may be 0.
    Returns: (o [B,T,H,V], state [B,H,K,V] after the last token).
    Raises: ValueError for shapes or dtypes that do not agree, NaN in g or g above 0.
    Source: report §2.1; `naive_recurrent_kda` of flash-linear-attention. The released code's
        kernels keep the state as [B,H,V,K].
    The pullback walks forwards again and holds the state after every token: T K V numbers a head.
    """
    B, T, H, K, V = check_kda(q, k, v, g, beta, initial_state)
    scale = float(K ** -0.5 if scale is None else scale)
    first = np.zeros((B, H, K, V), q.dtype) if initial_state is None else initial_state
    weight = beta[..., None]                                                 # [B,T,H,1]

    def step(S, t):
        faded = np.exp(g[:, t])[..., None] * S                               # [B,H,K,V]
        error = v[:, t] - _read(faded, k[:, t])                              # [B,H,V]
        return faded, error, faded + _outer(k[:, t], weight[:, t] * error)

    o, state = np.empty_like(v), first.copy()
    for t in range(T):
        _, _, state = step(state, t)
        o[:, t] = _read(state, scale * q[:, t])

    def pullback(ct):
        ct_o = np.zeros_like(o) if ct[0] is None else ct[0]
        ct_S = np.zeros_like(first) if ct[1] is None else ct[1]
        states = [first]
        for t in range(T - 1):
            states.append(step(states[-1], t)[2])
        ct_q, ct_k, ct_v, ct_g, ct_beta = (np.empty_like(x) for x in (q, k, v, g, beta))
        for t in reversed(range(T)):
            faded, error, after = step(states[t], t)
            ct_S = ct_S + _outer(scale * q[:, t], ct_o[:, t])
            ct_q[:, t] = scale * _read(after.swapaxes(-1, -2), ct_o[:, t])
            ct_write = _read(ct_S, k[:, t])                      # of weight * error
            ct_beta[:, t] = (ct_write * error).sum(axis=-1)
            ct_v[:, t] = weight[:, t] * ct_write                 # of the error
            ct_k[:, t] = (_read(ct_S.swapaxes(-1, -2), weight[:, t] * error)
                          - _read(faded.swapaxes(-1, -2), ct_v[:, t]))
            ct_faded = ct_S - _outer(k[:, t], ct_v[:, t])
            ct_g[:, t] = (ct_faded * faded).sum(axis=-1)
            ct_S = np.exp(g[:, t])[..., None] * ct_faded
        return ct_q, ct_k, ct_v, ct_g, ct_beta, None if initial_state is None else ct_S, None
    return (o, state), pullback


def _read(S, key):
    """S^T key: [B,H,K,V], [B,H,K] -> [B,H,V]."""
    return (key[..., None, :] @ S)[..., 0, :]


def _outer(key, value):
    """key value^T: [B,H,K], [B,H,V] -> [B,H,K,V]."""
    return key[..., :, None] * value[..., None, :]
