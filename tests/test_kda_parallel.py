"""Context parallelism: segments, their composition, ranks of any length, the merge that fails."""
import numpy as np
import pytest
from helpers import rel
from test_kda import draw

from k3np.kda import (
    Segment,
    combine,
    context_parallel,
    kda_chunkwise,
    kda_recurrent,
    kda_segment,
    reset_gates,
)
from k3np.vectors import golden

NAMES = ("q", "k", "v", "g", "beta")
pytestmark = pytest.mark.property


def cut(args, start, stop):
    return [x[:, start:stop] for x in args[:5]]


def test_a_segment_is_an_affine_map_of_the_state():
    args = draw(T=70)
    M, R = kda_segment(*args[:5])
    assert M.shape == (2, 3, 8, 8) and R.shape == (2, 3, 8, 6)
    assert rel(M @ args[5] + R, kda_recurrent(*args)[1]) < 1e-12
    product = np.broadcast_to(np.eye(8), M.shape)
    for t in range(70):                                          # the definition, factor by factor
        k, beta = args[1][:, t], args[4][:, t, :, None, None]
        factor = np.eye(8) - beta * k[..., :, None] * k[..., None, :]
        product = factor * np.exp(args[3][:, t])[..., None, :] @ product
    assert rel(M, product) < 1e-12


def test_combining_is_associative_and_ordered():
    args = draw(T=40)
    a, b, c = (kda_segment(*cut(args, *ends)) for ends in ((0, 9), (9, 30), (30, 40)))
    left, right = combine(combine(a, b), c), combine(a, combine(b, c))
    whole = kda_segment(*args[:5])
    for x, y, z in zip(left, right, whole):
        assert rel(x, y) < 1e-12 and rel(x, z) < 1e-12
    assert rel(combine(b, a).state, combine(a, b).state) > 1e-2
    empty = kda_segment(*cut(args, 0, 0))
    assert np.array_equal(empty.transition, np.broadcast_to(np.eye(8), (2, 3, 8, 8)))
    assert all(np.array_equal(x, y) for x, y in zip(combine(empty, a), a))


RANKS = [1, 2, 3, 8, [50], [13, 37], [0, 1, 49], [20, 0, 17, 13], [1, 2, 3, 5, 8, 13, 17, 1]]


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("with_state", [False, True])
def test_ranks_equal_the_single_pass(ranks, with_state):
    args = draw(T=50, gates=[0, -0.01, -1, -5, -60])
    args = args if with_state else args[:5]
    o, state = kda_recurrent(*args)
    o2, state2 = context_parallel(*args[:5], ranks, *args[5:], chunk_size=16)
    assert rel(o2, o) < 1e-12 and rel(state2, state) < 1e-12


@pytest.mark.golden
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_reproduce_the_reference(ranks):
    case = golden("kda_1")
    o, state = context_parallel(*(case[n] for n in NAMES), ranks, case["initial_state"])
    assert rel(o, case["o"]) < 1e-10 and rel(state, case["final_state"]) < 1e-10


def test_float32_stays_float32():
    args = draw(T=50, dtype=np.float32)
    o, state = context_parallel(*args[:5], 3, args[5])
    assert o.dtype == state.dtype == np.float32
    assert rel(o, kda_recurrent(*draw(T=50))[0]) < 2e-6


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, [4, 0, 46]], ids=str)
def test_document_boundaries_reset(ranks):
    """Boundaries inside a rank, at its edge, and documents that span several ranks."""
    args, cuts = draw(T=50, B=1), [0, 3, 4, 25, 50]
    o, state = context_parallel(*args[:5], ranks, cu_seqlens=cuts, chunk_size=8)
    for start, stop in zip(cuts, cuts[1:]):
        alone, end = kda_recurrent(*cut(args, start, stop))
        assert rel(o[:, start:stop], alone) < 1e-12
    assert rel(state, end) < 1e-12
    changed = [x.copy() for x in args[:5]]
    for n in (1, 2, 3):
        changed[n][:, :25] *= 0.5
    o2, state2 = context_parallel(*changed, ranks, cu_seqlens=cuts, chunk_size=8)
    assert np.array_equal(o2[:, 25:], o[:, 25:]) and np.array_equal(state2, state)


def test_a_boundary_makes_the_transition_zero():
    args = draw(T=20, B=1)
    g = reset_gates(args[3], [0, 20])
    M, R = kda_segment(args[0], args[1], args[2], g, args[4])
    assert not M.any() and R.any()
    assert g is not args[3] and np.isfinite(args[3]).all()


@pytest.mark.traps
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name, far", [("kda_1", 1e-8), ("kda_5", 1e-2)])
def test_trap_16_states_cannot_be_added(name, far, ranks):
    """Strong decay (kda_1) leaves the delta rule little to do; without decay it does it all."""
    case = golden(name)
    args = [case[n] for n in NAMES]
    T = args[0].shape[1]
    cuts = [T * r // ranks for r in range(ranks + 1)]
    segments = [kda_segment(*cut(args, *ends)) for ends in zip(cuts, cuts[1:])]
    decays = [np.exp(args[3][:, a:b].sum(axis=1))[..., None] for a, b in zip(cuts, cuts[1:])]
    right = added = faded = case["initial_state"]
    for (M, R), decay in zip(segments, decays):
        right = M @ right + R
        added = added + R                      # linear attention may do this
        faded = decay * faded + R              # and gated linear attention this
    assert rel(right, case["final_state"]) < 1e-10
    assert rel(added, case["final_state"]) > 1e-2
    assert rel(faded, case["final_state"]) > far


def test_without_delta_rule_and_decay_adding_would_do():
    """What makes adding wrong is the transition: where it is the identity, states add up."""
    q, k, v, g, _, _ = draw(T=20)
    segments = [Segment(np.broadcast_to(np.eye(8), (2, 3, 8, 8)),
                        np.einsum("bthk,bthv->bhkv", k[:, a:b], v[:, a:b]))
                for a, b in ((0, 7), (7, 20))]
    assert rel(combine(*segments).state, segments[0].state + segments[1].state) < 1e-15


def test_a_summary_has_one_size_however_many_tokens():
    few, many = (kda_segment(*draw(T=T)[:5]) for T in (3, 130))
    assert [x.shape for x in few] == [x.shape for x in many]


@pytest.mark.errors
@pytest.mark.parametrize("ranks", [0, -2, 2.0, True, [], [10, 9], [21, -1], [[20]], [10.0, 10.0]],
                         ids=str)
def test_bad_ranks(ranks):
    with pytest.raises(ValueError, match="ranks is"):
        context_parallel(*draw(T=20)[:5], ranks)


@pytest.mark.errors
def test_bad_segments_and_boundaries():
    args = draw(T=20)
    a = kda_segment(*args[:5])
    with pytest.raises(ValueError, match=r"a.transition has shape .* b.transition"):
        combine(a, Segment(a.transition[:1], a.state[:1]))
    with pytest.raises(ValueError, match="v has shape"):
        kda_segment(args[0], args[1], args[2][:, :-1], args[3], args[4])
    with pytest.raises(ValueError, match="cu_seqlens"):
        context_parallel(*args[:5], 2, cu_seqlens=[0, 19])
    with pytest.raises(ValueError, match="chunk_size"):
        kda_chunkwise(*args, chunk_size=0)
