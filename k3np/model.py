"""Kimi K3 as a whole: tokens and pictures in, logits out. Each earlier chapter has its line here.

The parameters are the checkpoint's tree: params["language_model"]["model"]["layers"]["0"] is a
layer, params["vision_tower"] the eyes. `forward` is for inference: it keeps a cache and holds one
layer's intermediates at a time. `logits` and `loss` are differentiable and keep them all.
"""
from typing import NamedTuple

import numpy as np

from k3np.attnres import Depth, add, begin_block, mix, plus, start, starts_block
from k3np.embed import check_ids, embed, expand
from k3np.kda import KDACache, init_kda_cache, kda_layer
from k3np.mla import MLACache, init_mla_cache, mla_layer
from k3np.moe import feed_forward
from k3np.ops import check_shapes, cross_entropy, differentiable, linear, rms_norm
from k3np.tree import fill, merge


class Cache(NamedTuple):
    """What decoding remembers: `layers`, a KDACache or an MLACache for each; `length`, tokens."""
    layers: tuple
    length: int


class Taps(NamedTuple):
    """A look inside a forward: `mixtures`, what each sub-layer read, two a layer [B,T,d], then what
    the head reads; `partials`, the running sum after each layer; `routings`, None where dense."""
    mixtures: list
    partials: list
    routings: list


def init_cache(cfg, batch, dtype=np.float32):
    """The cache before the first token, for `batch` sequences."""
    return Cache(tuple((init_mla_cache if cfg.is_mla_layer(i) else init_kda_cache)(
        cfg, batch, dtype) for i in range(cfg.num_hidden_layers)), 0)


@differentiable
def read(state, p, name, cfg):
    """What a sub-layer reads: the mixture over depth, by the parameters `name`_norm and _proj.

    Before a first block is finished, and in a model without Attention Residuals, it is the sum.
    """
    names = f"{name}_norm", f"{name}_proj"
    if not state.blocks:
        unused = {key: np.zeros_like(p[key]) for key in names if key in p}
        return state.partial, lambda ct: (Depth((), ct), unused, None, None)
    h, pull = mix.vjp(state, p[names[0]], p[names[1]], cfg.rms_norm_eps)

    def pullback(ct):
        ct_state, *ct_p, _ = pull(ct)
        return ct_state, dict(zip(names, ct_p)), None, None
    return h, pullback


@differentiable
def decoder_layer(state, p, cfg, i, cache=None, mask=None):
    """One layer: attention, then feed-forward, each on its own mixture over depth.

    h = mix(state); at a block's start the sum becomes a block; state += attention(RMS(h));
    h = mix(state); state += feed_forward(RMS(h)).

    Args: state, Depth of arrays [B,T,d]; p, the layer's parameters; cfg, K3Config; i, its number
        from 0; cache, KDACache or MLACache of the tokens before; mask [B,T], 0 at padding.
    Returns: (Depth, the cache after, (the two mixtures read), Routing or None).
    Source: report §2; KimiDecoderLayer of the released code.
    """
    attend = mla_layer if cfg.is_mla_layer(i) else kda_layer
    ffn = "mlp" if cfg.is_dense_layer(i) else "block_sparse_moe"
    _check_layer(p, cfg, i, ffn)
    block = cfg.attn_res_block_size and 2 * cfg.attn_res_block_size      # in sub-layers

    h, pull_read = read.vjp(state, p, "self_attention_res", cfg)
    pull_begin = None
    if starts_block(2 * i, block):
        state, pull_begin = begin_block.vjp(state)
    x, pull_norm = rms_norm.vjp(h, p["input_layernorm"], cfg.rms_norm_eps)
    (out, cache), pull_attention = attend.vjp(x, p["self_attn"], cfg, cache, mask=mask)
    state, pull_add = add.vjp(state, out)

    h_2, pull_read_2 = read.vjp(state, p, "mlp_res", cfg)
    x, pull_norm_2 = rms_norm.vjp(h_2, p["post_attention_layernorm"], cfg.rms_norm_eps)
    (out, routing), pull_ffn = feed_forward.vjp(x, p[ffn], cfg, i)
    state, pull_add_2 = add.vjp(state, out)

    def pullback(ct):
        ct_state, ct_cache, ct_mixtures, ct_routing = ct
        ct_h, ct_h_2 = ct_mixtures or (None, None)
        ct_state, ct_out = pull_add_2(ct_state)
        ct_x, ct_ffn, *_ = pull_ffn((ct_out, ct_routing))
        ct_read, ct_norm_2, _ = pull_norm_2(ct_x)
        more, ct_res_2, *_ = pull_read_2(ct_read if ct_h_2 is None else ct_read + ct_h_2)
        ct_state, ct_out = pull_add(plus(ct_state, more))
        ct_x, ct_attention, _, ct_before, *_ = pull_attention((ct_out, ct_cache))
        ct_read, ct_norm, _ = pull_norm(ct_x)
        more, ct_res, *_ = pull_read(ct_read if ct_h is None else ct_read + ct_h)
        if pull_begin:
            ct_state, = pull_begin(ct_state)
        return (plus(ct_state, more),
                {"self_attn": ct_attention, ffn: ct_ffn, "input_layernorm": ct_norm,
                 "post_attention_layernorm": ct_norm_2, **ct_res, **ct_res_2},
                None, None, ct_before, None)
    return (state, cache, (h, h_2), routing), pullback


@differentiable
def head(state, params, cfg):
    """The mixture over all blocks, the final norm, the output matrix. Depth -> logits [B,T,N]."""
    lm, tied = params["language_model"], cfg.tie_word_embeddings
    matrix = lm["model"]["embed_tokens"] if tied else lm["lm_head"]
    check_shapes(norm=(lm["model"]["norm"], f"{cfg.hidden_size}"),
                 lm_head=(matrix, f"{cfg.vocab_size} {cfg.hidden_size}"))
    h, pull_read = read.vjp(state, lm["model"], "output_attn_res", cfg)
    x, pull_norm = rms_norm.vjp(h, lm["model"]["norm"], cfg.rms_norm_eps)
    value, pull_linear = linear.vjp(x, matrix)                           # [B,T,d] -> [B,T,N]

    def pullback(ct):
        ct_x, ct_matrix = pull_linear(ct)
        ct_h, ct_norm, _ = pull_norm(ct_x)
        ct_state, ct_res, *_ = pull_read(ct_h)
        ct_model = {"norm": ct_norm, **ct_res}
        ct_lm = ({"model": {**ct_model, "embed_tokens": ct_matrix}} if tied
                 else {"model": ct_model, "lm_head": ct_matrix})
        return ct_state, {"language_model": ct_lm}, None
    return value, pullback


def cut(state, last):
    """The Depth of the `last` positions alone (None: of all), when only their logits are wanted."""
    if last is not None and last < 1:
        raise ValueError(f"last={last}; expected how many positions, at least one, or None")
    if last is None:
        return state
    keep = slice(max(0, state.partial.shape[1] - last), None)
    return Depth(tuple(b[:, keep] for b in state.blocks), state.partial[:, keep])


def forward(params, input_ids, cfg, cache=None, images=None, mask=None, last=None, taps=False):
    """Logits of a piece of text, and the cache that the next piece needs.

    Pieces of any size, one token included, give what one pass gives. Beside the cache and a Depth
    of at most ceil(L/S) + 1 arrays [B,T,d], one layer's intermediates are held: attention works in
    tiles, KDA in chunks, experts one after the other. So memory grows with T, not with its square.

    Args: params, the tree; input_ids [B,T], integers, T >= 1, or [B,T,d] as `embed` gives (to cut
        inside a picture); cfg, K3Config; cache, Cache of the tokens before or None; images, Images
        whose placeholders are in input_ids; mask [B,T], 0 at padding, on the left; last, of how
        many positions at the end logits are wanted (None: of all); taps, whether to give Taps too.
    Returns: (logits [B,T',N], Cache), and Taps if asked for. T' counts expanded pictures.
    Raises: ValueError for ids, pictures, a cache or parameters that do not fit.
    Source: report §2; KimiK3ForConditionalGeneration of the released code.
    """
    layers = params["language_model"]["model"]["layers"]
    if np.ndim(input_ids) == 3:
        x = np.asarray(input_ids)
        if images is not None:
            raise ValueError("input_ids are vectors [B,T,d] already; give images to embed")
        check_shapes(input_ids=(x, f"B T {cfg.hidden_size}"))
    else:
        x = embed(params, input_ids, cfg, images)
        if mask is not None and images is not None:
            where, flat = expand(np.asarray(input_ids), cfg, images), np.asarray(mask).reshape(-1)
            mask = np.where(where < 0, flat[-1 - np.minimum(where, -1)], 1)
    state, after, seen = start(x), [], Taps([], [], [])
    caches, length = _check_cache(cache, cfg, x.shape[1])
    for i in range(cfg.num_hidden_layers):
        state, layer_cache, mixtures, routing = decoder_layer(state, _layer(layers, i), cfg, i,
                                                              caches[i], mask)
        after.append(layer_cache)
        if taps:
            seen.mixtures.extend(mixtures)
            seen.partials.append(state.partial)
            seen.routings.append(routing)
    if taps:
        seen.mixtures.append(read(state, params["language_model"]["model"], "output_attn_res", cfg))
    value = head(cut(state, last), params, cfg), Cache(tuple(after), length)
    return (*value, seen) if taps else value


@differentiable
def logits(params, input_ids, cfg, images=None):
    """Logits of whole sequences, differentiable in params: (logits [B,T',N], list of Routing).

    Args, Raises: as `forward`, without a cache. The cotangent of the routings is None, or a list
        with None or a Routing's cotangent for each layer.
    """
    layers = params["language_model"]["model"]["layers"]
    x, pull_embed = embed.vjp(params, input_ids, cfg, images)
    state, pulls, routings = start(x), [], []
    for i in range(cfg.num_hidden_layers):
        (state, _, _, routing), pull = decoder_layer.vjp(state, _layer(layers, i), cfg, i)
        pulls.append(pull)
        routings.append(routing)
    value, pull_head = head.vjp(state, params, cfg)

    def pullback(ct):
        ct_logits, ct_routings = ct
        ct_state, ct_params, _ = pull_head(np.zeros_like(value) if ct_logits is None else ct_logits)
        ct_layers = {}
        for i in reversed(range(len(pulls))):
            ct_routing = ct_routings[i] if ct_routings else None
            ct_state, ct_layers[str(i)], *_ = pulls[i]((ct_state, None, None, ct_routing))
        ct_layers = {"language_model": {"model": {"layers": ct_layers}}}
        ct_params = merge(merge(ct_params, ct_layers), pull_embed(ct_state.partial)[0])
        return fill(ct_params, params), None, None, None
    return (value, routings), pullback


@differentiable
def loss_and_routings(params, batch, cfg):
    """`loss`, and the Routing of each layer, whose scores balancing reads."""
    ids, images = check_ids(batch["input_ids"], cfg), batch.get("images")
    (value, routings), pull = logits.vjp(params, ids, cfg, images)
    where = expand(ids, cfg, images)
    labels = np.asarray(batch.get("labels", ids))
    if labels.shape != ids.shape:
        raise ValueError(f"labels has shape {labels.shape}; expected that of input_ids {ids.shape}")
    labels = np.where(where < 0, labels.reshape(-1)[-1 - np.minimum(where, -1)], cfg.ignore_index)
    mean, pull_ce = cross_entropy.vjp(value[:, :-1], labels[:, 1:], cfg.ignore_index)

    def pullback(ct):
        ct_mean, ct_routings = ct
        ct_value = np.zeros_like(value)
        if ct_mean is not None:
            ct_value[:, :-1] = pull_ce(ct_mean)[0]
        return pull((ct_value, ct_routings))[0], None, None
    return (mean, routings), pullback


@differentiable
def loss(params, batch, cfg):
    """Mean cross-entropy of the next token, in nats.

    Args: params; batch, dict of input_ids [B,T] and, if given, images (Images) and labels [B,T]
        (default: input_ids; cfg.ignore_index leaves a position out). Pictures are not predicted.
    Returns: a scalar.
    """
    (value, _), pull = loss_and_routings.vjp(params, batch, cfg)
    return value, lambda ct: pull((ct, None))


def _check_cache(cache, cfg, n_new):
    """The layers' caches and the length after n_new tokens more."""
    kinds = [MLACache if cfg.is_mla_layer(i) else KDACache for i in range(cfg.num_hidden_layers)]
    if cache is not None and not (isinstance(cache, Cache) and len(cache.layers) == len(kinds)
                                  and all(map(isinstance, cache.layers, kinds))):
        raise ValueError("cache must be the Cache that forward returned for this model, or "
                         f"init_cache(cfg, batch): {len(kinds)} layers, KDACache and MLACache as "
                         "cfg.linear_attn_config has them")
    length = (cache.length if cache else 0) + n_new
    if length > cfg.max_position_embeddings:
        raise ValueError(f"input_ids reach length {length}; cfg.max_position_embeddings is "
                         f"{cfg.max_position_embeddings}")
    return cache.layers if cache else (None,) * len(kinds), length


def _layer(layers, i):
    if str(i) not in layers:
        raise ValueError(f"params has no layer {i}; it has {len(layers)} layers")
    return layers[str(i)]


def _check_layer(p, cfg, i, ffn):
    norms = ["input_layernorm", "post_attention_layernorm"]
    needed = [*norms, "self_attn", ffn]
    if cfg.attn_res_block_size:
        needed += [f"{a}_res_{b}" for a in ("self_attention", "mlp") for b in ("norm", "proj")]
    missing = [name for name in needed if name not in p]
    if missing:
        raise ValueError(f"layer {i} lacks {', '.join(missing)}; it has {', '.join(sorted(p))}")
    check_shapes(**{f"layers.{i}.{name}": (p[name], f"{cfg.hidden_size}") for name in norms})
