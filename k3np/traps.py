"""The mistakes that ports of K3 make, each of which can be switched on in the whole model.

A trap is fluent: shapes fit, nothing is raised, text comes out. `switched_on(trap)` puts the wrong
variant in place of the right function while it lasts, or changes the parameters or the config. To
find a mistake of your own, compare what your port does to the logits with what each trap does.
Wrong variants compute values only; they have no gradient.
"""
import contextlib
import dataclasses
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from k3np import attnres, mla
from k3np.attention import attention
from k3np.balance import route
from k3np.kda import kda_chunkwise, kda_recurrent
from k3np.ops import rms_norm, sigmoid, silu, softplus
from k3np.situ import mlp


class Trap(NamedTuple):
    """A mistake: `number` in the list; `name`; `patches`, wrong functions by the name that they
    stand in for; `change`, a function (cfg, params) -> (cfg, params), or None."""
    number: int
    name: str
    patches: Any = {}
    change: Any = None


@contextlib.contextmanager
def switched_on(trap, cfg, params):
    """While it lasts the trap's functions are in place. Gives the cfg and params to use with it."""
    with contextlib.ExitStack() as stack:
        for target, wrong in trap.patches.items():
            stack.enter_context(mock.patch(f"k3np.{target}", wrong))
        yield trap.change(cfg, params) if trap.change else (cfg, params)


def value_only(f):
    """Let f stand where a differentiable function is called by its `.vjp`; there is no pullback."""
    f.vjp = lambda *args, **kwargs: (f(*args, **kwargs), None)
    return f


def change_arrays(f):
    """A change of every array whose released name f answers to: f(name, array, cfg) or None."""
    def change(cfg, params):
        def walk(node, path):
            if isinstance(node, dict):
                return {key: walk(child, f"{path}.{key}") for key, child in node.items()}
            new = f(path, node, cfg)
            return node if new is None else new
        return cfg, walk(params, "")
    return change


# 1: the "rope" slots of MLA are not rotated, and count in the scale.

def _turn(x, P):
    """Rotate the last P channels of [B,T,...,K] by the position, as rotary embeddings do."""
    shape = (1, x.shape[1], *(1,) * (x.ndim - 3), P // 2)
    angle = (np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(P // 2) / (P // 2)))
    cos, sin = np.cos(angle).reshape(shape), np.sin(angle).reshape(shape)
    a, b = x[..., -P:-P // 2], x[..., -P // 2:]
    return np.concatenate([x[..., :-P], a * cos - b * sin, a * sin + b * cos], axis=-1)


_queries, _entries, _output = mla._queries, mla._entries, mla._output


def rotated_queries(x, p, cfg):
    return _turn(_queries(x, p, cfg)[0], cfg.qk_rope_head_dim), None


def rotated_entries(x, p, cfg):
    return _turn(_entries(x, p, cfg)[0], cfg.qk_rope_head_dim), None


@value_only
def scale_without_shared(q, k, v, scale, *args, **kwargs):
    """In the expanded form of the tiny model: (N)^-1/2 in place of (N + P)^-1/2, N = 2 P."""
    return attention(q, k, v, scale * 1.5 ** 0.5, *args, **kwargs)


# 2, 3, 4: the mixture of experts and its activation.

@value_only
def mlp_normed(x, p, cfg):
    """Norm each expert's output, not their sum: the shared expert writes the full width."""
    y = mlp(x, p, cfg)
    return y if y.shape[-1] == cfg.hidden_size else rms_norm(y, np.ones(y.shape[-1]), 1e-5)


@value_only
def weight_only(x, w, eps=1e-5):
    return x * w


@value_only
def route_by_biased(scores, bias, *args):
    """The bias selects and weighs."""
    return route(scores + bias, np.zeros_like(bias), *args)


@value_only
def situ_capped_first(gate, up, beta, linear_beta):
    capped = beta * np.tanh(gate / beta)
    return capped * sigmoid(capped) * linear_beta * np.tanh(up / linear_beta)


@value_only
def silu_glu(gate, up, beta, linear_beta):
    return silu(gate) * up


# 5, 6, 7, 10, 11, 16: KDA.

@value_only
def clamped_softplus(z, A_log, dt_bias, lower_bound):
    H, K = z.shape[-2:]
    return np.maximum(lower_bound, -np.exp(A_log[:H, None]) * softplus(z + dt_bias.reshape(H, K)))


@value_only
def decay_by_channel(z, A_log, dt_bias, lower_bound):
    """The stored vector, 96 heads and zeros up to 128, taken for 128 channels."""
    H, K = z.shape[-2:]
    rate = np.exp(np.resize(np.pad(A_log[:H], (0, max(0, K - H))), K))
    return lower_bound * sigmoid(rate * (z + dt_bias.reshape(H, K)))


def gate_before_norm(o, x, p, cfg):
    s = sigmoid(x @ p["g_proj"].T).reshape(o.shape)
    return rms_norm(o * s, p["o_norm"], cfg.rms_norm_eps).reshape(*x.shape[:2], -1) @ p[
        "o_proj"].T, None


def mla_with_norm(o, x, p, cfg):
    return _output(rms_norm(o, np.ones(o.shape[-1]), cfg.rms_norm_eps), x, p, cfg)[0], None


@value_only
def reads_before_it_writes(q, k, v, g, beta, state):
    rows = []
    for t in range(q.shape[1]):
        now = [a[:, t:t + 1] for a in (q, k, v, g, beta)]
        faded = state * np.exp(g[:, t])[..., None]
        rows.append((q[:, t, :, None] @ faded)[:, :, 0] * q.shape[-1] ** -0.5)
        state = kda_recurrent(*now, state)[1]
    return np.stack(rows, axis=1), state


@value_only
def query_unscaled(q, k, v, g, beta, state):
    return kda_chunkwise(q * q.shape[-1] ** 0.5, k, v, g, beta, state)


@value_only
def diagonal_kept(q, k, v, g, beta, state):
    """The k-k matrix with its diagonal: a token is corrected by itself."""
    return kda_chunkwise(q, k, v, g, beta / (1 + beta * (k * k).sum(axis=-1)), state)


@value_only
def l2_by_mean(x, eps=1e-6):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + x.shape[-1] * eps)


@value_only
def segments_added(q, k, v, g, beta, state):
    """Two halves, each from nothing; the first one's state is added to what the second reads."""
    half = q.shape[1] // 2
    a, b = ([x[:, s] for x in (q, k, v, g, beta)] for s in (slice(half), slice(half, None)))
    (o_a, s_a), (o_b, s_b) = kda_chunkwise(*a, state), kda_chunkwise(*b)
    more = np.einsum("bthk,bhkv->bthv", b[0], s_a) * q.shape[-1] ** -0.5
    return np.concatenate([o_a, o_b + more], axis=1), s_a + s_b


# 8: Attention Residuals.

def raw_keys(v, u, eps):
    return v @ u, 1.0


_attn_res = attnres.attn_res


@value_only
def values_normalised(sources, norm_weight, query, eps=1e-5):
    return _attn_res([v / np.sqrt((v * v).mean(axis=-1, keepdims=True) + eps) for v in sources],
                     norm_weight, query, eps)


def one_layer_late(sublayer, block):
    return sublayer == 0 or sublayer % block == 2


# 9, 12: what is read from the files.

def lists_from_zero(cfg, params):
    lac, n = cfg.linear_attn_config, cfg.num_hidden_layers
    mla_layers = tuple(i + 1 for i in lac.full_attn_layers if i < n)
    return dataclasses.replace(cfg, linear_attn_config=dataclasses.replace(
        lac, full_attn_layers=mla_layers,
        kda_layers=tuple(i for i in range(1, n + 1) if i not in mla_layers))), params


def _divide_queries(name, array, cfg):
    return array / cfg.hidden_size ** 0.5 if name.endswith("_res_proj") else None


def _swap_nibbles(name, array, cfg):
    if ".experts." not in name:
        return None
    return array.reshape(*array.shape[:-1], -1, 2)[..., ::-1].reshape(array.shape)


def _halve(name, array, cfg):
    return array / 2 if ".experts." in name else None


TRAPS = (
    Trap(1, "MLA's shared slots are rotated", {"mla._queries": rotated_queries,
                                               "mla._entries": rotated_entries}),
    Trap(1, "MLA's scale forgets them", {"mla.attention": scale_without_shared}),
    Trap(2, "the norm acts on each expert", {"moe.mlp": mlp_normed, "moe.rms_norm": weight_only}),
    Trap(3, "the router's bias weighs too", {"moe.route": route_by_biased}),
    Trap(4, "the sigmoid sees the capped gate", {"situ.situ_glu": situ_capped_first}),
    Trap(4, "SwiGLU for SiTU", {"situ.situ_glu": silu_glu}),
    Trap(5, "the decay is a clamped softplus", {"kda.layer.decay_gate": clamped_softplus}),
    Trap(5, "A_log is read by channel", {"kda.layer.decay_gate": decay_by_channel}),
    Trap(6, "KDA's gate before its norm", {"kda.layer._layer_output": gate_before_norm}),
    Trap(6, "a norm in MLA's output", {"mla._output": mla_with_norm}),
    Trap(7, "KDA reads before it writes", {"kda.layer.kda_chunkwise": reads_before_it_writes}),
    Trap(7, "its query is not scaled", {"kda.layer.kda_chunkwise": query_unscaled}),
    Trap(8, "keys over depth are raw", {"attnres._logit": raw_keys}),
    Trap(8, "values over depth are normalised", {"attnres.attn_res": values_normalised}),
    Trap(8, "scores over depth by sqrt(d)", {}, change_arrays(_divide_queries)),
    Trap(8, "blocks begin a layer late", {"model.starts_block": one_layer_late}),
    Trap(9, "layer lists from zero", {}, lists_from_zero),
    Trap(10, "a token corrects itself", {"kda.layer.kda_chunkwise": diagonal_kept}),
    Trap(11, "MLA's norms with eps 1e-5", {"mla.LATENT_EPS": 1e-5}),
    Trap(11, "eps on the mean in the L2 norm", {"kda.layer.l2_norm": l2_by_mean}),
    Trap(12, "high nibble first", {}, change_arrays(_swap_nibbles)),
    Trap(12, "scales of 2^(byte - 128)", {}, change_arrays(_halve)),
    Trap(16, "states of segments are added", {"kda.layer.kda_chunkwise": segments_added}),
)
