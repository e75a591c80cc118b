"""From an image of any size to the patches that the vision tower reads.

An image is only ever made smaller, and only when it has more patches than the limits allow. Then
transparency is laid on a chessboard, the right and bottom edges are padded until 2x2 patches merge,
and the pixels are scaled to [-1, 1]. There is no crop and no fixed size.
"""
import math

import numpy as np

PATCH_LIMIT = 65536                  # patches in an image, counted before padding; K2.5: 16384
SIDE_LIMIT = 512                     # patches along one side
SQUARE, WHITE, GREY = 8, 255, 180    # the chessboard under transparent pixels
READABLE = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")


def scaled_size(width, height, cfg, patch_limit=PATCH_LIMIT, side_limit=SIDE_LIMIT):
    """Size in pixels to which an image is brought before padding: scale = min(1, s1, s2, s3).

    s1 = sqrt(patch_limit / (patches across * patches down)), whole patches, at least one;
    s2 and s3 = side_limit * patch_size / width and / height. Sizes are rounded down.

    Args: width, height in pixels; cfg, VisionConfig; patch_limit, side_limit in patches.
    Returns: (width, height) in pixels, each at least 1.
    Raises: ValueError for sizes or limits that are not positive whole numbers.
    Source: the released image processor, as five ports agree on it.
    """
    for name, n in (("width", width), ("height", height), ("patch_limit", patch_limit),
                    ("side_limit", side_limit)):
        if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 1:
            raise ValueError(f"{name}={n!r}; expected a whole number of at least 1")
    P, width, height = cfg.patch_size, int(width), int(height)
    longest = side_limit * P
    scale = min(1.0, math.sqrt(patch_limit / (max(1, width // P) * max(1, height // P))),
                longest / width, longest / height)
    return tuple(min(max(1, int(n * scale)), longest) for n in (width, height))


def grid_of(width, height, cfg, patch_limit=PATCH_LIMIT, side_limit=SIDE_LIMIT):
    """Grid (t, h, w) in patches of an image of width by height pixels; t is 1.

    Padding comes after the limit, so h * w may exceed `patch_limit` by a few percent: the largest
    found by a search over sizes is 67,320 patches, 16,830 tokens, for 7,489 by 1,917 pixels.

    Args, Raises: as `scaled_size`. Returns: (1, h, w), h and w multiples of the merge kernel.
    """
    new_width, new_height = scaled_size(width, height, cfg, patch_limit, side_limit)
    kh, kw = cfg.merge_kernel_size
    P = cfg.patch_size
    return 1, -(-new_height // (kh * P)) * kh, -(-new_width // (kw * P)) * kw


def on_chessboard(rgba):
    """Lay an image with transparency on the chessboard of white and grey squares.

    Args: rgba [H,W,4], uint8.
    Returns: [H,W,3], uint8; fractions are cut off, as the released processor does in float32.
    """
    y, x = np.indices(rgba.shape[:2]) // SQUARE
    board = np.where((y + x) % 2, GREY, WHITE).astype(np.float32)[..., None]   # [H,W,1]
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    return (alpha * rgba[..., :3] + (1 - alpha) * board).astype(np.uint8)


def patchify(image, cfg, dtype=np.float32):
    """Pad an image with zeros right and below, scale it to [-1, 1], cut it into patches.

    Args: image [H,W,3], uint8; cfg, VisionConfig; dtype of the result.
    Returns: pixel_values [h*w,3,P,P], row by row; grid_thw [3], (1, h, w).
    """
    P, (kh, kw) = cfg.patch_size, cfg.merge_kernel_size
    height, width = image.shape[:2]
    padded = np.pad(image, ((0, -height % (kh * P)), (0, -width % (kw * P)), (0, 0)))
    h, w = padded.shape[0] // P, padded.shape[1] // P
    scaled = (padded.astype(dtype) / dtype(255) - dtype(0.5)) / dtype(0.5)
    patches = scaled.reshape(h, P, w, P, 3).transpose(0, 2, 4, 1, 3)           # [h,w,3,P,P]
    return patches.reshape(h * w, 3, P, P), np.array([1, h, w], np.int64)


def preprocess_image(image, cfg, patch_limit=PATCH_LIMIT, side_limit=SIDE_LIMIT,
                     dtype=np.float32):
    """Turn an image into patches and their grid, as the released processor does.

    In this order: resize (bicubic, never larger), chessboard, padding, normalisation.

    Args: image, a Pillow image, or an array of uint8 [H,W] (grey), [H,W,3] (RGB) or [H,W,4]
        (RGBA); cfg, VisionConfig; patch_limit, side_limit in patches; dtype of the patches.
    Returns: pixel_values [h*w,3,P,P] in [-1, 1]; grid_thw [3], (1, h, w), int64.
    Raises: ValueError for another rank, dtype or mode, or no pixels; ImportError that says what to
        install when an array must be resized and Pillow is missing.
    Source: the released image processor; report §2.4. Images only: it refuses video, and so does
        this.
    Departs: images of 16 or 32 bits a channel are refused; Pillow would clip them to white.
    """
    dtype = np.dtype(dtype).type
    if dtype not in (np.float32, np.float64):
        raise ValueError(f"dtype={dtype.__name__}; expected float32 or float64")
    if not hasattr(image, "getbands"):
        image = _checked_array(image)
        height, width = image.shape[:2]
    else:
        width, height = image.size
        if image.mode not in READABLE:
            raise ValueError(f"image has mode {image.mode!r}; expected 8 bits a channel: "
                             f"one of {', '.join(READABLE)}")
    if not width or not height:
        raise ValueError(f"image has {width} x {height} pixels; there is nothing to see")
    size = scaled_size(width, height, cfg, patch_limit, side_limit)
    if isinstance(image, np.ndarray) and size != (width, height):
        image = _pillow().fromarray(image)
    if not isinstance(image, np.ndarray):
        image = _to_array(image.resize(size, _pillow().Resampling.BICUBIC))
    if image.ndim == 2:
        image = np.repeat(image[..., None], 3, axis=-1)
    return patchify(on_chessboard(image) if image.shape[-1] == 4 else image, cfg, dtype)


def _checked_array(image):
    image = np.asarray(image)
    if image.dtype != np.uint8:
        raise ValueError(f"image has dtype {image.dtype}; expected uint8, 0 to 255: convert values "
                         "in [0, 1] with np.round(255 * image).astype(np.uint8)")
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[-1] not in (3, 4)):
        raise ValueError(f"image has shape {image.shape}; expected [H, W], [H, W, 3] or [H, W, 4], "
                         "one image at a time")
    return np.ascontiguousarray(image)


def _to_array(image):
    transparent = "A" in image.getbands() or "transparency" in image.info and image.mode != "RGB"
    return np.asarray(image.convert("RGBA" if transparent else "RGB"))


def _pillow():
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("resizing an image needs Pillow: pip install 'k3np[image]'") from None
    return Image
