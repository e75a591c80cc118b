"""Gated MLA: released cases, both forms, streaming, forks, padding, packing, traps, errors."""
import dataclasses

import numpy as np
import pytest
from helpers import check_grad, leaves, map_tree, rel
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.config import K3Config
from k3np.kda import init_kda_cache
from k3np.mla import (
    MLACache,
    append_entries,
    init_mla_cache,
    mla_layer,
    mla_shapes,
    prefer_absorbed,
)
from k3np.ops import linear, rms_norm, sigmoid
from k3np.vectors import golden

CASES = ["mla_0", "mla_1"]
FORMS = [None, True, False]
VARIANTS = {"K3": K3Config.tiny(), "Kimi Linear": dataclasses.replace(
    K3Config.tiny(), q_lora_rank=None, mla_use_output_gate=False)}


def read(name):
    case = golden(name)
    return case, K3Config.from_json(case["meta"]["config"])


def draw(cfg, B=2, T=11, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    p = {name: rng.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1
         else 1 + 0.1 * rng.standard_normal(shape) for name, shape in mla_shapes(cfg).items()}
    return rng.standard_normal((B, T, cfg.hidden_size)).astype(dtype), map_tree(
        lambda a: a.astype(dtype), p)


def filled_cache(cfg, batch, S=5, pad=None, seed=5):
    entries = np.random.default_rng(seed).standard_normal(
        (batch, S, cfg.kv_lora_rank + cfg.qk_rope_head_dim))
    return MLACache(entries, None if pad is None else np.array(pad))


@pytest.mark.golden
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("absorbed", FORMS)
def test_values_and_gradients_of_the_released_layer(name, absorbed):
    case, cfg = read(name)
    (y, _), pullback = mla_layer.vjp(case["x"], case["param"], cfg, None, absorbed)
    ct_x, ct_p, *rest = pullback((case["ct_y"], None))
    assert rel(y, case["y"]) < 1e-10 and rel(ct_x, case["grad_x"]) < 1e-10
    assert set(ct_p) == set(case["param"]) and rest == [None] * 5
    for name, grad in case["grad_param"].items():
        assert rel(ct_p[name], grad) < 1e-10, name


@pytest.mark.golden
@pytest.mark.parametrize("absorbed", FORMS)
def test_float32_follows_the_released_layer(absorbed):
    case, cfg = read("mla_1")
    x, p = case["x"].astype(np.float32), map_tree(lambda a: a.astype(np.float32), case["param"])
    (y, cache), pullback = mla_layer.vjp(x, p, cfg, None, absorbed)
    grads = pullback((y, cache))
    assert all(a.dtype == np.float32 for a in leaves([y, cache.entries, grads]))
    assert rel(y, case["y"]) < 1e-5


@pytest.mark.golden
@pytest.mark.parametrize("absorbed", FORMS)
def test_the_released_layer_token_by_token(absorbed):
    case, cfg = read("mla_1")
    cache, outputs = None, []
    for t in range(case["x"].shape[1]):
        y, cache = mla_layer(case["x"][:, t:t + 1], case["param"], cfg, cache, absorbed)
        outputs.append(y)
    assert rel(np.concatenate(outputs, axis=1), case["y"]) < 1e-10
    assert cache.entries.shape[2] == cfg.kv_lora_rank + cfg.qk_rope_head_dim
    assert cache.length == case["x"].shape[1]


@pytest.mark.grad
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("absorbed", [True, False])
def test_gradients(name, absorbed):
    cfg = VARIANTS[name]
    x, p = draw(cfg)
    check_grad(mla_layer, x, p, cfg, None, absorbed)
    check_grad(mla_layer, x, p, cfg, filled_cache(cfg, 2), absorbed)
    check_grad(mla_layer, x[:, :1], p, cfg, filled_cache(cfg, 2, pad=[2, 0]), absorbed)
    mask = np.arange(11) >= np.array([[4], [0]])
    check_grad(mla_layer, x, p, cfg, None, absorbed, mask)
    packed = x[:1], p, cfg, filled_cache(cfg, 3, pad=[0, 5, 2]), absorbed, None, [0, 2, 3, 11]
    check_grad(mla_layer, *packed)


@pytest.mark.grad
def test_gradients_with_spare_room():
    """A cache that has been appended to gives the gradients of one that has not."""
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    _, cache = mla_layer(x[:, :6], p, cfg)
    _, cache = mla_layer(x[:, 6:8], p, cfg, cache)
    assert cache.room is not None
    check_grad(mla_layer, x[:, 8:], p, cfg, cache)
    plain = MLACache(cache.entries.copy())
    (_, after), pullback = mla_layer.vjp(x[:, 8:], p, cfg, cache)
    (_, after2), pullback2 = mla_layer.vjp(x[:, 8:], p, cfg, plain)
    ct = (x[:, 8:], MLACache(after2.entries))
    for a, b in zip(leaves(pullback(ct)), leaves(pullback2(ct))):
        assert rel(a, b) < 1e-12


@pytest.mark.grad
def test_a_missing_cotangent_is_zero():
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    (y, cache), pullback = mla_layer.vjp(x, p, cfg)
    zeros = MLACache(np.zeros_like(cache.entries))
    for a, b in zip(leaves(pullback((y, None))), leaves(pullback((y, zeros)))):
        assert rel(a, b) < 1e-14
    for a, b in zip(leaves(pullback((None, cache))), leaves(pullback((0 * y, cache)))):
        assert np.array_equal(a, b)


@pytest.mark.property
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(VARIANTS)), st.integers(0, 6), st.integers(1, 9), st.integers(0, 99))
def test_absorbed_equals_expanded(name, past, T, seed):
    cfg = VARIANTS[name]
    x, p = draw(cfg, T=T, seed=seed)
    cache = filled_cache(cfg, 2, past, seed=seed)
    (y, after), pull = mla_layer.vjp(x, p, cfg, cache, True)
    (y2, after2), pull2 = mla_layer.vjp(x, p, cfg, cache, False)
    assert rel(y, y2) < 1e-12 and np.array_equal(after.entries, after2.entries)
    ct = (np.random.default_rng(seed).standard_normal(y.shape), None)
    for a, b in zip(leaves(pull(ct)), leaves(pull2(ct))):
        assert np.abs(a - b).max(initial=0) < 1e-11 * (1 + np.abs(b).max(initial=0))


@pytest.mark.property
def test_the_choice_of_form_counts_multiplications():
    released = K3Config.released()
    assert not prefer_absorbed(8192, 8192, released)            # a prompt from the start
    assert prefer_absorbed(1, 16384, released)                  # a step
    assert prefer_absorbed(8, 16384, released)                  # a few drafted tokens
    assert not prefer_absorbed(512, 16384, released)            # a long piece of a prompt
    assert not prefer_absorbed(1, 1, released)


@pytest.mark.property
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("absorbed", FORMS)
@pytest.mark.parametrize("lengths", [[1] * 11, [7, 1, 1, 2], [2, 1, 8], [10, 1]])
def test_streaming_equals_the_whole(name, absorbed, lengths):
    cfg = VARIANTS[name]
    x, p = draw(cfg)
    whole, end = mla_layer(x, p, cfg)
    cache, start, outputs = None, 0, []
    for n in lengths:
        y, cache = mla_layer(x[:, start:start + n], p, cfg, cache, absorbed)
        outputs.append(y)
        start += n
    assert rel(np.concatenate(outputs, axis=1), whole) < 1e-12
    assert rel(cache.entries, end.entries) < 1e-12 and cache.pad is None


@pytest.mark.property
def test_streaming_gradients_equal_the_whole():
    """A cotangent that comes back through the cache carries what later tokens ask of earlier."""
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    ct = np.random.default_rng(1).standard_normal(x.shape)
    ct_x, ct_p, *_ = mla_layer.vjp(x, p, cfg)[1]((ct, None))
    (_, cache), pull_a = mla_layer.vjp(x[:, :6], p, cfg)
    _, pull_b = mla_layer.vjp(x[:, 6:], p, cfg, cache)
    b_x, b_p, _, b_cache, *_ = pull_b((ct[:, 6:], None))
    a_x, a_p, *_ = pull_a((ct[:, :6], b_cache))
    assert rel(np.concatenate([a_x, b_x], axis=1), ct_x) < 1e-12
    for name in p:
        assert rel(a_p[name] + b_p[name], ct_p[name]) < 1e-12, name


@pytest.mark.property
def test_causality():
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    y, _ = mla_layer(x, p, cfg)
    changed = x.copy()
    changed[:, 6:] += 1
    y2, _ = mla_layer(changed, p, cfg)
    assert np.allclose(y2[:, :6], y[:, :6], rtol=0, atol=1e-14)
    assert not np.allclose(y2[:, 6], y[:, 6])


@pytest.mark.property
@pytest.mark.parametrize("absorbed", FORMS)
def test_without_positions_the_order_of_the_past_does_not_matter(absorbed):
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    y, _ = mla_layer(x, p, cfg, None, absorbed)
    order = np.append(np.random.default_rng(0).permutation(10), 10)
    y2, _ = mla_layer(x[:, order], p, cfg, None, absorbed)
    assert rel(y2[:, -1], y[:, -1]) < 1e-12


@pytest.mark.property
def test_heads_may_change_places():
    cfg = VARIANTS["K3"]
    H = cfg.num_attention_heads
    x, p = draw(cfg)
    order = np.random.default_rng(3).permutation(H)

    def rows(w):
        return w.reshape(H, -1, w.shape[1])[order].reshape(w.shape)
    moved = {**p, "q_b_proj": rows(p["q_b_proj"]), "kv_b_proj": rows(p["kv_b_proj"]),
             "g_proj": rows(p["g_proj"]), "o_proj": rows(p["o_proj"].T).T}
    assert rel(mla_layer(x, moved, cfg)[0], mla_layer(x, p, cfg)[0]) < 1e-12
    unmoved = {**moved, "g_proj": p["g_proj"]}
    assert rel(mla_layer(x, unmoved, cfg)[0], mla_layer(x, p, cfg)[0]) > 1e-2


@pytest.mark.property
def test_a_forked_conversation_does_not_disturb_the_other():
    cfg = VARIANTS["K3"]
    x, p = draw(cfg, T=40)
    _, cache = mla_layer(x[:, :10], p, cfg)
    kept = []
    for t in range(10, 30):                                     # grows through several rooms
        _, cache = mla_layer(x[:, t:t + 1], p, cfg, cache)
        kept.append((t + 1, cache, cache.entries.copy()))
    rng = np.random.default_rng(0)
    for stop, old, _ in kept:
        other = rng.standard_normal((2, 3, cfg.hidden_size))
        y, forked = mla_layer(other, p, cfg, old)
        joined = np.concatenate([x[:, :stop], other], axis=1)
        assert rel(y, mla_layer(joined, p, cfg)[0][:, -3:]) < 1e-12
        _, twice = mla_layer(other[:, :1], p, cfg, forked)
        assert twice.length == stop + 4
        y2, _ = mla_layer(other, p, cfg, old)                   # the same call, the same answer
        assert np.array_equal(y, y2)
    for _, old, entries in kept:
        assert np.array_equal(old.entries, entries)
    y, _ = mla_layer(x[:, 30:], p, cfg, cache)
    assert rel(y, mla_layer(x, p, cfg)[0][:, 30:]) < 1e-12


@pytest.mark.property
def test_appending_copies_seldom_and_only_its_own():
    cache = MLACache(np.zeros((1, 8, 3)))
    buffers, caches = [], [cache]
    for t in range(1000):
        cache = append_entries(cache, np.full((1, 1, 3), t + 1.0))
        caches.append(cache)
        if not buffers or cache.entries.base is not buffers[-1]:
            buffers.append(cache.entries.base)
    assert len(buffers) <= 6                                    # 64, 130, 262, ...
    assert np.array_equal(caches[-1].entries[0, 8:, 0], np.arange(1, 1001))
    last = caches[-1].entries
    for window in (caches[500].entries, last[:, ::-1], last[:, 1:], last[:, :-1]):
        grown = append_entries(caches[-1]._replace(entries=window), np.full((1, 1, 3), -1.0))
        assert np.array_equal(grown.entries[:, :-1], window) and grown.entries[0, -1, 0] == -1
    assert np.array_equal(last[0, 8:, 0], np.arange(1, 1001))


@pytest.mark.property
@pytest.mark.parametrize("absorbed", FORMS)
def test_left_padding_does_not_leak(absorbed):
    cfg = VARIANTS["K3"]
    x, p = draw(cfg, B=3)
    pads = [4, 0, 10]
    mask = np.arange(11) >= np.array(pads)[:, None]
    (y, cache), pullback = mla_layer.vjp(x, p, cfg, None, absorbed, mask)
    assert cache.pad.tolist() == pads
    ct = np.random.default_rng(1).standard_normal(x.shape)
    ct_x, ct_p, *_ = pullback((ct, None))
    total = map_tree(np.zeros_like, p)
    for row, pad in enumerate(pads):
        (alone, end), pull = mla_layer.vjp(x[row:row + 1, pad:], p, cfg)
        assert rel(y[row:row + 1, pad:], alone) < 1e-12 and not y[row, :pad].any()
        assert rel(cache.entries[row:row + 1, pad:], end.entries) < 1e-12
        alone_x, alone_p, *_ = pull((ct[row:row + 1, pad:], None))
        assert rel(ct_x[row:row + 1, pad:], alone_x) < 1e-12 and not ct_x[row, :pad].any()
        total = {name: total[name] + alone_p[name] for name in p}
    assert all(rel(ct_p[name], total[name]) < 1e-12 for name in p)
    dirty = np.where(mask[..., None], x, np.nan)
    assert np.array_equal(mla_layer(dirty, p, cfg, None, absorbed, mask)[0], y)
    step = np.random.default_rng(2).standard_normal((3, 2, cfg.hidden_size))
    for t in range(2):                                          # and decoding goes on from there
        after, cache = mla_layer(step[:, t:t + 1], p, cfg, cache, absorbed)
        for row, pad in enumerate(pads):
            joined = np.concatenate([x[row:row + 1, pad:], step[row:row + 1, :t + 1]], axis=1)
            assert rel(after[row], mla_layer(joined, p, cfg)[0][0, -1:]) < 1e-12


@pytest.mark.property
def test_a_padded_prompt_may_arrive_in_pieces():
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    mask = np.arange(11) >= np.array([[5], [0]])
    whole, end = mla_layer(x, p, cfg, None, None, mask)
    y, cache = mla_layer(x[:, :3], p, cfg, None, None, mask[:, :3])
    y2, cache = mla_layer(x[:, 3:], p, cfg, cache, None, mask[:, 3:])
    assert rel(np.concatenate([y, y2], axis=1), whole) < 1e-12
    assert rel(cache.entries, end.entries) < 1e-12 and cache.pad.tolist() == end.pad.tolist()


@pytest.mark.property
@pytest.mark.parametrize("absorbed", FORMS)
def test_packed_documents_do_not_leak(absorbed):
    cfg = VARIANTS["K3"]
    x, p = draw(cfg, B=1, T=20)
    cuts = [0, 7, 8, 10, 20]
    before = filled_cache(cfg, 4, 6, pad=[0, 6, 2, 1])
    y, cache = mla_layer(x, p, cfg, before, absorbed, None, cuts)
    for n, (start, stop) in enumerate(zip(cuts, cuts[1:])):
        past = MLACache(before.entries[n:n + 1, before.pad[n]:])
        alone, end = mla_layer(x[:, start:stop], p, cfg, past)
        assert rel(y[:, start:stop], alone) < 1e-12
        assert rel(cache.entries[n:n + 1, cache.pad[n]:], end.entries) < 1e-12
    changed = x.copy()
    changed[:, :7] = 9
    y2, _ = mla_layer(changed, p, cfg, before, absorbed, None, cuts)
    assert np.array_equal(y2[:, 7:], y[:, 7:])
    step = np.random.default_rng(2).standard_normal((4, 1, cfg.hidden_size))
    after, _ = mla_layer(step, p, cfg, cache, absorbed)         # each goes on as a row of its own
    for n, (start, stop) in enumerate(zip(cuts, cuts[1:])):
        past = MLACache(before.entries[n:n + 1, before.pad[n]:])
        joined = np.concatenate([x[:, start:stop], step[n:n + 1]], axis=1)
        assert rel(after[n:n + 1], mla_layer(joined, p, cfg, past)[0][:, -1:]) < 1e-12


def layer_again(x, p, cfg, **wrong):
    """The layer written again, one head and query at a time, with one thing wrong; or released."""
    H, R, K, P, V = (cfg.num_attention_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim,
                     cfg.qk_rope_head_dim, cfg.v_head_dim)
    B, T, eps = *x.shape[:2], wrong.get("eps", 1e-6)
    if "q_proj" in p:
        q = linear(x, p["q_proj"])
    else:
        q = linear(rms_norm(linear(x, p["q_a_proj"]), p["q_a_layernorm"], eps), p["q_b_proj"])
    q = q.reshape(B, T, H, K + P)
    c = linear(x, p["kv_a_proj_with_mqa"])
    latent, shared = rms_norm(c[..., :R], p["kv_a_layernorm"], eps), c[..., R:]
    rotate = wrong.get("rotate", lambda a: a)
    q = np.concatenate([q[..., :K], rotate(q[..., K:])], axis=-1)
    shared = rotate(wrong.get("shared", lambda a: a)(shared)[:, :, None])[:, :, 0]
    kv = linear(latent, p["kv_b_proj"])
    if wrong.get("split") == "keys, then values":
        k, v = kv[..., :H * K].reshape(B, T, H, K), kv[..., H * K:].reshape(B, T, H, V)
    else:
        kv = kv.reshape(B, T, H, K + V)
        k, v = kv[..., :K], kv[..., K:]
    o = np.zeros((B, T, H, V))
    for b, t, h in np.ndindex(B, T, H):
        keys = np.concatenate([k[b, :t + 1, h], shared[b, :t + 1]], axis=1)
        if wrong.get("slots") == "left out":
            keys = np.concatenate([k[b, :t + 1, h], 0 * shared[b, :t + 1]], axis=1)
        scores = keys @ q[b, t, h] * wrong.get("scale", (K + P) ** -0.5)
        weights = np.exp(scores - scores.max())
        o[b, t, h] = weights / weights.sum() @ v[b, :t + 1, h]
    gate = sigmoid(linear(x, p["g_proj"])).reshape(B, T, H, V) if "g_proj" in p else 1
    o = wrong.get("finish", lambda o, gate: o * gate)(o, gate)
    return linear(o.reshape(B, T, H * V), p["o_proj"])


def rope(a, theta=10000.0):
    """Rotary positions on [B,T,.,P], halves turned against each other."""
    half = a.shape[-1] // 2
    angle = np.arange(a.shape[1])[:, None, None] * theta ** (-np.arange(half) / half)
    x, y = a[..., :half], a[..., half:]
    return np.concatenate([x * np.cos(angle) - y * np.sin(angle),
                           x * np.sin(angle) + y * np.cos(angle)], axis=-1)


def rope_in_pairs(a):
    turned = rope(np.concatenate([a[..., ::2], a[..., 1::2]], axis=-1))
    return np.stack(np.split(turned, 2, axis=-1), axis=-1).reshape(a.shape)


WRONG = {
    "trap 1: slots rotated, in halves": {"rotate": rope},
    "trap 1: slots rotated, in pairs": {"rotate": rope_in_pairs},
    "trap 1: slots left out": {"slots": "left out"},
    "trap 1: scale of the first part only": {"scale": 8 ** -0.5},
    "trap 1: no scale": {"scale": 1.0},
    "trap 1: shared key normalised": {"shared": lambda a: a / np.sqrt(
        (a * a).mean(-1, keepdims=True) + 1e-6)},
    "trap 6: a norm before the gate": {"finish": lambda o, gate: gate * o / np.sqrt(
        (o * o).mean(-1, keepdims=True) + 1e-5)},
    "trap 6: no gate": {"finish": lambda o, gate: o},
    "trap 6: SiLU gate": {"finish": lambda o, gate: o * gate * np.log(gate / (1 - gate))},
    "trap 11: eps 1e-5 in the latent norms": {"eps": 1e-5},
    "all keys before all values": {"split": "keys, then values"},
}


@pytest.mark.traps
@pytest.mark.parametrize("name", CASES)
def test_the_layer_written_again_is_right(name):
    case, cfg = read(name)
    assert rel(layer_again(case["x"], case["param"], cfg), case["y"]) < 1e-10


@pytest.mark.property
def test_kimi_linears_variant_follows_its_formulas():
    cfg = VARIANTS["Kimi Linear"]
    x, p = draw(cfg)
    assert set(p) == {"q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    assert rel(mla_layer(x, p, cfg)[0], layer_again(x, p, cfg)) < 1e-12


@pytest.mark.traps
@pytest.mark.parametrize("trap", WRONG)
def test_wrong_layers_are_rejected(trap):
    case, cfg = read("mla_1")
    assert rel(layer_again(case["x"], case["param"], cfg, **WRONG[trap]), case["y"]) > 1e-6


@pytest.mark.errors
def test_bad_caches():
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    good = filled_cache(cfg, 2)
    bad = [(init_kda_cache(cfg, 2, np.float64), "a KDACache; an MLA layer keeps an MLACache: make"),
           ({"kv": 1}, "cache is a dict"),
           (filled_cache(cfg, 3), r"cache.entries has shape \(3, 5, 24\); expected \[2, S, 24\]"),
           (good._replace(entries=good.entries[..., 1:]), r"cache.entries has shape \(2, 5, 23\)"),
           (good._replace(entries=good.entries.astype(np.float32)),
            "dtypes differ: x float64, cache.entries float32"),
           (good._replace(pad=np.array([-1, 0])), r"cache.pad is \[-1, 0\]; expected for each of"),
           (good._replace(pad=np.array([6, 0])), "its 5 entries are padding"),
           (good._replace(pad=np.array([0])), "for each of 2 rows")]
    for cache, message in bad:
        with pytest.raises(ValueError, match=message):
            mla_layer(x, p, cfg, cache)
    assert init_mla_cache(cfg, 2, np.float64).entries.shape == (2, 0, 24)


@pytest.mark.errors
def test_bad_layer_arguments():
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    no_gate = {k: v for k, v in p.items() if k != "g_proj"}
    for args, message in [
            ((x[:, :0], p, cfg), "no tokens"), ((x[..., 1:], p, cfg), "x has shape"),
            ((x[0], p, cfg), "x has shape"), ((x, no_gate, cfg), "p lacks g_proj"),
            ((x, p, VARIANTS["Kimi Linear"]), "p lacks q_proj"),
            ((x, {**p, "kv_b_proj": p["kv_b_proj"][1:]}, cfg), "kv_b_proj has shape"),
            ((x, {**p, "o_proj": p["o_proj"].T[1:]}, cfg), "o_proj has shape"),
            ((x, p, cfg, None, "decode"), "absorbed is 'decode'; expected True, False, or None"),
            ((x.astype(np.float32), p, cfg), "dtypes differ"),
            ((x.astype(int), p, cfg), "x has dtype int")]:
        with pytest.raises(ValueError, match=message):
            mla_layer(*args)


@pytest.mark.errors
def test_bad_masks_and_boundaries():
    cfg = VARIANTS["K3"]
    x, p = draw(cfg)
    ones = np.ones((2, 11), bool)
    right, hole = ones.copy(), ones.copy()
    right[0, -1], hole[0, 4] = False, False
    for mask, message in [(ones[:, 1:], "mask has shape"), (ones * 0.5, "of 0 .padding. and 1"),
                          (right, "padding belongs on the left"), (hole, "belongs on the left")]:
        with pytest.raises(ValueError, match=message):
            mla_layer(x, p, cfg, None, None, mask)
    late = np.arange(11) >= np.array([[1], [0]])
    with pytest.raises(ValueError, match="whose cache has begun"):
        mla_layer(x, p, cfg, filled_cache(cfg, 2), None, late)
    for cuts in [[0, 5], [1, 11], [-1, 11], [0, 5, 5, 11], [0, 7, 3, 11], [0.0, 11.0], 11]:
        with pytest.raises(ValueError, match="cu_seqlens is .* climb from 0 to T=11"):
            mla_layer(x[:1], p, cfg, cu_seqlens=cuts)
    with pytest.raises(ValueError, match="one row without padding; x has 2 rows"):
        mla_layer(x, p, cfg, cu_seqlens=[0, 11])
    with pytest.raises(ValueError, match="and a mask"):
        mla_layer(x[:1], p, cfg, mask=ones[:1], cu_seqlens=[0, 11])
    with pytest.raises(ValueError, match=r"cache.entries has shape \(1, .* expected \[2, "):
        mla_layer(x[:1], p, cfg, filled_cache(cfg, 1), cu_seqlens=[0, 5, 11])
