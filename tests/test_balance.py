"""Routing and balancing: golden vectors, an exact solver as judge, sharding, ties, wrong rules."""
import numpy as np
import pytest
from helpers import check_grad, rel
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from k3np import balance
from k3np.balance import (
    auxiliary_loss,
    balanced_assignment,
    bias_from_counts,
    bip_bias,
    cutoffs,
    dead_experts,
    expert_loads,
    histogram_bias,
    histogram_counts,
    load_variation,
    max_violation,
    quantile_bias,
    route,
    sign_bias,
)
from k3np.ops import sigmoid
from k3np.vectors import golden

QB = ("quantile_balance_0", "quantile_balance_1")
NEXT_BIAS = (quantile_bias, histogram_bias, sign_bias, bip_bias)
seeds = st.integers(0, 2 ** 32 - 1)


def draw(rng, m, E, spread=0.8, dtype=np.float64):
    """Scores of m tokens under experts of unequal popularity."""
    logits = spread * rng.standard_normal(E, dtype) + rng.standard_normal((m, E), dtype)
    return sigmoid(logits)


def loads_of(scores, bias, top_k):
    return expert_loads(route(scores, bias, top_k)[0], len(bias))


def sorted_top(x, k):
    """The definition of the choice: a stable sort by value descending."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]


@pytest.mark.golden
@pytest.mark.parametrize("name", QB)
def test_golden_quantile_balance(name):
    case = golden(name)
    s, b, k = case["scores"], case["bias"], case["meta"]["top_k"]
    n_bins = case["meta"]["histogram_bins"]
    assert np.array_equal(cutoffs(s, b, k), case["cutoff"])
    assert rel(quantile_bias(s, b, k), case["next_bias"]) < 1e-10
    assert rel(quantile_bias(s, b, k, centre=False), case["next_bias_before_centring"]) < 1e-10
    assert rel(histogram_bias(s, b, k, n_bins), case["histogram_bias"]) < 1e-10
    raw = histogram_bias(s, b, k, n_bins, centre=False)
    assert rel(raw, case["histogram_bias_before_centring"]) < 1e-10
    off = np.abs(raw - case["qth_smallest_required_bias"])
    assert off.max() <= case["meta"]["bin_width"]
    assert np.array_equal(loads_of(s, b, k), case["load_before"])
    assert np.array_equal(loads_of(s, quantile_bias(s, b, k), k), case["load_after_same_batch"])


@pytest.mark.traps
@pytest.mark.golden
def test_golden_rejects_wrong_rules_of_balancing():
    case = golden("quantile_balance_1")
    s, b, k, right = case["scores"], case["bias"], case["meta"]["top_k"], case["next_bias"]
    m, E = s.shape
    q = m * k // E
    alpha = case["cutoff"]

    def centred(x):
        return x - x.mean()

    def kth(x, rank, axis=0):
        return -np.take(np.sort(-x, axis=axis), rank, axis=axis)
    halves = [quantile_bias(part, b, k) for part in np.split(s, 4)]
    wrong = {
        "averaged quantiles of four ranks": np.mean(halves, axis=0),
        "margins of biased scores": centred(-kth(s + b - alpha[:, None], q)),
        "cutoff at the k-th choice": centred(-kth(s - kth(s + b, k - 1, 1)[:, None], q)),
        "cutoff of raw scores": centred(-kth(s - kth(s, k, 1)[:, None], q)),
        "added to the old bias": centred(b - kth(s - alpha[:, None], q)),
        "not centred": -kth(s - alpha[:, None], q),
        "sign turned round": -right,
        "quantile k/E of the margins": centred(-kth(s - alpha[:, None], m - 1 - q)),
        "sign rule": sign_bias(s, b, k),
        "inequality": bip_bias(s, b, k)}
    assert rel(centred(-kth(s - alpha[:, None], q)), right) < 1e-12
    for name, value in wrong.items():
        assert rel(value, right) > 1e-3, name
    assert rel(kth(-case["histogram_bias"], 0), kth(-right, 0)) > 1e-6   # an estimate, not equal


@pytest.mark.property
def test_one_exact_step_at_896_of_which_16():
    m, E, k = 16384, 896, 16
    q = m * k // E
    scores = draw(np.random.default_rng(0), m, E, dtype=np.float32)
    bias = np.zeros(E, np.float32)
    before = loads_of(scores, bias, k)
    raw = quantile_bias(scores, bias, k, centre=False)
    margins = scores - cutoffs(scores, bias, k)[:, None]
    assert ((margins > -raw).sum(axis=0) <= q).all()                     # the threshold is -raw
    assert ((margins >= -raw).sum(axis=0) >= q + 1).all()
    after = loads_of(scores, quantile_bias(scores, bias, k), k)
    assert before.sum() == after.sum() == m * k
    assert max_violation(before) > 20 and dead_experts(before) > 20
    assert max_violation(after) < 0.4 and dead_experts(after) == 0
    # The histogram: within a bin of the q-th smallest required bias, whatever the shards.
    counts = histogram_counts(scores, bias, k)
    shards = np.split(scores, [100, 101, 5000, 5000, 16000])
    assert np.array_equal(counts, sum(histogram_counts(part, bias, k) for part in shards))
    assert np.array_equal(counts, histogram_counts(iter(shards), bias, k, chunk=777))
    assert (counts.sum(axis=1) == m).all() and counts.dtype == np.int64
    qth = np.sort(-margins, axis=0)[q - 1]
    estimate = bias_from_counts(counts, bias, k, centre=False)
    assert np.abs(estimate - qth).max() <= 2 / 1000
    assert max_violation(loads_of(scores, histogram_bias(scores, bias, k), k)) < 0.4


@pytest.mark.property
@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(2, 40), st.integers(3, 12), st.integers(0, 3))
def test_thresholds_and_estimates(seed, m, E, extra):
    rng = np.random.default_rng(seed)
    k = 1 + extra % (E - 1)
    scores = np.round(draw(rng, m, E), 2 if seed % 2 else 15)            # with and without ties
    bias = np.round(rng.normal(0, 0.2, E), 2)
    q, margins = m * k // E, scores - cutoffs(scores, bias, k)[:, None]
    raw = quantile_bias(scores, bias, k, centre=False)
    assert ((margins > -raw).sum(axis=0) <= q).all()
    assert ((margins >= -raw).sum(axis=0) >= q + 1).all()
    cut = rng.integers(0, m + 1)
    for n_bins in (7, 1000):
        counts = histogram_counts(scores, bias, k, n_bins)
        parts = (scores[:cut], scores[cut:])                             # one may be empty
        assert np.array_equal(counts, sum(histogram_counts(p, bias, k, n_bins) for p in parts))
        width = (bias.max() - bias.min() + 2) / n_bins
        qth = np.sort(-margins, axis=0)[-(-m * k // E) - 1]
        estimate = bias_from_counts(counts, bias, k, centre=False)
        assert np.abs(estimate - qth).max() <= width * (1 + 1e-9)


@pytest.mark.property
@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 9), st.integers(2, 9), st.booleans())
def test_route_is_a_stable_sort_and_weights_are_raw_shares(seed, m, E, ties):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, E))
    scores, bias = draw(rng, m, E), rng.normal(0, 0.3, E)
    if ties:
        scores, bias = np.round(scores, 1), np.zeros(E)
    indices, weights = route(scores, bias, k)
    assert np.array_equal(indices, sorted_top(scores + bias, k))
    chosen = np.take_along_axis(scores, indices, 1)
    expected = chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20) if k > 1 else chosen
    assert rel(weights, expected) < 1e-15
    if k > 1 and (chosen.sum(axis=1) > 0).all():
        assert np.abs(weights.sum(axis=1) - 1).max() < 1e-12
    assert rel(route(scores, bias, k, renormalise=False, scale=2.5)[1], 2.5 * chosen) < 1e-15


@pytest.mark.property
def test_ties_go_to_the_lower_index():
    scores = np.array([[0.5, 0.7, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1], [0.2, 0.5, 0.5, 0.9]])
    assert route(scores, np.zeros(4), 2)[0].tolist() == [[1, 0], [0, 1], [3, 1]]


@pytest.mark.property
@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(-0.5, 0.5))
def test_permutations_and_constants(seed, constant):
    rng = np.random.default_rng(seed)
    m, E, k = 60, 10, 3
    scores, bias, order = draw(rng, m, E), rng.normal(0, 0.2, E), rng.permutation(E)
    loads = loads_of(scores, bias, k)
    assert np.array_equal(loads_of(scores[:, order], bias[order], k), loads[order])
    assert loads.sum() == m * k
    shifted = loads_of(scores, bias + constant, k)
    assert np.array_equal(shifted, loads)
    for rule in (quantile_bias, sign_bias):
        assert np.abs(rule(scores[:, order], bias[order], k)
                      - rule(scores, bias, k)[order]).max() < 1e-12
    assert np.abs(quantile_bias(scores, bias + constant, k)
                  - quantile_bias(scores, bias, k)).max() < 1e-12
    assert abs(quantile_bias(scores, bias, k).mean()) < 1e-15
    assert np.array_equal(quantile_bias(scores[rng.permutation(m)], bias, k),
                          quantile_bias(scores, bias, k))                # tokens in any order


@pytest.mark.property
def test_groups_bound_the_choice():
    rng = np.random.default_rng(3)
    scores, bias = draw(rng, 50, 12), rng.normal(-0.8, 0.3, 12)          # biased scores below 0
    indices, _ = route(scores, bias, 4, n_group=4, topk_group=2)
    for row, chosen in zip(scores + bias, indices):
        sums = np.sort(row.reshape(4, 3), axis=1)[:, 1:].sum(axis=1)
        groups = sorted_top(sums, 2)
        allowed = np.where(np.isin(np.arange(12) // 3, groups), row, -np.inf)
        assert np.array_equal(chosen, sorted_top(allowed, 4))
    assert np.array_equal(route(scores, bias, 4, n_group=1)[0], route(scores, bias, 4)[0])


def exact_assignment(scores, k):
    """The best balanced assignment by a linear programme: SciPy's HiGHS."""
    m, E = scores.shape
    rows = sparse.vstack([sparse.kron(sparse.eye(m), np.ones((1, E))),
                          sparse.kron(np.ones((1, m)), sparse.eye(E))]).tocsr()
    totals = np.r_[np.full(m, k), np.full(E, m * k // E)]
    solution = optimize.linprog(-scores.ravel(), A_eq=rows, b_eq=totals, bounds=(0, 1))
    return solution.x.reshape(m, E), -solution.fun


@pytest.mark.property
@pytest.mark.golden
@pytest.mark.parametrize("m,E,k", [(8, 4, 1), (16, 4, 2), (32, 8, 2), (48, 16, 4), (30, 6, 5)])
def test_balanced_assignment_is_the_linear_programmes(m, E, k):
    for seed in range(6):
        scores = draw(np.random.default_rng(seed), m, E)
        found = balanced_assignment(scores, k)
        x = np.zeros((m, E))
        np.put_along_axis(x, found.indices, 1, axis=1)
        best, value = exact_assignment(scores, k)
        assert (found.loads == m * k // E).all()
        assert np.abs(x - best).max() < 1e-6
        assert abs((x * scores).sum() - value) < 1e-9 * value
        assert np.array_equal(route(scores, found.bias, k)[0], found.indices)
        # Both sides of the dual meet: the certificate does not need the other solver.
        biased = scores + found.bias
        alpha = -np.sort(-biased, axis=1)[:, k]
        dual = (np.maximum(biased - alpha[:, None], 0).sum() + k * alpha.sum()
                - m * k / E * found.bias.sum())
        assert abs(dual - value) < 1e-9 * value


@pytest.mark.property
def test_balanced_assignment_is_a_square_assignment_for_one_token_an_expert():
    scores = draw(np.random.default_rng(5), 12, 12)
    found = balanced_assignment(scores, 1)
    assert np.array_equal(found.indices[:, 0],
                          optimize.linear_sum_assignment(scores, maximize=True)[1])


@pytest.mark.property
def test_the_end_of_the_interval_stalls_and_the_middle_does_not():
    stalled = 0
    for seed in range(10):
        scores = draw(np.random.default_rng(seed), 64, 8)
        end, mid = (balanced_assignment(scores, 2, middle=middle) for middle in (False, True))
        assert max_violation(mid.loads) == 0
        stalled += end.n_sweeps < 1000 and max_violation(end.loads) > 0
    assert stalled >= 8
    equal = balanced_assignment(np.full((8, 4), 0.5), 1, n_sweeps=20)    # ties: no bias can do it
    assert equal.loads.sum() == 8 and max_violation(equal.loads) > 0


@pytest.mark.property
def test_margins_tie_at_the_bias_where_an_expert_is_the_cutoff():
    rng = np.random.default_rng(2)
    m, E, k = 4096, 16, 4
    scores = draw(rng, m, E)
    bias = balanced_assignment(scores, k).bias
    q, margins = m * k // E, scores - cutoffs(scores, bias, k)[:, None]
    at_cutoff = sorted_top(scores + bias, k + 1)[:, k]
    for j in range(E):
        assert np.abs(margins[at_cutoff == j, j] + bias[j]).max() < 1e-12
        assert (margins[:, j] > -bias[j] + 1e-12).sum() == q
    assert np.abs(quantile_bias(scores, bias, k) - bias).max() < 1e-12   # a fixed point


@pytest.mark.property
def test_repeated_steps_and_the_rules_before():
    rng = np.random.default_rng(0)
    m, E, k = 4096, 64, 8
    popularity = 0.8 * rng.standard_normal(E)

    def batch():
        return sigmoid(popularity + rng.standard_normal((m, E)))
    start = max_violation(loads_of(batch(), np.zeros(E), k))
    ends = {}
    for rule in NEXT_BIAS:
        bias = np.zeros(E)
        for _ in range(4):
            bias = rule(batch(), bias, k)
        ends[rule.__name__] = max_violation(loads_of(batch(), bias, k))
    assert ends["quantile_bias"] < 0.25 and ends["histogram_bias"] < 0.25
    assert start > 2 and ends["sign_bias"] > 0.9 * start                 # four steps of 0.001
    assert ends["bip_bias"] > 2 * ends["quantile_bias"]
    one = sign_bias(batch(), np.zeros(E), k, rate=0.01)
    assert set(np.round(np.abs(one), 12)) <= {0.0, 0.01}
    assert (bip_bias(batch(), np.zeros(E), k) <= 0).all()


@pytest.mark.property
def test_the_load_is_the_slope_of_the_dual():
    """What the sign rule descends: d/d bias_j of the dual is load_j - q."""
    rng = np.random.default_rng(7)
    m, E, k = 200, 8, 2
    scores, bias = draw(rng, m, E), rng.normal(0, 0.1, E)

    def dual(b):
        biased = scores + b
        alpha = -np.sort(-biased, axis=1)[:, k]
        return (np.maximum(biased - alpha[:, None], 0).sum() + k * alpha.sum()
                - m * k / E * b.sum())
    h, slope = 1e-8, np.empty(E)
    for j in range(E):
        e = h * np.eye(E)[j]
        slope[j] = (dual(bias + e) - dual(bias - e)) / (2 * h)
    assert np.abs(slope - (loads_of(scores, bias, k) - m * k / E)).max() < 1e-4


@pytest.mark.property
def test_metrics_and_precision():
    loads = expert_loads(np.array([[0, 1], [1, 2]]), 4)
    assert loads.tolist() == [1, 2, 1, 0] and loads.dtype == np.int64
    assert max_violation(loads) == 1 and dead_experts(loads) == 1
    assert load_variation(loads) == pytest.approx(np.sqrt(0.5))
    rng = np.random.default_rng(0)
    scores = draw(rng, 50, 6, dtype=np.float32)
    bias = np.zeros(6, np.float32)
    (_, weights), pullback = route.vjp(scores, bias, 2)
    assert weights.dtype == np.float32 and pullback((None, weights))[0].dtype == np.float32
    for rule in NEXT_BIAS:
        value = rule(scores, bias, 2)
        assert value.dtype == np.float32, rule.__name__
        if rule is not histogram_bias:                                   # float32 may cross a bin
            assert rel(value, rule(scores.astype(float), bias.astype(float), 2)) < 1e-5
    loss, pullback = auxiliary_loss.vjp(scores, bias, 2)
    assert loss.dtype == np.float32 and pullback(loss)[0].dtype == np.float32
    batch = scores.reshape(5, 10, 6)
    assert np.array_equal(quantile_bias(batch, bias, 2), quantile_bias(scores, bias, 2))
    assert route(batch, bias, 2)[0].shape == (5, 10, 2)


@pytest.mark.grad
def test_gradients():
    rng = np.random.default_rng(0)
    scores, bias = draw(rng, 12, 8), rng.normal(0, 0.2, 8)
    check_grad(route, scores, bias, 3)
    check_grad(route, scores, bias, 1)
    check_grad(route, scores.reshape(2, 6, 8), bias, 3, 4, 2, True, 2.446)
    check_grad(route, scores, bias, 3, renormalise=False, scale=0.5)
    check_grad(auxiliary_loss, scores, bias, 3)
    check_grad(auxiliary_loss, scores.reshape(3, 4, 8), bias, 2)
    assert np.abs(route.vjp(scores, bias, 3)[1]((None, None))[0]).max() == 0


@pytest.mark.property
def test_auxiliary_loss_is_one_when_balanced_and_pushes_the_full_expert_down():
    scores = np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
    assert float(auxiliary_loss(scores, np.zeros(3), 1)) == pytest.approx(1)
    skewed = np.array([[0.8, 0.1, 0.1], [0.7, 0.2, 0.1], [0.6, 0.3, 0.1]])
    loss, pullback = auxiliary_loss.vjp(skewed, np.zeros(3), 1)
    slope = pullback(1.0)[0]
    assert loss > 1 and (slope[:, 0] > 0).all() and (slope[:, 1:] < 0).all()


@pytest.mark.errors
def test_errors():
    good, bias = draw(np.random.default_rng(0), 6, 4), np.zeros(4)
    calls = [lambda s, b, k, f=f: f(s, b, k) for f in (route, cutoffs, auxiliary_loss, *NEXT_BIAS)]
    calls.append(lambda s, b, k: balanced_assignment(s, k))
    for call in calls:
        for k in (4, 5, 0, -1):
            with pytest.raises(ValueError, match=f"top_k={k} must be at least 1 and less"):
                call(good, bias, k)
        with pytest.raises(ValueError, match="scores holds NaN or infinity"):
            call(np.where(good > good.mean(), np.nan, good), bias, 2)
        with pytest.raises(ValueError, match="dtype int64; expected float32 or float64"):
            call((10 * good).astype(np.int64), bias, 2)
    for call in [c for c in calls if c is not calls[4]]:                 # the histogram's own below
        with pytest.raises(ValueError, match="no tokens"):
            call(good[:0], bias, 2)
    for call in calls[:-1]:
        with pytest.raises(ValueError, match=r"bias has shape \(3,\); expected \[4\]"):
            call(good, bias[:3], 2)
        with pytest.raises(ValueError, match="bias holds NaN"):
            call(good, bias * np.nan, 2)
        with pytest.raises(ValueError, match="dtypes differ"):
            call(good.astype(np.float32), bias, 2)
    with pytest.raises(ValueError, match="pass the sigmoid, not the logits"):
        histogram_counts(good * 3, bias, 2)
    with pytest.raises(ValueError, match="rows that sum to 0 to 0"):
        histogram_bias(good[:0], bias, 2)
    with pytest.raises(ValueError, match="the same number of tokens"):
        bias_from_counts(np.eye(4, dtype=np.int64)[:3], bias, 2)
    with pytest.raises(ValueError, match="do not share out evenly"):
        balanced_assignment(good[:3], 2)
    for groups in (dict(n_group=3), dict(n_group=4, topk_group=4), dict(n_group=2, topk_group=3),
                   dict(n_group=2, topk_group=1)):
        with pytest.raises(ValueError, match="groups must divide E=4"):
            route(good, bias, 3, **groups)
    assert balance.histogram_counts(good[:0], bias, 2).sum() == 0        # an empty rank is fine


@pytest.mark.errors
def test_counts_of_bins_chunks_and_groups_are_checked():
    scores, bias = draw(np.random.default_rng(0), 6, 4), np.zeros(4)
    with pytest.raises(ValueError, match="chunk=-1"):
        balance.histogram_counts(scores, bias, 2, chunk=-1)
    with pytest.raises(ValueError, match="n_bins=0"):
        balance.histogram_counts(scores, bias, 2, n_bins=0)
    counts = balance.histogram_counts(scores, bias, 2)
    for k in (0, 4, 20):
        with pytest.raises(ValueError, match=f"top_k={k}"):
            balance.bias_from_counts(counts, bias, k)
    with pytest.raises(ValueError, match="n_group=0"):
        route(scores, bias, 2, n_group=0)
