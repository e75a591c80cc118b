"""The vision tower and projector: released vectors, packing, gradients, traps, messages."""
import dataclasses
import json
import pathlib
import tracemalloc

import numpy as np
import pytest
from helpers import check_grad, leaves, map_tree, rel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from k3np import count, vision, vision_positions
from k3np.config import K3Config, VisionConfig
from k3np.gelu import gelu, gelu_tanh
from k3np.ops import rms_norm, softmax
from k3np.vectors import golden, nest
from k3np.vision import (
    affine,
    embed_patches,
    layer_norm,
    merge_patches,
    packed_attention,
    projector,
    see,
    vision_block,
    vision_shapes,
    vision_tower,
)
from k3np.vision_positions import positions, rotation

TINY = K3Config.tiny().vision_config
FLOAT64_EPS = np.finfo(np.float64).eps          # what eps=None means in the float64 copy
CASES = ("vision_0", "vision_1", "vision_4")
FOLDER = pathlib.Path(__file__).parent / "golden" / "k3_tiny"
MEDIA = ((1, 4, 6), (2, 2, 4), (1, 4, 6), (1, 2, 2), (4, 2, 2))


def config(case):
    known = {field.name for field in dataclasses.fields(VisionConfig)}
    return VisionConfig(**{k: v for k, v in case["meta"]["config"].items() if k in known})


def outputs(case, name):
    return tuple(case[f"{name}_{i}"] for i in range(len(case["grid_thws"])))


def random_parameters(cfg, seed=0, dtype=np.float64):
    """Every parameter off its resting value, so that a forgotten one is seen."""
    rng = np.random.default_rng(seed)
    return nest({name: (rng.standard_normal(shape) / np.sqrt(shape[-1])
                        + (len(shape) == 1)).astype(dtype)
                 for name, shape in vision_shapes(cfg).items()})


def random_media(grids, cfg, seed=0):
    rng = np.random.default_rng(seed)
    n = sum(t * h * w for t, h, w in grids)
    return rng.uniform(-1, 1, (n, 3, cfg.patch_size, cfg.patch_size)), np.array(grids)


def like_k25(cfg):
    return dataclasses.replace(cfg, norm_type="layernorm", attn_bias=True, linear_bias=True,
                               patch_embed_proj_bias=True, mm_projector_type="patchmerger")


def k3_tiny():
    weights = {}
    for path in sorted(FOLDER.glob("*.safetensors")):
        weights |= load_file(path)
    p = nest({name: w.astype(np.float64) for name, w in weights.items()
              if name.startswith(("vision_tower.", "mm_projector."))})
    with np.load(FOLDER / "io_f64.npz") as arrays:
        io = {name: arrays[name] for name in arrays.files}
    cfg = K3Config.from_json(json.loads((FOLDER / "config.json").read_text())).vision_config
    return io["pixel_values"].astype(np.float64), io["grid_thws"], p, cfg, io


SMALL = dataclasses.replace(TINY, patch_size=3, vt_hidden_size=8, mm_hidden_size=8,
                            vt_intermediate_size=12, qkv_hidden_size=24, vt_num_hidden_layers=2,
                            text_hidden_size=10, init_pos_emb_height=3, init_pos_emb_width=5)


@pytest.mark.golden
@pytest.mark.grad
@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case = golden(name)
    cfg, (pixels, grids) = config(case), (case["pixel_values"], case["grid_thws"])
    features = vision_tower(pixels, grids, case["param"]["vision_tower"], cfg, FLOAT64_EPS)
    projected, pullback = see.vjp(pixels, grids, case["param"], cfg, FLOAT64_EPS)
    for mine, theirs in ((features, outputs(case, "features")),
                         (projected, outputs(case, "projected"))):
        assert max(map(rel, mine, theirs)) < 1e-10
    ct_pixels, _, ct_p, _, _ = pullback(outputs(case, "ct_projected"))
    assert rel(ct_pixels, case["grad_pixel_values"]) < 1e-10
    mine, theirs = leaves(ct_p), leaves(case["grad_param"])
    assert len(mine) == len(theirs) >= 18
    assert max(map(rel, mine, theirs)) < 1e-10


@pytest.mark.golden
def test_golden_patch_embedding_with_positions():
    for name in CASES:
        case = golden(name)
        p = case["param"]["vision_tower"]["patch_embed"]
        added = [positions(p["pos_emb"], tuple(grid)) for grid in case["grid_thws"].tolist()]
        x = embed_patches(case["pixel_values"], p["proj"]) + np.concatenate(added)
        assert rel(x, case["patch_embed_out"]) < 1e-12


@pytest.mark.golden
def test_golden_of_an_image_and_a_clip_in_the_tiny_model():
    pixels, grids, p, cfg, io = k3_tiny()
    assert grids.tolist() == [[1, 4, 6], [2, 8, 8]]
    features = vision_tower(pixels, grids, p["vision_tower"], cfg, FLOAT64_EPS)
    projected = see(pixels, grids, p, cfg, FLOAT64_EPS)
    for i, bound in ((0, 1e-10), (1, 5e-8)):             # the clip: a frame table in float32
        assert rel(features[i], io[f"vision_features_{i}"]) < bound
        assert rel(projected[i], io[f"projected_{i}"]) < bound


@pytest.mark.golden
@pytest.mark.property
def test_the_default_eps_is_seen_in_the_golden_case_and_small():
    case = golden("vision_0")
    y, = see(case["pixel_values"], case["grid_thws"], case["param"], config(case))
    assert 1e-9 < rel(y, case["projected_0"]) < 1e-6
    y, = see(case["pixel_values"], case["grid_thws"], case["param"], config(case), 2 ** -7)
    assert rel(y, case["projected_0"]) > 1e-3                  # finfo(bfloat16).eps


@pytest.mark.golden
def test_float32_stays_float32_and_near():
    case = golden("vision_1")
    p = map_tree(lambda a: a.astype(np.float32), case["param"])
    y, pullback = see.vjp(case["pixel_values"].astype(np.float32), case["grid_thws"], p,
                          config(case))
    grads = pullback(y)
    assert {a.dtype for a in leaves((y, grads))} == {np.dtype(np.float32)}
    assert max(map(rel, y, outputs(case, "projected"))) < 1e-5


# ---- several media ----

@pytest.mark.property
@pytest.mark.parametrize("cfg", [SMALL, like_k25(SMALL)], ids=["K3", "K2.5"])
def test_packed_equals_one_at_a_time_backwards_too(cfg):
    p, (pixels, grids) = random_parameters(cfg), random_media(MEDIA, SMALL)
    packed, pull = see.vjp(pixels, grids, p, cfg)
    rng = np.random.default_rng(1)
    ct = tuple(rng.standard_normal(y.shape) for y in packed)
    ct_pixels, _, ct_p, _, _ = pull(ct)
    total, start = None, 0
    for i, (t, h, w) in enumerate(MEDIA):
        part = slice(start, start := start + t * h * w)
        (y,), pull_one = see.vjp(pixels[part], grids[i:i + 1], p, cfg)
        assert y.shape == (h * w // 4, cfg.text_hidden_size)
        assert rel(packed[i], y) < 1e-12
        one = pull_one(ct[i:i + 1])
        assert rel(ct_pixels[part], one[0]) < 1e-12
        total = one[2] if total is None else map_pair(total, one[2])
    assert all(rel(a, b) < 1e-11 for a, b in zip(leaves(ct_p), leaves(total)))


def map_pair(a, b):
    return {k: map_pair(a[k], b[k]) for k in a} if isinstance(a, dict) else a + b


@pytest.mark.property
@settings(max_examples=15, deadline=None)
@given(st.permutations(range(len(MEDIA))))
def test_order_of_media_does_not_matter(order):
    p, (pixels, grids) = random_parameters(SMALL), random_media(MEDIA, SMALL)
    parts = np.split(pixels, np.cumsum([t * h * w for t, h, w in MEDIA])[:-1])
    packed = see(pixels, grids, p, SMALL)
    moved = see(np.concatenate([parts[i] for i in order]), grids[list(order)], p, SMALL)
    assert all(rel(moved[j], packed[i]) < 1e-12 for j, i in enumerate(order))


@pytest.mark.property
def test_a_medium_does_not_see_the_others_and_a_clip_sees_all_its_frames():
    p, (pixels, grids) = random_parameters(SMALL), random_media(MEDIA, SMALL)
    before = see(pixels, grids, p, SMALL)
    changed = pixels.copy()
    changed[24] += 0.1                                   # a patch of the second medium, frame 0
    after = see(changed, grids, p, SMALL)
    for i, (a, b) in enumerate(zip(before, after)):
        assert np.array_equal(a, b) == (i != 1)
    lengths = [16]
    cos, sin = rotation((2, 2, 4), 8)
    x = np.random.default_rng(2).standard_normal((16, 8))
    block = p["vision_tower"]["encoder"]["blocks"]["0"]
    y = vision_block(x, block, cos, sin, lengths, SMALL)
    x[0] += 0.1
    moved = np.abs(vision_block(x, block, cos, sin, lengths, SMALL) - y).max(axis=1)
    assert (moved > 1e-9).all()                          # frame 1 as well, whatever the place


@pytest.mark.property
def test_a_missing_cotangent_is_zero():
    p, (pixels, grids) = random_parameters(SMALL), random_media(MEDIA[:2], SMALL)
    for f, tree in ((see, p), (vision_tower, p["vision_tower"])):
        y, pull = f.vjp(pixels, grids, tree, SMALL)
        some, zeros = pull((y[0], None)), pull((y[0], np.zeros_like(y[1])))
        assert all(np.array_equal(a, b) for a, b in zip(leaves(some), leaves(zeros)))
        assert not some[0][24:].any()


@pytest.mark.property
def test_attention_in_blocks_equals_one_matrix_and_needs_no_square():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 30, 2, 8))
    lengths = [7, 16, 7]
    o = packed_attention(q, k, v, lengths, block=5)
    start = 0
    for n in lengths:
        part = slice(start, start := start + n)
        scores = np.einsum("ihk,jhk->hij", q[part], k[part]) / np.sqrt(8)
        assert rel(o[part], np.einsum("hij,jhk->ihk", softmax(scores), v[part])) < 1e-13
    n = 3000
    q, k, v = rng.standard_normal((3, n, 1, 8)).astype(np.float32)
    tracemalloc.start()
    y, pullback = packed_attention.vjp(q, k, v, [n])
    pullback(y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n * 4 / 3                          # one matrix of scores is three times that


@pytest.mark.property
def test_merge_averages_frames_and_reads_a_token_row_by_row():
    t, h, w = 3, 4, 6
    x = np.arange(t * h * w, dtype=float)[:, None] * np.ones(2)
    y = merge_patches(x, (t, h, w), (2, 2))
    assert y.shape == (6, 4, 2)
    first = np.array([0, 1, w, w + 1])
    assert np.array_equal(y[0, :, 0], first + h * w)     # the mean over three frames is frame 1
    assert np.array_equal(y[1, :, 0], first + 2 + h * w)
    assert np.array_equal(y[3, :, 0], first + 2 * w + h * w)
    assert merge_patches(np.zeros((65_536, 1)), (1, 256, 256), (2, 2)).shape == (16_384, 4, 1)


@pytest.mark.property
def test_shapes_are_those_of_the_counted_model():
    released = K3Config.released()
    shapes = vision_shapes(released.vision_config)
    counted = {name: shape for name, (shape, _) in count.parameter_shapes(released).items()
               if name in shapes or "vision" in name or "mm_" in name}
    assert shapes == counted
    def total(prefix):
        return sum(int(np.prod(s)) for n, s in shapes.items() if n.startswith(prefix))
    assert total("vision_tower") == 401_214_464 and total("mm_projector") == 46_144_512


# ---- gradients ----

@pytest.mark.grad
def test_grad_of_the_parts():
    rng = np.random.default_rng(0)
    def normal(*shape):
        return rng.standard_normal(shape)
    check_grad(affine, normal(2, 3), normal(4, 3))
    check_grad(affine, normal(2, 3), {"weight": normal(4, 3), "bias": normal(4)})
    check_grad(layer_norm, normal(2, 3, 5), {"weight": normal(5), "bias": normal(5)})
    check_grad(embed_patches, normal(5, 3, 2, 2), normal(4, 3, 2, 2))
    check_grad(embed_patches, normal(5, 3, 2, 2), {"weight": normal(4, 3, 2, 2),
                                                   "bias": normal(4)})
    check_grad(packed_attention, *normal(3, 10, 2, 4), [3, 4, 3], block=2)
    check_grad(merge_patches, normal(24, 5), (2, 2, 6), (2, 3))


@pytest.mark.grad
@pytest.mark.parametrize("cfg", [SMALL, like_k25(SMALL)], ids=["K3", "K2.5"])
def test_grad_of_the_whole(cfg):
    p, (pixels, grids) = random_parameters(cfg), random_media(MEDIA[:2], cfg)
    cos, sin = rotation((1, 4, 6), 8)
    x = np.random.default_rng(1).standard_normal((24, 8))
    block = p["vision_tower"]["encoder"]["blocks"]["0"]
    check_grad(vision_block, x, block, cos, sin, [24], cfg)
    check_grad(vision_tower, pixels, grids, p["vision_tower"], cfg)
    check_grad(projector, np.random.default_rng(2).standard_normal((5, 4, 8)),
               p["mm_projector"], cfg)
    check_grad(see, pixels, grids, p, cfg)


# ---- traps: what runs and is wrong ----

def align_corners(n_out, n_in):
    at = np.linspace(0, n_in - 1, n_out)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(n_in)))


def bicubic(n_out, n_in, a=-0.75):
    """Cubic convolution at the same centres, edges repeated."""
    weights = np.zeros((n_out, n_in))
    for i in range(n_out):
        at = (i + 0.5) * n_in / n_out - 0.5
        for j in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
            d = abs(at - j)
            value = ((a + 2) * d ** 3 - (a + 3) * d ** 2 + 1 if d <= 1 else
                     a * (d ** 3 - 5 * d ** 2 + 8 * d - 4))
            weights[i, min(max(j, 0), n_in - 1)] += value
    return weights


def antialiased(n_out, n_in):
    width = max(1, n_in / n_out)
    at = (np.arange(n_out) + 0.5) * n_in / n_out - 0.5
    weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(n_in)) / width)
    return weights / weights.sum(axis=1, keepdims=True)


def swapped(grid, K):
    t, h, w = grid
    cos, sin = (a.reshape(t, w, h, 1, K // 2).swapaxes(1, 2).reshape(-1, 1, K // 2)
                for a in rotation((t, w, h), K))
    return cos, sin


def no_rotation(grid, K):
    cos, sin = rotation(grid, K)
    return np.ones_like(cos), np.zeros_like(sin)


def by_dimension(grid, K):
    """All pairs of columns first, then those of rows."""
    cos, sin = rotation(grid, K)
    return tuple(np.concatenate([a[..., ::2], a[..., 1::2]], axis=-1) for a in (cos, sin))


def half_split(x, cos, sin):
    a, b = np.split(x, 2, axis=-1)
    y = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return y, None


def always_a_frame_row(table, grid):
    plane = vision_positions.resize_table(table, *grid[1:])
    rows = vision_positions.frame_table(grid[0], table.shape[-1])
    return (plane[None] + rows[:, None, None]).reshape(-1, table.shape[-1]), None


def never_a_frame_row(table, grid):
    plane = vision_positions.resize_table(table, *grid[1:])
    return np.tile(plane.reshape(-1, table.shape[-1]), (grid[0], 1)), None


def frame_by_frame(q, k, v, lengths, block=256):
    """Attention inside a frame only: each medium of more than 64 patches is cut in two."""
    return packed_attention.vjp(q, k, v, [m for n in lengths
                                          for m in ([n // 2] * 2 if n > 64 else [n])])


def columns_first(x, grid, kernel):
    t, h, w = grid
    y = merge_patches(x, grid, kernel)
    return y[:, [0, 2, 1, 3]], None


def fake(f):
    """A function that has only a forward pass, in the place of a differentiable one."""
    def wrong(*args, **kwargs):
        return f(*args, **kwargs)[0]
    wrong.vjp = f
    return wrong


TRAPS = {
    "tanh in the projector": (vision, "gelu", gelu_tanh),
    "erf in the blocks": (vision, "gelu_tanh", gelu),
    "corners aligned": (vision_positions, "bilinear_matrix", align_corners),
    "bicubic": (vision_positions, "bilinear_matrix", bicubic),
    "smoothed before shrinking": (vision_positions, "bilinear_matrix", antialiased),
    "rows and columns swapped": (vision, "rotation", swapped),
    "no rotation": (vision, "rotation", no_rotation),
    "columns in the first half": (vision, "rotation", by_dimension),
    "halves instead of neighbours": (vision, "rotate", fake(half_split)),
    "a frame row for a still": (vision, "positions", fake(always_a_frame_row)),
    "a token read by columns": (vision, "merge_patches", fake(columns_first)),
}


@pytest.mark.traps
@pytest.mark.golden
@pytest.mark.parametrize("trap", TRAPS)
def test_golden_rejects(trap, monkeypatch):
    case = golden("vision_0")
    arguments = case["pixel_values"], case["grid_thws"], case["param"], config(case), FLOAT64_EPS
    assert rel(see(*arguments)[0], case["projected_0"]) < 1e-10
    monkeypatch.setattr(*TRAPS[trap])
    assert rel(see(*arguments)[0], case["projected_0"]) > 1e-6


@pytest.mark.traps
@pytest.mark.golden
@pytest.mark.parametrize("name, wrong", [
    ("packed_attention", fake(frame_by_frame)),            # what the report describes, in part
    ("positions", fake(never_a_frame_row))])
def test_the_clip_rejects(name, wrong, monkeypatch):
    pixels, grids, p, cfg, io = k3_tiny()
    monkeypatch.setattr(vision, name, wrong)
    y = see(pixels, grids, p, cfg, FLOAT64_EPS)
    assert rel(y[0], io["projected_0"]) < 1e-10
    assert rel(y[1], io["projected_1"]) > 1e-4


@pytest.mark.traps
@pytest.mark.golden
def test_golden_rejects_other_scales_and_orders(monkeypatch):
    case = golden("vision_0")
    cfg = config(case)
    p = case["param"]
    block = p["vision_tower"]["encoder"]["blocks"]["0"]

    def error(tree):
        return rel(see(case["pixel_values"], case["grid_thws"], tree, cfg, FLOAT64_EPS)[0],
                   case["projected_0"])

    def with_block(**changes):
        tree = map_tree(np.copy, p)
        tree["vision_tower"]["encoder"]["blocks"]["0"].update(changes)
        return tree
    q, k, v = np.split(block["wqkv"], 3)
    assert error(with_block(wqkv=np.concatenate([v, k, q]))) > 1e-3
    per_head = block["wqkv"].reshape(3, 3, 8, -1).swapaxes(0, 1).reshape(block["wqkv"].shape)
    assert error(with_block(wqkv=per_head)) > 1e-3         # q, k, v head by head
    wrong_scale = np.concatenate([q * np.sqrt(8 / 16), k, v])
    assert error(with_block(wqkv=wrong_scale)) > 1e-4      # 1/sqrt(width) for 1/sqrt(head)
    monkeypatch.setattr(vision, "rms_norm", fake(
        lambda x, w, eps: rms_norm.vjp(x - x.mean(axis=-1, keepdims=True), w, eps)))
    assert error(p) > 1e-3


# ---- messages ----

@pytest.mark.errors
@pytest.mark.parametrize("grids, says", [
    ([[1, 3, 4]], r"grid_thws\[0\]=\(1, 3, 4\).*multiples of the merge kernel \(2, 2\)"),
    ([[5, 2, 2]], "at most init_pos_emb_time=4 frames"),
    ([[0, 2, 2]], "must be 1 or more"), ([[1, -2, -2]], "must be 1 or more"),
    ([[1, 514, 2]], "at most 512 patches along a side"),
    ([[1, 4, 6], [1, 2, 2]], r"pixel_values has 24 patches.*asks for 28"),
    ([1, 4, 6], r"shape \(3,\).*whole numbers \[M, 3\]"),
    (np.zeros((0, 3), int), "one or more media"),
    ([[1.0, 4.0, 6.0]], "dtype float64; expected whole numbers")])
def test_refused_grids(grids, says):
    p, (pixels, _) = random_parameters(SMALL), random_media([(1, 4, 6)], SMALL)
    with pytest.raises(ValueError, match=says):
        vision_tower(pixels, np.array(grids), p["vision_tower"], SMALL)


@pytest.mark.errors
def test_refused_pixels_parameters_and_configs():
    p, (pixels, grids) = random_parameters(SMALL), random_media([(1, 4, 6)], SMALL)
    tower = p["vision_tower"]
    bad = pixels.copy()
    bad[3, 1, 0, 0] = np.nan
    for array, says in ((bad, "NaN or infinity"), (pixels[:, :2], r"expected \[N, 3, 3, 3\]"),
                        (pixels.reshape(24, -1), r"shape \(24, 27\)"),
                        ((127 * pixels).astype(np.int8), "dtype int8; expected float32"),
                        (pixels.astype(np.float32), "float64; expected .* and float32")):
        with pytest.raises(ValueError, match=says):
            vision_tower(array, grids, tower, SMALL)
    def other(**keys):
        return dataclasses.replace(SMALL, **keys)
    for changed, says in ((like_k25(SMALL), "proj.bias is missing"),
                          (other(vt_num_hidden_layers=3), "blocks.2.*missing"),
                          (other(vt_num_hidden_layers=1), "not ask for.*blocks.1"),
                          (other(vt_intermediate_size=13), r"expected \(13, 8\)")):
        with pytest.raises(ValueError, match=says):
            vision_tower(pixels, grids, tower, changed)
    with pytest.raises(ValueError, match="does not ask for"):
        vision_tower(pixels, grids, random_parameters(like_k25(SMALL))["vision_tower"], SMALL)
    with pytest.raises(ValueError, match=r"features has shape \(5, 3, 8\); expected \[n, 4, 8\]"):
        projector(np.zeros((5, 3, 8)), p["mm_projector"], SMALL)
    with pytest.raises(ValueError, match="interpolation_mode='bicubic'; built here: 'bilinear'"):
        vision_shapes(dataclasses.replace(SMALL, pos_emb_interpolation_mode="bicubic"))
