"""The sixteen traps, each switched on in the whole model and rejected by a released case.

Three of them do not show in a forward: gradients, quantising and balancing have tests of their own,
and so have the parts for every other trap. The table names them.
"""
import ast
import pathlib

import numpy as np
import pytest
from helpers import rel
from test_model import k3_tiny

from k3np.model import forward
from k3np.traps import TRAPS, switched_on

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.traps
OF_PARTS = {                                             # trap: the part's own test
    1: "test_mla.test_wrong_layers_are_rejected",
    2: "test_moe.test_golden_rejects_wrong_variants",
    3: "test_moe.test_golden_rejects_wrong_variants",
    4: "test_situ",
    5: "test_kda.test_trap_5_the_bounded_gate_is_no_clamped_softplus",
    6: "test_kda_layer.test_wrong_layers_are_rejected",
    7: "test_kda.test_trap_7_reads_after_writing_with_a_scaled_query",
    8: "test_decoder_layer.test_the_cases_reject_wrong_wiring",
    9: "test_config.test_layer_lists_read_as_zero_based_would_move_every_mla_layer",
    10: "test_kda.test_trap_10_which_diagonal_stays",
    11: "test_mla.test_wrong_layers_are_rejected",
    12: "test_mx_use",
    13: "test_kda.test_trap_13_masking_after_exp_spoils_gradients",
    14: "test_mx_quantize.test_golden_rejects_a_scale_by_float32_log2",
    15: "test_balance.test_golden_rejects_wrong_rules_of_balancing",
    16: "test_kda_parallel.test_trap_16_states_cannot_be_added",
}
NOT_IN_A_FORWARD = {13, 14, 15}


@pytest.mark.golden
@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: f"{t.number} {t.name}")
def test_the_released_logits_reject_the_trap(trap):
    params, cfg, io = k3_tiny()
    with switched_on(trap, cfg, params) as (wrong_cfg, wrong_params):
        if trap.number == 9:                             # the only one that cannot run at all
            with pytest.raises(ValueError, match="p lacks"):
                forward(wrong_params, io["input_ids"], wrong_cfg)
            return
        value, _ = forward(wrong_params, io["input_ids"], wrong_cfg)
    assert np.isfinite(value).all()
    assert rel(value, io["logits"]) > 1e-6               # the right model: below 1e-9
    right, _ = forward(params, io["input_ids"], cfg)
    assert rel(right, io["logits"]) < 1e-9               # and nothing is left of the trap


def test_every_trap_of_the_list_is_here():
    assert {t.number for t in TRAPS} | NOT_IN_A_FORWARD == set(range(1, 17)) == set(OF_PARTS)
    assert not {t.number for t in TRAPS} & NOT_IN_A_FORWARD


@pytest.mark.parametrize("number", OF_PARTS)
def test_the_part_rejects_it_too(number):
    """By reference: the part's test exists and is of the kind `traps`."""
    module, _, name = OF_PARTS[number].partition(".")
    tree = ast.parse((HERE / f"{module}.py").read_text(encoding="utf8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)
             and (not name or node.name == name)
             and any(isinstance(n, ast.Attribute) and n.attr == "traps"
                     for d in node.decorator_list for n in ast.walk(d))]
    assert found, f"trap {number}: no test of the kind `traps` is {OF_PARTS[number]}"
