"""Topologies: link counts, routes, worked all-to-alls, slow and broken links."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.supernode import (
    PRESETS,
    degrade,
    full_mesh,
    preset,
    ring,
    star,
    torus,
    two_tier,
    without,
)
from k3np.supernode.fabric import NONE, alpha_beta, links_of
from k3np.vectors import golden_json

B, M = 100e9, 1e6


def us(fabric, algorithm="direct"):
    return fabric.all_to_all(n_bytes=M, algorithm=algorithm).time_s * 1e6


@pytest.mark.golden
def test_worked_all_to_alls():
    want = {c["case"][:2]: c["value"] for c in golden_json("supernode/worked_cases")}
    nodes = two_tier(8, 8, 450e9, 50e9)
    trace = nodes.all_to_all(n_bytes=M).trace
    inside = nodes.node[trace.src] == nodes.node[trace.dst]
    got = {"13": us(star(8, B)), "14": us(star(8, B, core_bytes_per_s=8 * B / 4)),
           "15": trace.finish_s[inside].max() * 1e6, "16": trace.finish_s[~inside].max() * 1e6,
           "17": us(two_tier(8, 8, 450e9, 50e9, oversubscription=2)), "18": us(nodes, "rail"),
           "19": us(ring(8, B, ties="clockwise"))}
    for case, value in got.items():
        assert abs(value / want[case] - 1) < 1e-12, case
    assert abs(us(ring(8, B)) / 80 - 1) < 1e-12                      # ties split: p^2 / 8
    assert abs(us(torus((4, 4), B)) / (4 / 8 * 16 * M / B * 1e6) - 1) < 1e-12
    assert abs(us(torus((4, 4, 4), B)) / (4 / 8 * 64 * M / B * 1e6) - 1) < 1e-12
    assert abs(us(full_mesh(5, B)) / (M / B * 1e6) - 1) < 1e-12


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([star(5, B), two_tier(2, 3, B, B / 8), two_tier(3, 2, B, B / 8, rails=True),
                        two_tier(2, 2, B, B / 8, 4), ring(7, B), torus((2, 3), B),
                        full_mesh(4, B)]), st.integers(0, 10 ** 6))
@pytest.mark.property
def test_routes_are_made_of_links_and_used_once(fabric, seed):
    p = fabric.n_ranks
    s, d = np.random.default_rng(seed).integers(0, p, 2)
    route = fabric.paths[s, d][fabric.paths[s, d] != NONE]
    assert len(set(route)) == len(route) and (len(route) > 0) == (s != d)
    assert fabric.capacity.shape == (len(fabric.link_names),) == (len(set(fabric.link_names)),)
    assert fabric.alpha_s.shape == (p, p) and fabric.alpha_s[s, s] == 0


@pytest.mark.property
def test_rails_go_by_the_rank_of_the_right_index():
    fabric = two_tier(2, 3, B, B / 8, rails=True)
    names = [fabric.link_names[i] for i in fabric.paths[0, 5] if i != NONE]
    assert names == ["rank 0 out", "rank 2 in", "rank 2 nic out", "rank 5 nic in"]
    assert (fabric.paths[0, 3] != NONE).sum() == 2
    load = fabric.all_to_all(n_bytes=M).bytes_per_link
    nic = [n for n, name in zip(load, fabric.link_names) if "nic" in name]
    assert np.ptp(nic) == 0                                      # the NICs are used evenly


@pytest.mark.property
def test_hops_cost_time():
    fabric = ring(6, B, alpha_s=1e-6, hop_s=5e-7)
    assert np.allclose(fabric.alpha_s[0], [0, 1.5e-6, 2e-6, 2.5e-6, 2e-6, 1.5e-6], atol=1e-15)
    assert np.allclose(alpha_beta(fabric), (2.5e-6, B), rtol=1e-12, atol=0)


@pytest.mark.property
def test_slow_links():
    fabric = two_tier(2, 4, 400e9, 50e9)
    slow = degrade(fabric, "rank 5 nic out", 0.5)
    assert slow.capacity.sum() == fabric.capacity.sum() - 25e9
    result = slow.all_to_all(n_bytes=M)
    assert result.bottleneck == "rank 5 nic out"
    assert abs(result.time_s / fabric.all_to_all(n_bytes=M).time_s - 2) < 1e-12
    assert len(links_of(fabric, 5)) == 4 and len(links_of(full_mesh(4, B), 1)) == 6
    assert abs(us(degrade(fabric, [5, 6], 0.5)) / us(fabric) - 2) < 1e-12


@pytest.mark.errors
def test_broken_links_are_errors_that_name_the_ranks():
    for broken, pair in ((without(star(4, B), 2), "rank 0 cannot reach rank 2"),
                         (without(ring(6, B), "rank 1 up"), "rank 0 cannot reach rank 2"),
                         (without(ring(6, B), 3), "rank 0 cannot reach rank 3"),
                         (without(two_tier(2, 2, B, B), "rank 1 nic in"),
                          "rank 2 cannot reach rank 1")):
        with pytest.raises(ValueError, match=pair):
            broken.all_to_all(n_bytes=M)
    assert without(star(4, B), 2).send(None, 0, 1, n_bytes=M).time_s == M / B
    sizes = np.ones((4, 4)) * M
    sizes[2] = sizes[:, 2] = 0
    assert abs(without(star(4, B), 2).exchange(sizes).time_s / (2 * M / B) - 1) < 1e-12


@pytest.mark.errors
def test_what_topologies_refuse():
    for make, says in ((lambda: star(4, 0), "bytes_per_s=0: a link needs"),
                       (lambda: star(0, B), "n=0"), (lambda: star(2, B, -1e-6), "alpha_s"),
                       (lambda: two_tier(2, 2, B, 0), "nic_bytes_per_s=0"),
                       (lambda: two_tier(2, 2, B, B, 2, rails=True), "rail's switch"),
                       (lambda: ring(4, B, ties="left"), "ties='left'"),
                       (lambda: torus((), B), "at least one dimension"),
                       (lambda: degrade(star(2, B), 0, 0), "factor=0"),
                       (lambda: degrade(star(2, B), "rank 9 out", 0.5), "no link 'rank 9 out'"),
                       (lambda: degrade(star(2, B), 2, 0.5), "rank 2: star of 2 has ranks 0 to 1"),
                       (lambda: preset("h9000"), "h100"), (lambda: preset("h100", 9), "n_nodes"),
                       (lambda: preset("cloudmatrix384", n_nodes=2), "no bandwidth")):
        with pytest.raises(ValueError, match=says):
            make()


@pytest.mark.property
def test_presets_say_where_their_numbers_come_from():
    for name, (n, inside, nic, *_, source) in PRESETS.items():
        assert len(source) > 60 and 100e9 < inside < 900e9 and (nic is None or nic < inside)
        if n <= 72:
            fabric = preset(name)
            assert fabric.n_ranks == n and alpha_beta(fabric)[1] == inside
    assert preset("h200", n_nodes=2).n_ranks == 16
