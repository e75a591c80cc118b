"""The decode step, capacity, hand-over, and a fleet: arithmetic by hand, laws, and refusals."""
import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.__main__ import main
from k3np.config import K3Config
from k3np.count import cache_bytes
from k3np.supernode import serving
from k3np.supernode.fleet import POLICIES, simulate_fleet

CFG = K3Config.released()
STEP = dict(cfg=CFG, machine="nvl72", ranks=64, batch=4096, context=8192)


@pytest.mark.golden
def test_worked_cases_38_to_45():
    cache = cache_bytes(CFG, 1)
    assert cache["mla_per_token"] == 27648 and cache["kda_state"] == 434110464
    assert Fraction(cache["kda_state"], cache["mla_per_token"]) == Fraction(47104, 3)
    assert serving.ring_penalty(16, 2, Fraction(9)) == Fraction(23, 15)
    assert serving.all_to_all_penalty(16, 2, Fraction(9)) == Fraction(79, 15)
    assert serving.nccl_ring_s(8) * 1e6 == pytest.approx(56, abs=1e-9)
    assert serving.nccl_ring_s(8, "LL") * 1e6 == pytest.approx(15, abs=1e-9)


@pytest.mark.golden
def test_the_figures_of_a_step_worked_out_by_hand():
    step = serving.decode_step(**STEP)
    assert step.parts["experts"] == pytest.approx(1446.456066048 / 64 / 8000, rel=1e-3)  # all read
    assert step.parts["operations"] == pytest.approx(184 * 10e-6)
    out, back = (serving.exchange_s(CFG, "nvl72", 64, 64, fmt) for fmt in ("mxfp8", "bf16"))
    assert (round(out * 1e6, 1), round(back * 1e6, 1)) == (5.1, 9.8)
    out, back = (serving.exchange_s(CFG, "b200x8", 64, 64, fmt) for fmt in ("mxfp8", "bf16"))
    assert (round(out * 1e6, 1), round(back * 1e6, 1)) == (31.8, 61.7)
    blind = 92 * sum(serving.exchange_s(CFG, "b200x8", 64, 64, fmt, dedup="none")
                     for fmt in ("mxfp8", "bf16"))
    assert round(blind * 1e3, 1) == 19.5
    assert round(serving.expected_experts(896, 16, 256)) == 887


@pytest.mark.golden
def test_capacity_agrees_with_the_machines_on_which_k3_is_known_to_run():
    fits = {(m, n): serving.capacity(CFG, m, n, 8192, tp=n, experts="tp").free > 0
            for m, n in (("h200x8", 8), ("h200x8", 16), ("b200x8", 8), ("b200x8", 16),
                         ("nvl72", 8), ("nvl72", 16), ("b300x8", 8), ("gb300", 8))}
    assert [key for key, yes in fits.items() if yes] == [
        ("h200x8", 16), ("b200x8", 16), ("nvl72", 16), ("b300x8", 8), ("gb300", 8)]


@pytest.mark.golden
def test_one_constant_for_software_from_one_measurement_predicts_others():
    """vLLM, K3, a batch of one: GB300 TP8 111 tok/s; TP16 118; GB200 TP16 8.0 ms."""
    def roof(machine, n):
        return serving.decode_step(CFG, machine, n, 1, 1000, tp=n, experts="tp", reduce_s=0.0)
    layer_s = (1 / 111 - roof("gb300", 8).time_s) / CFG.num_hidden_layers
    assert 70e-6 < layer_s < 80e-6
    for machine, measured_s in (("gb300", 1 / 118), ("nvl72", 8.0e-3)):
        model_s = roof(machine, 16).time_s + CFG.num_hidden_layers * layer_s
        assert abs(model_s / measured_s - 1) < 0.08


@pytest.mark.property
@settings(max_examples=25, deadline=None)
@given(st.sampled_from([8, 16, 64, 128]), st.integers(1, 4096), st.integers(0, 2**20),
       st.sampled_from([1, 2, 8]))
def test_more_work_never_takes_less_time(ranks, batch, context, tp):
    args = dict(STEP, ranks=ranks, batch=batch, context=context, tp=tp)
    step = serving.decode_step(**args)
    assert step.time_s == pytest.approx(sum(step.parts.values()))
    assert min(step.parts.values()) >= 0 and step.overlapped_s <= step.time_s * (1 + 1e-12)
    for more in (dict(batch=batch + 64), dict(context=context + 4096), dict(tokens=3),
                 dict(violation=0.5), dict(layer_s=1e-5), dict(op_s=2e-5, nic_op_s=8e-5)):
        assert serving.decode_step(**{**args, **more}).time_s >= step.time_s
    if tp > 1:
        shared = serving.decode_step(**args, dcp=tp)
        assert shared.parts["cache"] <= step.parts["cache"]


@pytest.mark.property
def test_a_supernode_is_a_lone_node_and_nics_only_add():
    near, far = (serving.decode_step(**{**STEP, "machine": m}) for m in ("nvl72", "b200x8"))
    assert (near.n_nodes, far.n_nodes) == (1, 8)
    assert far.parts["wire"] > 5 * near.parts["wire"]
    assert far.parts["experts"] == near.parts["experts"]


@pytest.mark.property
def test_experts_touched_by_drawing(n=4000):
    rng = np.random.default_rng(0)
    E, k, T = 56, 4, 9
    drawn = [len(np.unique(rng.random((T, E)).argpartition(k)[:, :k])) for _ in range(n)]
    assert np.mean(drawn) == pytest.approx(serving.expected_experts(E, k, T), rel=5e-3)


@pytest.mark.property
def test_accepted_tokens_by_drawing():
    rng = np.random.default_rng(0)
    kept = (rng.random((40000, 5)) < 0.7).cumprod(axis=1).sum(axis=1) + 1
    assert kept.mean() == pytest.approx(serving.accepted_tokens(0.7, 5), rel=5e-3)
    assert serving.accepted_tokens(1.0, 7) == 8 and serving.accepted_tokens(0.0, 7) == 1


@pytest.mark.property
def test_handing_over_layer_by_layer_hides_the_shorter_of_the_two():
    for context in (4096, 400_000):
        after, layerwise = serving.handover_s(CFG, context, 1.0, 46e9)
        assert 1.0 < layerwise < after
    total = cache_bytes(CFG, 400_000)["total"]
    assert [round(1e3 * serving.transfer_s(total, b, links=n))
            for b, n in ((46e9, 1), (46e9, 8), (660e9, 1))] == [250, 31, 17]


@pytest.mark.property
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 99), st.sampled_from(POLICIES), st.sampled_from([None, 50_000, 500_000]),
       st.sampled_from([10**5, 10**7]))
def test_a_fleet_loses_no_request(seed, policy, budget, room):
    fleet = simulate_fleet(np.random.default_rng(seed), policy, n_clusters=3, n_sessions=20,
                           turns=4, budget_tokens=budget, cache_tokens=room)
    served = fleet.cluster >= 0
    assert len(served) == 20 * 4                                      # every turn has a fate
    assert np.isfinite(fleet.finish_s[served]).all() and np.isnan(fleet.finish_s[~served]).all()
    assert served.all() or budget is not None
    assert (fleet.wait_s > 0).all() and (fleet.finish_s >= fleet.first_token_s)[served].all()
    assert (fleet.cached <= fleet.prompt).all() and (fleet.busy <= 1 + 1e-9).all()
    same = simulate_fleet(np.random.default_rng(seed), policy, n_clusters=3, n_sessions=20,
                          turns=4, budget_tokens=budget, cache_tokens=room)
    assert np.array_equal(same.finish_s, fleet.finish_s, equal_nan=True)


@pytest.mark.property
def test_affinity_pays_and_two_homes_shorten_the_tail():
    load = dict(start_tokens=100_000, sessions_per_s=2.0, n_sessions=300, cache_tokens=8_000_000)
    fleets = {p: simulate_fleet(np.random.default_rng(0), p, **load) for p in POLICIES}
    assert min(fleets[p].hit_rate for p in ("one", "two")) > 2 * fleets["idlest"].hit_rate
    assert np.percentile(fleets["two"].wait_s, 99) < np.percentile(fleets["one"].wait_s, 99)


@pytest.mark.errors
def test_errors():
    for change, message in ((dict(machine="abacus"), "there are h200x8"),
                            (dict(ranks=72), "896 experts"), (dict(tp=5), "heads"),
                            (dict(tp=8, dcp=3), "must divide tp"), (dict(experts="tp"), "cuts"),
                            (dict(machine="nvl72", ranks=73), "evenly"),
                            (dict(batch=0), "batch"), (dict(dedup="all"), "dedup"),
                            (dict(context=-1), "tokens")):
        with pytest.raises(ValueError, match=message):
            serving.decode_step(**{**STEP, **change})
    for call in (lambda: serving.expected_experts(8, 9, 1), lambda: serving.transfer_s(1, 0),
                 lambda: serving.accepted_tokens(1.5, 2),
                 lambda: simulate_fleet(np.random.default_rng(0), "nearest"),
                 lambda: simulate_fleet(np.random.default_rng(0), think_s=0)):
        with pytest.raises(ValueError):
            call()


@pytest.mark.property
def test_a_model_without_quantisation_and_the_trace():
    plain = replace(CFG, quantization_config=None)
    assert serving.weight_bytes(plain)["experts"] == pytest.approx(
        serving.weight_bytes(CFG)["experts"] * 2 * 32 / 17)
    step = serving.decode_step(**STEP)
    bars = [e for e in serving.step_trace([("a", step)])["traceEvents"] if e["ph"] == "X"]
    assert sum(e["dur"] for e in bars) == pytest.approx(step.time_s * 1e6)


@pytest.mark.property
def test_command(tmp_path, capsys):
    path = tmp_path / "steps.json"
    assert main(["simulate", "--ep", "8", "64", "128", "--per-gpu", "64", "--context", "8192",
                 "--fabric", "nvl72", "b200x8", "--trace", str(path)]) == 0
    text = capsys.readouterr().out
    assert "nvl72" in text and "does not fit" in text and "assumed" in text.lower()
    assert json.loads(path.read_text())["traceEvents"]
    assert [p.name for p in tmp_path.iterdir()] == ["steps.json"]


@pytest.mark.errors
@pytest.mark.parametrize("words, code, message", [
    (["--ep", "72"], 2, "896 experts"), (["--tp", "7"], 2, "tp=7"), (["--batch", "0"], 2, "batch"),
    (["--ep", "0"], 2, "--ep is 0; expected 1 or more"), (["--ep", "8", "-8"], 2, "--ep is -8"),
    (["--tokens", "0"], 2, "--tokens is 0"), (["--per-gpu", "-1"], 2, "--per-gpu is -1"),
    (["--op-us", "nan"], 2, "--op-us is nan; fixed costs"), (["--op-us", "inf"], 2, "is inf;"),
    (["--op-us", "-1"], 2, "--op-us is -1.0"), (["--dcp", "2"], 2, "--dcp 2 needs --tp"),
    (["--ep", "8", "--fabric", "h200x8"], 1, "does not fit"),
    (["--ep", "64", "--trace", "/no/such/folder/x.json"], 2, "folder")])
def test_command_errors(words, code, message, capsys):
    assert main(["simulate", *words]) == code
    out, err = capsys.readouterr()
    assert message in out + err
    assert "Traceback" not in err
