"""KDA as a recurrence and in chunks: gates, golden cases, gradients, limits, memory, errors."""
import tracemalloc

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from helpers import check_grad, rel
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.kda import decay_gate, kda_chunk, kda_chunkwise, kda_recurrent, softplus_decay_gate
from k3np.ops import sigmoid
from k3np.vectors import golden

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
CASES = ["kda_0", "kda_1", "kda_2", "kda_3", "kda_5", "kda_9"]
TWINS = [pytest.param(kda_recurrent, {}, id="recurrent")] + [
    pytest.param(kda_chunkwise, {"chunk_size": size}, id=f"chunks of {size}")
    for size in (1, 16, 32, 64, 100)]
TOLERANCE = {"float64": 1e-10, "float32": 2e-5}


def draw(seed=0, B=2, T=37, H=3, K=8, V=6, dtype=np.float64, gates=None):
    """Random arguments with keys and queries of length one and K3-like gates."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, T, H, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((B, T, H, V))
    g = -5 * sigmoid(rng.standard_normal((B, T, H, K)) - 2) if gates is None \
        else rng.choice(gates, (B, T, H, K))
    beta = sigmoid(rng.standard_normal((B, T, H)))
    state = rng.standard_normal((B, H, K, V))
    return tuple(x.astype(dtype) for x in (q, k, v, g, beta, state))


def worst(results, references):
    return max(rel(a, b) for a, b in zip(results, references))


@pytest.mark.golden
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kda, how", TWINS)
def test_values_and_gradients_of_the_reference(kda, how, name, dtype):
    case = {key: x.astype(dtype) for key, x in golden(name).items() if key != "meta"}
    args = [case.get(n) for n in NAMES]
    value, pullback = kda.vjp(*args, **how)
    grads = pullback((case["ct_o"], case["ct_final_state"]))
    assert value[0].dtype == value[1].dtype == dtype
    assert worst(value, (case["o"], case["final_state"])) < TOLERANCE[dtype]
    for n, grad in zip(NAMES, grads):
        assert (grad is None) == (n == "initial_state" and args[-1] is None)
        if grad is not None:
            assert grad.dtype == dtype
            assert rel(grad, case[f"grad_{n}"]) < TOLERANCE[dtype], n


@pytest.mark.golden
@pytest.mark.parametrize("name, gate", [("kda_gate_0", softplus_decay_gate),
                                        ("kda_gate_1", decay_gate), ("kda_gate_2", decay_gate)])
def test_gates_of_the_reference(name, gate):
    case = golden(name)
    g, pullback = gate.vjp(case["x"], case.get("A_log"), case["dt_bias"])
    assert rel(g, case["g"]) < 1e-10
    for n, grad in zip(("x", "A_log", "dt_bias"), pullback(case["ct_g"])):
        if n in case:
            assert rel(grad, case[f"grad_{n}"]) < 1e-10, n


@pytest.mark.grad
@pytest.mark.parametrize("gate", [decay_gate, softplus_decay_gate])
def test_gate_gradients_and_padding(gate):
    rng = np.random.default_rng(3)
    z, bias = rng.standard_normal((2, 5, 3, 4)), rng.standard_normal(12)
    A_log = rng.standard_normal(8)                              # 3 heads, 5 numbers of padding
    check_grad(gate, z, A_log, bias)
    check_grad(gate, z, None, None)
    g, pullback = gate.vjp(z, A_log, bias)
    assert np.array_equal(g, gate(z, A_log[:3], bias.reshape(3, 4)))
    assert np.array_equal(g, gate(z, A_log.reshape(1, 1, 8, 1), bias))      # Kimi Linear's form
    ct = pullback(np.ones_like(g))[1]
    assert ct.shape == (8,) and np.all(ct[3:] == 0) and np.all(ct[:3] != 0)


@pytest.mark.property
def test_gates_stay_in_their_range():
    z = np.linspace(-1e4, 1e4, 41).reshape(-1, 1, 1)
    for dtype in (np.float32, np.float64):
        g = decay_gate(z.astype(dtype), np.full(1, 3, dtype), None)
        assert g.dtype == dtype and np.all((g >= -5) & (g <= 0)) and g.min() == -5
        soft = softplus_decay_gate(z.astype(dtype), np.full(1, 3, dtype), None)
        assert soft.dtype == dtype and np.all(np.isfinite(soft) & (soft <= 0))


@pytest.mark.grad
@pytest.mark.parametrize("kda, how", TWINS)
def test_gradients(kda, how):
    check_grad(kda, *draw(T=37), **how)
    check_grad(kda, *draw(T=9)[:5], None, 0.7, **how)


@pytest.mark.grad
@pytest.mark.parametrize("C", [1, 2, 8])
def test_one_chunk(C):
    args = draw(T=C)
    heads_first = [x.swapaxes(1, 2) for x in args[:5]]                      # views, not in order
    (o, state), pullback = kda_chunk.vjp(*heads_first, args[5])
    (slow, slow_state), slow_pullback = kda_recurrent.vjp(*args, scale=1)
    assert rel(o.swapaxes(1, 2), slow) < 1e-13 and rel(state, slow_state) < 1e-13
    grads, slow_grads = pullback((o, state)), slow_pullback((slow, slow_state))
    for a, b in zip(grads[:5], slow_grads):
        assert rel(a.swapaxes(1, 2), b) < 1e-12
    assert rel(grads[5], slow_grads[5]) < 1e-12
    check_grad(kda_chunk, *heads_first, args[5])


@pytest.mark.grad
@pytest.mark.parametrize("kda, how", TWINS)
def test_agrees_with_automatic_differentiation(kda, how):
    """HIPS autograd runs the recurrence written afresh; both pullbacks must agree with it."""
    args = draw(seed=7, B=1, T=21, H=2)
    rng = np.random.default_rng(8)
    ct_o, ct_state = rng.standard_normal(args[2].shape), rng.standard_normal(args[5].shape)

    def loss(args):
        q, k, v, g, beta, S = args
        total = 0.0
        for t in range(q.shape[1]):
            S = anp.exp(g[:, t])[..., None] * S
            error = v[:, t] - anp.einsum("bhk,bhkv->bhv", k[:, t], S)
            S = S + anp.einsum("bhk,bh,bhv->bhkv", k[:, t], beta[:, t], error)
            o = anp.einsum("bhk,bhkv->bhv", q[:, t], S) / anp.sqrt(q.shape[-1])
            total = total + anp.sum(o * ct_o[:, t])
        return total + anp.sum(S * ct_state)
    judged = autograd.grad(loss)(args)
    grads = kda.vjp(*args, **how)[1]((ct_o, ct_state))
    assert worst(grads[:6], judged) < 1e-10


@pytest.mark.grad
@pytest.mark.parametrize("kda", [kda_recurrent, kda_chunkwise])
def test_a_missing_cotangent_is_zero(kda):
    args = draw(T=20)
    (o, state), pullback = kda.vjp(*args)
    for pair, full in [((o, None), (o, np.zeros_like(state))),
                       ((None, state), (np.zeros_like(o), state))]:
        for a, b in zip(pullback(pair)[:6], pullback(full)[:6]):
            assert np.array_equal(a, b)


@pytest.mark.property
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 70), st.integers(1, 80), st.integers(1, 9),
       st.integers(1, 9))
def test_any_gates_any_length_any_chunk(seed, T, size, K, V):
    """From no decay at all to complete forgetting, mixed channel by channel."""
    gates = [0, -1e-9, -0.01, -1, -5, -60, -300, -1e4, -np.inf]
    args = draw(seed, B=1, T=T, H=2, K=K, V=V, gates=gates)
    ct = draw(seed + 1, B=1, T=T, H=2, K=K, V=V)
    ct = (ct[2], ct[5])
    slow, slow_pull = kda_recurrent.vjp(*args)
    fast, fast_pull = kda_chunkwise.vjp(*args, chunk_size=size)
    for a, b in zip(fast + fast_pull(ct)[:6], slow + slow_pull(ct)[:6]):
        assert np.abs(a - b).max() < 1e-11 * np.abs(b).max() + 1e-290       # e^-701 counts as 0


@pytest.mark.property
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("floor", [-5.0, -60.0, -1e4])
def test_all_gates_at_the_floor(floor, size):
    """Where K / Gamma overflows, float32 chunks still follow the float64 recurrence."""
    exact = draw(T=150, K=16, V=16, gates=[floor])
    ct = (exact[2], exact[5])
    reference, pull = kda_recurrent.vjp(*exact)
    rough = [x.astype(np.float32) for x in exact]
    value, pull_rough = kda_chunkwise.vjp(*rough, chunk_size=size)
    assert worst(value, reference) < 2e-6
    grads = pull_rough(tuple(x.astype(np.float32) for x in ct))
    assert worst(grads[:6], pull(ct)[:6]) < 2e-6


@pytest.mark.property
def test_equal_keys_without_decay():
    """The hardest system: every score is 1. Powers of it reach 1e17; substitution keeps to 1."""
    q, k, v, g, beta, state = draw(T=64, K=16, V=16, gates=[0])
    k, beta = np.broadcast_to(k[:, :1], k.shape).copy(), np.ones_like(beta)
    args = q, k, v, g, beta, state
    single = [x.astype(np.float32) for x in args]
    assert worst(kda_chunkwise(*single), kda_recurrent(*args)) < 2e-6


@pytest.mark.property
@pytest.mark.parametrize("kda, how", TWINS)
def test_causality(kda, how):
    args, t = draw(T=40), 23
    o, _ = kda(*args, **how)
    for n in range(5):
        changed = [x.copy() for x in args]
        changed[n][:, t:] *= 0.5
        assert rel(kda(*changed, **how)[0][:, :t], o[:, :t]) < 1e-14
        assert n == 3 or not np.allclose(kda(*changed, **how)[0][:, t], o[:, t])


@pytest.mark.property
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 40))
def test_streaming_equals_the_whole(lengths, size):
    args = draw(seed=sum(lengths), B=1, T=sum(lengths))
    whole, state = kda_recurrent(*args)
    S, start, outputs = args[5], 0, []
    for n in lengths:
        o, S = kda_chunkwise(*(x[:, start:start + n] for x in args[:5]), S, chunk_size=size)
        outputs.append(o)
        start += n
    assert rel(np.concatenate(outputs, axis=1), whole) < 1e-12 and rel(S, state) < 1e-12


@pytest.mark.property
@pytest.mark.parametrize("kda, how", TWINS)
def test_limits(kda, how):
    q, k, v, g, beta, state = draw(T=33)
    none, full = np.zeros_like(g), np.full_like(g, -np.inf)
    o, after = kda(q, k, v, none, np.zeros_like(beta), state, **how)        # a memory left alone
    assert rel(after, state) < 1e-15
    assert rel(o, np.einsum("bthk,bhkv->bthv", q, state) * 8 ** -0.5) < 1e-14
    o, after = kda(q, k, v, full, beta, state, **how)                       # no memory at all
    alone = np.einsum("bthk,bthk,bth,bthv->bthv", q, k, beta, v) * 8 ** -0.5
    assert rel(o, alone) < 1e-13
    _, after = kda(q, k, v, none, np.ones_like(beta), None, **how)          # the last is exact
    assert rel(np.einsum("bhk,bhkv->bhv", k[:, -1], after), v[:, -1]) < 1e-13


@pytest.mark.property
@pytest.mark.parametrize("kda, how", TWINS)
def test_heads_and_batch_are_apart(kda, how):
    args = draw(T=20)
    o, state = kda(*args, **how)
    order = [2, 0, 1]
    o2, state2 = kda(*(x[:, :, order] for x in args[:5]), args[5][:, order], **how)
    assert np.array_equal(o2, o[:, :, order]) and np.array_equal(state2, state[:, order])
    o1, state1 = kda(*(x[1:] for x in args), **how)
    assert np.array_equal(o1, o[1:]) and np.array_equal(state1, state[1:])


@pytest.mark.property
@pytest.mark.parametrize("kda, how", TWINS)
def test_any_memory_layout(kda, how):
    args = draw(T=20)
    odd = [np.asfortranarray(x) for x in args]
    odd[3] = args[3][:, ::-1].copy()[:, ::-1]
    (o, state), pullback = kda.vjp(*args, **how)
    (o2, state2), pullback2 = kda.vjp(*odd, **how)
    assert rel(o2, o) < 1e-14 and rel(state2, state) < 1e-14
    for a, b in zip(pullback2((o, state))[:6], pullback((o, state))[:6]):
        assert rel(a, b) < 1e-13


@pytest.mark.property
@pytest.mark.parametrize("kda, how", TWINS)
def test_no_tokens(kda, how):
    args = draw(T=0)
    (o, state), pullback = kda.vjp(*args, **how)
    assert o.shape == (2, 0, 3, 6) and np.array_equal(state, args[5])
    assert state is not args[5], "the caller's state must not be shared"
    grads = pullback((o, state))
    assert [x.shape for x in grads[:6]] == [x.shape for x in args]
    assert np.array_equal(grads[5], state)
    o, state = kda(*args[:5], **how)
    assert np.all(state == 0)


def peak_bytes(f):
    tracemalloc.start()
    f()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.property
@pytest.mark.parametrize("kda", [kda_recurrent, kda_chunkwise])
def test_memory_beyond_the_outputs_does_not_grow(kda):
    def extra(T):
        args = draw(B=1, T=T, H=1, K=16, V=16)
        return peak_bytes(lambda: kda(*args)) - args[2].nbytes
    assert extra(2048) < extra(256) + 8192


@pytest.mark.property
def test_the_pullback_holds_states_between_chunks_only():
    def extra(T):
        args = draw(B=1, T=T, H=1, K=16, V=16)
        (o, state), pullback = kda_chunkwise.vjp(*args)
        return peak_bytes(lambda: pullback((o, state))) - sum(x.nbytes for x in args[:5])
    state_bytes = 16 * 16 * 8
    assert extra(2048) - extra(256) < (2048 - 256) // 64 * state_bytes * 1.2


def textbook_chunk(q, k, v, g, beta, S, q_diagonal=0, k_diagonal=-1):
    """All tokens as one chunk, pair by pair, with the diagonals to be kept as arguments."""
    G = g.cumsum(axis=1)
    d = np.exp(np.minimum(G[:, :, None] - G[:, None], 0))                   # [B,i,j,H,K]
    Aqk = np.tril(np.einsum("bihk,bjhk,bijhk->bhij", q, k, d) * q.shape[-1] ** -0.5, q_diagonal)
    Akk = np.tril(np.einsum("bihk,bjhk,bijhk,bih->bhij", k, k, d, beta), k_diagonal)
    right = beta[..., None] * (v - np.einsum("bihk,bhkv->bihv", k * np.exp(G), S))
    w = np.linalg.solve(np.eye(len(G[0])) + Akk, right.swapaxes(1, 2))      # [B,H,T,V]
    far = np.einsum("bihk,bhkv->bihv", q * np.exp(G) * q.shape[-1] ** -0.5, S)
    return far + (Aqk @ w).swapaxes(1, 2)


@pytest.mark.traps
def test_trap_10_which_diagonal_stays():
    case = golden("kda_1")
    args = [case[n] for n in NAMES]
    assert rel(textbook_chunk(*args), case["o"]) < 1e-10
    assert rel(textbook_chunk(*args, q_diagonal=-1), case["o"]) > 1e-2
    assert rel(textbook_chunk(*args, k_diagonal=0), case["o"]) > 1e-2


def variant(case, order="decay, write, read", scale=None):
    """The recurrence with its steps in another order or with another scale."""
    q, k, v, g, beta, S = (case.get(n) for n in NAMES)
    o = []
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for t in range(q.shape[1]):
        for step in order.split(", "):
            if step == "decay":
                S = S * np.exp(g[:, t])[..., None]
            elif step == "write":
                u = beta[:, t, :, None] * (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], S))
                S = S + k[:, t][..., None] * u[:, :, None]
            else:
                o.append(scale * np.einsum("bhk,bhkv->bhv", q[:, t], S))
    return np.stack(o, axis=1)


@pytest.mark.traps
@pytest.mark.parametrize("name", ["kda_1", "kda_2"])
def test_trap_7_reads_after_writing_with_a_scaled_query(name):
    case = golden(name)
    assert rel(variant(case), case["o"]) < 1e-10
    assert rel(variant(case, "decay, read, write"), case["o"]) > 1e-2
    assert rel(variant(case, "write, decay, read"), case["o"]) > 1e-2
    assert rel(variant(case, scale=1.0), case["o"]) > 1e-2
    assert rel(variant(case, scale=1 / case["q"].shape[-1]), case["o"]) > 1e-2


@pytest.mark.traps
def test_a_transposed_state_is_refused_or_rejected():
    case = golden("kda_1")                                       # K = 16, V = 24
    args = [case[n] for n in NAMES]
    with pytest.raises(ValueError, match="initial_state"):
        kda_recurrent(*args[:5], args[5].swapaxes(-1, -2))
    case = golden("kda_2")                                       # K = V hides it from the shapes
    args = [case[n] for n in NAMES]
    o, state = kda_chunkwise(*args[:5], args[5].swapaxes(-1, -2))
    assert rel(o, case["o"]) > 1e-2
    assert rel(kda_chunkwise(*args)[1].swapaxes(-1, -2), case["final_state"]) > 1e-2


@pytest.mark.traps
def test_trap_5_the_bounded_gate_is_no_clamped_softplus():
    case = golden("kda_gate_1")
    z, A_log, bias = case["x"], case["A_log"], case["dt_bias"]
    clamped = np.maximum(softplus_decay_gate(z, A_log, bias), -5)
    assert rel(clamped, case["g"]) > 1e-2
    outside = -5 * sigmoid(np.exp(A_log)[:, None] * z + bias.reshape(3, 8))  # bias not scaled
    assert rel(outside, case["g"]) > 1e-2
    per_channel = -5 * sigmoid(np.exp(np.resize(A_log, 8)) * (z + bias.reshape(3, 8)))
    assert rel(per_channel, case["g"]) > 1e-2


@pytest.mark.traps
def test_trap_13_masking_after_exp_spoils_gradients():
    """The values are right, because the mask hides the infinities; the gradients are NaN."""
    case = golden("kda_3")
    q, k, g = case["q"][0, :, 0], case["k"][0, :, 0], case["g"][0, :, 0]
    lower = np.tril(np.ones((len(q), len(q)), bool))[..., None]

    def scores(g, mask_first):
        G = anp.dot(np.tril(np.ones((len(q), len(q)))), g)
        apart = G[:, None] - G[None]
        d = anp.exp(anp.where(lower, apart, -np.inf)) if mask_first else \
            anp.where(lower, anp.exp(apart), 0.0)
        return anp.sum(q[:, None] * k[None] * d)
    with np.errstate(all="ignore"):
        assert np.isclose(scores(g, True), scores(g, False))
        assert np.isfinite(autograd.grad(scores)(g, True)).all()
        assert np.isnan(autograd.grad(scores)(g, False)).any()


BAD = [
    ({"q": lambda x: x[..., :-1]}, "k has shape"), ({"v": lambda x: x[:, :-1]}, "v has shape"),
    ({"g": lambda x: x[..., 0]}, "g has shape"), ({"beta": lambda x: x[..., None]}, "beta has"),
    ({"q": lambda x: x[0]}, "q has shape"), ({"initial_state": lambda x: x[:1]}, "initial_state"),
    ({"q": lambda x: x.astype(int)}, "q has dtype int"),
    ({"v": lambda x: x.astype(np.float16)}, "v has dtype float16"),
    ({"beta": lambda x: x.astype(np.float32)}, "dtypes differ"),
    ({"initial_state": lambda x: x.astype(np.float32)}, "dtypes differ"),
    ({"g": lambda x: np.where(x == x.max(), np.nan, x)}, "g holds NaN"),
    ({"k": lambda x: np.where(x == x.max(), np.nan, x)}, "k holds NaN or infinity"),
    ({"beta": lambda x: np.where(x == x.max(), np.inf, x)}, "beta holds NaN or infinity"),
    ({"g": lambda x: -x}, "g holds .* at most 0"),
]


@pytest.mark.errors
@pytest.mark.parametrize("change, message", BAD)
@pytest.mark.parametrize("kda", [kda_recurrent, kda_chunkwise])
def test_bad_arguments(kda, change, message):
    args = dict(zip(NAMES, draw(T=5)))
    args.update({n: f(args[n]) for n, f in change.items()})
    with pytest.raises(ValueError, match=message):
        kda(**args)


@pytest.mark.errors
@pytest.mark.parametrize("size", [0, -1, 2.0, None, "64", True])
def test_bad_chunk_size(size):
    with pytest.raises(ValueError, match="chunk_size is .* whole number"):
        kda_chunkwise(*draw(T=5), chunk_size=size)


@pytest.mark.errors
@pytest.mark.parametrize("C", [0, 3, 12])
def test_bad_chunk_rows(C):
    args = draw(T=C)
    with pytest.raises(ValueError, match="k has shape .* power of two"):
        kda_chunk(*(x.swapaxes(1, 2) for x in args[:5]), args[5])


@pytest.mark.errors
def test_bad_gate_arguments():
    z, A_log, bias = np.zeros((5, 3, 4)), np.zeros(3), np.zeros(12)
    for gate in (decay_gate, softplus_decay_gate):
        with pytest.raises(ValueError, match="A_log has shape .* at least H=3"):
            gate(z, A_log[:2], bias)
        with pytest.raises(ValueError, match=r"dt_bias has shape .*\[12\]"):
            gate(z, A_log, bias[:4])
        with pytest.raises(ValueError, match="z has shape"):
            gate(np.zeros(4), A_log, bias)
        with pytest.raises(ValueError, match="dtypes differ"):
            gate(z.astype(np.float32), A_log, bias)
    for bound in (0.0, 5.0, -np.inf, np.nan):
        with pytest.raises(ValueError, match="lower_bound"):
            decay_gate(z, A_log, bias, bound)
