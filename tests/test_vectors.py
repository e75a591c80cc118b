"""Golden cases in this package's layout."""
import numpy as np
import pytest

from k3np import vectors
from k3np.vectors import golden, nest


@pytest.mark.property
def test_nest_collapses_weights_and_stacks_experts_in_numeric_order():
    flat = {"q_proj.weight": np.ones((2, 3)), "A_log": np.zeros(2), "gate.weight": np.ones((12, 3)),
            "gate.e_score_correction_bias": np.zeros(12), "self_attn.o_norm.weight": np.ones(4)}
    flat |= {f"experts.{e}.{w}.weight": np.full((2, 2), e) for e in range(12) for w in ("w1", "w2")}
    tree = nest(flat)
    assert tree["q_proj"].shape == (2, 3) and tree["self_attn"]["o_norm"].shape == (4,)
    assert set(tree["gate"]) == {"weight", "e_score_correction_bias"}
    assert tree["experts"]["w1"].shape == (12, 2, 2)
    assert tree["experts"]["w2"][:, 0, 0].tolist() == list(range(12))     # 10 after 9, not after 1


@pytest.mark.property
def test_nest_does_not_change_its_argument_and_keeps_list_like_modules():
    flat = {"layers.0.norm.weight": np.ones(1), "layers.1.norm.weight": np.ones(1)}
    before = dict(flat)
    tree = nest(flat)
    assert flat == before and set(tree["layers"]) == {"0", "1"}


@pytest.mark.golden
def test_golden_reads_a_case_with_parameters(tmp_path, monkeypatch):
    arrays = {"x": np.ones(3), "param.experts.0.w1.weight": np.ones((1, 2)),
              "param.experts.1.w1.weight": np.ones((1, 2)), "param.norm.weight": np.ones(2),
              "grad_param.experts.1.w1.weight": np.full((1, 2), 5.0), "ct_y": np.ones(1)}
    np.savez(tmp_path / "small.npz", **arrays)
    (tmp_path / "small.json").write_text('{"note": "made here"}')
    monkeypatch.setattr(vectors, "_folder", lambda: tmp_path)
    case = golden("small")
    assert set(case) == {"x", "ct_y", "param", "grad_param", "meta"}
    assert case["meta"]["note"] == "made here"
    assert case["param"]["experts"]["w1"].shape == (2, 1, 2)
    assert case["grad_param"]["experts"]["w1"][:, 0, 0].tolist() == [0, 5]    # missing means zero
    assert case["grad_param"]["norm"].tolist() == [0, 0]


@pytest.mark.golden
def test_a_released_case_is_in_the_repository():
    case = golden("situ_0")
    assert case["x"].dtype == np.float64 and "source" in case["meta"]


@pytest.mark.errors
def test_a_case_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="nothing_0.npz: no such golden case"):
        golden("nothing_0")
