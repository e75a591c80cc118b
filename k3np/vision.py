"""MoonViT-V2: images of any size, packed, to features; and the projector into the text model.

Media (images, or clips of a few frames) lie one after another in one array of patches. `grid_thws`
says how many frames, rows and columns each has. Everything but attention, positions and the merge
acts on single patches and does not see where one medium ends.
"""
import math

import numpy as np

from k3np.attention import attention
from k3np.gelu import gelu, gelu_tanh
from k3np.ops import check_floats, check_shapes, differentiable, linear, rms_norm
from k3np.preprocess import SIDE_LIMIT
from k3np.vision_positions import positions, rotate, rotation

TOWER_EPS = 1.19e-7          # what PyTorch takes for eps=None on float32; see `vision_tower`
LAYER_NORM_EPS = 1e-5
KNOWN = {"pos_emb_type": ("divided_fixed",), "pos_emb_interpolation_mode": ("bilinear",),
         "merge_type": ("sd2_tpool",), "mm_projector_type": ("patchmergerv2", "patchmerger"),
         "norm_type": ("rmsnorm", "layernorm"), "mlp_type": ("mlp2",),
         "activation_func": ("gelu_pytorch_tanh",), "projector_hidden_act": ("gelu",)}


def vision_shapes(cfg):
    """Released names and shapes of the tower's and the projector's parameters.

    Args: cfg, VisionConfig. K3's has no biases; those of K2.5 come with its keys (norm_type
        "layernorm", mm_projector_type "patchmerger", attn_bias, linear_bias,
        patch_embed_proj_bias).
    Returns: dict from name to shape.
    Raises: ValueError for a key whose value is not built here.
    """
    for key, values in KNOWN.items():
        if getattr(cfg, key) not in values:
            raise ValueError(f"vision_config.{key}={getattr(cfg, key)!r}; built here: "
                             f"{', '.join(map(repr, values))}")
    D, Q, P = cfg.vt_hidden_size, cfg.qkv_hidden_size, cfg.patch_size
    merged, layer_norm = D * math.prod(cfg.merge_kernel_size), cfg.norm_type == "layernorm"
    first = cfg.mm_projector_type == "patchmerger"
    shapes = {"vision_tower.patch_embed.pos_emb.weight":
              (cfg.init_pos_emb_height, cfg.init_pos_emb_width, D)}

    def module(name, *shape, bias):
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]
    module("vision_tower.patch_embed.proj", D, 3, P, P, bias=cfg.patch_embed_proj_bias)
    for i in range(cfg.vt_num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{i}"
        module(f"{block}.norm0", D, bias=layer_norm)
        module(f"{block}.norm1", D, bias=layer_norm)
        module(f"{block}.wqkv", 3 * Q, D, bias=cfg.attn_bias)
        module(f"{block}.wo", D, Q, bias=cfg.attn_bias)
        module(f"{block}.mlp.fc0", cfg.vt_intermediate_size, D, bias=cfg.linear_bias)
        module(f"{block}.mlp.fc1", D, cfg.vt_intermediate_size, bias=cfg.linear_bias)
    module("vision_tower.encoder.final_layernorm", D, bias=layer_norm)
    if first:
        module("mm_projector.pre_norm", D, bias=True)
    module("mm_projector.proj.0", merged, merged, bias=first)
    module("mm_projector.proj.2", cfg.text_hidden_size, merged, bias=first)
    if not first:
        module("mm_projector.post_norm", cfg.text_hidden_size, bias=False)
    return shapes


@differentiable
def affine(x, p):
    """`linear`, plus a bias where p is a dict of weight and bias. x [..., I] -> [..., O]."""
    if not isinstance(p, dict):
        return linear.vjp(x, p)
    y, pull = linear.vjp(x, p["weight"])

    def pullback(ct):
        ct_x, ct_weight = pull(ct)
        return ct_x, {"weight": ct_weight, "bias": ct.reshape(-1, ct.shape[-1]).sum(axis=0)}
    return y + p["bias"], pullback


@differentiable
def layer_norm(x, p, eps=LAYER_NORM_EPS):
    """Subtract the mean over the last axis, then RMSNorm, then add a bias.

    Args: x [..., D]; p, dict of weight and bias [D]; eps on the variance. Returns: y [..., D].
    Source: torch.nn.LayerNorm, in the tower and projector of K2.5.
    """
    y, pull = rms_norm.vjp(x - x.mean(axis=-1, keepdims=True), p["weight"], eps)

    def pullback(ct):
        ct_centred, ct_weight, _ = pull(ct)
        ct_bias = ct.reshape(-1, ct.shape[-1]).sum(axis=0)
        return (ct_centred - ct_centred.mean(axis=-1, keepdims=True),
                {"weight": ct_weight, "bias": ct_bias}, None)
    return y + p["bias"], pullback


def _norm(x, p, cfg, eps):
    """The tower's norm with its pullback; eps is that of the RMSNorm."""
    return (layer_norm.vjp(x, p) if cfg.norm_type == "layernorm" else rms_norm.vjp(x, p, eps))


@differentiable
def embed_patches(pixel_values, p):
    """Each patch through one linear map: a convolution whose kernel is its stride.

    Args: pixel_values [N,3,P,P]; p, weight [D,3,P,P], or a dict of it and a bias [D].
    Returns: [N,D].
    """
    weight = p["weight"] if isinstance(p, dict) else p
    flat = weight.reshape(len(weight), -1)
    y, pull = affine.vjp(pixel_values.reshape(len(pixel_values), -1),
                         {**p, "weight": flat} if isinstance(p, dict) else flat)

    def pullback(ct):
        ct_pixels, ct_p = pull(ct)
        ct_p = ({**ct_p, "weight": ct_p["weight"].reshape(weight.shape)} if isinstance(p, dict)
                else ct_p.reshape(weight.shape))
        return ct_pixels.reshape(pixel_values.shape), ct_p
    return y, pullback


@differentiable
def packed_attention(q, k, v, lengths, block=256):
    """Softmax attention without a mask, each medium to itself; scale 1 / sqrt(K).

    Media of one length are computed together. Scores are made a block at a time and again in the
    pullback, so memory grows with N, not with its square.

    Args: q, k, v [N,H,K]; lengths, patches of each medium, summing to N; block, rows of a block.
    Returns: o [N,H,K].
    """
    ends = np.cumsum(lengths)
    runs = []                                            # (indices [B,T] of a length, pullback)
    o = np.empty_like(v)
    for n in sorted(set(lengths)):
        at = np.stack([np.arange(end - n, end) for end, m in zip(ends, lengths) if m == n])
        o[at], pull = attention.vjp(q[at], k[at], v[at], q.shape[-1] ** -0.5, False, block)
        runs.append((at, pull))

    def pullback(ct):
        cts = np.empty_like(q), np.empty_like(k), np.empty_like(v)
        for at, pull in runs:
            for whole, part in zip(cts, pull(ct[at])):
                whole[at] = part
        return (*cts, None, None)
    return o, pullback


@differentiable
def vision_block(x, p, cos, sin, lengths, cfg, eps=TOWER_EPS):
    """One block of the tower: x += wo attention(norm0 x), then x += fc1 gelu(fc0 norm1 x).

    Args: x [N,D], all media; p, the block's parameters; cos, sin [N,1,K/2]; lengths, patches of
        each medium; cfg, VisionConfig; eps of the RMSNorms.
    Returns: [N,D].
    """
    N, H = x.shape[0], cfg.vt_num_attention_heads
    y, pull_norm0 = _norm(x, p["norm0"], cfg, eps)
    qkv, pull_qkv = affine.vjp(y, p["wqkv"])                             # [N,D] -> [N,3HK]
    q, k, v = qkv.reshape(N, 3, H, -1).swapaxes(0, 1)                    # [N,H,K] each
    (q, pull_q), (k, pull_k) = rotate.vjp(q, cos, sin), rotate.vjp(k, cos, sin)
    o, pull_attention = packed_attention.vjp(q, k, v, lengths)
    y, pull_wo = affine.vjp(o.reshape(N, -1), p["wo"])                   # [N,HK] -> [N,D]
    middle = x + y
    y, pull_norm1 = _norm(middle, p["norm1"], cfg, eps)
    y, pull_fc0 = affine.vjp(y, p["mlp"]["fc0"])                         # [N,D] -> [N,I]
    y, pull_gelu = gelu_tanh.vjp(y)
    y, pull_fc1 = affine.vjp(y, p["mlp"]["fc1"])                         # [N,I] -> [N,D]

    def pullback(ct):
        ct_y, ct_fc1 = pull_fc1(ct)
        ct_y, ct_fc0 = pull_fc0(*pull_gelu(ct_y))
        ct_y, ct_norm1 = pull_norm1(ct_y)[:2]
        ct_middle = ct + ct_y
        ct_o, ct_wo = pull_wo(ct_middle)
        ct_q, ct_k, ct_v = pull_attention(ct_o.reshape(o.shape))[:3]
        ct_qkv = np.stack([pull_q(ct_q)[0], pull_k(ct_k)[0], ct_v], axis=1)
        ct_y, ct_wqkv = pull_qkv(ct_qkv.reshape(N, -1))
        ct_y, ct_norm0 = pull_norm0(ct_y)[:2]
        ct_p = {"norm0": ct_norm0, "norm1": ct_norm1, "wqkv": ct_wqkv, "wo": ct_wo,
                "mlp": {"fc0": ct_fc0, "fc1": ct_fc1}}
        return ct_middle + ct_y, ct_p, None, None, None, None, None
    return middle + y, pullback


@differentiable
def merge_patches(x, grid, kernel):
    """Mean over the frames, then neighbouring patches side by side.

    Args: x [t*h*w,D]; grid (t, h, w); kernel (kh, kw).
    Returns: [h/kh * w/kw, kh*kw, D], inside a token row by row.
    Source: "sd2_tpool" of the released code.
    """
    (t, h, w), (kh, kw), D = grid, kernel, x.shape[-1]
    mean = x.reshape(t, h, w, D).mean(axis=0)
    y = mean.reshape(h // kh, kh, w // kw, kw, D).swapaxes(1, 2)         # [h/kh,w/kw,kh,kw,D]

    def pullback(ct):
        ct_mean = ct.reshape(h // kh, w // kw, kh, kw, D).swapaxes(1, 2).reshape(h, w, D)
        return np.broadcast_to(ct_mean / t, (t, h, w, D)).reshape(x.shape), None, None
    return y.reshape(-1, kh * kw, D), pullback


@differentiable
def vision_tower(pixel_values, grid_thws, p, cfg, eps=TOWER_EPS):
    """MoonViT-V2: patches of several media to features, each medium attending to itself alone.

    Patch embedding, positions, blocks, final norm, mean over frames and merge. In a clip every
    patch attends to all patches of all its frames.

    Keeps the input of each block, layers * N * D numbers; the pullback computes each block again.

    Args: pixel_values [N,3,P,P]; grid_thws [M,3], whole numbers (t, h, w), N = sum of t*h*w;
        p, the parameters under "vision_tower"; cfg, VisionConfig; eps of the tower's RMSNorms.
        The released code gives none. PyTorch then takes 1.19e-7 for float32, 2.2e-16 for float64;
        for bfloat16 today's takes 1.19e-7, and two ports assume 2^-7. What training used is
        unknown.
    Returns: tuple of M arrays [h/kh * w/kw, kh*kw, D].
    Raises: ValueError for ranks, grids and patches that do not agree, for a grid that cannot be
        merged, more frames than init_pos_emb_time, sides beyond 512, pixels that are not finite.
    Source: report §2.4; MoonViT3d of the released code.
    Departs: the report says that attention is factorised into space and time; the released code
        attends over the whole clip, and so does this.
    """
    grids = check_grids(pixel_values, grid_thws, cfg)
    _check_parameters(p, cfg, "vision_tower", pixel_values)
    lengths = [math.prod(grid) for grid in grids]
    patches, pull_embed = embed_patches.vjp(pixel_values, p["patch_embed"]["proj"])
    table, K = p["patch_embed"]["pos_emb"], cfg.qkv_hidden_size // cfg.vt_num_attention_heads
    added = {grid: positions.vjp(table, grid) for grid in dict.fromkeys(grids)}
    turns = {grid: rotation(grid, K) for grid in added}
    x = patches + np.concatenate([added[grid][0] for grid in grids])     # [N,D]
    cos, sin = (np.concatenate([turns[grid][i] for grid in grids]).astype(x.dtype)
                for i in (0, 1))
    inputs, blocks = [], p["encoder"]["blocks"]
    for i in range(cfg.vt_num_hidden_layers):
        inputs.append(x)
        x = vision_block(x, blocks[str(i)], cos, sin, lengths, cfg, eps)
    x, pull_final = _norm(x, p["encoder"]["final_layernorm"], cfg, eps)
    cuts = np.cumsum(lengths)[:-1]
    merged = [merge_patches.vjp(part, grid, cfg.merge_kernel_size)
              for part, grid in zip(np.split(x, cuts), grids)]

    def pullback(ct):
        ct_x = np.concatenate([
            np.zeros((n, x.shape[1]), x.dtype) if part is None else pull(part)[0]
            for part, (_, pull), n in zip(ct, merged, lengths, strict=True)])
        ct_x, ct_final = pull_final(ct_x)[:2]
        ct_blocks = {}
        for i in reversed(range(cfg.vt_num_hidden_layers)):
            _, pull = vision_block.vjp(inputs[i], blocks[str(i)], cos, sin, lengths, cfg, eps)
            ct_x, ct_blocks[str(i)] = pull(ct_x)[:2]
        parts = list(zip(np.split(ct_x, cuts), grids))
        ct_table = sum(pull(sum(part for part, of in parts if of == grid))[0]
                       for grid, (_, pull) in added.items())
        ct_pixels, ct_embed = pull_embed(ct_x)
        ct_p = {"patch_embed": {"proj": ct_embed, "pos_emb": ct_table},
                "encoder": {"blocks": ct_blocks, "final_layernorm": ct_final}}
        return ct_pixels, None, ct_p, None, None
    return tuple(y for y, _ in merged), pullback


@differentiable
def projector(features, p, cfg):
    """Features of merged patches into the width of the text model.

    Two linear maps with an exact GELU between them, then RMSNorm (K3), or LayerNorm before them
    and biases (K2.5, mm_projector_type "patchmerger").

    Args: features [n, kh*kw, D]; p, the parameters under "mm_projector"; cfg, VisionConfig.
    Returns: [n, text_hidden_size].
    Source: PatchMergerMLPV2 (and its predecessor) of the released code.
    """
    check_shapes(features=(features, f"n {math.prod(cfg.merge_kernel_size)} {cfg.vt_hidden_size}"))
    _check_parameters(p, cfg, "mm_projector", features)
    first = cfg.mm_projector_type == "patchmerger"
    y, pull_pre = (layer_norm.vjp(features, p["pre_norm"], cfg.projector_ln_eps) if first
                   else (features, None))
    y, pull_0 = affine.vjp(y.reshape(len(features), -1), p["proj"]["0"])
    y, pull_gelu = gelu.vjp(y)
    y, pull_2 = affine.vjp(y, p["proj"]["2"])
    y, pull_post = (y, None) if first else rms_norm.vjp(y, p["post_norm"], cfg.projector_ln_eps)

    def pullback(ct):
        ct_p = {}
        if not first:
            ct, ct_p["post_norm"] = pull_post(ct)[:2]
        ct, ct_2 = pull_2(ct)
        ct, ct_0 = pull_0(*pull_gelu(ct))
        ct = ct.reshape(features.shape)
        if first:
            ct, ct_p["pre_norm"] = pull_pre(ct)[:2]
        return ct, {"proj": {"0": ct_0, "2": ct_2}, **ct_p}, None
    return y, pullback


@differentiable
def see(pixel_values, grid_thws, p, cfg, eps=TOWER_EPS):
    """Media to what the text model reads in place of its placeholders: tower, then projector.

    Args: as `vision_tower`, but p holds "vision_tower" and "mm_projector".
    Returns: tuple of M arrays [h/kh * w/kw, text_hidden_size].
    """
    features, pull_tower = vision_tower.vjp(pixel_values, grid_thws, p["vision_tower"], cfg, eps)
    cuts = np.cumsum([len(f) for f in features])[:-1]
    y, pull_projector = projector.vjp(np.concatenate(features), p["mm_projector"], cfg)
    parts = tuple(np.split(y, cuts))

    def pullback(ct):
        ct_y = np.concatenate([np.zeros_like(part) if c is None else c
                               for c, part in zip(ct, parts, strict=True)])
        ct_features, ct_projector, _ = pull_projector(ct_y)
        ct_pixels, _, ct_tower, _, _ = pull_tower(tuple(np.split(ct_features, cuts)))
        return (ct_pixels, None, {"vision_tower": ct_tower, "mm_projector": ct_projector},
                None, None)
    return parts, pullback


def check_grids(pixel_values, grid_thws, cfg):
    """Hold patches and grids against each other and the config; give the grids as tuples."""
    P, (kh, kw), t_max = cfg.patch_size, cfg.merge_kernel_size, cfg.init_pos_emb_time
    check_shapes(pixel_values=(pixel_values, f"N 3 {P} {P}"))
    check_floats(pixel_values=pixel_values)
    table = np.asarray(grid_thws)
    if table.ndim != 2 or table.shape[1] != 3 or not len(table) or table.dtype.kind not in "iu":
        raise ValueError(f"grid_thws has shape {table.shape} and dtype {table.dtype}; expected "
                         "whole numbers [M, 3]: (t, h, w) for each of one or more media")
    grids = [tuple(map(int, row)) for row in table]
    for i, (t, h, w) in enumerate(grids):
        where = f"grid_thws[{i}]={t, h, w}"
        if min(t, h, w) < 1:
            raise ValueError(f"{where}: frames, rows and columns must be 1 or more")
        if h % kh or w % kw:
            raise ValueError(f"{where}: rows and columns must be multiples of the merge kernel "
                             f"{kh, kw}; pad the image, as preprocess_image does")
        if t > t_max:
            raise ValueError(f"{where}: a clip has at most init_pos_emb_time={t_max} frames; "
                             "give a longer video as several media")
        if max(h, w) > SIDE_LIMIT:
            raise ValueError(f"{where}: at most {SIDE_LIMIT} patches along a side; scale the "
                             "image down, as preprocess_image does")
    n = sum(map(math.prod, grids))
    if n != len(pixel_values):
        raise ValueError(f"pixel_values has {len(pixel_values)} patches and shape "
                         f"{pixel_values.shape}; grid_thws {grids} asks for {n}")
    if not np.isfinite(pixel_values).all():
        raise ValueError("pixel_values holds NaN or infinity; patches lie in [-1, 1]")
    return grids


def _check_parameters(p, cfg, prefix, x):
    """Hold a parameter tree against the names and shapes that the config asks for."""
    expected = {name.removeprefix(f"{prefix}."): shape for name, shape in
                vision_shapes(cfg).items() if name.startswith(f"{prefix}.")}
    found = dict(_flatten(p))
    for name, shape in expected.items():
        short = name.removesuffix(".weight")
        array = found.pop(name, None) if name in found else found.pop(short, None)
        if array is None or array.shape != shape or array.dtype != x.dtype:
            has = "missing" if array is None else f"of shape {array.shape} and {array.dtype}"
            raise ValueError(f"{prefix}.{name} is {has}; expected {shape} and {x.dtype}, the "
                             "config's sizes and the input's dtype")
    if found:
        raise ValueError(f"{prefix} holds parameters that the config does not ask for: "
                         f"{', '.join(sorted(found))}")


def _flatten(tree, prefix=""):
    for key, child in tree.items():
        if isinstance(child, dict):
            yield from _flatten(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", child
