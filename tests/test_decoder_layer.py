"""One whole decoder layer of the released code, composed from the parts: the wiring over depth.

The state goes in and comes out, so a boundary in the wrong place, a sum that is not emptied or a
mixture that reads something else cannot hide.
"""
import numpy as np
import pytest
from helpers import leaves, rel

from k3np.attnres import Depth, add, begin_block, mix, plus, starts_block
from k3np.config import K3Config
from k3np.kda import kda_layer
from k3np.mla import mla_layer
from k3np.moe import feed_forward
from k3np.ops import rms_norm
from k3np.vectors import golden

LAYERS = {"decoder_layer_0": 0, "decoder_layer_1": 1}       # begins a block; stands inside one


def read(name):
    """The case, its config, and its state: blocks [B T,n,d] as released become n arrays [B,T,d]."""
    case = golden(name)
    shape = case["prefix_sum_in"].shape

    def blocks(array):
        return tuple(array[:, i].reshape(shape) for i in range(array.shape[1]))
    for key in ("block_residual_in", "block_residual_out", "ct_block_residual_out",
                "grad_block_residual_in"):
        case[key] = blocks(case[key])
    return case, K3Config.from_json(case["meta"]["config"])


def attention_vjp(x, p, cfg, layer):
    if cfg.is_mla_layer(layer):
        (y, _), pull = mla_layer.vjp(x, p, cfg)
    else:
        (y, _), pull = kda_layer.vjp(x, p, cfg)
    return y, lambda ct: pull((ct, None))[:2]


def decoder_layer_vjp(state, p, cfg, layer, boundary=starts_block, read_sum=False):
    """Attention and feed-forward on the state. `read_sum`: a port that mixes nothing."""
    eps, block = cfg.rms_norm_eps, 2 * cfg.attn_res_block_size
    ffn = "mlp" if cfg.is_dense_layer(layer) else "block_sparse_moe"
    parts = (("self_attention_res", "input_layernorm", "self_attn",
              lambda x: attention_vjp(x, p["self_attn"], cfg, layer)),
             ("mlp_res", "post_attention_layernorm", ffn,
              lambda x: feed_forward.vjp(x, p[ffn], cfg, layer)))
    steps = []
    for i, (res, norm, name, branch) in enumerate(parts):
        h, pull_mix = mix.vjp(Depth((), state.partial) if read_sum else state,
                              p[f"{res}_norm"], p[f"{res}_proj"], eps)
        pull_begin = None
        if boundary(2 * layer + i, block):
            state, pull_begin = begin_block.vjp(state)
        x, pull_norm = rms_norm.vjp(h, p[norm], eps)
        out, pull_branch = branch(x)
        if name == ffn:
            out, pull_ffn = out[0], pull_branch
            pull_branch = lambda ct: pull_ffn((ct, None))[:2]
        state, pull_add = add.vjp(state, out)
        steps.append((res, norm, name, pull_mix, pull_begin, pull_norm, pull_branch, pull_add))

    def pullback(ct):
        grads = {}
        for res, norm, name, pull_mix, pull_begin, pull_norm, pull_branch, pull_add in steps[::-1]:
            ct, ct_out = pull_add(ct)
            ct_x, grads[name] = pull_branch(ct_out)
            ct_h, grads[norm], _ = pull_norm(ct_x)
            if pull_begin:
                ct, = pull_begin(ct)
            ct_state, grads[f"{res}_norm"], grads[f"{res}_proj"], _ = pull_mix(ct_h)
            ct = plus(ct, ct_state)
        return ct, grads
    return state, pullback


def compare(got, reference, name=""):
    """Largest relative difference of two trees; what the reference lacks must be zero or absent."""
    if isinstance(reference, dict):
        return max(compare(got[key], reference[key], f"{name}.{key}") for key in reference)
    if got is None or not np.abs(reference).max():
        return float(max((np.abs(a).max() for a in leaves(got)), default=0)
                     + np.abs(reference).max())
    return rel(got, reference)


@pytest.mark.golden
@pytest.mark.grad
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name):
    case, cfg = read(name)
    state, pullback = decoder_layer_vjp(Depth(case["block_residual_in"], case["prefix_sum_in"]),
                                        case["param"], cfg, LAYERS[name])
    assert rel(state.partial, case["prefix_sum_out"]) < 1e-10
    assert len(state.blocks) == len(case["block_residual_out"]) == 1
    assert rel(state.blocks[0], case["block_residual_out"][0]) < 1e-10
    ct, grads = pullback(Depth(case["ct_block_residual_out"], case["ct_prefix_sum_out"]))
    assert rel(ct.partial, case["grad_prefix_sum_in"]) < 1e-10
    assert len(ct.blocks) == len(case["grad_block_residual_in"])
    for got, reference in zip(ct.blocks, case["grad_block_residual_in"]):
        assert rel(got, reference) < 1e-10
    assert set(grads) == set(case["param"])
    for key, reference in case["grad_param"].items():
        assert compare(grads[key], reference) < 1e-10, key


@pytest.mark.traps
@pytest.mark.golden
@pytest.mark.parametrize("name", LAYERS)
def test_the_cases_reject_wrong_wiring(name):
    case, cfg = read(name)
    layer, before = LAYERS[name], Depth(case["block_residual_in"], case["prefix_sum_in"])

    def rejected(**wrong):
        state, _ = decoder_layer_vjp(before, case["param"], cfg, layer, **wrong)
        return (len(state.blocks) != 1 or rel(state.partial, case["prefix_sum_out"]) > 1e-2)
    assert not rejected()
    block = cfg.attn_res_block_size

    def at(remainder, part=0):
        return lambda s, _: s % 2 == part and s // 2 % block == remainder
    assert not rejected(boundary=at(0))
    assert rejected(boundary=at(1))                         # one layer late, blocks of two layers
    assert rejected(boundary=at(layer % block, part=1))     # at the feed-forward
    if layer:
        assert rejected(read_sum=True)
