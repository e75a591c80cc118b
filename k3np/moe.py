"""Stable LatentMoE: a router on the full width, experts in a latent, and a norm before the way up.

One down-projection takes a token into a latent of half its width, each chosen expert is a gated
MLP there, and the weighted sum of their outputs is normalised and projected up again. A shared
expert works beside them at full width. By configuration the same function has experts at full
width (`routed_expert_hidden_size` None: Kimi K2 and Kimi Linear).
"""
from typing import Any, NamedTuple

import numpy as np

from k3np.balance import route
from k3np.ops import check_floats, check_shapes, differentiable, linear, rms_norm, sigmoid
from k3np.situ import mlp


class Routing(NamedTuple):
    """Which experts a token goes to: `indices` [...,k]; `weights` [...,k]; `scores` [...,E], of
    all experts, before any bias: what balancing and auxiliary losses read."""
    indices: Any
    weights: Any
    scores: Any


@differentiable
def router(x, p, cfg):
    """Score all experts from the full width and choose: s = sigmoid(x W^T), then `route`.

    Args: x [...,d], float32 or float64: the released router computes in float32, whatever the rest
        of the layer does; p, dict of weight [E,d] and e_score_correction_bias [E]; cfg.
    Returns: Routing. Cotangents flow into weights and scores; the bias has none, its entry is 0.
    Raises: ValueError for shapes or dtypes that do not agree, and as `route`.
    Source: report §2.3.3; KimiMoEGate of the released code.
    """
    weight, bias = p["weight"], p["e_score_correction_bias"]
    check_shapes(x=(x, "... d"), weight=(weight, f"{cfg.num_experts} d"),
                 e_score_correction_bias=(bias, f"{cfg.num_experts}"))
    check_floats(x=x, weight=weight, e_score_correction_bias=bias)
    logits, pull_linear = linear.vjp(x, weight)                          # [...,d] -> [...,E]
    scores, pull_sigmoid = sigmoid.vjp(logits)
    (indices, weights), pull_route = route.vjp(
        scores, bias, cfg.num_experts_per_token, cfg.num_expert_group, cfg.topk_group,
        cfg.moe_renormalize, cfg.routed_scaling_factor)

    def pullback(ct):
        ct_scores = pull_route((None, ct[1]))[0]
        ct_scores = ct_scores if ct[2] is None else ct_scores + ct[2]
        ct_x, ct_weight = pull_linear(*pull_sigmoid(ct_scores))
        return ct_x, {"weight": ct_weight, "e_score_correction_bias": np.zeros_like(bias)}, None
    return Routing(indices, weights, scores), pullback


@differentiable
def mix_experts_loop(z, indices, weights, experts, cfg):
    """Weighted sum of expert outputs, one token and one expert at a time: the definition.

    u = sum over chosen e of p_e w2_e act(w1_e z, w3_e z).

    Args: z [N,l]; indices, weights [N,k]; experts, dict of w1, w3 [E,I,l] and w2 [E,l,I], each an
        array or any sequence of matrices (indexing by an expert is all that is asked of it); cfg.
    Returns: u [N,l]. The sum is kept in z's dtype, float32 or float64.
    Raises: ValueError for an expert that does not exist or that a token names twice.
    Source: report §2.3; the released code, whose experts w1, w3, w2 are gate, up, down.
    The pullback computes each expert again.
    """
    _check_choice(indices, cfg)
    u = np.zeros_like(z)
    for i in range(len(z)):
        for e, weight in zip(indices[i], weights[i]):
            u[i] += weight * mlp(z[i:i + 1], _expert(experts, e), cfg)[0]

    def pullback(ct):
        ct_z, ct_weights, ct_experts = np.zeros_like(z), np.zeros_like(weights), {}
        for i in range(len(z)):
            for slot, e in enumerate(indices[i]):
                y, pull = mlp.vjp(z[i:i + 1], _expert(experts, e), cfg)
                ct_weights[i, slot] = ct[i] @ y[0]
                ct_row, ct_e, _ = pull(weights[i, slot] * ct[i:i + 1])
                ct_z[i] += ct_row[0]
                _add(ct_experts, e, ct_e, cfg.num_experts)
        return ct_z, None, ct_weights, ct_experts, None
    return u, pullback


@differentiable
def mix_experts(z, indices, weights, experts, cfg):
    """`mix_experts_loop` with tokens sorted by expert: three matrix products for each expert.

    Args, returns: as there. No token is dropped: an expert takes as many as chose it.
    The pullback keeps z and the routing, and computes an expert's hidden activations again: they
    would take k I numbers a token.
    """
    _check_choice(indices, cfg)
    flat, k = indices.reshape(-1), indices.shape[-1]
    order = np.argsort(flat, kind="stable")              # pairs (token, slot), expert by expert
    ends = np.cumsum(np.bincount(flat, minlength=cfg.num_experts))
    groups = [(e, *np.divmod(order[start:end], k)) for e, (start, end)
              in enumerate(zip([0, *ends[:-1]], ends)) if start < end]   # expert, tokens, slots
    u = np.zeros_like(z)
    for e, tokens, slots in groups:                      # a token is at most once in a group
        u[tokens] += weights[tokens, slots, None] * mlp(z[tokens], _expert(experts, e), cfg)

    def pullback(ct):
        ct_z, ct_weights, ct_experts = np.zeros_like(z), np.zeros_like(weights), {}
        for e, tokens, slots in groups:
            y, pull = mlp.vjp(z[tokens], _expert(experts, e), cfg)
            ct_weights[tokens, slots] = (ct[tokens] * y).sum(axis=-1)
            ct_rows, ct_e, _ = pull(weights[tokens, slots, None] * ct[tokens])
            ct_z[tokens] += ct_rows
            _add(ct_experts, e, ct_e, cfg.num_experts)
        return ct_z, None, ct_weights, ct_experts, None
    return u, pullback


@differentiable
def routed_moe(x, p, cfg, mix=mix_experts):
    """`latent_moe` that also says how it routed: (y, Routing). Training reads the scores.

    The pullback takes (ct_y, ct_routing); ct_routing is None, or a triple whose scores part is the
    cotangent that, say, an auxiliary loss has for the scores.
    """
    latent = cfg.routed_expert_hidden_size
    _check(x, p, cfg)
    routing, pull_router = router.vjp(x, p["gate"], cfg)
    indices, weights = (a.reshape(-1, a.shape[-1]) for a in routing[:2])     # [...,k] -> [N,k]
    z, pull_down = linear.vjp(x, p["routed_expert_down_proj"]) if latent else (x, None)
    u, pull_mix = mix.vjp(z.reshape(-1, z.shape[-1]), indices, weights, p["experts"], cfg)
    y = u.reshape(z.shape)                                                   # [N,l] -> [...,l]
    if latent and cfg.latent_moe_use_norm:
        y, pull_norm = rms_norm.vjp(y, p["routed_expert_norm"], cfg.rms_norm_eps)
    if latent:
        y, pull_up = linear.vjp(y, p["routed_expert_up_proj"])               # [...,l] -> [...,d]
    if cfg.num_shared_experts:
        shared, pull_shared = mlp.vjp(x, p["shared_experts"], cfg)
        y = y + shared

    def pullback(ct):
        ct_y, ct_routing = ct
        ct_y = np.zeros_like(y) if ct_y is None else ct_y
        ct_x, ct_p = np.zeros_like(x), {}
        if cfg.num_shared_experts:
            ct_x, ct_p["shared_experts"], _ = pull_shared(ct_y)
        ct_u = ct_y
        if latent:
            ct_u, ct_p["routed_expert_up_proj"] = pull_up(ct_u)
        if latent and cfg.latent_moe_use_norm:
            ct_u, ct_p["routed_expert_norm"], _ = pull_norm(ct_u)
        ct_z, _, ct_weights, ct_p["experts"], _ = pull_mix(ct_u.reshape(u.shape))
        ct_z, ct_weights = ct_z.reshape(z.shape), ct_weights.reshape(routing.weights.shape)
        if latent:
            ct_z, ct_p["routed_expert_down_proj"] = pull_down(ct_z)
        _, ct_more, ct_scores = ct_routing or (None, None, None)
        ct_weights = ct_weights if ct_more is None else ct_weights + ct_more
        ct_gate_x, ct_p["gate"], _ = pull_router((None, ct_weights, ct_scores))
        return ct_x + ct_z + ct_gate_x, ct_p, None, None
    return (y, routing), pullback


@differentiable
def latent_moe(x, p, cfg, mix=mix_experts):
    """Stable LatentMoE: y = W_up RMSNorm(sum over chosen e of p_e E_e(W_down x)) + shared(x).

    The router reads x, not the latent. The norm acts on the weighted sum.

    Args: x [...,d]; p, dict of gate (see `router`), experts (see `mix_experts`), and where the
        config has them routed_expert_down_proj [l,d], routed_expert_norm [l],
        routed_expert_up_proj [d,l], shared_experts (see `mlp`); cfg; mix, `mix_experts` or its slow
        twin `mix_experts_loop`.
    Returns: y [...,d]. `routed_moe` gives the routing too.
    Raises: ValueError for widths that do not agree, no tokens, an x that is not finite.
    Source: report §2.3; KimiSparseMoeBlock of the released code.
    """
    (y, _), pull = routed_moe.vjp(x, p, cfg, mix)
    return y, lambda ct: pull((ct, None))


@differentiable
def feed_forward(x, p, cfg, layer, mix=mix_experts):
    """The feed-forward of a layer, by configuration: dense for the first ones, else with experts.

    Args: x [...,d]; p, the layer's own parameters, of `mlp` or of `latent_moe`; cfg; layer, from 0.
    Returns: (y [...,d], Routing, or None where the layer is dense). Cotangents as `routed_moe`.
    """
    if not cfg.is_dense_layer(layer):
        value, pull = routed_moe.vjp(x, p, cfg, mix)
        return value, lambda ct: (*pull(ct)[:3], None, None)
    y, pull_mlp = mlp.vjp(x, p, cfg)

    def pullback(ct):
        return *pull_mlp(np.zeros_like(y) if ct[0] is None else ct[0]), None, None
    return (y, None), pullback


def _check_choice(indices, cfg):
    if indices.size and (indices.min() < 0 or indices.max() >= cfg.num_experts):
        raise ValueError(f"indices lie in {indices.min()}..{indices.max()}; there are experts "
                         f"0..{cfg.num_experts - 1}")
    in_order = np.sort(indices, axis=-1)
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise ValueError("indices name an expert twice for one token; `route` never does")


def _expert(experts, e):
    return {"gate_proj": experts["w1"][e], "up_proj": experts["w3"][e],
            "down_proj": experts["w2"][e]}


def _add(stacked, e, ct, n_experts):
    """Add an expert's cotangents to those of all; an expert that no token chose keeps its zeros."""
    for name, part in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        if name not in stacked:
            stacked[name] = np.zeros((n_experts, *ct[part].shape), ct[part].dtype)
        stacked[name][e] += ct[part]


def _check(x, p, cfg):
    """Hold the layer's own shapes together; experts that are no arrays are looked at when used."""
    latent = cfg.routed_expert_hidden_size
    names = ("routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj")
    down, norm, up = (p.get(name) if latent else None for name in names)
    w1, w3, w2 = (w if isinstance(w, np.ndarray) else None
                  for w in (p["experts"][name] for name in ("w1", "w3", "w2")))
    l = latent or "d"
    check_shapes(x=(x, "... d"), routed_expert_down_proj=(down, f"{l} d"),
                 routed_expert_norm=(norm, f"{l}"), routed_expert_up_proj=(up, f"d {l}"),
                 w1=(w1, f"{cfg.num_experts} I {l}"), w3=(w3, f"{cfg.num_experts} I {l}"),
                 w2=(w2, f"{cfg.num_experts} {l} I"))
    check_floats(x=x, routed_expert_down_proj=down, routed_expert_norm=norm,
                 routed_expert_up_proj=up, w1=w1, w3=w3, w2=w2)
    if not np.isfinite(x).all():
        raise ValueError("x holds NaN or infinity; a sigmoid would hide it from the router")
