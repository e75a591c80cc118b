"""SiTU-GLU, the activation of every feed-forward in K3, and the gated units that it came from.

A gated linear unit multiplies two projections of its input, gate and up. SwiGLU leaves both
factors unbounded; SiTU-GLU puts a smooth cap on each, so that no product exceeds
beta * linear_beta, which is 100 in K3.
"""
import numpy as np

from k3np.ops import check_floats, check_shapes, differentiable, linear, sigmoid, silu


def bound(beta=4.0, linear_beta=25.0):
    """Largest absolute value that `situ_glu` can take; infinite when the up factor has no cap."""
    return np.inf if linear_beta is None else beta * linear_beta


@differentiable
def soft_cap(x, cap):
    """Smooth limit that leaves small values alone: cap tanh(x / cap).

    Args: x [...]; cap > 0, the value that is never exceeded.
    Returns: y [...], |y| <= cap (reached by rounding only); y = x - x³ / (3 cap²) + ...
    Raises: ValueError for a cap that is not positive.
    Source: report §2.3.2.
    """
    _check_cap("cap", cap)
    t = np.tanh(x / cap)
    return cap * t, lambda ct: (ct * (1 - t * t), None)


@differentiable
def situ_glu(gate, up, beta=4.0, linear_beta=25.0):
    """Gated unit with both factors capped softly: [β tanh(g/β) σ(g)] ⊙ [β' tanh(u/β')].

    The sigmoid reads the gate before the cap. The report's Eq. 12.

    Args: gate, up [...] of one shape; beta, cap of the gate factor; linear_beta, cap of the up
        factor, None for no cap.
    Returns: y [...], |y| <= beta * linear_beta.
    Raises: ValueError for shapes that differ or a cap that is not positive.
    Source: report §2.3.2 and App. B; SituAndMul of the released code.
    Departs: a cap of zero is refused; the released code reads beta = 0 as 1.
    """
    _check_pair(gate, up)
    _check_cap("beta", beta)
    capped, pull_gate_cap = soft_cap.vjp(gate, beta)
    s, pull_sigmoid = sigmoid.vjp(gate)                     # of the raw gate
    value, pull_up_cap = (up, None) if linear_beta is None else soft_cap.vjp(up, linear_beta)

    def pullback(ct):
        ct_factor = ct * value
        ct_gate = pull_gate_cap(ct_factor * s)[0] + pull_sigmoid(ct_factor * capped)[0]
        ct_value = ct * (capped * s)
        ct_up = ct_value if linear_beta is None else pull_up_cap(ct_value)[0]
        return ct_gate, ct_up, None, None
    return capped * s * value, pullback


@differentiable
def glu(gate, up):
    """The first gated linear unit: σ(g) ⊙ u. gate, up [...] -> [...]. Source: Dauphin 2016."""
    _check_pair(gate, up)
    s, pull = sigmoid.vjp(gate)
    return s * up, lambda ct: (pull(ct * up)[0], ct * s)


@differentiable
def swiglu(gate, up):
    """Two unbounded factors: silu(g) ⊙ u. gate, up [...] -> [...]. Source: Shazeer 2020."""
    _check_pair(gate, up)
    a, pull = silu.vjp(gate)
    return a * up, lambda ct: (pull(ct * up)[0], ct * a)


@differentiable
def clamped_swiglu(gate, up, beta=4.0, linear_beta=25.0):
    """SwiGLU with hard limits, for comparison: min(silu(g), β) ⊙ clip(u, -β', β').

    Args: gate, up [...] of one shape; beta, linear_beta, limits of the factors, > 0.
    Returns: y [...], |y| <= beta * linear_beta. Where a limit acts, that factor's gradient is 0.
    Source: the hard clamp that report §2.3.2 compares with, with SiTU's limits.
    """
    _check_pair(gate, up)
    _check_cap("beta", beta)
    _check_cap("linear_beta", linear_beta)
    a, pull = silu.vjp(gate)
    factor, value = np.minimum(a, beta), np.clip(up, -linear_beta, linear_beta)

    def pullback(ct):
        ct_gate = pull(ct * value * (a < beta))[0]
        return ct_gate, ct * factor * (np.abs(up) < linear_beta), None, None
    return factor * value, pullback


@differentiable
def mlp(x, p, cfg):
    """Gated feed-forward: down(act(gate(x), up(x))), act by `cfg.hidden_act`.

    Args: x [..., d]; p, dict of gate_proj, up_proj [I, d] and down_proj [d, I]; cfg, with
        hidden_act ("situ" or "silu"), activation_situ_beta, activation_situ_linear_beta.
    Returns: y [..., d].
    Raises: ValueError for widths that do not agree or an unknown activation.
    Source: KimiMLP of the released code: the dense layer 0 and the shared experts.
    """
    check_shapes(x=(x, "... d"), gate_proj=(p["gate_proj"], "I d"),
                 up_proj=(p["up_proj"], "I d"), down_proj=(p["down_proj"], "d I"))
    check_floats(x=x, gate_proj=p["gate_proj"], up_proj=p["up_proj"], down_proj=p["down_proj"])
    gate, pull_gate = linear.vjp(x, p["gate_proj"])         # [..., d] -> [..., I]
    up, pull_up = linear.vjp(x, p["up_proj"])
    hidden, pull_act = activation(cfg)(gate, up)
    y, pull_down = linear.vjp(hidden, p["down_proj"])       # [..., I] -> [..., d]

    def pullback(ct):
        ct_hidden, ct_down_proj = pull_down(ct)
        ct_gate, ct_up = pull_act(ct_hidden)[:2]
        ct_x_up, ct_up_proj = pull_up(ct_up)
        ct_x_gate, ct_gate_proj = pull_gate(ct_gate)
        return (ct_x_gate + ct_x_up,
                {"gate_proj": ct_gate_proj, "up_proj": ct_up_proj, "down_proj": ct_down_proj},
                None)
    return y, pullback


def activation(cfg):
    """The gated activation that a config asks for, as a function (gate, up) -> (value, pullback).

    The pullback returns the cotangents of gate and up first.
    """
    if cfg.hidden_act == "situ":
        caps = cfg.activation_situ_beta, cfg.activation_situ_linear_beta
        return lambda gate, up: situ_glu.vjp(gate, up, *caps)
    if cfg.hidden_act == "silu":
        return swiglu.vjp
    raise ValueError(f"hidden_act={cfg.hidden_act!r}; known are 'situ' and 'silu'")


def _check_pair(gate, up):
    if np.shape(gate) != np.shape(up):
        raise ValueError(f"gate has shape {np.shape(gate)} and up {np.shape(up)}; "
                         "a gated unit multiplies them entry by entry: give one shape")


def _check_cap(name, cap):
    if cap is None or not 0 < cap < np.inf:
        raise ValueError(f"{name}={cap}; a cap must be a positive, finite number")
