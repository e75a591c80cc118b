"""Bytes, products, training and NVFP4: what is done with quantised arrays."""
import inspect
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from helpers import check_grad, rel, same
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.mx.dot import ACCUMULATE, block_dots, dot, linear_mx, matmul, sum_bits
from k3np.mx.formats import FORMATS, decode_e8m0, values
from k3np.mx.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from k3np.mx.pack import LAYOUTS, pack, pack_nibbles, unpack, unpack_nibbles
from k3np.mx.qat import linear_qat, straight_through
from k3np.mx.quantize import MXArray, dequantize, fake_quantize, quantize
from k3np.ops import differentiable, linear
from k3np.vectors import golden

# --- bytes ---------------------------------------------------------------------------------------

@pytest.mark.golden
def test_bytes_written_by_hand():
    codes = np.zeros(32, np.uint8)
    codes[:4] = [1, 2, 6, 7]
    codes[16:18] = [15, 8]
    mx = MXArray(codes, np.array([130], np.uint8), "e2m1", (32,), 0, 32)
    linear_bytes = [0x21, 0x76] + [0] * 6 + [0x8F] + [0] * 7
    split = [130, 0xF1, 0x82, 0x06, 0x07] + [0] * 12
    assert pack(mx)["weight_packed"].tolist() == linear_bytes
    assert pack(mx)["weight_scale"].tolist() == [130]
    assert pack(mx, "gpt-oss")["blocks"].tolist() == [linear_bytes]
    assert pack(mx, "gguf")["data"].tolist() == [split]
    tensors = {"weight_packed": np.full((1, 16), 0x21, np.uint8),
               "weight_scale": np.array([[127]], np.uint8)}
    assert dequantize(unpack(tensors))[0].tolist() == [0.5, 1] * 16
    tensors = {"weight_packed": np.full((1, 16), 0xBA, np.uint8),
               "weight_scale": np.array([[128]], np.uint8)}
    assert dequantize(unpack(tensors))[0].tolist() == [-2, -3] * 16


@pytest.mark.golden
def test_layouts_against_their_libraries():
    case = golden("mx_layouts")
    assert np.array_equal(pack_nibbles(case["codes"]), case["packed"])
    assert np.array_equal(unpack_nibbles(case["packed"]), case["codes"])
    data = unpack({"data": case["gguf_data"]}, "gguf")
    assert np.array_equal(dequantize(data), case["gguf_values"])
    assert np.array_equal(pack(data, "gguf")["data"], case["gguf_data"])
    ours = pack(quantize(case["x"], "e2m1", "floor"), "gguf")["data"]
    assert np.array_equal(ours[..., 0], case["gguf_data"][..., 0])
    assert np.array_equal(dequantize(unpack({"data": ours}, "gguf")), case["gguf_values"])
    experts = unpack({"blocks": case["gptoss_blocks"], "scales": case["gptoss_scales"]}, "gpt-oss")
    assert np.array_equal(dequantize(experts).transpose(0, 2, 1), case["gptoss_values"])
    ours = pack(quantize(case["x"], "e2m1", "even175"))
    theirs = {"weight_packed": case["ct_packed"], "weight_scale": case["ct_scale_4"]}
    assert np.array_equal(ours["weight_scale"], case["ct_scale_4"])
    differs = np.argwhere(ours["weight_packed"] != case["ct_packed"])
    assert differs.tolist() == [[1, 20]]                             # the exact -0 of x
    assert np.array_equal(dequantize(unpack(ours)), dequantize(unpack(theirs)))


@pytest.mark.golden
@pytest.mark.parametrize("name", ["mxfp4_0", "mxfp4_1"])
def test_decoding_as_mlx(name):
    case = golden(name)
    mx = unpack({"weight_packed": case["packed_u8"], "weight_scale": case["scale_e8m0_u8"]})
    assert np.array_equal(dequantize(mx), case["dequant"])
    assert np.array_equal(case["packed_u32"].view(np.uint8), pack(mx)["weight_packed"])


@pytest.mark.traps
@pytest.mark.golden
def test_golden_rejects_misread_bytes():
    case = golden("mxfp4_1")
    packed, scale = case["packed_u8"], case["scale_e8m0_u8"]
    swapped = packed >> 4 | packed << 4                              # high nibble first
    wrong = {
        "high nibble first": (swapped, scale),
        "2^(byte - 128)": (packed, scale - 1),
        "2^(byte - 126)": (packed, scale + 1),
        "scales of the row above": (packed, np.roll(scale, 1, axis=0))}
    for name, (p, s) in wrong.items():
        y = dequantize(unpack({"weight_packed": p, "weight_scale": s}))
        assert rel(y, case["dequant"]) > 0.1, name
    bytes_as_numbers = values("e2m1")[unpack_nibbles(packed)] * np.repeat(scale, 32, axis=1)
    assert rel(bytes_as_numbers, case["dequant"]) > 100
    halves = np.concatenate([packed.reshape(5, 3, 16) & 15, packed.reshape(5, 3, 16) >> 4], axis=-1)
    split = MXArray(halves.reshape(5, 96), scale, "e2m1", (5, 96), 1, 32)
    assert rel(dequantize(split), case["dequant"]) > 0.1             # gguf's order
    all_bytes = np.arange(256, dtype=np.uint8)
    theirs = all_bytes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert np.array_equal(decode_e8m0(all_bytes, np.float64), theirs, equal_nan=True)
    assert not np.array_equal(2.0 ** (all_bytes - 127.0), theirs, equal_nan=True)      # 255 is NaN


@pytest.mark.property
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(LAYOUTS)), st.lists(st.integers(1, 4), max_size=3), st.integers(1, 4),
       st.integers(0, 99))
def test_pack_is_lossless_both_ways(layout, lead, n_blocks, seed):
    rng = np.random.default_rng(seed)
    shape = (*lead, 32 * n_blocks)
    mx = MXArray(rng.integers(0, 16, shape).astype(np.uint8),
                 rng.integers(0, 256, (*lead, n_blocks)).astype(np.uint8),
                 "e2m1", shape, len(lead), 32)
    tensors = pack(mx, layout)
    assert tuple(tensors) == LAYOUTS[layout]
    assert all(t.dtype == np.uint8 for t in tensors.values())
    back = unpack(tensors, layout)
    assert np.array_equal(back.codes, mx.codes) and np.array_equal(back.scales, mx.scales)
    assert back[2:] == mx[2:]
    assert sum(t.size for t in tensors.values()) * 8 == mx.codes.size * 4.25


@pytest.mark.property
@pytest.mark.parametrize("rule", ["floor", "even", "even175", "ceil", "rceil"])
def test_every_byte_survives_decoding_and_encoding_as_a_value(rule):
    """All bytes at each scale of a plausible checkpoint: values stay, bytes need not."""
    packed = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(48, axis=0)
    scale = np.arange(96, 144, dtype=np.uint8)[:, None].repeat(16, axis=1)
    tensors = {"weight_packed": packed.reshape(48, 256), "weight_scale": scale}
    x = dequantize(unpack(tensors))
    again = pack(quantize(x, "e2m1", rule))
    if rule == "ceil":                                               # doubles the scale: 0.5 goes
        assert (again["weight_scale"] == scale + 1).all()
        return
    assert np.array_equal(dequantize(unpack(again)), x)
    assert np.array_equal(again["weight_packed"], tensors["weight_packed"])
    small = dequantize(unpack({"weight_packed": np.full((1, 16), 0x21, np.uint8),
                               "weight_scale": np.array([[127]], np.uint8)}))
    assert quantize(small, "e2m1", "floor").scales[0, 0] == 125      # no 4 and no 6 in the block


@pytest.mark.property
def test_bytes_of_an_expert():
    """w1, w3 [3072, 3584] and w2 [3584, 3072] in K3's layout, without making them."""
    n = 3 * 3072 * 3584
    assert n * 17 // 32 == 17_547_264
    mx = quantize(np.ones((4, 64), np.float32))
    assert {k: v.shape for k, v in pack(mx).items()} == {"weight_packed": (4, 32),
                                                         "weight_scale": (4, 2)}


@pytest.mark.errors
def test_errors_of_packing():
    mx = quantize(np.ones((4, 64), np.float32))
    good = pack(mx)
    blocks = pack(mx, "gpt-oss")
    u8 = np.uint8
    for call, message in (
            (lambda: pack(mx, "awq"), "known are compressed-tensors, gpt-oss, gguf"),
            (lambda: unpack(good, "awq"), "known are compressed-tensors"),
            (lambda: pack(quantize(np.ones((4, 64)), "e4m3")), "holds e2m1 in blocks of 32"),
            (lambda: pack(quantize(np.ones((64, 4)), axis=0)), "along axis 0"),
            (lambda: pack(quantize(np.ones((4, 64)), block=16)), "blocks of 16"),
            (lambda: pack(quantize(np.ones((4, 40)))), "40, which 32 does not divide"),
            (lambda: unpack({"weight_packed": good["weight_packed"]}), "tensors lack weight_scale"),
            (lambda: unpack(good | {"weight_packed": good["weight_packed"][:, :-1]}),
             r"weight_scale of shape \(4, 2\) does not fit weight_packed of shape \(4, 31\), 62"),
            (lambda: unpack(good | {"weight_scale": good["weight_scale"][:, :1]}), "does not fit"),
            (lambda: unpack(good | {"weight_scale": good["weight_scale"].astype(int)}), "dtype"),
            (lambda: unpack(good | {"weight_packed": u8(3)}), "an array of uint8"),
            (lambda: unpack(blocks | {"blocks": blocks["blocks"][..., :15]}, "gpt-oss"), "16"),
            (lambda: unpack({"data": np.zeros((2, 18), u8)}, "gguf"), "17 bytes, a block"),
            (lambda: pack_nibbles(np.zeros(3, u8)), "must be even"),
            (lambda: pack_nibbles(np.full(2, 16, u8)), "are these packed bytes")):
        with pytest.raises(ValueError, match=message):
            call()
    ragged = quantize(np.arange(1, 41, dtype=np.float32))            # 40: 20 bytes, 2 scales
    assert pack_nibbles(ragged.codes[:40]).shape == (20,) and ragged.scales.shape == (2,)


# --- products ------------------------------------------------------------------------------------

def draw(shape, fmt, rule="even", seed=0, spread=6):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread, (*shape[:-1], 1))
    return quantize(x.astype(np.float32), fmt, rule)


def fractions(mx):
    return [[Fraction(float(v)) for v in row] for row in dequantize(mx, np.float64)]


@pytest.mark.property
@pytest.mark.parametrize("a_fmt, b_fmt", [("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e4m3", "e4m3"),
                                          ("int8", "int8"), ("e3m2", "e2m3"), ("e5m2", "e5m2")])
def test_products_against_fractions(a_fmt, b_fmt):
    a, b = draw((3, 128), a_fmt, seed=1), draw((4, 128), b_fmt, seed=2)
    exact = [[sum(p * q for p, q in zip(r, s, strict=True)) for s in fractions(b)]
             for r in fractions(a)]
    want = np.array([[float(v) for v in row] for row in exact])      # each rounded once
    assert np.array_equal(matmul(a, b, "exact"), want)
    assert rel(matmul(a, b), want) < 1e-14
    assert rel(matmul(a, b, "float32"), want) < 1e-5
    blocks = block_dots(a, draw((3, 128), b_fmt, seed=2))
    if sum_bits(a_fmt, b_fmt) <= 53:
        parts = [[sum(p * q for p, q in zip(r[g:g + 32], s[g:g + 32], strict=True))
                  for g in range(0, 128, 32)]
                 for r, s in zip(fractions(a), fractions(draw((3, 128), b_fmt, seed=2)),
                                 strict=True)]
        assert [[Fraction(float(v)) for v in row] for row in blocks] == parts


@pytest.mark.property
def test_how_many_bits_a_block_needs():
    bits = {("e2m1", "e2m1"): 13, ("e2m1", "e4m3"): 27, ("e4m3", "e4m3"): 41, ("e5m2", "e5m2"): 69}
    for (a, b), n in bits.items():
        assert sum_bits(a, b) == sum_bits(b, a) == n
    largest = {f.name: f.max for f in FORMATS.values()}
    assert largest["e2m1"] ** 2 * 32 == 1152 and 1152 * 4 < 2 ** 15  # fits 16 bits with a sign


@pytest.mark.property
@pytest.mark.parametrize("accumulate", ACCUMULATE)
def test_dot_matmul_and_block_dots_agree(accumulate):
    a, b = draw((2, 3, 96), "e4m3", seed=3), draw((2, 3, 96), "e2m1", seed=4)
    row = MXArray(b.codes[1, 2][None], b.scales[1, 2][None], "e2m1", (1, 96), 1, 32)
    y = matmul(a, row, accumulate)
    assert y.shape == (2, 3, 1)
    assert y.dtype == (np.float32 if accumulate == "float32" else np.float64)
    assert dot(a, b, accumulate)[1, 2] == y[1, 2, 0]
    parts = block_dots(a, b)
    total = np.float64(0) if accumulate != "float32" else np.float32(0)
    for g in range(3):
        total = total + parts[1, 2, g].astype(total.dtype)
    assert accumulate == "exact" or total == y[1, 2, 0]
    assert dot(a, b).shape == (2, 3)


@pytest.mark.property
def test_the_order_of_accumulation_shows_in_float32_only():
    """1 + 2^-24 + 2^-24: added one by one in float32 the small blocks vanish."""
    x = np.zeros(96, np.float32)
    x[[0, 32, 64]] = 1, 2.0 ** -24, 2.0 ** -24
    a, one = quantize(x), quantize(np.ones(96, np.float32))
    exact = 1 + 2.0 ** -23
    assert dot(a, one) == dot(a, one, "exact") == exact and dot(a, one, "float32") == 1


@pytest.mark.property
def test_padding_nan_and_empty():
    a, b = draw((2, 40), "e4m3"), draw((3, 40), "e2m1", seed=1)
    want = dequantize(a, np.float64) @ dequantize(b, np.float64).T
    assert rel(matmul(a, b), want) < 1e-14
    a.scales[0, 1] = 255
    for accumulate in ("float64", "float32"):
        y = matmul(a, b, accumulate)
        assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()
    y = matmul(a, b, "exact")
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()
    empty = quantize(np.ones((2, 0), np.float32))
    assert matmul(empty, empty).tolist() == [[0, 0], [0, 0]]
    assert dot(empty, empty).tolist() == [0, 0]


@pytest.mark.property
def test_an_expert_multiplies_fp4_with_fp8():
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((3, 5, 64)).astype(np.float32), rng.standard_normal((7, 64))
    packed = pack(quantize(w.astype(np.float32), "e2m1", "even"))
    for fmt, rule in (("e4m3", "floor"), ("e4m3", "rceil"), ("e5m2", "even")):
        y = linear_mx(x, unpack(packed), fmt, rule)
        want = linear(fake_quantize(x, fmt, rule).astype(np.float64),
                      dequantize(unpack(packed), np.float64))
        assert y.shape == (3, 5, 7) and rel(y, want) < 1e-14


@pytest.mark.errors
def test_errors_of_products():
    a, b = draw((2, 64), "e4m3"), draw((3, 64), "e2m1")
    columns = quantize(np.ones((64, 3), np.float32), axis=0)
    short = quantize(np.ones((3, 64), np.float32), block=16)
    for call, message in (
            (lambda: matmul(a, b, "bfloat16"), "known are float64, float32, exact"),
            (lambda: dot(a, b, "sum"), "known are float64"),
            (lambda: matmul(a, columns), "blocked along axis 0"),
            (lambda: matmul(a, short), "blocks of 32 and of 16"),
            (lambda: matmul(a, draw((3, 96), "e2m1")), r"\(3, 96\); expected \[O, 64\]"),
            (lambda: matmul(a, draw((2, 3, 64), "e2m1")), "w has shape"),
            (lambda: block_dots(a, b), r"a has shape \(2, 64\) and b \(3, 64\)")):
        with pytest.raises(ValueError, match=message):
            call()


# --- training ------------------------------------------------------------------------------------

@pytest.mark.grad
def test_straight_through_on_the_block_7_6_1():
    x = np.zeros(32)
    x[:3] = [7, 6, 1]
    ct = np.arange(1.0, 33)
    for gradient, slope in (("pass", [1, 1, 1]), ("clip", [0, 1, 1])):
        y, pullback = straight_through.vjp(x, "e2m1", "floor", gradient=gradient)
        assert y[:3].tolist() == [6, 6, 1]
        grads, again = pullback(ct), pullback(ct)
        assert len(grads) == len(inspect.signature(straight_through).parameters)
        assert grads[1:] == (None,) * 5 and np.array_equal(grads[0], again[0])
        assert (grads[0][:3] / ct[:3]).tolist() == slope
        assert (grads[0][3:] == ct[3:]).all()
    assert straight_through.vjp(x, "e2m1", "rceil", gradient="clip")[1](ct)[0].tolist() \
        == ct.tolist()                                               # rceil clips nothing


@pytest.mark.grad
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_clipping_is_the_slope_of_a_clamp(fmt, axis):
    """With the scales held still, the clipping variant is the gradient of a clamp."""
    x = np.random.default_rng(6).standard_normal((40, 33))
    mx = quantize(x, fmt, "floor", axis)
    limit = np.repeat(decode_e8m0(mx.scales, np.float64), 32, axis=axis)[:40, :33]
    limit = limit * FORMATS[fmt].max

    @differentiable
    def clamp(v):
        return np.clip(v, -limit, limit), lambda ct: (ct * (np.abs(v) <= limit),)
    check_grad(clamp, x)
    ct = np.random.default_rng(7).standard_normal(x.shape)
    ours = straight_through.vjp(x, fmt, "floor", axis, gradient="clip")[1](ct)[0]
    assert np.array_equal(ours, clamp.vjp(x)[1](ct)[0])
    assert (ours == 0).any() or fmt == "int8"
    for gradient in ("pass", "clip"):
        y = straight_through(x.astype(np.float32), fmt, "floor", axis, gradient=gradient)
        assert y.dtype == np.float32 and np.array_equal(y, fake_quantize(y, fmt, "floor", axis))


@pytest.mark.grad
def test_linear_qat_is_linear_in_the_quantised_operands():
    rng = np.random.default_rng(8)
    x, w, ct = rng.standard_normal((2, 3, 64)), rng.standard_normal((5, 64)), rng.standard_normal(
        (2, 3, 5))
    y, pullback = linear_qat.vjp(x, w, x_rule="rceil", w_rule="even")
    xq, wq = fake_quantize(x, "e4m3", "rceil"), fake_quantize(w, "e2m1", "even")
    assert np.array_equal(y, linear(xq, wq))
    grads = pullback(ct)
    want = linear.vjp(xq, wq)[1](ct)
    assert len(grads) == len(inspect.signature(linear_qat).parameters)
    assert same(grads, pullback(ct)) and same(grads[:2], want) and grads[2:] == (None,) * 5
    check_grad(linear_qat, x, w, None, None)                         # nothing quantised: exact
    half = linear_qat(x, w, None)
    assert np.array_equal(half, linear(x, fake_quantize(w, "e2m1", "floor")))
    assert rel(y, linear_mx(x, quantize(w, "e2m1", "even"), "e4m3", "rceil")) < 1e-14


@pytest.mark.errors
def test_errors_of_training():
    with pytest.raises(ValueError, match="known are pass, clip"):
        straight_through(np.ones(32), gradient="ste")
    with pytest.raises(ValueError, match="known scale rules"):
        straight_through(np.ones(32), rule="round")


# --- NVFP4 ---------------------------------------------------------------------------------------

@pytest.mark.golden
def test_nvfp4_against_ml_dtypes():
    rng = np.random.default_rng(9)
    x = (rng.standard_normal((50, 64)) * 2.0 ** rng.integers(-8, 4, (50, 1))).astype(np.float32)
    nv = quantize_nvfp4(x)
    g = float(np.float32(np.abs(x).max() / 2688))
    assert nv.tensor_scale == np.float32(g) and nv.scales.shape == (50, 4)
    blocks = x.reshape(50, 4, 16).astype(np.float64)
    scale = np.minimum(np.abs(blocks).max(-1) / 6 / g, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(nv.scales, scale.view(np.uint8))
    unit = scale.astype(np.float64)[..., None] * g
    codes = np.clip(blocks / unit, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(nv.codes, codes.view(np.uint8).reshape(50, 64))
    y = (codes.astype(np.float64) * unit).reshape(50, 64)
    assert np.array_equal(dequantize_nvfp4(nv, np.float64), y)
    assert dequantize_nvfp4(nv).dtype == np.float32


@pytest.mark.property
def test_nvfp4_without_its_second_scale_ends_at_2688():
    x = np.zeros(16)
    x[0] = 3000
    assert dequantize_nvfp4(quantize_nvfp4(x, 1.0))[0] == 2688
    assert abs(dequantize_nvfp4(quantize_nvfp4(x))[0] - 3000) < 1e-3
    tiny = np.concatenate([np.full(16, 1.0), np.full(16, -1e-7)])
    y = dequantize_nvfp4(quantize_nvfp4(tiny))
    assert not y[16:].any() and np.signbit(y[16:]).all()             # a scale that rounds to zero
    assert not dequantize_nvfp4(quantize_nvfp4(np.zeros((2, 32)))).any()


@pytest.mark.errors
def test_errors_of_nvfp4():
    for x, scale, message in ((np.ones(24), None, "multiple of 16"),
                              (np.full(16, np.nan), None, "NaN or infinity"),
                              (np.ones(16), 0.0, "positive, finite"),
                              (np.ones(16, int), None, "x has dtype int64")):
        with pytest.raises(ValueError, match=message):
            quantize_nvfp4(x, scale)
