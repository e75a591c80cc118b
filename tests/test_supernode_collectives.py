"""Collectives over 1 to 17 ranks: the arrays against NumPy, the times against the closed forms."""
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.supernode import degrade, star, torus, two_tier
from k3np.supernode import schedules as sched
from k3np.supernode.engine import move, time_schedule
from k3np.supernode.trace import chrome_trace, gantt, lanes, write_trace
from k3np.vectors import golden_json

few = settings(deadline=None, max_examples=40)
A, B = 1e-6, 100e9
REDUCE = ("ring", "recursive_doubling", "halving_doubling", "binomial", "hierarchical", "in_switch")


def fabric_of(p, algorithm=""):
    """A star; for what wants nodes, two of them if p is even."""
    if algorithm in ("hierarchical", "rail") and p % 2 == 0 and p > 2:
        return two_tier(2, p // 2, B, B / 4, inside_alpha_s=A, nic_alpha_s=4 * A)
    return star(p, B, A)


def whole_numbers(rng, p, n, dtype=np.float64):
    return [rng.integers(-1000, 1000, n).astype(dtype) for _ in range(p)]


@pytest.mark.golden
def test_worked_cases():
    want = {c["case"][:2]: c["value"] for c in golden_json("supernode/worked_cases")}
    f, n = star(8, B, A), 8e6
    results = {"01": star(2, B, A).send(None, 0, 1, n_bytes=1e6), "03": f.all_gather(n_bytes=n),
               "04": f.all_reduce(n_bytes=n), "05": f.all_reduce(None, "recursive_doubling", n),
               "06": f.all_reduce(None, "halving_doubling", n),
               "07": f.all_reduce(None, "binomial", n),
               "08": f.broadcast(n_bytes=n, algorithm="chain", n_parts=22),
               "10": f.all_to_all(n_bytes=1e6, algorithm="pairwise"),
               "11": f.all_to_all(n_bytes=1e6, algorithm="bruck")}
    for case, result in results.items():
        assert abs(result.time_s * 1e6 / want[case] - 1) < 1e-12, case
        assert abs(result.closed_form_s * 1e6 / want[case] - 1) < 1e-12, case
    assert sched.chain_parts(8, n, A, B) == 22
    for case, run, pair in (("09", f.all_reduce, ("ring", "recursive_doubling")),
                            ("12", f.all_to_all, ("pairwise", "bruck"))):
        times = [run(n_bytes=want[case], algorithm=algorithm).time_s for algorithm in pair]
        assert abs(times[0] / times[1] - 1) < 1e-12, case


@pytest.mark.golden
def test_latency_of_nccl_rings():
    """Cases 44, 45: NCCL's base time and its time a step, 14 steps for 8 ranks."""
    want = {c["case"][:2]: c["value"] for c in golden_json("supernode/worked_cases")}
    for case, base, step in (("44", 8.4, 3.4), ("45", 6.6, 0.6)):
        got = base + star(8, B, step * 1e-6).all_reduce(n_bytes=0).time_s * 1e6
        assert abs(got / want[case] - 1) < 1e-12


@pytest.mark.parametrize("algorithm", REDUCE)
@pytest.mark.property
def test_all_reduce_is_the_sum(algorithm):
    rng = np.random.default_rng(0)
    for p in range(1, 18):
        for n in (0, 1, p - 1, 3 * p + 2):
            arrays = whole_numbers(rng, p, n)
            result = fabric_of(p, algorithm).all_reduce(arrays, algorithm)
            for out in result.out:
                assert np.array_equal(out, np.sum(arrays, 0)), (p, n)
        assert (result.trace.n_bytes >= 0).all() and len(result.out) == p


@pytest.mark.parametrize("algorithm", ["ring", "halving"])
@pytest.mark.property
def test_scatter_and_gather(algorithm):
    rng = np.random.default_rng(1)
    for p in range(1, 18):
        if algorithm == "halving" and p & (p - 1):
            continue
        f, arrays = star(p, B, A), whole_numbers(rng, p, 2 * p + 3)
        parts = f.reduce_scatter(arrays, algorithm).out
        for got, want in zip(parts, np.array_split(np.sum(arrays, 0), p), strict=True):
            assert np.array_equal(got, want)
        ragged = [rng.normal(size=(i % 4, 2)) for i in range(p)]
        gathered = f.all_gather(ragged, "doubling" if algorithm == "halving" else algorithm).out
        for row in gathered:
            assert all(np.array_equal(x, y) for x, y in zip(row, ragged, strict=True))


@pytest.mark.parametrize("algorithm", ["binomial", "chain"])
@pytest.mark.property
def test_broadcast_from_every_root(algorithm):
    x = np.random.default_rng(2).normal(size=(3, 7))
    for p in range(1, 18):
        for root in {0, p // 2, p - 1}:
            result = star(p, B, A).broadcast(x, root, algorithm)
            assert all(np.array_equal(out, x) for out in result.out) and len(result.out) == p


@pytest.mark.parametrize("algorithm", ["direct", "pairwise", "bruck", "rail"])
@pytest.mark.property
def test_all_to_all_is_the_transpose(algorithm):
    rng = np.random.default_rng(3)
    for p in range(1, 18):
        blocks = [[rng.normal(size=rng.integers(0, 5)) for _ in range(p)] for _ in range(p)]
        result = fabric_of(p, algorithm).all_to_all(blocks, algorithm)
        for d in range(p):
            for s in range(p):
                assert result.out[d][s] is blocks[s][d]          # moved, not made again
    square = rng.normal(size=(4, 4, 2, 3))
    moved = star(4, B).all_to_all(square).out
    assert np.array_equal(np.array(moved), square.swapaxes(0, 1))


@few
@given(st.integers(2, 17), st.sampled_from(REDUCE), st.integers(1, 40))
@pytest.mark.property
def test_bytes_add_up(p, algorithm, n):
    """What the links carry is what the messages hold, and no time beats the busiest link."""
    f = fabric_of(p, algorithm)
    result = f.all_reduce([np.ones(n)] * p, algorithm)
    trace = result.trace
    hops = np.array([1 if -1 in (s, d) else (f.paths[s, d] >= 0).sum()
                     for s, d in zip(trace.src, trace.dst)])
    assert result.bytes_per_link.sum() == (trace.n_bytes * hops).sum()
    assert result.time_s >= (result.bytes_per_link / f.capacity).max() * (1 - 1e-12)
    if algorithm in ("ring", "halving_doubling") and p & (p - 1) == 0:
        per_rank = np.bincount(trace.src, trace.n_bytes, p)
        assert abs(per_rank.sum() - 2 * (p - 1) * 8 * n) < 1e-9      # 2 (p-1)/p n each: the least


@few
@given(st.integers(2, 16), st.sampled_from(REDUCE), st.floats(0, 1e8))
@pytest.mark.property
def test_both_engines_agree_where_nobody_shares(p, algorithm, n):
    result = fabric_of(p, algorithm).all_reduce(n_bytes=n, algorithm=algorithm)
    assert abs(result.time_s - result.closed_form_s) <= 1e-9 * result.closed_form_s


@pytest.mark.property
def test_time_falls_with_capacity_and_waits_for_the_slowest():
    for f, g in ((star(6, B), star(6, 4 * B)), (torus((2, 3), B), torus((2, 3), 4 * B))):
        for algorithm in ("direct", "pairwise", "bruck"):
            times = [x.all_to_all(n_bytes=1e6, algorithm=algorithm).time_s for x in (f, g)]
            assert abs(times[0] / times[1] - 4) < 1e-9
    slow = degrade(star(8, B, A), 2, 0.25)
    result = slow.all_reduce(n_bytes=8e6)
    assert abs(result.time_s / (14 * (A + 4e6 / B)) - 1) < 1e-12 and "rank 2" in result.bottleneck


@pytest.mark.property
def test_the_order_of_additions_shows():
    rng = np.random.default_rng(4)
    arrays = [rng.normal(size=999).astype(np.float32) for _ in range(8)]
    f, exact = two_tier(2, 4, B, B), np.sum(arrays, 0, np.float64)
    outs = {}
    for algorithm in REDUCE:
        fabric = star(8, B) if algorithm == "in_switch" else f
        out = fabric.all_reduce(arrays, algorithm).out
        assert all(np.array_equal(out[0], other) for other in out)     # all ranks agree to the bit
        assert out[0].dtype == np.float32 and np.abs(out[0] - exact).max() < 1e-5
        outs[algorithm] = out[0]
    in_order = arrays[0]
    for a in arrays[1:]:
        in_order = in_order + a
    tree = [a + b for a, b in zip(arrays[::2], arrays[1::2])]
    tree = (tree[0] + tree[1]) + (tree[2] + tree[3])
    assert np.array_equal(outs["in_switch"], in_order)
    assert np.array_equal(outs["recursive_doubling"], tree)
    part = np.array_split(np.arange(999), 8)[3]                        # starts at rank 4, ends at 3
    by_ring = arrays[4][part]
    for r in (5, 6, 7, 0, 1, 2, 3):
        by_ring = by_ring + arrays[r][part]
    assert np.array_equal(outs["ring"][part], by_ring)
    assert not np.array_equal(outs["ring"], tree) and not np.array_equal(tree, in_order)


@pytest.mark.traps
def test_a_schedule_cannot_send_what_a_rank_does_not_hold():
    with pytest.raises(KeyError):
        move([[sched.Message(0, 1, (5,))]], [{0: 1}, {}])
    before = [{0: 1}, {0: 2}]                                    # a round reads before it writes
    after = move([[sched.Message(0, 1, (0,)), sched.Message(1, 0, (0,))]], before)
    assert (after[0], after[1]) == ({0: 2}, {0: 1}) and before == [{0: 1}, {0: 2}]


@pytest.mark.traps
def test_a_ring_one_step_short_or_shifted_is_not_an_all_reduce():
    parts = [(i,) for i in range(5)]
    held = [{i: 1 for i in range(5)} for _ in range(5)]
    whole = move(sched.ring_reduce_scatter(range(5), parts), held)
    short = move(sched.ring_reduce_scatter(range(5), parts)[:-1], held)
    assert [whole[r][r] for r in range(5)] == [5] * 5
    assert 5 not in [short[r][r] for r in range(5)]
    shifted = sched.ring_reduce_scatter(range(5), parts) + sched.ring_all_gather(
        range(5), parts[1:] + parts[:1])
    assert {v for r in range(5) for v in move(shifted, held)[r].values()} != {5}


@pytest.mark.errors
def test_what_collectives_refuse():
    f, x = star(3, B), [np.ones(4)] * 3
    for call, says in ((lambda: f.all_reduce([np.ones(4), np.ones(4), np.ones(5)]),
                        r"rank 0 has \(4,\) float64, rank 2 \(5,\)"),
                       (lambda: f.all_reduce([np.ones(4)] * 2), "2 arrays for 3 ranks"),
                       (lambda: f.all_reduce([np.ones(4)] * 2 + [np.ones(4, np.float32)]),
                        "float32"),
                       (lambda: f.all_reduce(x, "tree"), "recursive_doubling"),
                       (lambda: f.all_reduce(), "either arrays"),
                       (lambda: f.all_reduce(n_bytes=-1), "negative"),
                       (lambda: f.reduce_scatter(x, "halving"), "2\\^k ranks, not 3"),
                       (lambda: f.broadcast(x[0], root=3), "root=3"),
                       (lambda: f.all_to_all([[1, 2]] * 3), "give 3 lists of 3"),
                       (lambda: f.all_to_all(n_bytes=-np.ones((3, 3))), "negative size"),
                       (lambda: f.exchange(np.ones((2, 2))), r"give \[3,3\]"),
                       (lambda: f.send(None, 0, 3, n_bytes=1), "dst=3"),
                       (lambda: two_tier(2, 2, B, B).all_reduce(n_bytes=1, algorithm="in_switch"),
                        "no switch between all")):
        with pytest.raises(ValueError, match=says):
            call()


@pytest.mark.property
def test_trace(tmp_path):
    f = two_tier(2, 2, B, B / 4, inside_alpha_s=A, nic_alpha_s=A)
    trace = f.all_to_all(n_bytes=1e6).trace
    lane = lanes(trace)
    assert len({(s, n) for s, n in zip(trace.src, lane)}) == len(lane)     # all overlap
    assert lanes(f.all_reduce(n_bytes=1e6).trace).max() == 0               # none does
    path = write_trace(tmp_path / "t.json", f, trace, "a2a")
    events = json.loads(path.read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == 12 and {e["pid"] for e in bars} == {0, 1}
    assert abs(max(e["ts"] + e["dur"] for e in bars) - trace.finish_s.max() * 1e6) < 1e-9
    assert {e["args"]["bottleneck"] for e in bars} <= set(f.link_names)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    switch = star(2, B).all_reduce(n_bytes=1e6, algorithm="in_switch").trace
    assert any(e["args"].get("name") == "switch" for e in
               chrome_trace(star(2, B), switch)["traceEvents"])


@pytest.mark.traps
def test_a_trace_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    f = star(2, B)
    path = tmp_path / "t.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_trace(path, f, f.all_to_all(n_bytes=1.0).trace)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.property
def test_gantt_has_a_row_for_each_sender():
    plt = pytest.importorskip("matplotlib.pyplot")
    _, ax = plt.subplots()
    trace, _ = time_schedule(star(4, B), sched.pairwise(4), lambda key: 1e6)
    gantt(ax, trace)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "1", "2", "3"]
    assert len(ax.collections) == 12
    plt.close("all")
