"""From an image to patches: sizes, order, transparency, and what is refused."""
import dataclasses
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from k3np.config import K3Config
from k3np.preprocess import grid_of, on_chessboard, patchify, preprocess_image, scaled_size

CFG = K3Config.released().vision_config
side = st.integers(1, 30_000)


def picture(height, width, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, channels)).astype(np.uint8)


def smooth(height, width):
    y, x = np.indices((height, width))
    return np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], -1).astype(np.uint8)


def unpatchify(pixel_values, grid):
    """Patches back to an image in [-1, 1]."""
    _, h, w = grid
    P = pixel_values.shape[-1]
    return pixel_values.reshape(h, w, 3, P, P).transpose(0, 3, 1, 4, 2).reshape(h * P, w * P, 3)


def levels(pixel_values, grid):
    """Patches back to an image of 0..255."""
    return np.round((unpatchify(pixel_values, grid) + 1) * 127.5).astype(int)


@pytest.mark.property
@settings(max_examples=50, deadline=None)
@given(side, side, st.sampled_from((16384, 65536)))
def test_size_is_the_written_out_rule(width, height, limit):
    across, down = max(1, width // 14), max(1, height // 14)
    s = min(1, math.sqrt(limit / (across * down)), 7168 / width, 7168 / height)
    expected = [max(1, min(7168, math.floor(n * s))) for n in (width, height)]
    assert list(scaled_size(width, height, CFG, limit)) == expected
    rows, columns = (2 * math.ceil(n / 28) for n in expected[::-1])
    assert grid_of(width, height, CFG, limit) == (1, rows, columns)


@pytest.mark.property
@settings(max_examples=50, deadline=None)
@given(side, side)
def test_never_larger_and_within_the_limits(width, height):
    new_width, new_height = scaled_size(width, height, CFG)
    assert 1 <= new_width <= min(width, 7168) and 1 <= new_height <= min(height, 7168)
    t, h, w = grid_of(width, height, CFG)
    assert t == 1 and h % 2 == w % 2 == 0 and max(h, w) <= 512
    assert h * w // 4 <= 16830                       # the most that a search over sizes finds
    assert h * 14 - 28 < new_height <= h * 14 and w * 14 - 28 < new_width <= w * 14
    if width * height <= 14 * 14 * 65536 and max(width, height) <= 7168:
        assert (new_width, new_height) == (width, height)


@pytest.mark.property
def test_the_largest_square_gives_16384_tokens():
    assert grid_of(3584, 3584, CFG) == (1, 256, 256)
    assert 256 * 256 == 65_536 and 256 * 256 // 4 == 16_384
    assert grid_of(3597, 3597, CFG) == (1, 258, 258)       # padding comes after the limit
    assert grid_of(7489, 1917, CFG) == (1, 132, 510)       # 16,830 tokens
    assert scaled_size(20_000, 20_000, CFG) == (3585, 3585)  # one pixel begins another row
    assert grid_of(20_000, 20_000, CFG) == (1, 258, 258)
    assert grid_of(30_000, 100, CFG) == (1, 2, 512)
    assert grid_of(1, 1, CFG) == (1, 2, 2)


@pytest.mark.property
@pytest.mark.parametrize("height, width", [(28, 28), (29, 57), (1, 1), (100, 30)])
def test_patches_are_the_image_row_by_row_and_padded_right_and_below(height, width):
    image = picture(height, width)
    pixel_values, grid = preprocess_image(image, CFG)
    assert pixel_values.dtype == np.float32 and grid.dtype == np.int64
    assert tuple(grid) == grid_of(width, height, CFG)
    assert pixel_values.shape == (grid[1] * grid[2], 3, 14, 14)
    back = levels(pixel_values, grid)
    assert np.array_equal(back[:height, :width], image)
    assert not back[height:].any() and not back[:, width:].any()
    r, c, channel, i, j = grid[1] - 2, grid[2] - 1, 2, 3, 5
    y, x = r * 14 + i, c * 14 + j
    expected = image[y, x, channel] if y < height and x < width else 0
    assert abs(pixel_values[r * grid[2] + c, channel, i, j] - (expected / 127.5 - 1)) < 1e-6


@pytest.mark.property
def test_precision_follows_the_argument():
    image = picture(28, 28)
    exact, _ = preprocess_image(image, CFG, dtype=np.float64)
    assert exact.dtype == np.float64 and exact.min() >= -1 and exact.max() <= 1
    assert np.abs(preprocess_image(image, CFG)[0] - exact).max() < 1e-7
    values = np.unique(exact[:, 0])
    assert np.abs(values - (np.round((values + 1) * 127.5) / 127.5 - 1)).max() < 1e-15


@pytest.mark.property
def test_resizes_with_pillows_bicubic():
    image, size = picture(90, 140), scaled_size(140, 90, CFG, patch_limit=24)
    assert size != (140, 90)
    pixel_values, grid = preprocess_image(image, CFG, patch_limit=24)
    expected = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
    assert np.array_equal(levels(pixel_values, grid)[:size[1], :size[0]], expected)
    for other in (Image.Resampling.BILINEAR, Image.Resampling.NEAREST):
        wrong = np.asarray(Image.fromarray(image).resize(size, other)).astype(int)
        assert np.abs(wrong - expected).max() > 2


@pytest.mark.property
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("limit", [24, 65536])
def test_pillow_images_of_any_mode(mode, limit):
    image = Image.fromarray(picture(90, 140, 4), "RGBA").convert(mode)
    pixel_values, grid = preprocess_image(image, CFG, patch_limit=limit)
    size = scaled_size(140, 90, CFG, limit)
    small = image.resize(size, Image.Resampling.BICUBIC)
    expected = np.asarray(small.convert("RGBA" if "A" in mode else "RGB"))
    if "A" in mode:
        expected = on_chessboard(expected)
    assert np.array_equal(levels(pixel_values, grid)[:size[1], :size[0]], expected)
    if mode in ("L", "RGB", "RGBA"):
        again, _ = preprocess_image(np.asarray(image), CFG, patch_limit=limit)
        assert np.array_equal(again, pixel_values)


@pytest.mark.property
def test_transparency_of_a_palette_is_seen_and_a_colour_key_of_rgb_is_not():
    palette = Image.fromarray(np.zeros((28, 28), np.uint8), "P")
    palette.putpalette([10, 20, 30])
    palette.info["transparency"] = 0
    board = levels(*preprocess_image(palette, CFG))
    assert board[0, 0].tolist() == [255] * 3 and board[0, 8].tolist() == [180] * 3
    rgb = Image.new("RGB", (28, 28), (10, 20, 30))
    rgb.info["transparency"] = (10, 20, 30)
    assert levels(*preprocess_image(rgb, CFG))[0, 8].tolist() == [10, 20, 30]


@pytest.mark.property
def test_chessboard_pixel_by_pixel():
    rgba = picture(20, 35, 4)
    rgba[:4, :, 3], rgba[4:8, :, 3] = 0, 255
    laid = on_chessboard(rgba)
    assert np.array_equal(laid[4:8], rgba[4:8, :, :3])
    for y, x in np.ndindex(20, 35):
        square = 255 if (y // 8 + x // 8) % 2 == 0 else 180          # white at the top left
        a = np.float32(rgba[y, x, 3]) / np.float32(255)
        for c in range(3):
            assert laid[y, x, c] == math.floor(a * rgba[y, x, c] + (1 - a) * np.float32(square))
    assert laid[0, 0, 0] == 255 and laid[0, 8, 0] == 180


@pytest.mark.traps
def test_order_of_the_steps_and_the_limit_matter():
    rgba = np.dstack([smooth(90, 140), np.full((90, 140), 0, np.uint8)])
    right = levels(*preprocess_image(rgba, CFG, patch_limit=24))
    early, grid = preprocess_image(on_chessboard(rgba), CFG, patch_limit=24)
    assert set(np.unique(right)) == {0, 180, 255}                    # squares of exactly 8
    assert np.abs(levels(early, grid) - right).max() > 50            # board before the resize
    dropped = levels(*preprocess_image(rgba[..., :3], CFG, patch_limit=24))
    assert np.abs(dropped - right).max() > 50                        # alpha thrown away
    k25 = grid_of(3584, 3584, CFG, patch_limit=16384)
    assert k25 == (1, 128, 128)                                      # a quarter of the tokens
    pixel_values, grid = preprocess_image(smooth(56, 84), CFG)
    columns_first = pixel_values.reshape(4, 6, 3, 14, 14).swapaxes(0, 1).reshape(24, 3, 14, 14)
    assert np.abs(columns_first - pixel_values).max() > 0.5
    channels_last = pixel_values.transpose(0, 2, 3, 1).reshape(24, 3, 14, 14)
    assert np.abs(channels_last - pixel_values).max() > 0.5


@pytest.mark.errors
def test_refused_images():
    for bad, says in ((np.zeros((28, 28, 3)), "dtype float64; expected uint8"),
                      (np.full((28, 28), np.nan), "dtype float64.*np.round"),
                      (np.zeros((28, 28, 3), np.int64), "dtype int64"),
                      (np.zeros((28, 28, 2), np.uint8), r"shape \(28, 28, 2\)"),
                      (np.zeros((1, 28, 28, 3), np.uint8), "one image at a time"),
                      (np.zeros(28, np.uint8), r"shape \(28,\)"),
                      (np.zeros((0, 28, 3), np.uint8), "28 x 0 pixels; there is nothing to see"),
                      (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
                      (Image.new("I;16", (28, 28)), "mode 'I;16'; expected 8 bits"),
                      (Image.new("F", (28, 28)), "mode 'F'")):
        with pytest.raises(ValueError, match=says):
            preprocess_image(bad, CFG)
    with pytest.raises(ValueError, match="dtype=int32; expected float32 or float64"):
        preprocess_image(picture(28, 28), CFG, dtype=np.int32)
    for arguments, says in (((0, 5), "width=0"), ((5, -1), "height=-1"), ((5.5, 5), "width=5.5"),
                            ((5, True), "height=True"), ((5, 5, CFG, 0), "patch_limit=0"),
                            ((5, 5, CFG, 9, 0), "side_limit=0")):
        with pytest.raises(ValueError, match=f"{says}; expected a whole number"):
            scaled_size(*(arguments if len(arguments) > 2 else (*arguments, CFG)))


@pytest.mark.errors
def test_without_pillow_only_a_resize_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    pixel_values, _ = preprocess_image(picture(28, 28), CFG)
    assert pixel_values.shape == (4, 3, 14, 14)
    with pytest.raises(ImportError, match=r"resizing an image needs Pillow: pip install 'k3np\[im"):
        preprocess_image(picture(90, 140), CFG, patch_limit=4)


@pytest.mark.property
def test_patchify_in_a_config_with_other_sizes():
    cfg = K3Config.tiny().vision_config
    odd = dataclasses.replace(cfg, patch_size=4, merge_kernel_size=(3, 2))
    image = picture(13, 9)
    pixel_values, grid = patchify(image, odd, np.float64)
    assert grid.tolist() == [1, 6, 4] and pixel_values.shape == (24, 3, 4, 4)
    assert grid_of(9, 13, odd) == (1, 6, 4)
    assert np.array_equal(levels(pixel_values, grid)[:13, :9], image)
