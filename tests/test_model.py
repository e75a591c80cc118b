"""The whole model: held against the released code, against itself in pieces, and at its doors."""
import dataclasses
import functools
import json
import tracemalloc

import numpy as np
import pytest
from helpers import check_grad, dot, leaves, map_tree, rel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from k3np import vectors
from k3np.attnres import Depth
from k3np.config import K3Config
from k3np.embed import Images, embed, expand
from k3np.init import init_params
from k3np.kda import KDACache
from k3np.model import (
    Cache,
    decoder_layer,
    forward,
    head,
    init_cache,
    logits,
    loss,
    loss_and_routings,
    read,
)
from k3np.tree import fill, merge, nest

FOLDER = vectors._folder() / "k3_tiny"
EPS = float(np.finfo(np.float64).eps)     # the tower's, in a float64 copy of the released code


@functools.cache
def flat_k3_tiny():
    return {name: array.astype(np.float64) for path in sorted(FOLDER.glob("*.safetensors"))
            for name, array in load_file(path).items()}


@functools.cache
def k3_tiny():
    """The released code's tiny model: (params in float64, cfg, arrays)."""
    with np.load(FOLDER / "io_f64.npz", allow_pickle=False) as io:
        arrays = dict(io)
    return nest(flat_k3_tiny()), K3Config.from_json(FOLDER / "config.json"), arrays


def pictures(io):
    return Images(io["pixel_values"], io["grid_thws"], EPS)


def float32_frame_table(t, D):
    """The frame vectors as the released code computes them, in float32 from the start."""
    omega = 1 / np.float32(10000) ** (np.arange(D // 2, dtype=np.float32) / np.float32(D / 2))
    angle = np.arange(t, dtype=np.float32)[:, None] * omega
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


@functools.cache
def small(seed=0, **keys):
    """A model with random parameters, none of which is at a point of rest."""
    cfg = dataclasses.replace(K3Config.tiny(), **keys)
    rng = np.random.default_rng(seed)
    params = map_tree(lambda a: a + 0.2 * rng.standard_normal(a.shape), init_params(cfg, rng))
    return params, cfg


def a_picture(cfg, rng):
    size = (4 * 6 + 2 * 4, 3, cfg.vision_config.patch_size, cfg.vision_config.patch_size)
    return Images(rng.uniform(-1, 1, size), np.array([[1, 4, 6], [1, 2, 4]]))


def ids_with_pictures(cfg, rng, T=9):
    ids = rng.integers(0, 200, (1, T))
    ids[0, [2, T - 2]] = cfg.media_placeholder_token_id
    return ids


@pytest.mark.golden
def test_logits_and_every_partial_sum():
    params, cfg, io = k3_tiny()
    value, cache, taps = forward(params, io["input_ids"], cfg, taps=True)
    assert rel(value, io["logits"]) < 1e-9
    for i in range(cfg.num_hidden_layers):
        assert rel(taps.partials[i], io[f"prefix_sum_after_layer{i}"]) < 1e-9, i
    assert cache.length == 21 and len(taps.mixtures) == 2 * cfg.num_hidden_layers + 1
    assert [r is None for r in taps.routings] == [True] + [False] * 5


@pytest.mark.golden
def test_long_input():
    params, cfg, io = k3_tiny()
    assert rel(forward(params, io["input_ids_long"], cfg)[0], io["logits_long"]) < 1e-9


@pytest.mark.golden
def test_decoding_with_a_cache():
    params, cfg, io = k3_tiny()
    value, cache = forward(params, io["input_ids"][:, :18], cfg)
    pieces = [value]
    for t in range(18, 21):
        value, cache = forward(params, io["input_ids"][:, t:t + 1], cfg, cache)
        pieces.append(value)
    assert rel(np.concatenate(pieces, axis=1), io["logits_decode"]) < 1e-9


@pytest.mark.golden
def test_pictures_in_the_text(monkeypatch):
    params, cfg, io = k3_tiny()
    value, _ = forward(params, io["mm_input_ids"], cfg, images=pictures(io))
    assert rel(value, io["mm_logits"]) < 1e-6      # a clip is among them: see the next lines
    with monkeypatch.context() as patch:           # its frame vectors are float32 upstream
        patch.setattr("k3np.vision_positions.frame_table", float32_frame_table)
        value, _ = forward(params, io["mm_input_ids"], cfg, images=pictures(io))
        assert rel(value, io["mm_logits"]) < 1e-9
    default, _ = forward(params, io["mm_input_ids"], cfg,
                         images=Images(io["pixel_values"], io["grid_thws"]))
    assert 1e-9 < rel(default, io["mm_logits"]) < 1e-3         # the eps of the tower can be seen


@pytest.mark.golden
@pytest.mark.grad
def test_loss_and_the_gradient_of_every_text_parameter():
    params, cfg, io = k3_tiny()
    meta = json.loads((FOLDER / "README.json").read_text())
    value, pull = loss.vjp(params, {"input_ids": io["input_ids"]}, cfg)
    assert abs(value - meta["loss"]) < 1e-9
    grads = pull(1.0)[0]
    with np.load(FOLDER / "grads_f64.npz", allow_pickle=False) as arrays:
        reference = {key.removeprefix("grad."): arrays[key] for key in arrays.files}
    assert abs(value - reference.pop("loss")) < 1e-9
    assert len(reference) > 200
    zeros = {name: np.zeros_like(array) for name, array in flat_k3_tiny().items()}
    assert set(reference) <= set(zeros)        # what it lacks took no part: unchosen experts, ...
    expected = nest({**zeros, **reference})
    assert compare(grads, expected) < 1e-8
    assert not grads["language_model"]["model"]["layers"]["0"]["self_attention_res_proj"].any()


def compare(got, expected):
    """Largest relative difference of two trees; where the reference is zero, the value itself."""
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        return max(compare(got[key], child) for key, child in expected.items())
    return rel(got, expected) if expected.any() else float(np.abs(got).max())


@pytest.mark.property
@pytest.mark.parametrize("chunk", (1, 7, 64))
@pytest.mark.parametrize("with_pictures", (False, True))
def test_pieces_of_any_size_give_what_one_pass_gives(chunk, with_pictures):
    params, cfg, io = k3_tiny()
    x = (embed(params, io["mm_input_ids"], cfg, pictures(io)) if with_pictures
         else io["input_ids_long"][:, :80])
    whole, end = forward(params, x, cfg)
    cache, pieces = init_cache(cfg, 1, np.float64), []
    for t in range(0, x.shape[1], chunk):
        value, cache = forward(params, x[:, t:t + chunk], cfg, cache)
        pieces.append(value)
    assert rel(np.concatenate(pieces, axis=1), whole) < 1e-11
    assert cache.length == end.length == x.shape[1]
    for a, b in zip(cache.layers, end.layers):
        arrays = (lambda c: list(c)) if isinstance(a, KDACache) else (lambda c: [c.entries])
        assert all(rel(p, q) < 1e-10 for p, q in zip(arrays(a), arrays(b)))


@pytest.mark.property
def test_text_around_a_picture_may_come_in_pieces_too():
    params, cfg, io = k3_tiny()
    ids, images = io["mm_input_ids"], pictures(io)
    whole, _ = forward(params, ids, cfg, images=images)
    first = int(np.argmax(ids[0] == cfg.media_placeholder_token_id))
    n = int(np.prod(io["grid_thws"][0]))
    a = Images(images.pixel_values[:n], images.grid_thws[:1], EPS)
    b = Images(images.pixel_values[n:], images.grid_thws[1:], EPS)
    head_, cache = forward(params, ids[:, :first + 1], cfg, images=a)
    tail, _ = forward(params, ids[:, first + 1:], cfg, cache, images=b)
    assert rel(np.concatenate([head_, tail], axis=1), whole) < 1e-11


@pytest.mark.property
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 100))
def test_padding_changes_nothing_for_the_tokens(T, pad, seed):
    params, cfg = small()
    ids = np.random.default_rng(seed).integers(0, cfg.vocab_size, (1, T))
    alone, _ = forward(params, ids, cfg)
    padded = np.concatenate([np.full((1, pad), cfg.pad_token_id), ids], axis=1)
    both = np.concatenate([padded, np.full((1, pad + T), 7)])
    mask = np.ones_like(both)
    mask[0, :pad] = 0
    value, cache = forward(params, both, cfg, mask=mask)
    assert rel(value[:1, pad:], alone) < 1e-10
    step, _ = forward(params, np.array([[3], [3]]), cfg, cache)
    longer, _ = forward(params, np.concatenate([ids, [[3]]], axis=1), cfg)
    assert rel(step[:1], longer[:, -1:]) < 1e-10


@pytest.mark.property
def test_padding_beside_a_picture():
    params, cfg, io = k3_tiny()
    ids = np.concatenate([np.full((1, 3), cfg.pad_token_id), io["mm_input_ids"]], axis=1)
    mask = (np.arange(ids.shape[1]) >= 3)[None]
    value, _ = forward(params, ids, cfg, images=pictures(io), mask=mask)
    alone, _ = forward(params, io["mm_input_ids"], cfg, images=pictures(io))
    assert rel(value[:, 3:], alone) < 1e-10


@pytest.mark.property
@settings(max_examples=10, deadline=None)
@given(st.integers(2, 16), st.integers(0, 100))
def test_no_token_sees_the_future(T, seed):
    params, cfg = small()
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, cfg.vocab_size, (1, T))
    t = int(rng.integers(1, T))
    other = ids.copy()
    other[:, t:] = rng.integers(0, cfg.vocab_size, T - t)
    assert rel(forward(params, other, cfg)[0][:, :t], forward(params, ids, cfg)[0][:, :t]) < 1e-11


@pytest.mark.property
def test_rows_do_not_see_each_other_and_last_cuts_only_the_logits():
    params, cfg = small()
    ids = np.random.default_rng(3).integers(0, cfg.vocab_size, (3, 11))
    whole, cache = forward(params, ids, cfg)
    for b in range(3):
        assert rel(whole[b:b + 1], forward(params, ids[b:b + 1], cfg)[0]) < 1e-11
    end, same = forward(params, ids, cfg, last=2)
    assert rel(end, whole[:, -2:]) < 1e-13 and same.length == cache.length
    assert forward(params, ids, cfg, last=99)[0].shape == whole.shape
    assert rel(logits(params, ids, cfg)[0], whole) == 0


@pytest.mark.property
def test_float32_stays_float32_and_close():
    params, cfg = small()
    ids = np.random.default_rng(4).integers(0, cfg.vocab_size, (1, 20))
    single, cache = forward(map_tree(lambda a: a.astype(np.float32), params), ids, cfg)
    assert single.dtype == np.float32
    assert all(a.dtype == np.float32 for a in leaves([c[0] for c in cache.layers]))
    assert rel(single, forward(params, ids, cfg)[0]) < 2e-3


@pytest.mark.property
def test_memory_of_a_forward_grows_with_the_text_and_not_with_its_square():
    params, cfg = small()
    peaks = []
    for T in (512, 2048):
        ids = np.zeros((1, T), int)
        tracemalloc.start()
        forward(params, ids, cfg, last=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 4.5 * peaks[0]


@pytest.mark.property
@pytest.mark.parametrize("keys", ({"attn_res_block_size": None}, {"tie_word_embeddings": True},
                                  {"attn_res_block_size": 1}, {"q_lora_rank": None},
                                  {"routed_expert_hidden_size": None, "hidden_act": "silu"}),
                         ids=str)
def test_relatives_by_configuration(keys):
    params, cfg = small(**keys)
    ids = np.random.default_rng(5).integers(0, cfg.vocab_size, (1, 9))
    whole, _ = forward(params, ids, cfg)
    first, cache = forward(params, ids[:, :5], cfg)
    second, _ = forward(params, ids[:, 5:], cfg, cache)
    assert rel(np.concatenate([first, second], axis=1), whole) < 1e-11
    directional(params, cfg, {"input_ids": ids})


def directional(params, cfg, batch, seed=0):
    """The gradient of the loss against a central difference along a random direction."""
    rng = np.random.default_rng(seed)
    step = map_tree(lambda a: rng.standard_normal(a.shape), params)
    _, pull = loss.vjp(params, batch, cfg)

    def at(t):
        def move(a, d):
            return {k: move(a[k], d[k]) for k in a} if isinstance(a, dict) else a + t * d
        return loss(move(params, step), batch, cfg)
    numeric, analytic = (at(1e-6) - at(-1e-6)) / 2e-6, dot(step, pull(1.0)[0])
    assert abs(numeric - analytic) < 1e-5 * max(abs(analytic), 1e-2), (numeric, analytic)


@pytest.mark.grad
@pytest.mark.parametrize("i", (0, 1, 3, 4), ids=("starts", "kda", "mla", "starts again"))
def test_gradient_of_a_layer(i):
    params, cfg = small()
    rng = np.random.default_rng(i)
    blocks = tuple(rng.standard_normal((2, 5, cfg.hidden_size)) for _ in range(-(-i // 4)))
    state = Depth(blocks, rng.standard_normal((2, 5, cfg.hidden_size)))
    p = params["language_model"]["model"]["layers"][str(i)]
    check_grad(decoder_layer, state, p, cfg, i)
    _, cache, *_ = decoder_layer(state, p, cfg, i)
    check_grad(decoder_layer, state, p, cfg, i, cache, tol=3e-6)


@pytest.mark.grad
def test_gradients_of_the_ends():
    params, cfg = small()
    rng = np.random.default_rng(0)
    state = Depth((rng.standard_normal((1, 4, cfg.hidden_size)),),
                  rng.standard_normal((1, 4, cfg.hidden_size)))
    model = params["language_model"]["model"]
    check_grad(head, state, params, cfg)
    check_grad(read, state, {k: model[f"output_attn_res_{k[2:]}"] for k in ("x_norm", "x_proj")},
               "x", cfg)
    check_grad(embed, params, rng.integers(0, 200, (2, 5)), cfg)
    check_grad(embed, params, ids_with_pictures(cfg, rng), cfg, a_picture(cfg, rng))


@pytest.mark.grad
def test_gradients_of_the_whole():
    params, cfg = small()
    rng = np.random.default_rng(1)
    ids, images = ids_with_pictures(cfg, rng), a_picture(cfg, rng)
    check_grad(logits, params, ids, cfg, images, tol=1e-5)
    batch = {"input_ids": ids, "images": images}
    check_grad(loss_and_routings, params, batch, cfg, wrt=[0], tol=1e-5)
    check_grad(loss, params, batch, cfg, wrt=[0], tol=1e-5)
    directional(params, cfg, {"input_ids": rng.integers(0, 200, (2, 6))})


@pytest.mark.property
def test_pictures_are_not_predicted_and_labels_are_taken():
    params, cfg = small()
    rng = np.random.default_rng(2)
    ids, images = ids_with_pictures(cfg, rng, 6), a_picture(cfg, rng)
    where = expand(ids, cfg, images)
    assert where.shape == (1, 6 - 2 + 6 + 2) and (where >= 0).sum() == 8
    value = forward(params, ids, cfg, images=images)[0]
    log_p = value - np.log(np.exp(value).sum(axis=-1, keepdims=True))
    targets = np.where(where < 0, ids.reshape(-1)[-1 - np.minimum(where, -1)], -1)[0, 1:]
    expected = -np.mean([log_p[0, t, y] for t, y in enumerate(targets) if y >= 0])
    assert abs(loss(params, {"input_ids": ids, "images": images}, cfg) - expected) < 1e-12
    only = np.full_like(ids, cfg.ignore_index)
    only[0, 5] = ids[0, 5]
    assert abs(loss(params, {"input_ids": ids, "images": images, "labels": only}, cfg)
               + log_p[0, -2, ids[0, 5]]) < 1e-12


@pytest.mark.property
def test_random_parameters():
    cfg = K3Config.released()
    tiny = dataclasses.replace(K3Config.tiny(), quantization_config=cfg.quantization_config)
    params = init_params(tiny, np.random.default_rng(0), np.float32)
    layer = params["language_model"]["model"]["layers"]["1"]
    assert layer["self_attn"]["A_log"].shape == (2,) and not layer["self_attn"]["A_log"].any()
    assert not layer["mlp_res_proj"].any() and (layer["mlp_res_norm"] == 1).all()
    assert abs(layer["block_sparse_moe"]["experts"]["w1"].std() - 0.02) < 1e-3
    assert all(a.dtype == np.float32 for a in leaves(params))
    decay = -5 / (1 + np.exp(-layer["self_attn"]["dt_bias"].astype(float)))
    half_life = np.log(2) / -decay
    assert 0.99 < half_life.min() and half_life.max() < 1001
    again = init_params(tiny, np.random.default_rng(0), np.float32)
    assert all(np.array_equal(a, b) for a, b in zip(leaves(params), leaves(again)))
    uniform = loss(params, {"input_ids": np.arange(40)[None]}, tiny)
    assert abs(uniform - np.log(tiny.vocab_size)) < 0.2


@pytest.mark.property
def test_trees_of_cotangents():
    a, b = {"x": {"y": np.ones(2)}, "z": np.ones(1)}, {"x": {"y": np.ones(2), "w": np.ones(3)}}
    both = merge(a, b)
    assert both["x"]["y"].tolist() == [2, 2] and both["z"].tolist() == [1]
    assert fill(a, both)["x"]["w"].tolist() == [0, 0, 0]


def without(tree, *path):
    """A copy of a tree in which what lies at `path` is gone."""
    key, *rest = path
    return ({k: v for k, v in tree.items() if k != key} if not rest
            else {**tree, key: without(tree[key], *rest)})


def changed(tree, array, *path):
    key, *rest = path
    return {**tree, key: array if not rest else changed(tree[key], array, *rest)}


@pytest.mark.errors
def test_ids_and_caches_that_do_not_fit():
    params, cfg = small()
    for ids, message in ((np.zeros((1, 0), int), "at least one token"),
                         (np.zeros(3, int), r"shape \(3,\)"), (np.zeros((1, 2)), "float64"),
                         (np.array([[256]]), r"0\.\.255; found 256"),
                         (np.array([[-1]]), "found -1")):
        with pytest.raises(ValueError, match=message):
            forward(params, ids, cfg)
    ids = np.array([[1, 2]])
    _, cache = forward(params, ids, cfg)
    for wrong in (Cache(cache.layers[:-1], 2), Cache(cache.layers[::-1], 2), cache.layers, "x"):
        with pytest.raises(ValueError, match="cache must be the Cache"):
            forward(params, ids, cfg, wrong)
    with pytest.raises(ValueError, match="cache"):
        forward(params, np.array([[1], [2]]), cfg, cache)      # two rows, a cache of one
    wide = dataclasses.replace(cfg, linear_attn_config=dataclasses.replace(
        cfg.linear_attn_config, head_dim=8))
    with pytest.raises(ValueError, match="cache"):
        forward(params, ids, cfg, init_cache(wide, 1, np.float64))
    short = dataclasses.replace(cfg, max_position_embeddings=3)
    with pytest.raises(ValueError, match="max_position_embeddings is 3"):
        forward(params, ids, short, cache)


@pytest.mark.errors
def test_parameters_that_do_not_fit():
    params, cfg = small()
    ids, lm = np.array([[1, 2]]), ("language_model", "model")
    layer = (*lm, "layers", "2")
    d = cfg.hidden_size
    for path, message in (((*layer, "mlp_res_norm"), "layer 2 lacks mlp_res_norm"),
                          (layer, "no layer 2"), ((*layer, "self_attn", "q_proj"), "q_proj")):
        with pytest.raises(ValueError, match=message):
            forward(without(params, *path), ids, cfg)
    for path, shape, message in (
            ((*lm, "embed_tokens"), (256, d + 1), "embed_tokens has shape"),
            (("language_model", "lm_head"), (255, d), "lm_head has shape"),
            ((*lm, "norm"), (1,), "norm has shape"),
            ((*layer, "input_layernorm"), (1,), r"layers\.2\.input_layernorm has shape \(1,\)"),
            ((*layer, "mlp_res_proj"), (d + 1,), "query has shape"),
            ((*layer, "self_attn", "o_proj"), (d, 3), "o_proj has shape"),
            ((*layer, "block_sparse_moe", "routed_expert_norm"), (3,), "routed_expert_norm")):
        with pytest.raises(ValueError, match=message):
            forward(changed(params, np.ones(shape), *path), ids, cfg)


@pytest.mark.errors
def test_pictures_that_do_not_fit():
    params, cfg = small()
    rng = np.random.default_rng(0)
    images, ids = a_picture(cfg, rng), ids_with_pictures(cfg, rng)
    with pytest.raises(ValueError, match="0 placeholders .* 2 pictures"):
        forward(params, np.array([[1, 2]]), cfg, images=images)
    two = np.array([[253, 1], [253, 1]])
    with pytest.raises(ValueError, match=r"differ in length .* \[7, 3\]"):
        forward(params, two, cfg, images=images)
    blind = dataclasses.replace(cfg, vision_config=None)
    with pytest.raises(ValueError, match="no vision_config"):
        forward(params, ids, blind, images=images)
    with pytest.raises(ValueError, match="pixel_values"):
        forward(params, ids, cfg, images=images._replace(pixel_values=images.pixel_values[:-1]))
    with pytest.raises(ValueError, match="input_ids has shape"):
        forward(params, np.ones((1, 2, 3)), cfg)
    with pytest.raises(ValueError, match="give images to embed"):
        forward(params, np.ones((1, 2, cfg.hidden_size)), cfg, images=images)


@pytest.mark.errors
def test_labels_that_do_not_fit():
    params, cfg = small()
    ids = np.array([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"labels has shape \(1, 2\); .* \(1, 3\)"):
        loss(params, {"input_ids": ids, "labels": ids[:, 1:]}, cfg)
    nothing = np.full_like(ids, cfg.ignore_index)
    with pytest.raises(ValueError, match="holds only ignore_index"):
        loss(params, {"input_ids": ids, "labels": nothing}, cfg)


@pytest.mark.errors
@pytest.mark.parametrize("last", [0, -1])
def test_positions_asked_for_are_at_least_one(last):
    cfg = K3Config.tiny()
    with pytest.raises(ValueError, match=f"last={last}"):
        forward(init_params(cfg, np.random.default_rng(0)), np.array([[1, 2]]), cfg, last=last)
