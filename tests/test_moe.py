"""Stable LatentMoE: golden vectors, the loop twin, dropped tokens, lazy experts, wrong variants."""
import dataclasses

import numpy as np
import pytest
from helpers import check_grad, leaves, map_tree, rel
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.balance import auxiliary_loss, expert_loads, route
from k3np.config import K3Config
from k3np.moe import (
    Routing,
    feed_forward,
    latent_moe,
    mix_experts,
    mix_experts_loop,
    routed_moe,
    router,
)
from k3np.ops import linear, rms_norm, sigmoid
from k3np.situ import mlp, swiglu
from k3np.vectors import golden

CASES = ("latent_moe_0", "latent_moe_1", "latent_moe_2")     # tiny; 16 experts; without the norm
ROUTERS = ("router_0", "router_1", "router_2")               # K3's; 16 of 64; in groups, scaled
MIXES = (mix_experts, mix_experts_loop)
both = pytest.mark.parametrize("mix", MIXES, ids=lambda f: f.__name__)
seeds = st.integers(0, 2 ** 32 - 1)


def read(name):
    case = golden(name)
    return case, K3Config.from_json(case["meta"]["config"])


def config(**changes):
    return dataclasses.replace(K3Config.tiny(), **changes)


def parameters(cfg, rng, dtype=np.float64):
    """A random layer under the released names."""
    d, I, E = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_experts
    l = cfg.routed_expert_hidden_size or d

    def draw(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)
    p = {"gate": {"weight": draw(E, d), "e_score_correction_bias": 0.1 * draw(E)},
         "experts": {"w1": draw(E, I, l), "w3": draw(E, I, l), "w2": draw(E, l, I)}}
    if cfg.routed_expert_hidden_size:
        p["routed_expert_down_proj"], p["routed_expert_up_proj"] = draw(l, d), draw(d, l)
        if cfg.latent_moe_use_norm:
            p["routed_expert_norm"] = 1 + 0.1 * draw(l)
    if cfg.num_shared_experts:
        S = I * cfg.num_shared_experts
        p["shared_experts"] = {"gate_proj": draw(S, d), "up_proj": draw(S, d),
                               "down_proj": draw(d, S)}
    return p


def compare(got, want, tol):
    """Hold every gradient of a tree against its reference, the bias's zeros included."""
    if isinstance(want, dict):
        assert set(got) == set(want)
        for key in want:
            compare(got[key], want[key], tol)
    elif np.any(want):
        assert rel(got, want) < tol
    else:
        assert not np.any(got) and got.shape == want.shape


@pytest.mark.golden
@pytest.mark.grad
@both
@pytest.mark.parametrize("name", CASES)
def test_golden_layer(name, mix):
    case, cfg = read(name)
    y, pullback = latent_moe.vjp(case["x"], case["param"], cfg, mix)
    assert rel(y, case["y"]) < 1e-10
    ct_x, ct_p, *choices = pullback(case["ct_y"])
    assert choices == [None, None]
    assert rel(ct_x, case["grad_x"]) < 1e-10
    compare(ct_p, case["grad_param"], 1e-10)
    single = latent_moe(case["x"].astype(np.float32),
                        map_tree(lambda a: a.astype(np.float32), case["param"]), cfg, mix)
    assert single.dtype == np.float32 and rel(single, case["y"]) < 1e-5


@pytest.mark.golden
@pytest.mark.grad
@pytest.mark.parametrize("name", ROUTERS)
def test_golden_router(name):
    case, cfg = read(name)
    routing, pullback = router.vjp(case["x"], case["param"], cfg)
    order = np.argsort(routing.indices, axis=-1)             # the case lists experts by index
    indices = np.take_along_axis(routing.indices, order, -1)[0]
    assert np.array_equal(indices, case["topk_idx_sorted"])
    assert rel(np.take_along_axis(routing.weights, order, -1)[0],
               case["topk_weight_sorted"]) < 1e-10
    ct = np.empty_like(routing.weights)
    np.put_along_axis(ct, order, case["ct_topk_weight_sorted"][None], axis=-1)
    ct_x, ct_p, _ = pullback((None, ct, None))
    assert rel(ct_x, case["grad_x"]) < 1e-10
    assert rel(ct_p["weight"], case["grad_param"]["weight"]) < 1e-10
    assert not ct_p["e_score_correction_bias"].any()


def variant(x, p, cfg, norm="sum", weigh="scores", reads="x", act="situ", route_on="biased"):
    """The layer once more, each of its choices a switch: what a port may get wrong."""
    flat = x.reshape(-1, x.shape[-1])
    z = linear(flat, p["routed_expert_down_proj"])
    scores = sigmoid(linear(flat, p["gate"]["weight"]))
    bias = p["gate"]["e_score_correction_bias"]
    indices, weights = route(scores, bias if route_on == "biased" else 0 * bias,
                             cfg.num_experts_per_token)
    if weigh == "biased":
        weights = np.take_along_axis(scores + bias, indices, 1)
        weights = weights / weights.sum(axis=1, keepdims=True)
    if weigh == "not renormalised":
        weights = np.take_along_axis(scores, indices, 1)
    if weigh == "softmax":
        chosen = np.exp(np.take_along_axis(scores, indices, 1))
        weights = chosen / chosen.sum(axis=1, keepdims=True)
    u = np.zeros_like(z)
    for i in range(len(z)):
        for e, weight in zip(indices[i], weights[i]):
            w1, w3, w2 = (p["experts"][w][e] for w in ("w1", "w3", "w2"))
            if act == "exchanged":
                w1, w3 = w3, w1
            out = (swiglu(z[i] @ w1.T, z[i] @ w3.T) @ w2.T if act == "silu" else
                   mlp(z[i], {"gate_proj": w1, "up_proj": w3, "down_proj": w2}, cfg))
            if norm == "each":
                out = rms_norm(out, p["routed_expert_norm"], cfg.rms_norm_eps)
            u[i] += weight * out
    if norm == "sum":
        u = rms_norm(u, p["routed_expert_norm"], cfg.rms_norm_eps)
    y = linear(u, p["routed_expert_up_proj"])
    if norm == "after":
        y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + cfg.rms_norm_eps)
    shared = mlp(flat, p["shared_experts"], cfg)
    if reads == "gated":
        shared = shared * sigmoid(flat.mean(axis=-1, keepdims=True))
    return (y + shared if reads != "none" else y).reshape(x.shape)


@pytest.mark.traps
@pytest.mark.golden
@pytest.mark.parametrize("name", CASES[:2])
def test_golden_rejects_wrong_variants(name):
    case, cfg = read(name)
    x, p, y = case["x"], case["param"], case["y"]
    assert rel(variant(x, p, cfg), y) < 1e-10
    for choice in (dict(norm="each"), dict(norm="none"), dict(norm="after"), dict(weigh="biased"),
                   dict(weigh="softmax"), dict(act="silu"), dict(act="exchanged"),
                   dict(route_on="raw"), dict(reads="none"), dict(reads="gated")):
        assert rel(variant(x, p, cfg, **choice), y) > 1e-2, choice


@pytest.mark.traps
@pytest.mark.golden
def test_the_norm_all_but_hides_weights_that_were_not_renormalised():
    case, cfg = read("latent_moe_0")                         # only eps tells a common factor
    off = rel(variant(case["x"], case["param"], cfg, weigh="not renormalised"), case["y"])
    assert 1e-6 < off < 1e-4
    case, cfg = read("latent_moe_2")
    assert rel(variant(case["x"], case["param"], cfg, norm="none"), case["y"]) < 1e-10
    assert rel(variant(case["x"], case["param"], cfg, norm="none", weigh="not renormalised"),
               case["y"]) > 0.3


@pytest.mark.traps
@pytest.mark.golden
@pytest.mark.parametrize("name", ROUTERS[:2])
def test_golden_rejects_weights_from_biased_scores(name):
    case, cfg = read(name)
    p, k = case["param"], cfg.num_experts_per_token
    scores = sigmoid(linear(case["x"][0], p["weight"]))
    biased = scores + p["e_score_correction_bias"]
    indices = np.sort(np.argsort(-biased, axis=1)[:, :k], axis=1)
    assert np.array_equal(indices, case["topk_idx_sorted"])
    for source, right in ((scores, True), (biased, False)):
        chosen = np.take_along_axis(source, indices, 1)
        wrong = rel(chosen / chosen.sum(axis=1, keepdims=True), case["topk_weight_sorted"])
        assert wrong < 1e-10 if right else wrong > 1e-3
    unbiased = np.sort(np.argsort(-scores, axis=1)[:, :k], axis=1)
    assert not np.array_equal(unbiased, case["topk_idx_sorted"])


@pytest.mark.property
@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 20), st.integers(2, 9))
def test_grouped_equals_loop(seed, n, E):
    rng = np.random.default_rng(seed)
    cfg = config(num_experts=E, num_experts_per_token=int(rng.integers(1, E)))
    experts = parameters(cfg, rng)["experts"]
    z = rng.standard_normal((n, cfg.routed_expert_hidden_size))
    indices, weights = route(sigmoid(rng.standard_normal((n, E))), np.zeros(E),
                             cfg.num_experts_per_token)
    (u, pull), (u_loop, pull_loop) = (f.vjp(z, indices, weights, experts, cfg) for f in MIXES)
    assert rel(u, u_loop) < 1e-13
    ct = rng.standard_normal(u.shape)
    for got, want in zip(leaves(pull(ct)), leaves(pull_loop(ct)), strict=True):
        assert rel(got, want) < 1e-12


@pytest.mark.property
@both
def test_no_token_is_dropped_even_when_one_expert_gets_them_all(mix):
    rng = np.random.default_rng(0)
    cfg = config()
    p, x = parameters(cfg, rng), rng.standard_normal((3, 20, cfg.hidden_size))
    p["gate"]["e_score_correction_bias"] = np.array([9.0, 8, 0, 0, 0, 0, 0, 0])
    y, routing = routed_moe(x, p, cfg, mix)
    loads = expert_loads(routing.indices, cfg.num_experts)
    assert loads.tolist() == [60, 60, 0, 0, 0, 0, 0, 0]
    alone = np.stack([[latent_moe(token[None], p, cfg, mix)[0] for token in row] for row in x])
    assert rel(alone, y) < 1e-13                             # each token as if it were alone
    ones = {w: np.ones_like(m) for w, m in p["experts"].items()}
    u = mix(np.ones((60, cfg.routed_expert_hidden_size)), routing.indices.reshape(60, -1),
            routing.weights.reshape(60, -1), ones, cfg)
    assert rel(u, np.full_like(u, u[0, 0])) < 1e-13          # equal experts: weights sum to one


@pytest.mark.property
def test_permuting_experts_permutes_loads_and_leaves_the_output():
    rng = np.random.default_rng(1)
    cfg = config()
    p, x = parameters(cfg, rng), rng.standard_normal((2, 30, cfg.hidden_size))
    order = rng.permutation(cfg.num_experts)
    permuted = {**p, "gate": {key: a[order] for key, a in p["gate"].items()},
                "experts": {key: a[order] for key, a in p["experts"].items()}}
    (y, routing), (y_permuted, after) = routed_moe(x, p, cfg), routed_moe(x, permuted, cfg)
    assert rel(y_permuted, y) < 1e-13
    assert np.array_equal(expert_loads(after.indices, cfg.num_experts),
                          expert_loads(routing.indices, cfg.num_experts)[order])
    p["gate"]["e_score_correction_bias"] = p["gate"]["e_score_correction_bias"] + 0.25
    assert rel(latent_moe(x, p, cfg), y) < 1e-13             # a constant changes nothing


class Lazy:
    """A sequence of matrices made when asked for, as a checkpoint decodes them; it counts."""

    def __init__(self, stacked):
        self.stacked, self.asked = stacked, []

    def __getitem__(self, e):
        self.asked.append(int(e))
        return self.stacked[e]


@pytest.mark.property
def test_experts_may_be_decoded_lazily_and_only_those_chosen():
    rng = np.random.default_rng(2)
    cfg = config()
    p, x = parameters(cfg, rng), rng.standard_normal((1, 2, cfg.hidden_size))
    lazy = {name: Lazy(w) for name, w in p["experts"].items()}
    y, pull = latent_moe.vjp(x, {**p, "experts": lazy}, cfg)
    expected, pull_stacked = latent_moe.vjp(x, p, cfg)
    chosen = set(router(x, p["gate"], cfg).indices.reshape(-1).tolist())
    assert np.array_equal(y, expected)
    for w in lazy.values():
        assert sorted(w.asked) == sorted(chosen)             # each once
    for got, want in zip(leaves(pull(y)), leaves(pull_stacked(y)), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.property
def test_variants_by_configuration():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 64))
    full = config(routed_expert_hidden_size=None, latent_moe_use_norm=False, num_shared_experts=1,
                  hidden_act="silu", routed_scaling_factor=2.5)          # Kimi K2's kind
    p = parameters(full, rng)
    routing = router(x, p["gate"], full)
    expected = mlp(x, p["shared_experts"], full)
    for b, t in np.ndindex(2, 5):
        for e, weight in zip(routing.indices[b, t], routing.weights[b, t]):
            w1, w3, w2 = (p["experts"][w][e] for w in ("w1", "w3", "w2"))
            expected[b, t] += weight * swiglu(x[b, t] @ w1.T, x[b, t] @ w3.T) @ w2.T
    assert rel(latent_moe(x, p, full), expected) < 1e-13
    assert rel(routing.weights.sum(axis=-1), np.full((2, 5), 2.5)) < 1e-12
    alone = config(num_shared_experts=0)
    p = parameters(config(), rng)
    shared = mlp(x, p["shared_experts"], alone)
    assert rel(latent_moe(x, p, alone) + shared, latent_moe(x, p, config())) < 1e-13
    dense = {"gate_proj": rng.standard_normal((96, 64)), "up_proj": rng.standard_normal((96, 64)),
             "down_proj": rng.standard_normal((64, 96))}
    y, nothing = feed_forward(x, dense, config(), 0)
    assert nothing is None and np.array_equal(y, mlp(x, dense, config()))
    y, routing = feed_forward(x, p, config(), 1)
    assert np.array_equal(y, latent_moe(x, p, config())) and isinstance(routing, Routing)


@pytest.mark.property
def test_the_norm_hides_the_experts_size_and_the_router_does_not_see_the_latent():
    rng = np.random.default_rng(4)
    cfg = config(num_shared_experts=0, rms_norm_eps=1e-30, activation_situ_linear_beta=None)
    p, x = parameters(cfg, rng), rng.standard_normal((1, 6, cfg.hidden_size))
    y, routing = routed_moe(x, p, cfg)
    p["experts"]["w2"] = 1000 * p["experts"]["w2"]
    assert rel(latent_moe(x, p, cfg), y) < 1e-12
    p["routed_expert_down_proj"] = rng.standard_normal(p["routed_expert_down_proj"].shape)
    assert np.array_equal(routed_moe(x, p, cfg)[1].indices, routing.indices)


@pytest.mark.grad
def test_gradients():
    rng = np.random.default_rng(0)
    cfg = config(hidden_size=12, routed_expert_hidden_size=6, moe_intermediate_size=5,
                 num_experts=6, vision_config=None)
    x, p = rng.standard_normal((2, 4, 12)), parameters(cfg, rng)
    check_grad(router, x, p["gate"], cfg)
    check_grad(latent_moe, x, p, cfg)
    check_grad(latent_moe, x, p, cfg, mix_experts_loop)
    check_grad(routed_moe, x, p, cfg)
    check_grad(feed_forward, x, p, cfg, 1)
    check_grad(feed_forward, x, p["shared_experts"], cfg, 0)
    full = dataclasses.replace(cfg, routed_expert_hidden_size=None, num_shared_experts=0,
                               hidden_act="silu", routed_scaling_factor=2.5)
    check_grad(latent_moe, x, parameters(full, rng), full)
    z, routing = rng.standard_normal((8, 6)), router(x, p["gate"], cfg)
    indices, weights = routing.indices.reshape(8, -1), routing.weights.reshape(8, -1)
    for mix in MIXES:
        check_grad(mix, z, indices, weights, p["experts"], cfg)


@pytest.mark.grad
def test_an_auxiliary_loss_reaches_the_router_through_the_scores():
    rng = np.random.default_rng(5)
    cfg = config()
    p, x = parameters(cfg, rng), rng.standard_normal((2, 8, cfg.hidden_size))
    bias, k = p["gate"]["e_score_correction_bias"], cfg.num_experts_per_token

    def loss(weight):
        q = {**p, "gate": {**p["gate"], "weight": weight}}
        return float(auxiliary_loss(routed_moe(x, q, cfg)[1].scores, bias, k))
    (y, routing), pull = routed_moe.vjp(x, p, cfg)
    _, pull_loss = auxiliary_loss.vjp(routing.scores, bias, k)
    ct_p = pull((None, (None, None, pull_loss(1.0)[0])))[1]
    direction = rng.standard_normal(p["gate"]["weight"].shape)
    h = 1e-6
    numeric = (loss(p["gate"]["weight"] + h * direction)
               - loss(p["gate"]["weight"] - h * direction)) / (2 * h)
    assert abs(numeric - (ct_p["gate"]["weight"] * direction).sum()) < 1e-6 * abs(numeric)
    assert not ct_p["experts"]["w1"].any()


@pytest.mark.errors
def test_errors():
    rng = np.random.default_rng(0)
    cfg = config()
    p, x = parameters(cfg, rng), rng.standard_normal((2, 3, cfg.hidden_size))

    def refused(match, x=x, cfg=cfg, **changes):
        with pytest.raises(ValueError, match=match):
            latent_moe(x, {**p, **changes}, cfg)
    refused(r"routed_expert_down_proj has shape \(32, 64\); expected \[33, d\]",
            cfg=config(routed_expert_hidden_size=33))        # mismatched latent width
    refused(r"routed_expert_up_proj has shape \(64, 31\)",
            routed_expert_up_proj=p["routed_expert_up_proj"][:, :31])
    refused(r"routed_expert_norm has shape \(31,\)",
            routed_expert_norm=p["routed_expert_norm"][:31])
    refused(r"w1 has shape \(8, 32, 31\); expected \[8, I, 32\]",
            experts={**p["experts"], "w1": p["experts"]["w1"][:, :, :31]})
    refused(r"w2 has shape \(7, 32, 32\)", experts={**p["experts"], "w2": p["experts"]["w2"][:7]})
    refused(r"weight has shape \(7, 64\); expected \[8, d\]",
            gate={**p["gate"], "weight": p["gate"]["weight"][:7]})
    refused(r"e_score_correction_bias has shape \(7,\)",
            gate={**p["gate"], "e_score_correction_bias": np.zeros(7)})
    refused("there are no tokens", x=x[:, :0])
    refused("x holds NaN", x=np.where(x > 1, np.nan, x))
    refused("dtypes differ", x=x.astype(np.float32))
    with pytest.raises(ValueError, match="must be less than num_experts=8"):
        config(num_experts_per_token=8)
    lazy = {name: Lazy(w[:, :, :31] if name == "w1" else w) for name, w in p["experts"].items()}
    refused(r"gate_proj has shape \(32, 31\)", experts=lazy)


@pytest.mark.errors
@pytest.mark.parametrize("mix", [mix_experts, mix_experts_loop])
def test_choices_that_route_never_makes_are_refused(mix):
    rng = np.random.default_rng(0)
    cfg = config()
    z = rng.standard_normal((3, cfg.routed_expert_hidden_size))
    experts, weights = parameters(cfg, rng)["experts"], np.full((3, 2), 0.5)
    for indices, match in (([[0, 0], [1, 2], [2, 3]], "an expert twice"),
                           ([[0, 1], [1, 2], [2, cfg.num_experts]], "there are experts"),
                           ([[0, 1], [1, 2], [-1, 3]], "there are experts")):
        with pytest.raises(ValueError, match=match):
            mix(z, np.array(indices), weights, experts, cfg)


@pytest.mark.errors
def test_infinity_is_refused_before_a_sigmoid_hides_it():
    rng = np.random.default_rng(0)
    cfg = config()
    x = rng.standard_normal((2, 3, cfg.hidden_size))
    x[0, 0, 0] = np.inf
    with pytest.raises(ValueError, match="x holds NaN or infinity"):
        latent_moe(x, parameters(cfg, rng), cfg)
