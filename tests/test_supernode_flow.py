"""Sharing: the loop and the fast solver agree, certificates hold, SimGrid gives the same times."""
import numpy as np
import pytest
from helpers import rel
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.supernode import degrade, star, two_tier
from k3np.supernode.flow import certificate, max_min_rates, max_min_rates_loop, simulate
from k3np.vectors import golden_json

few = settings(deadline=None, max_examples=50)
seeds = st.integers(0, 2 ** 32 - 1)
twins = pytest.mark.parametrize("twin", [max_min_rates, max_min_rates_loop],
                                ids=lambda f: f.__name__)


def network(seed, n_flows=None):
    """Random links, and flows over one to three different ones."""
    rng = np.random.default_rng(seed)
    n_links, n_flows = int(rng.integers(3, 12)), n_flows or int(rng.integers(1, 40))
    paths = np.array([np.where(np.arange(3) < rng.integers(1, 4), rng.permutation(n_links)[:3], -1)
                      for _ in range(n_flows)])
    capacity = rng.choice([1.0, 2.0, 3.0, 10 * rng.random() + 0.1], n_links)
    return rng, paths, capacity


def cases():
    return {c["case"][:2]: c["value"] for c in golden_json("supernode/worked_cases")}


@twins
@pytest.mark.golden
def test_rates_worked_by_hand(twin):
    want = cases()
    rates, tight = twin([[0, 1], [0, -1], [1, -1]], [1.0, 2.0])
    assert rates.tolist() == [0.5, 0.5, want["20"]] and tight.tolist() == [0, 0, 1]
    parking = [[0, 1, 2], [0, -1, -1], [1, -1, -1], [1, -1, -1], [2, -1, -1]]
    rates, tight = twin(parking, [1.0, 1.0, 1.0])
    assert rel(rates, [want["23"], want["24"], 1 / 3, 1 / 3, 2 / 3]) < 1e-15
    assert tight.tolist() == [1, 0, 1, 1, 2]


@pytest.mark.golden
def test_times_worked_by_hand():
    want = cases()
    flows = simulate([[0, 1], [0, -1], [1, -1]], [1.0, 2.0], [1, 1, 1])
    assert rel(flows.finish_s, [want["22"], want["22"], want["21"]]) < 1e-12
    assert flows.n_bytes.tolist() == [2, 2] and flows.time_s == flows.finish_s.max()
    slow = degrade(star(8, 100e9), 3, 0.25)
    trace = slow.all_to_all(n_bytes=1e6).trace
    healthy = (trace.src != 3) & (trace.dst != 3)
    assert abs(trace.finish_s.max() * 1e6 / want["25"] - 1) < 1e-12
    assert rel(trace.finish_s[healthy] * 1e6, np.full(healthy.sum(), want["26"])) < 1e-12
    assert {slow.link_names[i] for i in trace.bottleneck[~healthy]} == {"rank 3 out", "rank 3 in"}


@pytest.mark.golden
@pytest.mark.parametrize("name", ["star8", "parking", "random60", "twotier64", "skew64"])
def test_simgrid_gives_the_same_times(name):
    case = golden_json(f"supernode/{name}")
    capacity = np.array([np.inf if c is None else c for c in case["capacity"]])
    flows = simulate(case["path"], capacity, case["size"])
    assert rel(np.sort(flows.finish_s), case["finish_sorted"]) < 1e-9
    if name == "skew64":                                 # the same, over this package's own links
        ours = two_tier(8, 8, 450e3, 50e3, oversubscription=2)
        sizes = np.zeros((64, 64))
        sizes[~np.eye(64, dtype=bool)] = case["size"]
        assert abs(ours.exchange(sizes, batch=0.05).time_s / flows.time_s - 1) < 0.1
    if name == "twotier64":
        ours = two_tier(8, 8, 450e3, 50e3, oversubscription=2).all_to_all(n_bytes=1e6)
        assert rel(np.sort(ours.trace.finish_s), case["finish_sorted"]) < 1e-9


@few
@given(seeds)
@pytest.mark.property
def test_the_solvers_agree_and_certify(seed):
    _, paths, capacity = network(seed)
    (slow, _), (fast, tight) = max_min_rates_loop(paths, capacity), max_min_rates(paths, capacity)
    assert rel(fast, slow) < 1e-12
    overfull, witness = certificate(paths, capacity, fast)
    assert not len(overfull) and (witness >= 0).all()
    assert ((paths == tight[:, None]).any(1)).all()              # the link named is on the path
    load = np.bincount(paths[paths >= 0], np.repeat(fast, (paths >= 0).sum(1)), len(capacity))
    assert rel(load[tight], capacity[tight]) < 1e-9              # and it is full


@few
@given(seeds)
@pytest.mark.traps
def test_the_certificate_refuses_other_rates(seed):
    rng, paths, capacity = network(seed, 6)
    rates = max_min_rates(paths, capacity)[0]
    f = int(rng.integers(6))
    lower, higher = rates.copy(), rates.copy()
    lower[f], higher[f] = rates[f] * 0.9, rates[f] * 1.1
    assert certificate(paths, capacity, lower)[1][f] == -1
    assert len(certificate(paths, capacity, higher)[0])


@pytest.mark.traps
def test_an_equal_share_of_every_link_is_not_max_min():
    paths, capacity = np.array([[0, 1], [0, -1], [1, -1]]), np.array([1.0, 2.0])
    users = np.bincount(paths[paths >= 0])
    equal = np.min(np.where(paths >= 0, (capacity / users)[paths], np.inf), 1)
    assert equal[2] == 1.0                                       # half a unit of link 1 is unused
    assert certificate(paths, capacity, equal)[1].tolist() == [0, 0, -1]


@few
@given(seeds)
@pytest.mark.property
def test_conservation_scale_and_order(seed):
    rng, paths, capacity = network(seed, 12)
    size, start = rng.integers(0, 100, 12).astype(float), rng.choice([0.0, 0.0, 3.0], 12)
    flows = simulate(paths, capacity, size, start)
    used = paths >= 0
    assert flows.n_bytes.sum() == (size * used.sum(1)).sum()
    assert (flows.finish_s >= start).all()
    assert flows.time_s >= (flows.n_bytes / capacity).max() * (1 - 1e-12)
    faster = simulate(paths, capacity * 4, size, start / 4)
    assert rel(faster.finish_s * 4, flows.finish_s) < 1e-11
    bigger = simulate(paths, capacity, size * 3, start * 3)
    assert rel(bigger.finish_s, flows.finish_s * 3) < 1e-11
    order = rng.permutation(12)
    again = simulate(paths[order], capacity, size[order], start[order])
    assert rel(again.finish_s, flows.finish_s[order]) < 1e-11


@few
@given(seeds)
@pytest.mark.property
def test_batching_is_near_and_says_late(seed):
    _, paths, capacity = network(seed, 30)
    size = np.random.default_rng(seed).random(30) + 0.5
    exact, near = (simulate(paths, capacity, size, batch=b) for b in (0, 0.01))
    assert -0.01 < near.time_s / exact.time_s - 1 < 0.05


@pytest.mark.property
def test_a_flow_that_starts_later_slows_the_first_from_then_on():
    flows = simulate([[0], [0]], [1.0], [2.0, 1.0], [0.0, 1.0])
    assert flows.finish_s.tolist() == [3.0, 3.0]
    flows = simulate([[0], [0]], [1.0], [1.0, 1.0], [0.0, 1.0])
    assert flows.finish_s.tolist() == [1.0, 2.0]


@pytest.mark.property
def test_no_flows_no_bytes_no_limits():
    assert simulate(np.empty((0, 2), int), [1.0], []).time_s == 0
    assert simulate([[0], [0]], [1.0], [0.0, 2.0], [5.0, 0.0]).finish_s.tolist() == [5, 2]
    free = simulate([[0], [-1]], [np.inf], [9.0, 9.0], 1.0)
    assert free.finish_s.tolist() == [1, 1] and free.bottleneck.tolist() == [-1, -1]
    assert max_min_rates([[-1]], [1.0])[0][0] == max_min_rates_loop([[-1]], [1.0])[0][0] == np.inf


@twins
@pytest.mark.errors
def test_what_the_solvers_refuse(twin):
    for paths, capacity, says in (([[0, 2]], [1.0], "links from 0 to 2"), ([0], [1.0], r"\[F,J\]"),
                                  ([[0]], [0.0], r"capacity\[0\]=0.0")):
        with pytest.raises(ValueError, match=says):
            twin(paths, capacity)


@pytest.mark.errors
def test_what_simulate_refuses():
    for size, start, says in (([-1.0], 0, "not negative"), ([np.nan], 0, "finite"),
                              ([1.0, 2.0], 0, "one size each"), ([1.0], -1, "negative")):
        with pytest.raises(ValueError, match=says):
            simulate([[0]], [1.0], size, start)
