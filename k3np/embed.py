"""Tokens and pictures to the vectors that the first layer reads."""
from typing import Any, NamedTuple

import numpy as np

from k3np.ops import check_shapes, differentiable
from k3np.vision import TOWER_EPS, see


class Images(NamedTuple):
    """Pictures that replace placeholders, in their order: `pixel_values` [N,3,P,P], the patches of
    all; `grid_thws` [M,3], frames, rows and columns of each; `eps` of the tower's norms."""
    pixel_values: Any
    grid_thws: Any
    eps: float = TOWER_EPS


@differentiable
def embed(params, input_ids, cfg, images=None):
    """Look tokens up, and put each picture's features where its placeholder stands.

    A placeholder expands: one token becomes h/2 * w/2 of them. Without pictures it is a token like
    any other. The pullback gives nothing for the pixels.

    Args: params; input_ids [B,T], integers; cfg; images, Images or None.
    Returns: x [B,T',d].
    Raises: ValueError for ids outside the vocabulary, more or fewer pictures than placeholders,
        rows that differ in length once expanded.
    Source: report §2.4; the merge of the released KimiK3ForConditionalGeneration.
    """
    table = params["language_model"]["model"]["embed_tokens"]            # [N,d]
    check_shapes(embed_tokens=(table, f"{cfg.vocab_size} {cfg.hidden_size}"))
    ids = check_ids(input_ids, cfg)
    where = expand(ids, cfg, images)
    tokens = ids.reshape(-1)[-1 - where[where < 0]]
    x = np.empty((*where.shape, cfg.hidden_size), table.dtype)
    x[where < 0] = table[tokens]
    if images is not None:
        features, pull_see = see.vjp(np.asarray(images.pixel_values, table.dtype),
                                     images.grid_thws, params, cfg.vision_config, images.eps)
        x[where >= 0] = np.concatenate(features)                         # in the order of `where`

    def pullback(ct):
        ct_table = np.zeros_like(table)
        np.add.at(ct_table, tokens, ct[where < 0])
        ct_params = {"language_model": {"model": {"embed_tokens": ct_table}}}
        if images is not None:
            cuts = np.cumsum([len(f) for f in features])[:-1]
            ct_params |= pull_see(tuple(np.split(ct[where >= 0], cuts)))[2]
        return ct_params, None, None, None
    return x, pullback


def expand(ids, cfg, images=None):
    """Where each position of the expanded sequence comes from.

    Args: ids [B,T]; cfg; images, Images or None.
    Returns: int64 [B,T']: the number of a feature, counted over all pictures, or -1 - (b T + t)
        for token t of row b.
    """
    lengths, is_media = [], np.zeros(ids.size, bool)
    if images is not None:
        if cfg.vision_config is None:
            raise ValueError("images: this model has no vision_config, so it reads no pictures")
        kh, kw = cfg.vision_config.merge_kernel_size
        lengths = [int(h) // kh * (int(w) // kw) for _, h, w in np.asarray(images.grid_thws)]
        is_media = ids.reshape(-1) == cfg.media_placeholder_token_id
    if int(is_media.sum()) != len(lengths):
        raise ValueError(f"input_ids holds {int(is_media.sum())} placeholders (token "
                         f"{cfg.media_placeholder_token_id}) and images {len(lengths)} pictures; "
                         "give one for each")
    counts = np.ones(ids.size, np.int64)
    counts[is_media] = lengths
    totals = counts.reshape(ids.shape).sum(axis=1).tolist()
    if len(set(totals)) > 1:
        raise ValueError("rows of input_ids differ in length once their pictures are expanded: "
                         f"{totals}; pad them on the left, or run them one by one")
    where = np.repeat(-1 - np.arange(ids.size, dtype=np.int64), counts)
    where[np.repeat(is_media, counts)] = np.arange(sum(lengths))
    return where.reshape(ids.shape[0], -1)


def check_ids(input_ids, cfg):
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise ValueError(f"input_ids has shape {ids.shape} and dtype {ids.dtype}; expected whole "
                         "numbers [B,T] with at least one token")
    if ids.min() < 0 or ids.max() >= cfg.vocab_size:
        raise ValueError(f"input_ids must lie in 0..{cfg.vocab_size - 1}; found "
                         f"{ids.min()}..{ids.max()}")
    return ids
