"""Attention Residuals: golden vectors, the three forms, two phases, pullbacks, costs by count."""
import numpy as np
import pytest
from helpers import check_grad, dot, rel
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np import attnres
from k3np.attnres import Depth, add, attn_res, begin_block, depth_weights, mix, plus, start
from k3np.ops import linear, rms_norm, silu, softmax
from k3np.vectors import golden

CASES = ("attnres_0", "attnres_1", "attnres_2")             # 1, 3 and 9 sources
FORMS = {"residual": None, "full": 1, "block": 4}


def read(name):
    case = golden(name)
    n = sum(key.startswith("source_") for key in case)
    return case, [case[f"source_{i}"] for i in range(n)], case["meta"]["rms_eps"]


def random_sources(rng, n=3, d=5, shape=(2, 3)):
    return [rng.standard_normal((*shape, d)) * 3.0 ** rng.integers(-2, 3) for _ in range(n)]


@pytest.mark.golden
@pytest.mark.grad
@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case, sources, eps = read(name)
    args = sources, case["rms_weight"], case["query"], eps
    h, pullback = attn_res.vjp(*args)
    assert rel(h, case["o"]) < 1e-10
    assert rel(depth_weights(*args), case["weights"]) < 1e-10
    ct_sources, ct_norm, ct_query, choice = pullback(case["ct_o"])
    assert choice is None
    for i, ct in enumerate(ct_sources):
        assert rel(ct, case[f"grad_source_{i}"]) < 1e-10
    for ct, reference in ((ct_norm, case["grad_rms_weight"]), (ct_query, case["grad_query"])):
        assert np.abs(ct - reference).max() <= 1e-10 * max(np.abs(reference).max(), 1)


def wrong(sources, norm_weight, query, eps, scale=1.0, normalise_keys=True, mix_keys=False):
    keys = [rms_norm(v, norm_weight, eps) if normalise_keys else v * norm_weight for v in sources]
    p = softmax(np.stack([k @ query for k in keys]) * scale, axis=0)
    return sum(p_i[..., None] * v for p_i, v in zip(p, keys if mix_keys else sources))


@pytest.mark.traps
@pytest.mark.golden
@pytest.mark.parametrize("name", CASES[1:])
def test_golden_rejects_the_fluent_variants(name):
    case, sources, eps = read(name)
    args = sources, case["rms_weight"], case["query"], eps
    assert rel(wrong(*args), case["o"]) < 1e-10                 # the slow twin, keys first
    d = case["query"].size
    for variant in ({"mix_keys": True}, {"scale": d ** -0.5}, {"normalise_keys": False}):
        assert rel(wrong(*args, **variant), case["o"]) > 1e-2, variant
    recent_first = attn_res(sources[::-1], *args[1:])           # order alone does not matter
    assert rel(recent_first, case["o"]) < 1e-10
    assert rel(sum(sources), case["o"]) > 1e-2                  # an ordinary residual sum


@pytest.mark.property
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2 ** 32), st.floats(0, 30))
def test_a_mixture_over_depth(n, seed, sharpness):
    rng = np.random.default_rng(seed)
    sources = random_sources(rng, n)
    g, w = rng.uniform(0.5, 1.5, 5), sharpness * rng.standard_normal(5)
    p = depth_weights(sources, g, w)
    assert p.shape == (n, 2, 3) and (p >= 0).all()
    assert np.abs(p.sum(axis=0) - 1).max() < 1e-14
    h = attn_res(sources, g, w)
    low, high = np.min(sources, axis=0), np.max(sources, axis=0)
    slack = 1e-12 * np.abs(sources).max()
    assert (h >= low - slack).all() and (h <= high + slack).all()       # a convex combination
    order = rng.permutation(n)
    shuffled = attn_res([sources[i] for i in order], g, w)
    assert np.abs(shuffled - h).max() <= slack
    assert np.abs(depth_weights([sources[i] for i in order], g, w) - p[order]).max() < 1e-13


@pytest.mark.property
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2 ** 32))
def test_single_source_and_zero_query(seed):
    rng = np.random.default_rng(seed)
    sources = random_sources(rng, 4)
    g, w = rng.standard_normal(5), rng.standard_normal(5)
    h, pullback = attn_res.vjp(sources[:1], g, w)
    assert np.array_equal(h, sources[0])
    ct = rng.standard_normal(h.shape)
    (ct_source,), ct_g, ct_w, _ = pullback(ct)
    assert np.array_equal(ct_source, ct) and not ct_g.any() and not ct_w.any()
    assert rel(attn_res(sources, g, 0 * w), np.mean(sources, axis=0)) < 1e-14   # at the start
    scaled = [v * s for v, s in zip(sources, (1e-2, 1.0, 50.0, 1e3))]    # keys forget the length
    assert np.abs(depth_weights(scaled, g, w, eps=0.0)
                  - depth_weights(sources, g, w, eps=0.0)).max() < 1e-12


@pytest.mark.grad
def test_gradients():
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((2, 3, 5)) for _ in range(3))
    g, w = rng.standard_normal(5), rng.standard_normal((1, 5))
    check_grad(attn_res, [a, 2 * b, 5 * c], g, w, 1e-5)
    check_grad(attn_res, [a, b], g, w[0], 1e-3)
    check_grad(mix, Depth((a, b), c), g, w)
    check_grad(mix, Depth((a, b), None), g, w)
    check_grad(begin_block, Depth((a, b), c))
    check_grad(begin_block, start(a))
    check_grad(add, Depth((a, b), c), a)
    check_grad(add, Depth((a, b), None), c)


# A whole stack, value and pullback composed by hand from the pieces: how model.py will do it.

def layer_vjp(state, p, s, block_size):
    h, pull_mix = mix.vjp(state, p["norm"], p["query"])
    if attnres.starts_block(s, block_size):
        state, pull_begin = begin_block.vjp(state)
    else:
        pull_begin = lambda ct: (ct,)
    x, pull_norm = rms_norm.vjp(h, p["input_norm"])
    y, pull_linear = linear.vjp(x, p["w"])
    out, pull_silu = silu.vjp(y)
    state, pull_add = add.vjp(state, out)

    def pullback(ct):
        grads = {}
        ct, ct_out = pull_add(ct)
        ct_x, grads["w"] = pull_linear(pull_silu(ct_out)[0])
        ct_h, grads["input_norm"], _ = pull_norm(ct_x)
        ct, = pull_begin(ct)
        ct_state, grads["norm"], grads["query"], _ = pull_mix(ct_h)
        return plus(ct, ct_state), grads
    return state, pullback


def stack_vjp(embedding, layers, block_size):
    state, pulls = start(embedding), []
    for s, p in enumerate(layers[:-1]):
        state, pull = layer_vjp(state, p, s, block_size)
        pulls.append(pull)
    h, pull_mix = mix.vjp(state, layers[-1]["norm"], layers[-1]["query"])

    def pullback(ct):
        ct, ct_norm, ct_query, _ = pull_mix(ct)
        grads = [{"norm": ct_norm, "query": ct_query}]
        for pull in reversed(pulls):
            ct, g = pull(ct)
            grads.insert(0, g)
        assert ct.blocks == ()
        return ct.partial, grads
    return h, pullback


def random_stack(rng, n, d=4):
    def layer():
        return {"norm": rng.uniform(0.5, 1.5, d), "query": rng.standard_normal((1, d)),
                "input_norm": rng.uniform(0.5, 1.5, d), "w": rng.standard_normal((d, d))}
    last = layer()
    return [*(layer() for _ in range(n)), {"norm": last["norm"], "query": last["query"]}]


@pytest.mark.grad
@pytest.mark.parametrize("form", FORMS)
def test_a_stack_composed_by_hand(form):
    rng = np.random.default_rng(2)
    x, layers = rng.standard_normal((2, 3, 4)), random_stack(rng, 10)
    dx, dlayers = rng.standard_normal(x.shape), random_stack(rng, 10)
    h, pullback = stack_vjp(x, layers, FORMS[form])
    ct = rng.standard_normal(h.shape)
    ct_x, grads = pullback(ct)
    assert dot(dlayers, grads) == dot(dlayers, pullback(ct)[1])

    def at(t):
        moved = [{k: a[k] + t * b[k] for k in a} for a, b in zip(layers, dlayers)]
        return dot(ct, stack_vjp(x + t * dx, moved, FORMS[form])[0])
    step = 1e-6
    numeric = (at(step) - at(-step)) / (2 * step)
    assert abs(numeric - dot(dx, ct_x) - dot(dlayers, grads)) < 1e-6 * abs(numeric)


def toy(rng, n, d=6, shape=(1, 2)):
    weights = rng.standard_normal((n, d, d)) / np.sqrt(d)
    branches = [lambda h, w=w: np.tanh(rms_norm(h, np.ones(d)) @ w.T) for w in weights]
    embedding = rng.standard_normal((*shape, d))
    return (embedding, rng.uniform(0.5, 1.5, (n + 1, d)), rng.standard_normal((n + 1, d)), branches)


@pytest.mark.property
def test_two_phases_equal_the_direct_form_at_every_layer_of_k3():
    args = toy(np.random.default_rng(3), 2 * 93)
    direct, state = attnres.run(*args, 24)
    phased, other = attnres.run_two_phase(*args, 24)
    assert len(direct) == len(phased) == 187
    for h, twin in zip(direct, phased):
        assert rel(twin, h) < 1e-12
    assert len(attnres.sources_of(state)) == len(attnres.sources_of(other)) == 9
    assert np.array_equal(state.blocks[0], args[0])             # the embedding is its own block
    assert rel(other.partial, state.partial) < 1e-12


@pytest.mark.property
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("twin", [attnres.run, attnres.run_two_phase], ids=lambda f: f.__name__)
def test_the_forms_are_what_they_say(form, twin):
    args = toy(np.random.default_rng(4), 10)
    embedding, norms, queries, branches = args
    mixtures, state = twin(*args, FORMS[form])
    outs = [branch(h) for branch, h in zip(branches, mixtures)]
    if form == "residual":
        expected = [embedding + sum(outs)]
    elif form == "full":
        expected = [embedding, *outs]
    else:
        expected = [embedding, sum(outs[:4]), sum(outs[4:8]), sum(outs[8:])]
    got = attnres.sources_of(state)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert rel(a, b) < 1e-13
    assert rel(mixtures[-1], attn_res(expected, norms[-1], queries[-1])) < 1e-12
    assert np.array_equal(mixtures[0], embedding)
    if form == "block":         # the first sub-layer of a block reads the sum of the one before
        seen = [embedding, sum(outs[:4])]
        assert rel(mixtures[4], attn_res(seen, norms[4], queries[4])) < 1e-12


@pytest.mark.traps
def test_block_boundaries_of_k3():
    starts = [layer for layer in range(93) if attnres.starts_block(2 * layer, 24)]
    assert starts == [0, 12, 24, 36, 48, 60, 72, 84]
    assert not any(attnres.starts_block(2 * layer + 1, 24) for layer in range(93))
    args = toy(np.random.default_rng(5), 12)
    right = attnres.run(*args, 4)[0][-1]
    for off in (3, 5, 8):
        assert rel(attnres.run(*args, off)[0][-1], right) > 1e-2


@pytest.mark.property
def test_merge_survives_large_logits():
    rng = np.random.default_rng(6)
    sources = random_sources(rng, 5)
    g, w = np.ones(5), 1e4 * rng.standard_normal(5)             # e^1e4 would overflow
    stats = attnres.inter_block(sources[:4], g[None], w[None])
    assert rel(attnres.merge(stats, 0, sources[4], g, w), attn_res(sources, g, w)) < 1e-12


@pytest.mark.property
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_is_kept(dtype):
    rng = np.random.default_rng(7)
    sources = [v.astype(dtype) for v in random_sources(rng)]
    g, w = np.ones(5, dtype), rng.standard_normal((1, 5)).astype(dtype)
    h, pullback = mix.vjp(Depth(tuple(sources[:2]), sources[2]), g, w)
    ct, ct_g, ct_w, _ = pullback(h)
    assert {a.dtype for a in (h, *ct.blocks, ct.partial, ct_g, ct_w)} == {np.dtype(dtype)}
    stats = attnres.inter_block(sources[:2], g[None], w)
    twin = attnres.merge(stats, 0, sources[2], g, w)
    assert twin.dtype == dtype and rel(twin, h) < 1e-5


@pytest.mark.property
def test_traffic_counted_equals_the_closed_forms():
    for n_blocks, size in ((8, 16), (8, 24), (3, 4), (1, 1)):
        totals = {form: [sum(c) for c in attnres.count_io(form, n_blocks, size)]
                  for form in ("residual", "block", "full")}
        assert set(totals["residual"]) == {attnres.io_vectors("residual")} == {3}
        for t in totals["block"]:
            assert abs(t - attnres.io_vectors("block", n_blocks, size)) < 1e-12
        assert abs(max(totals["full"]) - attnres.io_vectors("full", n_blocks, size)) < 1e-12
        assert totals["full"][-1] == max(totals["full"])
    assert attnres.io_vectors("block", 8, 16) == 5.5 and attnres.io_vectors("full", 8, 16) == 24


@pytest.mark.property
def test_pipeline_traffic_counted_equals_the_closed_forms():
    for stages in range(1, 9):
        for virtual in range(1, 5):
            for per_chunk in (1, 3):
                for cached in (False, True):
                    size = stages, virtual, per_chunk, cached
                    assert sum(attnres.count_pipeline(*size)) == attnres.pipeline_blocks(*size)
    assert [attnres.pipeline_blocks(*pv, cached=c) for pv in ((4, 2), (8, 4), (16, 4))
            for c in (False, True)] == [28, 22, 496, 220, 2016, 888]
    assert max(attnres.count_pipeline(8, 4, cached=False)) == 31
    assert max(attnres.count_pipeline(8, 4)) == 8
    assert max(attnres.count_pipeline(8, 4, keep_own=True)) == 7        # one less still


@pytest.mark.property
def test_block_memory():
    state = attnres.run(*toy(np.random.default_rng(8), 12, d=6, shape=(1, 10)), 4)[1]
    assert sum(b.nbytes for b in state.blocks) == attnres.blocks_n_bytes(10, 3, 6, 8)
    assert round(attnres.blocks_n_bytes(131072) / 1e9, 2) == 15.03
    assert round(attnres.blocks_n_bytes(131072, n_shards=8) / 1e9, 2) == 1.88


@pytest.mark.errors
def test_errors():
    v, g, w = np.zeros((2, 3, 5)), np.ones(5), np.zeros((1, 5))
    with pytest.raises(ValueError, match="at least one source"):
        attn_res([], g, w)
    with pytest.raises(ValueError, match="at least one source"):
        mix(Depth((), None), g, w)
    with pytest.raises(ValueError, match=r"sources\[1\] has shape \(2, 3, 4\).*\(2, 3, 5\)"):
        attn_res([v, v[..., :4]], g, w)
    with pytest.raises(ValueError, match=r"norm_weight has shape \(4,\)"):
        attn_res([v], g[:4], w)
    with pytest.raises(ValueError, match=r"query has shape \(1, 4\).*\(2, 3, 5\)"):
        attn_res([v], g, w[:, :4])
    with pytest.raises(ValueError, match="query has shape"):
        depth_weights([v], g, np.zeros((2, 5)))
    with pytest.raises(ValueError, match="dtypes differ"):
        attn_res([v, v.astype(np.float32)], g, w)
    with pytest.raises(ValueError, match="nothing was added"):
        begin_block(Depth((v,), None))
    with pytest.raises(ValueError, match="no finished block"):
        attnres.inter_block((), g[None], w)
    with pytest.raises(ValueError, match="1 blocks and 0"):
        plus(Depth((v,), v), Depth((), v))
