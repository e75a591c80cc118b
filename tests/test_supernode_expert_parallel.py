"""Experts on many ranks: moved and unmoved, counts by formula and by hand, DeepEP's table."""
import dataclasses

import numpy as np
import pytest
from helpers import rel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_moe import parameters

from k3np.config import K3Config
from k3np.moe import latent_moe, router
from k3np.ops import round_bf16
from k3np.supernode import preset, star, two_tier, without
from k3np.supernode.copies import (
    DEDUP,
    count_rows,
    destinations,
    draw_choices,
    expected_distinct,
    replicate,
    room_for,
    row_bytes,
    split_evenly,
    uniform_time,
)
from k3np.supernode.expert_parallel import (
    closed_form_time,
    decode_rows,
    encode_rows,
    exchange_time,
    expert_parallel_moe,
)
from k3np.supernode.measured import fit_alpha_beta, leave_one_out, relative_errors
from k3np.supernode.moonep import few
from k3np.vectors import golden, golden_json

ways = pytest.mark.parametrize("dedup", DEDUP)


def layer(seed=0, n_ranks=8, S=6, **changes):
    cfg = dataclasses.replace(K3Config.tiny(), num_experts=16, num_experts_per_token=4, **changes)
    rng = np.random.default_rng(seed)
    p = parameters(cfg, rng)
    return cfg, p, rng.standard_normal((n_ranks, S, cfg.hidden_size))


def quotas(cfg, p, x):
    loads = np.bincount(router(x, p["gate"], cfg).indices.ravel(), minlength=cfg.num_experts)
    return {"home": None, "moonep": few(loads, len(x)).quota,
            "replicas": split_evenly(loads, replicate(loads, len(x), 1))}


@pytest.mark.property
@ways
@pytest.mark.parametrize("which", ("home", "moonep", "replicas"))
def test_moved_equals_unmoved(dedup, which):
    cfg, p, x = layer()
    quota, node = quotas(cfg, p, x)[which], np.arange(8) // 4
    got = expert_parallel_moe(x, p, cfg, dedup, node=node, quota=quota)
    assert rel(got.y, latent_moe(x, p, cfg)) < 1e-12
    routing = router(x, p["gate"], cfg)
    want = count_rows(destinations(routing.indices, 16, quota), dedup, node)
    row = cfg.routed_expert_hidden_size * 8
    assert all((w * row == b).all() for w, b in zip(want, got.bytes_out, strict=True))
    assert all((w.T * row == b).all() for w, b in zip(want[::-1], got.bytes_back, strict=True))
    if quota is not None:
        assert (got.loads == quota).all()
    assert (got.loads.sum(0) == np.bincount(routing.indices.ravel(), minlength=16)).all()


@pytest.mark.golden
@pytest.mark.parametrize("name", ("latent_moe_0", "latent_moe_1", "latent_moe_2"))
def test_moved_equals_the_released_layer(name):
    case = golden(name)
    cfg = K3Config.from_json(case["meta"]["config"])
    flat = case["x"].reshape(-1, cfg.hidden_size)
    R = next(r for r in (4, 2, 3, 1) if cfg.num_experts % r == 0 and len(flat) % r == 0)
    got = expert_parallel_moe(flat.reshape(R, -1, cfg.hidden_size), case["param"], cfg)
    assert rel(got.y.reshape(case["y"].shape), case["y"]) < 1e-10


@pytest.mark.property
@ways
def test_full_width_layers_without_shared_experts(dedup):
    cfg, p, x = layer(routed_expert_hidden_size=None, num_shared_experts=0)
    got = expert_parallel_moe(x, p, cfg, dedup, node=np.arange(8) // 2)
    assert rel(got.y, latent_moe(x, p, cfg)) < 1e-12


@pytest.mark.property
@ways
def test_narrow_rows_cost_what_they_round(dedup):
    """MXFP8 out, bfloat16 back: an error of a few percent, whose floor is the e4m3 step."""
    cfg, p, x = layer(S=16)
    exact, node = latent_moe(x, p, cfg), np.arange(8) // 4
    errors = {}
    for out, back in (("exact", "bf16"), ("mxfp8", "exact"), ("mxfp8", "bf16")):
        got = expert_parallel_moe(x, p, cfg, dedup, out, back, node)
        errors[out, back] = np.linalg.norm(got.y - exact) / np.linalg.norm(exact)
    assert 1e-4 < errors["exact", "bf16"] < 5e-3
    assert 5e-3 < errors["mxfp8", "exact"] < 5e-2
    assert abs(errors["mxfp8", "bf16"] / errors["mxfp8", "exact"] - 1) < 0.05
    latent = cfg.routed_expert_hidden_size
    rows = count_rows(destinations(router(x, p["gate"], cfg).indices, 16), dedup, node)
    assert sum(b.sum() for b in got.bytes_out) == sum(r.sum() for r in rows) * row_bytes(
        latent, "mxfp8")
    assert sum(b.sum() for b in got.bytes_back) == sum(r.sum() for r in rows) * row_bytes(
        latent, "bf16")


@pytest.mark.property
@pytest.mark.parametrize("width", (1, 31, 32, 100))
@pytest.mark.parametrize("dtype", (np.float32, np.float64))
def test_rows_over_the_wire(width, dtype):
    x = np.random.default_rng(0).standard_normal((5, width)).astype(dtype)
    for fmt, tol in (("mxfp8", 2 ** -3), ("bf16", 2 ** -8), ("exact", 0)):
        message = encode_rows(x, fmt)
        back = decode_rows(message, fmt, dtype)
        assert back.dtype == dtype and back.shape == x.shape
        assert (np.abs(back - x).max(axis=1) <= tol * np.abs(x).max(axis=1)).all()
        if fmt != "exact":
            assert sum(part.nbytes for part in message) == 5 * row_bytes(width, fmt)
        kept = decode_rows(tuple(part[[3, 1]] for part in message), fmt, dtype)
        assert (kept == back[[3, 1]]).all()              # a relay may pick rows without decoding
    assert (decode_rows(encode_rows(x, "bf16"), "bf16", dtype) == round_bf16(x)).all()
    assert decode_rows(encode_rows(x[:0], "mxfp8"), "mxfp8", dtype).shape == (0, width)


# --- counting ------------------------------------------------------------------------------------

@pytest.mark.golden
def test_worked_cases():
    cases = {c["case"][:2]: c["exact"] for c in golden_json("supernode/worked_cases")}
    ranks, nodes = expected_distinct(64, 896, 16), expected_distinct(8, 896, 16)
    got = {"27": ranks, "28": nodes, "29": 16 * (1 - expected_distinct(8, 8, 1) / 8),
           "30": nodes * 7 / 8, "31": row_bytes(3584, "mxfp8"), "32": row_bytes(7168, "mxfp8"),
           "33": 16 * (row_bytes(3584, "mxfp8") + row_bytes(3584, "bf16"))}
    for number, value in got.items():
        assert str(value) == cases[number], number
    assert got["33"] == 8 * (row_bytes(7168, "mxfp8") + row_bytes(7168, "bf16"))
    for number, fmt, us in (("36", "fp8", 77), ("37", "bf16", 114)):
        top, bottom = map(int, cases[number].split("/"))
        assert 128 * 8 * row_bytes(7168, fmt) * bottom == top * us * 1000
    assert row_bytes(3584, "fp8") == row_bytes(3584, "mxfp8")


@pytest.mark.property
def test_expected_distinct_by_drawing():
    rng = np.random.default_rng(0)
    indices = draw_choices(np.ones(896), (16, 500), 16, rng)
    for G in (8, 16, 64, 128):
        groups = indices // (896 // G)
        seen = np.mean([len(set(row)) for row in groups.reshape(-1, 16).tolist()])
        assert abs(seen / float(expected_distinct(G, 896, 16)) - 1) < 5e-3
    assert expected_distinct(1, 896, 16) == 1 and expected_distinct(896, 896, 16) == 16
    assert expected_distinct(4, 4, 4) == 4


@pytest.mark.property
def test_draws_are_different_experts_by_popularity():
    rng = np.random.default_rng(1)
    popularity = np.array([4.0, 1, 1, 1, 1])
    indices = draw_choices(popularity, (4000,), 2, rng)
    assert all(len(set(row)) == 2 for row in indices.tolist())
    first = draw_choices(popularity, (4000,), 1, rng)
    assert abs((first == 0).mean() - 0.5) < 0.03         # 4 of 8


@pytest.mark.property
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2 ** 32 - 1), st.sampled_from((1, 2, 4, 8)), st.integers(1, 4))
def test_counts_add_up(seed, n_ranks, k):
    rng = np.random.default_rng(seed)
    indices = draw_choices(rng.gamma(0.5, size=16) + 1e-9, (n_ranks, 5), k, rng)
    node = np.arange(n_ranks) // min(2, n_ranks)
    dest = destinations(indices, 16)
    by_expert, = count_rows(dest, "expert")
    by_rank, = count_rows(dest, "rank")
    first, second = count_rows(dest, "node", node)
    slow = np.zeros((2, n_ranks, n_ranks), int)
    for s in range(n_ranks):
        for token in dest[s]:
            for q in token:
                slow[0, s, q] += 1
            for q in set(token.tolist()):
                slow[1, s, q] += 1
    assert (by_expert == slow[0]).all() and (by_rank == slow[1]).all()
    assert by_expert.sum() == n_ranks * 5 * k
    assert (second.sum(axis=0) == by_rank.sum(axis=0)).all()     # each rank gets what it needs once
    apart = node[:, None] != node
    assert (second[apart] == 0).all() and first[apart].sum() <= by_rank[apart].sum()
    assert (first >= 0).all() and first.sum() <= n_ranks * 5 * min(k, node.max() + 1)


@pytest.mark.property
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2 ** 32 - 1), st.integers(0, 3))
def test_replicas_share_and_never_hurt_much(seed, n_slots):
    rng = np.random.default_rng(seed)
    loads = np.floor(1000 / (1 + rng.permutation(16)) ** rng.uniform(0, 2)).astype(int)
    hosts = replicate(loads, 4, n_slots)
    assert (hosts.sum(axis=1) <= 4 + n_slots).all()
    assert hosts[np.arange(16) // 4, np.arange(16)].all()
    quota = split_evenly(loads, hosts)
    assert (quota.sum(axis=0) == loads).all() and not quota[~hosts].any()
    for q, h in zip(quota.T, hosts.T):
        assert np.ptp(q[h]) <= 1
    if n_slots == 0:
        assert hosts.sum() == 16


@pytest.mark.property
def test_replicas_help_a_skewed_load():
    loads = np.floor(10000 / np.arange(1, 65) ** 1.0).astype(int)
    worst = [split_evenly(loads, replicate(loads, 8, n)).sum(axis=1).max() for n in (0, 1, 2, 4)]
    assert worst[0] > worst[1] > worst[2] >= worst[3] >= room_for(loads.sum(), 8).max()
    assert worst[0] > 4 * loads.sum() / 8 and worst[3] < 1.3 * loads.sum() / 8


@pytest.mark.property
def test_own_tokens_are_served_first():
    indices = np.array([[[0]] * 3, [[0]] * 3])           # both ranks want expert 0, of rank 0
    quota = np.array([[3, 0], [3, 0]])
    assert (destinations(indices, 2, quota)[..., 0] == [[0] * 3, [1] * 3]).all()


# --- time ----------------------------------------------------------------------------------------

@pytest.mark.property
def test_even_exchange_equals_the_hand_formula():
    T, R, B = 56, 8, 660e9
    indices = (np.arange(R * T * 16).reshape(R, T, 16) % 16)     # every token, all 16 experts
    rows, = count_rows(destinations(indices, 16), "rank")
    time = exchange_time(star(R, B), [rows * row_bytes(3584, "mxfp8")], t0_s=1e-6)
    by_hand = uniform_time(T, R - 1, 3696, B, t0_s=1e-6)
    assert abs(time.time_s / by_hand - 1) < 1e-12
    assert abs(time.closed_form_s / by_hand - 1) < 1e-12
    assert uniform_time(1, 1, 1, 1, violation=0.5) == 1.5


@pytest.mark.property
def test_skew_takes_longer_and_the_closed_form_bounds_the_fluid():
    rng, times = np.random.default_rng(0), []
    for power in (0, 0.5, 1):
        popularity = 1 / np.arange(1, 897.0) ** power
        dest = destinations(draw_choices(popularity, (16, 32), 16, rng), 896)
        rows, = count_rows(dest)
        time = exchange_time(star(16, 660e9), [rows * 3696])
        assert time.closed_form_s * (1 - 1e-9) <= time.time_s <= 1.2 * time.closed_form_s
        off = rows * ~np.eye(16, dtype=bool)
        most = max(off.sum(axis=0).max(), off.sum(axis=1).max())
        assert abs(time.closed_form_s - most * 3696 / 660e9) < 1e-15
        times.append(time.time_s)
    assert times[0] < times[1] < times[2]


@pytest.mark.property
def test_node_dedup_saves_what_the_formula_says():
    rng = np.random.default_rng(0)
    dest = destinations(draw_choices(np.ones(896), (64, 32), 16, rng), 896)
    node = np.arange(64) // 8
    fabric = preset("h100", n_nodes=8)
    (expert,), (rank,), (first, second) = (count_rows(dest, way, node) for way in DEDUP)
    apart = node[:, None] != node
    cross = [m[apart].sum() / 64 / 32 for m in (expert, rank, first)]
    want = [14, float(expected_distinct(64, 896, 16)) * 7 / 8,
            float(expected_distinct(8, 896, 16)) * 7 / 8]
    assert np.allclose(cross, want, rtol=1e-2)
    t = [closed_form_time(fabric, [m * 3696 for m in stages])[0]
         for stages in ((expert,), (rank,), (first, second))]
    assert t[0] > t[1] > t[2]
    time_s, link = closed_form_time(fabric, [first * 3696, second * 3696], overlap=True)
    assert time_s < t[2] and "nic" in link


@pytest.mark.property
@pytest.mark.parametrize("overlap", (False, True))
def test_closed_form_alone_and_beside_the_fluid(overlap):
    rng, fabric = np.random.default_rng(0), preset("h200", 4, n_nodes=2)
    dest = destinations(draw_choices(1 / np.arange(1, 65.0), (8, 40), 6, rng), 64)
    stages = [rows * 3696 for rows in count_rows(dest, "node", fabric.node)]
    both = exchange_time(fabric, stages, 5e-6, overlap)
    alone = closed_form_time(fabric, stages, 5e-6, overlap)
    assert abs(both.closed_form_s / alone[0] - 1) < 1e-12 and both.bottleneck == alone[1]
    assert both.time_s < 1.3 * both.closed_form_s and len(both.stages) == 2 - overlap
    assert closed_form_time(fabric, [np.diag(np.ones(8))]) == (0.0, "")


# --- DeepEP's published table --------------------------------------------------------------------

def deepep(op):
    rows = [r for r in golden_json("supernode/measurements")["rows"]
            if r["op"] == f"ep_{op}_low_latency" and r["hardware"] == "H800 + CX7 400Gb/s IB"]
    ranks = np.array([r["ranks"] for r in rows])
    per_rank = 128 * 8 * row_bytes(7168, "fp8" if op == "dispatch" else "bf16")
    assert len(ranks) == 6 and all(r["bytes"] == per_rank for r in rows)
    return ranks, per_rank * (1 - 8 / ranks), np.array([r["latency_us"] for r in rows]) * 1e-6


@pytest.mark.golden
@pytest.mark.parametrize("op, band, t0_us, GBps, inside, end", (
    ("dispatch", 0.03, 36.9, 47.2, 0.035, 0.09), ("combine", 0.06, 15.1, 41.4, 0.08, 0.17)))
def test_deepep_low_latency(op, band, t0_us, GBps, inside, end):
    """Two parameters, five sizes; a kernel's tables of 16 to 256 ranks within the band."""
    ranks, wire, time_s = deepep(op)
    t0, B = fit_alpha_beta(wire[1:], time_s[1:])
    assert abs(t0 * 1e6 - t0_us) < 0.1 and abs(B / 1e9 - GBps) < 0.1
    assert np.abs(relative_errors(wire[1:], time_s[1:], t0, B)).max() < band
    left_out = np.abs(leave_one_out(wire[1:], time_s[1:]))
    assert left_out[1:].max() < inside and inside < left_out[0] < end    # 16: an extrapolation


@pytest.mark.golden
@pytest.mark.parametrize("op, error", (("dispatch", 0.02), ("combine", 0.17)))
def test_deepep_eight_ranks_are_predicted(op, error):
    """Not fitted: t0 from the NICs, bytes over NVLink at the 160 GB/s DeepEP gives for it."""
    ranks, wire, time_s = deepep(op)
    t0, _ = fit_alpha_beta(wire[1:], time_s[1:])
    per_rank = wire[-1] / (1 - 8 / 256)
    predicted = t0 + per_rank * 7 / 8 / 160e9
    assert abs(predicted / time_s[0] - 1) < error


@pytest.mark.golden
def test_deepep_through_the_fabric():
    """The same two numbers, as flows over NICs: the engine and the formula agree."""
    ranks, wire, time_s = deepep("dispatch")
    t0, B = fit_alpha_beta(wire[1:], time_s[1:])
    for R, n, t in zip(ranks[1:4], wire[1:4], time_s[1:4]):
        even = np.full((R, R), 128 * 8 * row_bytes(7168, "fp8") / R)
        got = exchange_time(two_tier(R // 8, 8, 160e9, B), [even], t0_s=t0)
        assert abs(got.time_s / (t0 + n / B) - 1) < 1e-9 and abs(got.time_s / t - 1) < 0.03


# --- traps and errors ----------------------------------------------------------------------------

@pytest.mark.traps
def test_sums_that_come_back_in_eight_bits_are_seen():
    cfg, p, x = layer(S=16)
    exact = latent_moe(x, p, cfg)
    right, wrong = (np.linalg.norm(expert_parallel_moe(x, p, cfg, "rank", "exact", back).y - exact)
                    for back in ("bf16", "mxfp8"))
    assert wrong > 5 * right


@pytest.mark.traps
def test_counting_experts_for_ranks_overstates_traffic():
    assert 16 / float(expected_distinct(8, 896, 16)) > 2.2
    with_replacement = 8 * (1 - (7 / 8) ** 16)           # forgets that the experts differ
    assert abs(with_replacement - float(expected_distinct(8, 896, 16))) > 5e-3


@pytest.mark.errors
def test_what_is_refused():
    cfg, p, x = layer()
    cut = without(star(8, 1e9), 3)
    for call, says in (
            (lambda: expert_parallel_moe(x[:6], p, cfg), "cannot be shared out equally"),
            (lambda: expert_parallel_moe(x[0], p, cfg), "x"),
            (lambda: expert_parallel_moe(x, p, cfg, "host"), "dedup='host'"),
            (lambda: expert_parallel_moe(x, p, cfg, "node"), "node has shape"),
            (lambda: expert_parallel_moe(x, p, cfg, "node", node=[0] * 3 + [1] * 5), "as many"),
            (lambda: expert_parallel_moe(x, p, cfg, out="fp4"), "fmt='fp4'"),
            (lambda: row_bytes(32, "fp4"), "fmt='fp4'"),
            (lambda: expected_distinct(5, 896, 16), "cannot be shared out equally"),
            (lambda: expected_distinct(8, 896, 0), "top_k=0"),
            (lambda: destinations(np.zeros((2, 3), int), 4), r"\[R,S,k\]"),
            (lambda: destinations(np.full((2, 3, 1), 4), 4), "from 4 to 4"),
            (lambda: destinations(np.zeros((2, 3, 1), int), 4, np.zeros((2, 4), int)), "quota"),
            (lambda: destinations(np.zeros((2, 3, 1), int), 4, np.zeros((3, 4), int)), "quota"),
            (lambda: replicate(np.array([1, -1]), 2, 1), "nothing negative"),
            (lambda: exchange_time(star(8, 1e9), [np.zeros((4, 4))]), "n_bytes"),
            (lambda: exchange_time(star(2, 1e9), [-np.ones((2, 2))]), "negative"),
            (lambda: exchange_time(star(2, 1e9), []), "stages is empty"),
            (lambda: exchange_time(cut, [np.ones((8, 8))]), "cannot reach")):
        with pytest.raises(ValueError, match=says):
            call()
