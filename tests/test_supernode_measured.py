"""The model against what others measured, with bands: a change that leaves a band is seen here."""
import numpy as np
import pytest

from k3np.supernode import preset, star, two_tier
from k3np.supernode.measured import fit_alpha_beta, leave_one_out, relative_errors
from k3np.vectors import golden_json


def rows(op, hardware="", **equal):
    found = [r for r in golden_json("supernode/measurements")["rows"] if r["op"] == op
             and r["hardware"].startswith(hardware)
             and all(r.get(k) == v for k, v in equal.items())]
    assert found, f"no measurement of {op} on {hardware}"
    return found


def columns(found):
    return (np.array([r["bytes"] for r in found], float),
            np.array([r["latency_us"] for r in found]) * 1e-6)


def a2a_error(row, fabric):
    model = fabric.all_to_all(n_bytes=row["bytes"] / row["ranks"]).time_s
    return model * 1e6 / row["latency_us"] - 1


@pytest.mark.golden
def test_gb300_inside_a_rack_and_across():
    errors = [a2a_error(row, preset("nvl72", row["ranks"]))
              for row in rows("all_to_all", "GB300") if row["ranks"] < 128]
    assert len(errors) == 6 and max(map(abs, errors)) < 0.06
    times = {r["ranks"]: r["latency_us"] for r in rows("all_to_all", "GB300", bytes=2 ** 34)}
    measured = times[128] / times[64]
    racks = [two_tier(2, 64, 660e9, nic * 1e9).all_to_all(n_bytes=2 ** 27) for nic in (24.0, 92.0)]
    one = preset("nvl72", 64).all_to_all(n_bytes=2 ** 28)
    assert measured > 10 and racks[1].time_s / one.time_s > 3      # the cliff, with any NIC
    assert "nic" in racks[0].bottleneck
    # One number of the second rack gives the other row: NIC from 8 GiB, held against 16 GiB.
    row = rows("all_to_all", "GB300", ranks=128, bytes=2 ** 33)[0]
    nic = 64 * row["bytes"] / 128 / row["latency_us"] * 1e6
    assert abs(two_tier(2, 64, 660e9, nic).all_to_all(n_bytes=2 ** 27).time_s
               / times[128] * 1e6 - 1) < 0.02


@pytest.mark.golden
def test_two_h200():
    part = {"all_reduce": 1, "all_gather": 1, "send_recv": 1, "all_to_all": 0.5,
            "reduce_scatter": 0.5}
    for op, of in part.items():
        n, t = columns([r for r in rows(op, "2x H200") if r["bytes"] >= 2 ** 26])
        a, b = fit_alpha_beta(n * of, t)
        f = star(2, b, a)
        assert np.abs(relative_errors(n * of, t, a, b)).max() < 0.10
        if op != "send_recv":                            # the schedule has the same two numbers
            k = 2 if op == "all_reduce" else 1
            times = [getattr(f, op)(n_bytes=size / (2 if op == "all_to_all" else 1)
                                    * (2 if op == "all_gather" else 1)).time_s for size in n]
            assert np.abs(np.array(times) - a * (k - 1) - (a + n * of / b)).max() < 1e-9
        assert 250e9 < b < 400e9
    n, t = columns([r for r in rows("send_recv", "2x H200") if r["bytes"] >= 2 ** 26])
    assert np.abs(leave_one_out(n, t)).max() < 0.06


@pytest.mark.golden
def test_eight_h200_ring_against_the_preset():
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        ring = [r["busbw_GBps"] for r in rows(op, "8x H200", ranks=8) if r["busbw_GBps"] < 400]
        n = 2 ** 33
        time_s = getattr(preset("h200"), op)(n_bytes=n).time_s
        model = n / time_s * (2 if op == "all_reduce" else 1) * 7 / 8 / 1e9
        assert all(abs(model / x - 1) < 0.02 for x in ring)
    line = preset("h200").all_reduce(n_bytes=2 ** 33, algorithm="in_switch")
    apparent = 2 * 7 / 8 * 2 ** 33 / line.time_s / 1e9           # in-switch: too good by this model
    assert 1.15 < apparent / 475 < 1.25


@pytest.mark.golden
def test_mooncake_transfers():
    n, t = columns(rows("kv_transfer_1P1D"))
    a, b = fit_alpha_beta(n, t)
    assert 0.3e-3 < a < 0.45e-3 and 130e9 < b < 145e9
    assert np.abs(relative_errors(n, t, a, b)).max() < 0.07
    assert np.abs(leave_one_out(n, t)).max() < 0.12


@pytest.mark.traps
def test_plain_alpha_beta_misses_the_middle():
    n, t = columns([r for r in rows("all_reduce", "2x8 H100") if r["bytes"] >= 2 ** 10])
    a, b = fit_alpha_beta(n, t)
    assert np.abs(relative_errors(n, t, a, b)).max() > 0.3       # protocols are switched there


@pytest.mark.errors
def test_what_the_fit_refuses():
    for n, t, says in (([1, 1], [1, 1], "two sizes"), ([1, 2], [1], "give times"),
                       ([1, 2], [2, 1], "does not grow")):
        with pytest.raises(ValueError, match=says):
            fit_alpha_beta(n, t)


@pytest.mark.property
def test_the_fit_finds_what_is_there():
    n = np.array([1e3, 1e6, 1e9])
    a, b = fit_alpha_beta(n, 5e-6 + n / 7e10)
    assert abs(a / 5e-6 - 1) < 1e-9 and abs(b / 7e10 - 1) < 1e-9
    assert np.abs(leave_one_out(n, 5e-6 + n / 7e10)).max() < 1e-6
