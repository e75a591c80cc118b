"""Muon, Per-Head Muon and weight clipping: how K3's matrices are updated.

Muon replaces the momentum of a matrix by a nearby matrix whose singular values are all about one.
Per-Head Muon does so for each head's rows of the query, key and value projections by themselves.
Optimisers are pure functions, (grads, state, params) -> (updates, state); a step adds the updates.

Evidence. Report: Muon for matrices as in Kimi K2, blocks by head for the Q, K and V projections,
weight decay 0.1, weight clipping. Moonlight's defaults: the quintic's coefficients, five steps,
momentum 0.95 with Nesterov, the scale 0.2 sqrt(max(m, n)), AdamW for the rest. Unknown for K3: all
of these defaults, whether other projections are split too, and the clipping threshold.
"""
from typing import Any, NamedTuple

import numpy as np

from k3np.ops import check_floats, check_shapes

QUINTIC = (3.4445, -4.7750, 2.0315)
ADAMW_NAMES = ("embed_tokens", "lm_head", "A_log", "dt_bias", "e_score_correction_bias", "b_proj")


class OptimizerState(NamedTuple):
    """`step`, updates so far; `momentum`, a tree like the parameters, of sums of gradients (Muon)
    or means (AdamW); `second`, a tree of means of squares, None where Muon acts."""
    step: int
    momentum: Any
    second: Any


def newton_schulz(G, steps=5, coefficients=QUINTIC, eps=1e-7):
    """Push all singular values of a matrix towards one, by matrix products alone.

    X <- a X + (b X Xᵀ + c (X Xᵀ)²) X, from X = G / |G|. On singular values: s <- a s + b s³ + c s⁵.

    Args: G [...,m,n], a matrix or any stack of them; steps; coefficients (a, b, c); eps, added to
        the Frobenius norm. Tall matrices are transposed first, so products are of the short side.
    Returns: [...,m,n], nearly U Vᵀ of G = U s Vᵀ. A zero matrix stays zero.
    Raises: ValueError for less than two axes, a negative number of steps, values that are not
        finite or whose squares are not.
    Source: Moonlight's `zeropower_via_newtonschulz5`.
    Departs: in G's dtype; there bfloat16.
    """
    check_floats(G=G)
    if np.ndim(G) < 2:
        raise ValueError(f"G has shape {np.shape(G)}; expected matrices [..., m, n]")
    if not np.isfinite(G).all():
        raise ValueError("G holds a value that is not finite; look at the gradient before it")
    if type(steps) is not int or steps < 0:
        raise ValueError(f"steps={steps!r}; expected a whole number, zero or more")
    a, b, c = coefficients
    tall = G.shape[-2] > G.shape[-1]
    X = G.swapaxes(-1, -2) if tall else G
    norm = np.linalg.norm(X, axis=(-2, -1), keepdims=True)
    if not np.isfinite(norm).all():
        raise ValueError(f"G has entries up to {np.abs(G).max():.3g}, whose squares overflow "
                         f"{G.dtype}; scale it down: the result does not depend on its size")
    X = X / (norm + eps)
    for _ in range(steps):
        A = X @ X.swapaxes(-1, -2)                       # [...,m,n] -> [...,m,m]
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.swapaxes(-1, -2) if tall else X


def newton_schulz_flop(m, n, steps=5):
    """Operations of `newton_schulz` on one matrix: 4 m² n + 2 m³ a step, m the short side."""
    m, n = sorted((m, n))
    return steps * (4 * m * m * n + 2 * m ** 3)


def orthogonalise(G, n_blocks=1, **kwargs):
    """`newton_schulz`, with the rows of G cut into n_blocks of equal height, each by itself.

    Each block is multiplied by 0.2 sqrt(max of its sides), so that an entry's root mean square is
    about 0.2, as AdamW's updates have, whatever the shape.

    Args: G [...,m,n]; n_blocks, heads. Returns: [...,m,n].
    Raises: ValueError when the blocks do not divide the rows.
    Source: report §2.5; Moonlight's `adjust_lr_for_muon` for the factor.
    """
    *lead, m, n = G.shape
    if n_blocks < 1 or m % n_blocks:
        raise ValueError(f"G has {m} rows; {n_blocks} heads of one size do not divide them")
    blocks = newton_schulz(G.reshape(*lead, n_blocks, m // n_blocks, n), **kwargs)
    return 0.2 * max(m // n_blocks, n) ** 0.5 * blocks.reshape(G.shape)


def plan(params, cfg, per_head=True):
    """Which optimiser each parameter gets: a tree like params, of 0 for AdamW, else blocks of rows.

    Split by head (Report): q, k and v projections of KDA; q_b (or q) and kv_b of MLA, which make
    its queries, keys and values. One block: every other matrix of the text model, and of an expert.
    AdamW: embedding, head, norms, biases, vectors, convolutions, queries of Attention Residuals,
    beta's projection, the vision tower. That list is torchtitan's reading; K3's is Unknown.

    Args: params, tree; cfg, K3Config; per_head False gives plain Muon.
    """
    kda, mla = cfg.linear_attn_config.num_heads, cfg.num_attention_heads

    def walk(node, path):
        if isinstance(node, dict):
            return {key: walk(child, (*path, key)) for key, child in node.items()}
        name = next(key for key in reversed(path) if key != "weight")
        vector = node.ndim < 2 or name.endswith(("_conv1d", "res_proj")) or 1 in node.shape[-2:]
        if vector or name in ADAMW_NAMES or path[0] in ("vision_tower", "mm_projector"):
            return 0
        if per_head and "self_attn" in path:
            if name in ("q_b_proj", "kv_b_proj"):
                return mla
            if name in ("q_proj", "k_proj", "v_proj"):
                layer_is_mla = "layers" in path and cfg.is_mla_layer(
                    int(path[path.index("layers") + 1]))
                return mla if layer_is_mla else kda
        return 1
    return walk(params, ())


def init_optimizer(params, blocks):
    """State before the first step. params, tree; blocks, from `plan`. Returns: OptimizerState."""
    return OptimizerState(0, _map(np.zeros_like, params),
                          _map(lambda p, n: None if n else np.zeros_like(p), params, blocks))


def update(grads, state, params, blocks, lr, weight_decay=0.1, momentum=0.95, nesterov=True,
           betas=(0.9, 0.95), eps=1e-8, **newton_schulz_options):
    """One step of Muon where `blocks` says so, of AdamW elsewhere. Nothing is changed in place.

    Muon: M <- mu M + g; G = g + mu M (Nesterov) or M; update = -lr (orthogonalise(G) + decay W).
    AdamW: the usual means, bias corrected, with the same lr and decay (decay on matrices alone).

    Args: grads, params, trees of one shape; state, OptimizerState; blocks, tree from `plan`; lr.
    Returns: (updates, OptimizerState).
    Raises: ValueError naming the parameter whose gradient is missing, not finite or misshapen.
    Source: report §2.5; Moonlight's `Muon`.
    """
    step, (b1, b2) = state.step + 1, betas

    def one(name, g, m, v, p, n):
        if np.shape(g) != np.shape(p):
            raise ValueError(f"grads: {name} has shape {np.shape(g)}; params has {np.shape(p)}")
        if not np.isfinite(g).all():
            raise ValueError(f"grads: {name} holds a value that is not finite")
        if n:
            m = momentum * m + g
            direction = orthogonalise(g + momentum * m if nesterov else m, n,
                                      **newton_schulz_options)
        else:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            direction = m / (1 - b1 ** step) / (np.sqrt(v / (1 - b2 ** step)) + eps)
        decay = weight_decay if n or p.ndim >= 2 else 0.0
        return -lr * (direction + decay * p), m, v

    def walk(path, g, m, v, p, n):
        if not isinstance(p, dict):
            return one(".".join(path), g, m, v, p, n)
        missing = [key for key in p if key not in g]
        if missing:
            raise ValueError(f"grads lacks {'.'.join([*path, missing[0]])}")
        parts = {key: walk([*path, key], g[key], m[key], v[key], p[key], n[key]) for key in p}
        return tuple({key: part[i] for key, part in parts.items()} for i in range(3))
    updates, first, second = walk([], grads, state.momentum, state.second, params, blocks)
    return updates, OptimizerState(step, first, second)


def apply_updates(params, updates):
    """params + updates, as a new tree."""
    return _map(np.add, params, updates)


def clip_heads(p, cfg, max_logits, threshold=100.0):
    """Weight clipping by head (Kimi K2's QK-Clip) for a Gated MLA layer.

    Where a head's largest logit S exceeds the threshold, its weights shrink by gamma =
    threshold / S: query and key rows by sqrt(gamma) each, the query rows of the shared key slot by
    gamma, since the shared key itself belongs to all heads. The logits become gamma times what
    they were. KDA needs none of this: its queries and keys have length one.

    Args: p, the layer's parameters, q_b_proj (or q_proj) [H (nope + rope), *] and kv_b_proj
        [H (nope + V), R]; cfg; max_logits [H], the largest absolute logit a head had in a batch;
        threshold (100 in Kimi K2; for K3 Unknown).
    Returns: a new dict of parameters.
    Raises: ValueError for a wrong number of logits, negative or not finite ones, no threshold.
    Source: Kimi K2 report, QK-Clip; report §3.3 for its use in K3.
    """
    H, nope, rope = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    name = "q_b_proj" if "q_b_proj" in p else "q_proj"
    check_shapes(max_logits=(max_logits, f"{H}"))
    check_floats(**{name: p[name], "kv_b_proj": p["kv_b_proj"]})
    if not (np.isfinite(max_logits).all() and (np.asarray(max_logits) >= 0).all()):
        raise ValueError("max_logits must be finite and not negative")
    if not threshold > 0:
        raise ValueError(f"threshold={threshold}; expected a positive number")
    gamma = np.minimum(1.0, threshold / np.maximum(max_logits, 1e-30)).astype(p[name].dtype)
    query = p[name].reshape(H, nope + rope, -1).copy()
    keys = p["kv_b_proj"].reshape(H, nope + cfg.v_head_dim, -1).copy()
    root = np.sqrt(gamma)[:, None, None]
    query[:, :nope] *= root
    query[:, nope:] *= gamma[:, None, None]
    keys[:, :nope] *= root
    return {**p, name: query.reshape(p[name].shape),
            "kv_b_proj": keys.reshape(p["kv_b_proj"].shape)}


def _map(f, tree, *others):
    if isinstance(tree, dict):
        return {key: _map(f, child, *(other[key] for other in others))
                for key, child in tree.items()}
    return f(tree, *others)
