"""Pipeline schedules: dependencies, bubbles counted from the events, blocks on the way."""
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.attnres import pipeline_blocks
from k3np.supernode import pipeline

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))


@pytest.mark.golden
def test_worked_case_41():
    events = pipeline.schedule(8, 32, forward=Fraction(1), backward=Fraction(2))
    assert pipeline.bubble(events) == Fraction(7, 39)
    assert pipeline.bubble_share(8, 32) == 7 / 39


@pytest.mark.property
@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 3), st.integers(1, 3), st.sampled_from(["1f1b", "gpipe"]))
def test_counted_bubbles_equal_the_closed_form(size, forward, backward, kind):
    P, groups, V = size
    m = P * groups
    events = pipeline.schedule(P, m, V, Fraction(forward), Fraction(backward), kind=kind)
    assert pipeline.bubble(events) == Fraction(P - 1, V * m + P - 1)


@pytest.mark.property
@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 3), st.sampled_from(["1f1b", "gpipe"]))
def test_every_piece_runs_once_after_what_it_needs(size, hop, kind):
    P, groups, V = size
    m = P * groups
    events = pipeline.schedule(P, m, V, hop=hop, kind=kind)
    at = {(e.kind, e.chunk, e.micro_batch): e for e in events}
    assert len(at) == len(events) == 2 * P * V * m
    for (what, c, i), e in at.items():
        assert e.stage == c % P
        if what == "forward" and c:
            assert e.start >= at["forward", c - 1, i].end + hop
        if what == "backward":
            before = at["backward", c + 1, i].end + hop if c + 1 < P * V else \
                at["forward", c, i].end
            assert e.start >= before
    for s in range(P):
        mine = [e for e in events if e.stage == s]
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:]))


@pytest.mark.property
@pytest.mark.parametrize("m", [3, 8, 13])
def test_1f1b_holds_fewer_activations_than_gpipe(m):
    P = 4
    assert pipeline.in_flight(pipeline.schedule(P, m)) == [min(m, P - s) for s in range(P)]
    assert pipeline.in_flight(pipeline.schedule(P, m, kind="gpipe")) == [m] * P


@pytest.mark.property
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("P, V, per_chunk", [(4, 2, 1), (8, 4, 2), (3, 1, 1), (1, 1, 1)])
def test_blocks_on_the_schedule_add_up(P, V, per_chunk, cached):
    m = 2 * P
    events = pipeline.schedule(P, m, V)
    messages, peak = pipeline.block_messages(events, per_chunk, cached)
    assert sum(x.n_blocks for x in messages) == m * pipeline_blocks(P, V, per_chunk, cached)
    assert len(messages) == m * (P * V - 1)
    assert max((x.n_blocks for x in messages), default=0) <= max(peak)
    if cached:                                             # freed: no stage holds all micro-batches
        ahead = pipeline.in_flight(events)[0]
        assert max(peak) <= per_chunk * P * V * ahead and ahead < V * m


@pytest.mark.property
def test_the_cache_shortens_the_iteration():
    """Hops in proportion to the blocks that they carry: what the cache saves in time."""
    from k3np.attnres import count_pipeline
    P, V, m, per_block = 8, 4, 16, Fraction(1, 20)
    times = [max(e.end for e in pipeline.schedule(
        P, m, V, hop=[n * per_block for n in count_pipeline(P, V, cached=c)]))
        for c in (False, True)]
    assert times[1] < times[0]


@pytest.mark.errors
def test_errors():
    for wrong, message in ((dict(n_stages=0, n_micro=1), "n_stages"),
                           (dict(n_stages=2, n_micro=3, n_virtual=2), "multiple"),
                           (dict(n_stages=2, n_micro=2, kind="zb"), "known are"),
                           (dict(n_stages=2, n_micro=2, hop=[1, 1]), "1 hops"),
                           (dict(n_stages=2, n_micro=2, hop=-1), "zero or more")):
        with pytest.raises(ValueError, match=message):
            pipeline.schedule(**wrong)
