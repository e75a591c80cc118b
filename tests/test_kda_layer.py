"""The KDA layer: released cases, streaming, padding, packing, Kimi Linear's variant, errors."""
import dataclasses

import numpy as np
import pytest
from helpers import check_grad, leaves, map_tree, rel

from k3np.attnres import attn_res
from k3np.config import K3Config
from k3np.kda import KDACache, init_kda_cache, kda_layer, kda_shapes
from k3np.ops import causal_conv, linear, rms_norm, sigmoid, silu
from k3np.situ import mlp
from k3np.vectors import golden

CASES = ["kda_layer_0", "kda_layer_1"]


def read(name):
    case = golden(name)
    return case, K3Config.from_json(case["meta"]["config"])


def tiny(**changes):
    cfg = K3Config.tiny()
    return dataclasses.replace(cfg, linear_attn_config=dataclasses.replace(
        cfg.linear_attn_config, **changes))


def draw(cfg, B=2, T=11, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    p = {name: rng.standard_normal(shape) / np.sqrt(shape[-1])
         for name, shape in kda_shapes(cfg).items()}
    return rng.standard_normal((B, T, cfg.hidden_size)).astype(dtype), map_tree(
        lambda a: a.astype(dtype), p)


def filled_cache(cfg, batch, seed=5):
    rng = np.random.default_rng(seed)
    return map_tree(lambda a: rng.standard_normal(a.shape),
                    init_kda_cache(cfg, batch, np.float64))


@pytest.mark.golden
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_the_released_layer(name):
    case, cfg = read(name)
    (y, _), pullback = kda_layer.vjp(case["x"], case["param"], cfg)
    ct_x, ct_p, *rest = pullback((case["ct_y"], None))
    assert rel(y, case["y"]) < 1e-10 and rel(ct_x, case["grad_x"]) < 1e-10
    assert set(ct_p) == set(case["param"]) and rest == [None] * 4
    for name, grad in case["grad_param"].items():
        assert rel(ct_p[name], grad) < 1e-10, name


@pytest.mark.golden
def test_float32_follows_the_released_layer():
    case, cfg = read("kda_layer_1")
    x, p = case["x"].astype(np.float32), map_tree(lambda a: a.astype(np.float32), case["param"])
    (y, cache), pullback = kda_layer.vjp(x, p, cfg)
    grads = pullback((y, cache))
    assert all(a.dtype == np.float32 for a in leaves([y, cache, grads]))
    assert rel(y, case["y"]) < 1e-5


@pytest.mark.golden
def test_padded_A_log_is_per_head():
    case, cfg = read("kda_layer_1")
    p = {**case["param"], "A_log": np.concatenate([case["param"]["A_log"], np.full(125, 7.0)])}
    (y, _), pullback = kda_layer.vjp(case["x"], p, cfg)
    assert rel(y, case["y"]) < 1e-10
    ct = pullback((case["ct_y"], None))[1]["A_log"]
    assert rel(ct[:3], case["grad_param"]["A_log"]) < 1e-10 and not ct[3:].any()


@pytest.mark.golden
def test_prefill_and_steps_of_the_released_layer():
    case, cfg = read("kda_layer_cache_0")
    x, p = case["x"], case["param"]
    y, cache = kda_layer(x[:, :13], p, cfg)
    assert rel(y, case["y"][:, :13]) < 1e-10
    # The released cache keeps the state as [B,H,V,K] and W inputs as [B,C,W].
    assert rel(cache.state.swapaxes(-1, -2), case["state_after_13"]) < 1e-10
    assert rel(cache.state, case["state_after_13"]) > 1e-2
    for n, conv in zip("qkv", cache):
        assert rel(conv, case[f"conv_{n}_after_13"][..., 1:].swapaxes(1, 2)) < 1e-10
    for t in range(13, 16):
        y, cache = kda_layer(x[:, t:t + 1], p, cfg, cache)
        assert rel(y, case["y"][:, t:t + 1]) < 1e-10
    assert rel(cache.state.swapaxes(-1, -2), case["state_after_16"]) < 1e-10


@pytest.mark.golden
def test_inside_a_released_decoder_layer():
    """Layer 0: the embedding opens a block, KDA reads its norm, the dense MLP reads a mixture."""
    case, cfg = read("decoder_layer_0")
    p, x = case["param"], case["prefix_sum_in"]
    unit, pull_norm = rms_norm.vjp(x, p["input_layernorm"], cfg.rms_norm_eps)
    (a, _), pull_kda = kda_layer.vjp(unit, p["self_attn"], cfg)
    mixed, pull_mix = attn_res.vjp([x, a], p["mlp_res_norm"], p["mlp_res_proj"], cfg.rms_norm_eps)
    unit2, pull_norm2 = rms_norm.vjp(mixed, p["post_attention_layernorm"], cfg.rms_norm_eps)
    m, pull_mlp = mlp.vjp(unit2, p["mlp"], cfg)
    assert rel(a + m, case["prefix_sum_out"]) < 1e-10
    assert rel(x.reshape(10, 1, -1), case["block_residual_out"]) < 1e-10
    ct = case["ct_prefix_sum_out"]
    (ct_x, ct_a), *_ = pull_mix(pull_norm2(pull_mlp(ct)[0])[0])
    ct_unit, ct_p, *_ = pull_kda((ct + ct_a, None))
    for name, grad in case["grad_param"]["self_attn"].items():
        assert rel(ct_p[name], grad) < 1e-10, name
    ct_x = ct_x + pull_norm(ct_unit)[0] + case["ct_block_residual_out"].reshape(x.shape)
    assert rel(ct_x, case["grad_prefix_sum_in"]) < 1e-10


VARIANTS = {"K3": tiny(), "Kimi Linear": tiny(gate_lower_bound=None, use_full_rank_gate=False),
            "no convolution": tiny(short_conv_kernel_size=1)}


@pytest.mark.grad
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients(name):
    cfg = VARIANTS[name]
    x, p = draw(cfg)
    check_grad(kda_layer, x, p, cfg)
    check_grad(kda_layer, x, p, cfg, filled_cache(cfg, 2))
    check_grad(kda_layer, x[:, :1], p, cfg, filled_cache(cfg, 2))
    mask = np.arange(11) >= np.array([[4], [0]])
    check_grad(kda_layer, x, p, cfg, None, mask)
    check_grad(kda_layer, x[:1], p, cfg, filled_cache(cfg, 3), None, np.array([0, 2, 3, 11]))


@pytest.mark.grad
def test_a_missing_cotangent_is_zero():
    cfg = tiny()
    x, p = draw(cfg)
    (y, cache), pullback = kda_layer.vjp(x, p, cfg)
    zeros = map_tree(np.zeros_like, cache)
    for a, b in zip(leaves(pullback((y, None))), leaves(pullback((y, zeros)))):
        assert rel(a, b) < 1e-14
    for a, b in zip(leaves(pullback((None, cache))), leaves(pullback((0 * y, cache)))):
        assert np.array_equal(a, b)


@pytest.mark.property
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("lengths", [[1] * 11, [7, 1, 1, 2], [2, 1, 8], [10, 1]])
def test_streaming_equals_the_whole(name, lengths):
    cfg = VARIANTS[name]
    x, p = draw(cfg)
    whole, end = kda_layer(x, p, cfg)
    cache, start, outputs = None, 0, []
    for n in lengths:
        y, cache = kda_layer(x[:, start:start + n], p, cfg, cache)
        outputs.append(y)
        start += n
    assert rel(np.concatenate(outputs, axis=1), whole) < 1e-12
    for a, b in zip(cache, end):
        assert a.shape == b.shape and (not a.size or rel(a, b) < 1e-12)


@pytest.mark.property
def test_streaming_gradients_equal_the_whole():
    """A cotangent that comes back through the cache carries what later tokens ask of earlier."""
    cfg = tiny()
    x, p = draw(cfg)
    ct = np.random.default_rng(1).standard_normal(x.shape)
    _, pullback = kda_layer.vjp(x, p, cfg)
    ct_x, ct_p, *_ = pullback((ct, None))
    (_, cache), pull_a = kda_layer.vjp(x[:, :6], p, cfg)
    _, pull_b = kda_layer.vjp(x[:, 6:], p, cfg, cache)
    b_x, b_p, _, b_cache, *_ = pull_b((ct[:, 6:], None))
    a_x, a_p, *_ = pull_a((ct[:, :6], b_cache))
    assert rel(np.concatenate([a_x, b_x], axis=1), ct_x) < 1e-12
    for name in p:
        assert rel(a_p[name] + b_p[name], ct_p[name]) < 1e-12, name


@pytest.mark.property
def test_causality():
    cfg = tiny()
    x, p = draw(cfg)
    y, _ = kda_layer(x, p, cfg)
    changed = x.copy()
    changed[:, 6:] += 1
    y2, _ = kda_layer(changed, p, cfg)
    assert np.allclose(y2[:, :6], y[:, :6], rtol=0, atol=1e-14)
    assert not np.allclose(y2[:, 6], y[:, 6])


@pytest.mark.property
def test_left_padding_does_not_leak():
    cfg = tiny()
    x, p = draw(cfg, B=3)
    pads = [4, 0, 10]
    mask = np.arange(11) >= np.array(pads)[:, None]
    (y, cache), pullback = kda_layer.vjp(x, p, cfg, None, mask)
    ct = np.random.default_rng(1).standard_normal(x.shape)
    ct_x, ct_p, *_ = pullback((ct, None))
    total = map_tree(np.zeros_like, p)
    for row, pad in enumerate(pads):
        (alone, end), pull = kda_layer.vjp(x[row:row + 1, pad:], p, cfg)
        assert rel(y[row:row + 1, pad:], alone) < 1e-12 and not y[row, :pad].any()
        assert all(rel(a[row:row + 1], b) < 1e-12 for a, b in zip(cache, end))
        alone_x, alone_p, *_ = pull((ct[row:row + 1, pad:], None))
        assert rel(ct_x[row:row + 1, pad:], alone_x) < 1e-12 and not ct_x[row, :pad].any()
        total = {name: total[name] + alone_p[name] for name in p}
    assert all(rel(ct_p[name], total[name]) < 1e-12 for name in p)
    assert np.array_equal(kda_layer(np.where(mask[..., None], x, np.nan), p, cfg, None, mask)[0], y)
    step = np.random.default_rng(2).standard_normal((3, 1, cfg.hidden_size))
    after, _ = kda_layer(step, p, cfg, cache)                   # and decoding goes on from there
    for row, pad in enumerate(pads):
        joined = np.concatenate([x[row:row + 1, pad:], step[row:row + 1]], axis=1)
        assert rel(after[row], kda_layer(joined, p, cfg)[0][0, -1:]) < 1e-12


@pytest.mark.property
def test_a_padded_prompt_may_arrive_in_pieces():
    cfg = tiny()
    x, p = draw(cfg)
    mask = np.arange(11) >= np.array([[5], [0]])
    whole, end = kda_layer(x, p, cfg, None, mask)
    y, cache = kda_layer(x[:, :3], p, cfg, None, mask[:, :3])
    y2, cache = kda_layer(x[:, 3:], p, cfg, cache, mask[:, 3:])
    assert rel(np.concatenate([y, y2], axis=1), whole) < 1e-12
    assert rel(cache.state, end.state) < 1e-12


@pytest.mark.property
def test_packed_documents_do_not_leak():
    cfg = tiny()
    x, p = draw(cfg, B=1, T=20)
    cuts = [0, 7, 8, 10, 20]
    before = filled_cache(cfg, 4)
    y, cache = kda_layer(x, p, cfg, before, None, cuts)
    for n, (start, stop) in enumerate(zip(cuts, cuts[1:])):
        alone, end = kda_layer(x[:, start:stop], p, cfg, KDACache(*(a[n:n + 1] for a in before)))
        assert rel(y[:, start:stop], alone) < 1e-12
        assert all(rel(a[n:n + 1], b) < 1e-12 for a, b in zip(cache, end))
    changed = x.copy()
    changed[:, :7] = 9
    y2, _ = kda_layer(changed, p, cfg, before, None, cuts)
    assert np.array_equal(y2[:, 7:], y[:, 7:])


def layer_again(case, cfg, **wrong):
    """The layer written again, token by token, with one thing wrong; nothing wrong: released."""
    p, x, eps = case["param"], case["x"], cfg.rms_norm_eps
    B, T, H, K = *x.shape[:2], cfg.linear_attn_config.num_heads, cfg.linear_attn_config.head_dim
    act = wrong.get("act", silu)
    taps = {n: p[f"{n}_conv1d"][..., ::wrong.get("taps", 1)] for n in "qkv"}
    q, k, v = (act(causal_conv(linear(x, p[f"{n}_proj"]), taps[n])).reshape(B, T, H, K)
               for n in "qkv")
    q, k = (wrong.get("norm", lambda a: a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6))(a)
            for a in (q, k))
    z = linear(linear(x, p["f_a_proj"]), p["f_b_proj"]).reshape(B, T, H, K)
    bias = p["dt_bias"].reshape(H, K)
    rate = np.exp(p["A_log"])[:, None]
    g = wrong.get("gate", lambda z, bias, rate: -5 * sigmoid(rate * (z + bias)))(z, bias, rate)
    beta = sigmoid(linear(x, p["b_proj"])) * wrong.get("beta", 1)
    S, o = np.zeros((B, H, K, K)), []
    for t in range(T):
        S = S * np.exp(g[:, t])[..., None]
        u = beta[:, t, :, None] * (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t][..., None] * u[:, :, None]
        o.append(np.einsum("bhk,bhkv->bhv", q[:, t], S) * wrong.get("scale", K ** -0.5))
    logit = linear(x, p["g_proj"]) if "g_proj" in p else \
        linear(linear(x, p["g_a_proj"]), p["g_b_proj"])
    o, gate = np.stack(o, axis=1), sigmoid(logit).reshape(B, T, H, K)
    finish = wrong.get("finish", lambda o, gate: rms_norm(o, p["o_norm"], eps) * gate)
    return linear(finish(o, gate).reshape(B, T, H * K), p["o_proj"])


def softplus_clamped(z, bias, rate):
    return np.maximum(-rate * np.log1p(np.exp(z + bias)), -5)


WRONG = {
    "trap 5: softplus, clamped": {"gate": softplus_clamped},
    "trap 5: the bias outside the rate": {"gate": lambda z, b, r: -5 * sigmoid(r * z + b)},
    "trap 5: no rate": {"gate": lambda z, b, r: -5 * sigmoid(z + b)},
    "trap 5: the rate by channel": {"gate": lambda z, b, r: -5 * sigmoid(
        np.resize(r[:, 0], z.shape[-1]) * (z + b))},
    "trap 6: gate before the norm": {"finish": lambda o, gate: o * gate / np.sqrt(
        ((o * gate) ** 2).mean(-1, keepdims=True) + 1e-5)},
    "trap 6: no norm": {"finish": lambda o, gate: o * gate},
    "trap 6: one norm over all heads": {"finish": lambda o, gate: o * gate / np.sqrt(
        (o ** 2).mean((-2, -1), keepdims=True) + 1e-5)},
    "trap 6: SiLU gate": {"finish": lambda o, gate: o * gate * np.log(gate / (1 - gate)) / np.sqrt(
        (o ** 2).mean(-1, keepdims=True) + 1e-5)},
    "trap 7: the query not scaled": {"scale": 1.0},
    "trap 11: eps on the mean": {"norm": lambda a: a / np.sqrt(a.shape[-1] * (
        (a * a).mean(-1, keepdims=True) + 1e-6))},
    "trap 11: eps 1e-5": {"norm": lambda a: a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-5)},
    "trap 11: o_norm with 1e-6": {"finish": lambda o, gate: o * gate / np.sqrt(
        (o ** 2).mean(-1, keepdims=True) + 1e-6)},
    "convolution without SiLU": {"act": lambda a: a},
    "taps the wrong way round": {"taps": -1},
    "beta doubled": {"beta": 2},
}


@pytest.mark.traps
@pytest.mark.parametrize("name", CASES)
def test_the_layer_written_again_is_right(name):
    case, cfg = read(name)
    assert rel(layer_again(case, cfg), case["y"]) < 1e-10


@pytest.mark.property
def test_kimi_linears_variant_follows_its_formulas():
    cfg = VARIANTS["Kimi Linear"]
    x, p = draw(cfg)
    y = layer_again({"x": x, "param": p}, cfg,
                    gate=lambda z, bias, rate: -rate * np.log1p(np.exp(z + bias)))
    assert rel(kda_layer(x, p, cfg)[0], y) < 1e-12
    p["A_log"] = p["A_log"].reshape(1, 1, -1, 1)                # as Kimi Linear stores it
    assert rel(kda_layer(x, p, cfg)[0], y) < 1e-12


@pytest.mark.traps
@pytest.mark.parametrize("trap", WRONG)
def test_wrong_layers_are_rejected(trap):
    case, cfg = read("kda_layer_1")
    wrong = WRONG[trap]
    if "finish" in wrong and trap != "trap 6: no norm":         # the weight belongs to the norm
        inner = wrong["finish"]
        wrong = {"finish": lambda o, gate: inner(o, gate) * case["param"]["o_norm"]}
    assert rel(layer_again(case, cfg, **wrong), case["y"]) > 1e-6


@pytest.mark.errors
def test_bad_caches():
    cfg = tiny()
    x, p = draw(cfg)
    good = init_kda_cache(cfg, 2, np.float64)
    bad = [({"kv": 1}, "cache is a dict; a KDA layer keeps a KDACache"),
           (tuple(good), "cache is a tuple"),
           (init_kda_cache(cfg, 3, np.float64), r"cache.conv_q has shape \(3, .* expected \[2, "),
           (good._replace(conv_k=np.zeros((2, 4, 32))), "cache.conv_k"),
           (good._replace(state=np.zeros((2, 2, 16, 8))), "cache.state"),
           (init_kda_cache(cfg, 2, np.float32), "dtypes differ: .* cache.conv_q float32")]
    for cache, message in bad:
        with pytest.raises(ValueError, match=message):
            kda_layer(x, p, cfg, cache)


@pytest.mark.errors
def test_bad_layer_arguments():
    cfg = tiny()
    x, p = draw(cfg)
    low = {k: v for k, v in p.items() if k != "g_proj"}
    for args, message in [
            ((x[:, :0], p, cfg), "no tokens"), ((x[..., 1:], p, cfg), "x has shape"),
            ((x[0], p, cfg), "x has shape"), ((x, low, cfg), "p lacks g_proj"),
            ((x, p, tiny(use_full_rank_gate=False)), "p lacks g_a_proj, g_b_proj"),
            ((x, {**p, "q_conv1d": p["q_conv1d"][..., 1:]}, cfg), "q_conv1d has shape"),
            ((x, {**p, "o_proj": p["o_proj"].T}, cfg), "o_proj has shape"),
            ((x, {**p, "A_log": p["A_log"][:1]}, cfg), "A_log has shape"),
            ((x.astype(np.float32), p, cfg), "dtypes differ"),
            ((x.astype(int), p, cfg), "x has dtype int")]:
        with pytest.raises(ValueError, match=message):
            kda_layer(*args)


@pytest.mark.errors
def test_bad_masks_and_boundaries():
    cfg = tiny()
    x, p = draw(cfg)
    ones = np.ones((2, 11), bool)
    right, hole = ones.copy(), ones.copy()
    right[0, -1], hole[0, 4] = False, False
    for mask, message in [(ones[:, 1:], "mask has shape"), (ones * 0.5, "of 0 .padding. and 1"),
                          (right, "padding belongs on the left"), (hole, "belongs on the left")]:
        with pytest.raises(ValueError, match=message):
            kda_layer(x, p, cfg, None, mask)
    with pytest.raises(ValueError, match="whose cache has begun"):
        kda_layer(x, p, cfg, filled_cache(cfg, 2), np.arange(11) >= np.array([[1], [0]]))
    for cuts in [[0, 5], [1, 11], [0, 5, 5, 11], [0, 7, 3, 11], [0.0, 11.0], [11], 11]:
        with pytest.raises(ValueError, match="cu_seqlens is .* climb from 0 to T=11"):
            kda_layer(x[:1], p, cfg, cu_seqlens=cuts)
    with pytest.raises(ValueError, match="one row without padding; x has 2 rows"):
        kda_layer(x, p, cfg, cu_seqlens=[0, 11])
    with pytest.raises(ValueError, match="and a mask"):
        kda_layer(x[:1], p, cfg, mask=ones[:1], cu_seqlens=[0, 11])
    with pytest.raises(ValueError, match=r"cache.conv_q has shape \(1, .* expected \[2, "):
        kda_layer(x[:1], p, cfg, init_kda_cache(cfg, 1, np.float64), cu_seqlens=[0, 5, 11])
