"""The config: the released values, the round trip, zero-based questions, and refused values."""
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.config import K3Config, LinearAttnConfig, VisionConfig

RELEASED, TINY = K3Config.released(), K3Config.tiny()


def changed(**keys):
    """The tiny config as a released-style file with keys of its text_config replaced."""
    whole = TINY.to_json()
    whole["text_config"].update(keys)
    return whole


def linear(**keys):
    return changed(linear_attn_config={**TINY.to_json()["text_config"]["linear_attn_config"],
                                       **keys})


def quantized(weights=None, **keys):
    """The released quantization_config with keys of its weights, or its own, replaced."""
    q = RELEASED.to_json()["text_config"]["quantization_config"]
    q["config_groups"]["group_0"]["weights"].update(weights or {})
    return changed(quantization_config={**q, **keys})


@pytest.mark.property
def test_released_layers():
    mla = [i for i in range(93) if RELEASED.is_mla_layer(i)]
    assert mla == [*range(3, 92, 4), 92] and len(mla) == 24
    assert [i for i in range(93) if RELEASED.is_dense_layer(i)] == [0]
    assert RELEASED.linear_attn_config.kda_layers[:4] == (1, 2, 3, 5)      # one-based in the file


@pytest.mark.traps
def test_layer_lists_read_as_zero_based_would_move_every_mla_layer():
    misread = {i for i in range(93) if i in RELEASED.linear_attn_config.full_attn_layers}
    assert misread & {i for i in range(93) if RELEASED.is_mla_layer(i)} == {92}


@pytest.mark.property
@pytest.mark.parametrize("cfg", [RELEASED, TINY, dataclasses.replace(TINY, vision_config=None)])
def test_round_trip_through_a_dict_and_a_file(cfg, tmp_path):
    assert K3Config.from_json(cfg.to_json()) == cfg
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cfg.to_json()), encoding="utf8")
    assert K3Config.from_json(path) == K3Config.from_json(str(path)) == cfg
    if cfg.vision_config is None:
        assert K3Config.from_json(cfg.to_json()["text_config"]).hidden_size == cfg.hidden_size


@pytest.mark.property
def test_keys_that_do_not_concern_the_mathematics_are_passed_over_and_null_is_absence():
    cfg = K3Config.from_json(changed(use_cache=True, rope_theta=10000.0, q_lora_rank=None))
    assert cfg == dataclasses.replace(TINY, q_lora_rank=None)


@pytest.mark.property
def test_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.hidden_size = 1
    assert hash(RELEASED) == hash(K3Config.released()) and TINY != RELEASED


@pytest.mark.property
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 5), st.data())
def test_every_partition_of_the_layers_is_read_back_zero_based(n, first, freq, data):
    mla = data.draw(st.sets(st.integers(0, n - 1)))
    cfg = dataclasses.replace(
        TINY, num_hidden_layers=n, first_k_dense_replace=first, moe_layer_freq=freq,
        linear_attn_config=dataclasses.replace(
            TINY.linear_attn_config, full_attn_layers=tuple(i + 1 for i in sorted(mla)),
            kda_layers=tuple(i + 1 for i in range(n) if i not in mla)))
    assert {i for i in range(n) if cfg.is_mla_layer(i)} == mla
    for i in range(n):
        assert cfg.is_dense_layer(i) == (i < first or i % freq > 0)


@pytest.mark.errors
@pytest.mark.parametrize("source, words", [
    (linear(kda_layers=[0, 1, 2, 4]), "one-based"),
    (linear(kda_layers=[1, 2, 3, 4, 5]), r"in both: \[4\]"),
    (linear(kda_layers=[1, 2, 3]), "num_hidden_layers=6 once"),
    (linear(kda_layers=7), "kda_layers must be a list"),
    (linear(full_attn_layers=["4", 6]), "full_attn_layers must be a list of whole numbers"),
    (linear(gate_lower_bound=5.0), "gate_lower_bound must be negative"),
    (linear(gate_lower_bound="low"), "gate_lower_bound must be negative"),
    (linear(gate_lower_bound=float("nan")), "gate_lower_bound must be negative"),
    (linear(gate_lower_bound=float("-inf")), "gate_lower_bound must be negative and finite"),
    (linear(use_full_rank_gate=1), "linear_attn_config.use_full_rank_gate must be true or false"),
    (linear(num_heads=0), "linear_attn_config.num_heads must be a positive whole number"),
    (changed(linear_attn_config=[1]), "linear_attn_config must be a JSON object; got list"),
    (changed(hidden_size=64.0), "hidden_size must be a positive whole number; got 64.0"),
    (changed(hidden_size=True), "hidden_size must be a positive whole number; got True"),
    (changed(vocab_size=-1), "vocab_size"), (changed(q_lora_rank=0), "q_lora_rank"),
    (changed(num_experts_per_token=8), "num_experts_per_token=8 must be less than num_experts=8"),
    (changed(num_key_value_heads=2), "num_key_value_heads=2 must equal num_attention_heads=4"),
    (changed(mla_use_nope=False), "mla_use_nope"),
    (changed(hidden_act="relu"), "hidden_act='relu'"),
    (changed(moe_router_activation_func="softmax"), "moe_router_activation_func"),
    (changed(num_expert_group=0), "num_expert_group must be a positive whole number"),
    (changed(num_expert_group=3), "num_expert_group=3 must divide num_experts=8"),
    (changed(topk_group=2), "topk_group=2"), (changed(num_shared_experts=-1), "num_shared_experts"),
    (changed(rms_norm_eps=0.0), "rms_norm_eps must be a positive number"),
    (changed(activation_situ_beta=-4.0), "activation_situ_beta must be a positive number"),
    (changed(activation_situ_linear_beta="25"), "activation_situ_linear_beta"),
    (changed(routed_scaling_factor=float("inf")), "routed_scaling_factor"),
    (changed(moe_renormalize="yes"), "moe_renormalize must be true or false; got 'yes'"),
    (changed(pad_token_id=3), "pad_token_id is 255 at the top level and 3 in text_config"),
    ({**changed(), "media_placeholder_token_id": 1.5}, "media_placeholder_token_id must be a"),
    ({**changed(), "eos_token_id": True}, "eos_token_id must be a whole number; got True"),
    ({**changed(), "ignore_index": "a"}, "ignore_index must be a whole number; got 'a'"),
    (changed(quantization_config=[1]), "quantization_config must be a JSON object; got list"),
    (changed(quantization_config={}), "quantization_config.format=None"),
    (quantized(format="gptq"), "quantization_config.format='gptq'; known is"),
    (changed(quantization_config={"format": "mxfp4-pack-quantized"}),
     "quantization_config.config_groups must be a JSON object; got None"),
    (quantized(config_groups={}), "config_groups.group_0 must be a JSON object; got None"),
    (quantized(config_groups={"group_0": {"weights": 4}}), "group_0.weights must be .*; got 4"),
    (quantized({"group_size": 0}), "weights.group_size must be a positive whole number; got 0"),
    (quantized({"group_size": "x"}), "weights.group_size must be a positive whole number"),
    (quantized({"num_bits": 8}), "weights.num_bits=8; MXFP4 has 4"),
    ([1, 2], "config must be a JSON object"), ({"text_config": 3}, "text_config in it another"),
])
def test_refused_values_name_the_key(source, words, tmp_path):
    path = tmp_path / "refused.json"
    path.write_text(json.dumps(source))
    with pytest.raises(ValueError, match=f"refused.json: .*{words}"):
        K3Config.from_json(path)


@pytest.mark.errors
@pytest.mark.parametrize("key, value, words", [
    ("qkv_hidden_size", 50, "qkv_hidden_size=50"),
    ("mm_hidden_size", 16, "mm_hidden_size=16 differs from vt_hidden_size=32"),
    ("text_hidden_size", 32, "text_hidden_size=32 differs from hidden_size=64"),
    ("merge_kernel_size", 2, "merge_kernel_size must be two positive whole numbers"),
    ("merge_kernel_size", [2, 0], "merge_kernel_size must be two positive whole numbers"),
    ("projector_ln_eps", 0.0, "projector_ln_eps must be a positive number; got 0.0"),
    ("projector_ln_eps", "x", "projector_ln_eps must be a positive number; got 'x'"),
    ("projector_ln_eps", float("nan"), "projector_ln_eps must be a positive number; got nan"),
    ("patch_size", None, "patch_size must be a positive whole number"),
])
def test_refused_vision_values_name_the_key(key, value, words):
    whole = TINY.to_json()
    whole["vision_config"][key] = value
    with pytest.raises(ValueError, match=words):
        K3Config.from_json(whole)


@pytest.mark.errors
def test_missing_keys_are_named():
    whole = TINY.to_json()
    del whole["text_config"]["kv_lora_rank"], whole["text_config"]["hidden_size"]
    with pytest.raises(ValueError, match="missing hidden_size, kv_lora_rank"):
        K3Config.from_json(whole)
    del whole["vision_config"]["patch_size"]
    with pytest.raises(ValueError, match="missing vision_config.patch_size"):
        K3Config.from_json(whole)
    with pytest.raises(ValueError, match="missing linear_attn_config.kda_layers"):
        LinearAttnConfig(full_attn_layers=(1,), num_heads=1, head_dim=1)
    with pytest.raises(ValueError, match="missing vision_config.patch_size"):
        VisionConfig()


@pytest.mark.errors
def test_layers_outside_and_files_that_are_not_json(tmp_path):
    with pytest.raises(ValueError, match=r"layer 93 is outside 0..92 \(zero-based\)"):
        RELEASED.is_mla_layer(93)
    with pytest.raises(ValueError, match="layer -1"):
        RELEASED.is_dense_layer(-1)
    bad = tmp_path / "config.json"
    bad.write_text("{")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        K3Config.from_json(bad)
    bad.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        K3Config.from_json(bad)
    for source in ([1], None, 3):
        with pytest.raises(TypeError, match="path of a JSON file or a dict already read; got"):
            K3Config.from_json(source)
    with pytest.raises(FileNotFoundError, match="nowhere.json"):
        K3Config.from_json(tmp_path / "nowhere.json")
