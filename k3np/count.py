"""How large a model is and what it costs: parameters, bytes and floating-point operations.

Closed forms in the keys of the config, in Python integers. Beside them stands `parameter_shapes`,
the list of every tensor, from which the tests count again.

What an operation is: a multiply-add counts 2; where a state is only scaled, a multiply counts 1.
Counted are products of matrices, attention over the context, reading and writing the KDA state,
convolutions and the mixing of Attention Residuals. Not counted are norms, activations, gates,
softmax, top-k and sampling: work on vectors, some thousandth of the whole. Pairs of tokens that a
causal mask removes are not counted either. The vision tower is left out of the FLOPs.
"""
from math import ceil, prod

N_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
FLOAT32_NAMES = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def layer_counts(cfg):
    """Number of layers of each kind: {"kda", "mla", "dense", "moe"}."""
    layers = range(cfg.num_hidden_layers)
    mla, dense = (sum(map(kind, layers)) for kind in (cfg.is_mla_layer, cfg.is_dense_layer))
    return {"kda": len(layers) - mla, "mla": mla, "dense": dense, "moe": len(layers) - dense}


def _kda_layer(cfg):
    """Parameters of a KDA layer: (those in matrices, taps of the convolutions, the rest)."""
    d, lac = cfg.hidden_size, cfg.linear_attn_config
    H, K = lac.num_heads, lac.head_dim
    gate = d * H * K if lac.use_full_rank_gate else (d + H * K) * K
    matrices = 4 * d * H * K + gate + (d + H * K) * K + d * H        # q k v o, gate, decay, beta
    return matrices, 3 * H * K * lac.short_conv_kernel_size, H + H * K + K   # A_log, dt_bias, norm


def _mla_layer(cfg):
    """Parameters of an MLA layer: (those in matrices, those of its latent norms)."""
    d, H, r = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank
    q_width = H * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)
    q = cfg.q_lora_rank * (d + q_width) if cfg.q_lora_rank else d * q_width
    kv = d * (r + cfg.qk_rope_head_dim) + r * H * (cfg.qk_nope_head_dim + cfg.v_head_dim)
    gates_and_output = (2 if cfg.mla_use_output_gate else 1) * d * H * cfg.v_head_dim
    return q + kv + gates_and_output, r + (cfg.q_lora_rank or 0)


def _refuse_biases(vision):
    if vision.attn_bias or vision.linear_bias or vision.patch_embed_proj_bias:
        raise ValueError("vision_config asks for biases (attn_bias, linear_bias or "
                         "patch_embed_proj_bias); K3 has none and they are not counted here")


def _vision(cfg):
    """Parameters of (the vision tower, the projector)."""
    v = cfg.vision_config
    if v is None:
        return 0, 0
    _refuse_biases(v)
    D, merged = v.vt_hidden_size, v.mm_hidden_size * prod(v.merge_kernel_size)
    block = 2 * D + 4 * D * v.qkv_hidden_size + 2 * D * v.vt_intermediate_size
    embed = D * 3 * v.patch_size ** 2 + v.init_pos_emb_height * v.init_pos_emb_width * D
    return (embed + v.vt_num_hidden_layers * block + D,
            merged * merged + v.text_hidden_size * merged + v.text_hidden_size)


def parameters(cfg):
    """Parameters of a model, part by part.

    Args: cfg, K3Config.
    Returns: dict of integers. Parts: embed, lm_head, kda, mla, dense, routed_experts, router,
        latent, shared, norms, attnres, vision, projector. Sums: text_total; total (with vision);
        active, what one token of text multiplies by (an embedding is looked up, not multiplied).
    Source: the tensors of the released checkpoint's index. Of A_log the live heads are counted.
    """
    d, L, n = cfg.hidden_size, cfg.num_hidden_layers, layer_counts(cfg)
    width, inter = cfg.routed_expert_hidden_size or d, cfg.moe_intermediate_size
    latent = 2 * d * width + width * cfg.latent_moe_use_norm if cfg.routed_expert_hidden_size else 0
    parts = {
        "embed": cfg.vocab_size * d,
        "lm_head": 0 if cfg.tie_word_embeddings else cfg.vocab_size * d,
        "kda": n["kda"] * sum(_kda_layer(cfg)),
        "mla": n["mla"] * sum(_mla_layer(cfg)),
        "dense": n["dense"] * 3 * d * cfg.intermediate_size,
        "routed_experts": n["moe"] * cfg.num_experts * 3 * width * inter,
        "router": n["moe"] * cfg.num_experts * (d + 1),              # a row and a bias an expert
        "latent": n["moe"] * latent,
        "shared": n["moe"] * 3 * d * inter * cfg.num_shared_experts,
        "norms": (2 * L + 1) * d,
        "attnres": (4 * L + 2) * d if cfg.attn_res_block_size else 0,   # a norm and a query each
    }
    text_total = sum(parts.values())
    idle = n["moe"] * (cfg.num_experts - cfg.num_experts_per_token) * 3 * width * inter
    lookup = 0 if cfg.tie_word_embeddings else parts["embed"]
    parts["vision"], parts["projector"] = _vision(cfg)
    return {**parts, "text_total": text_total,
            "total": text_total + parts["vision"] + parts["projector"],
            "active": text_total - idle - lookup}


def parameters_of(tree):
    """Count the elements of a real parameter tree: nested dicts or sequences of arrays."""
    if hasattr(tree, "shape"):
        return prod(map(int, tree.shape))
    return sum(map(parameters_of, tree.values() if hasattr(tree, "values") else tree))


def stored_heads(heads):
    """Length at which the released layout stores a vector of one number a head (`A_log`).

    96 heads are stored as 128, the rest zeros (Released). The rule behind it is Unknown; the next
    power of two, at least 8, gives that and the 8 of the golden model with 2 heads.
    """
    return max(8, 1 << (heads - 1).bit_length())


def _kda_shapes(cfg):
    d, lac = cfg.hidden_size, cfg.linear_attn_config
    H, K, W = lac.num_heads, lac.head_dim, lac.short_conv_kernel_size
    P = H * K
    shapes = {f"{x}_proj.weight": (P, d) for x in "qkv"}
    shapes |= {f"{x}_conv1d.weight": (P, 1, W) for x in "qkv"}
    shapes |= {"f_a_proj.weight": (K, d), "f_b_proj.weight": (P, K), "b_proj.weight": (H, d),
               "A_log": (stored_heads(H) if cfg.quantization_config else H,), "dt_bias": (P,),
               "o_norm.weight": (K,), "o_proj.weight": (d, P)}
    if lac.use_full_rank_gate:
        return shapes | {"g_proj.weight": (P, d)}
    return shapes | {"g_a_proj.weight": (K, d), "g_b_proj.weight": (P, K)}


def _mla_shapes(cfg):
    d, H, r, R = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.q_lora_rank
    nope, rope, V = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    shapes = {"kv_a_proj_with_mqa.weight": (r + rope, d), "kv_a_layernorm.weight": (r,),
              "kv_b_proj.weight": (H * (nope + V), r), "o_proj.weight": (d, H * V)}
    if R:
        shapes |= {"q_a_proj.weight": (R, d), "q_a_layernorm.weight": (R,),
                   "q_b_proj.weight": (H * (nope + rope), R)}
    else:
        shapes["q_proj.weight"] = (H * (nope + rope), d)
    return shapes | ({"g_proj.weight": (H * V, d)} if cfg.mla_use_output_gate else {})


def _mlp_shapes(prefix, d, inter):
    return {f"{prefix}gate_proj.weight": (inter, d), f"{prefix}up_proj.weight": (inter, d),
            f"{prefix}down_proj.weight": (d, inter)}


def _moe_shapes(cfg):
    d, E, width = cfg.hidden_size, cfg.num_experts, cfg.routed_expert_hidden_size
    shapes = {"gate.weight": (E, d), "gate.e_score_correction_bias": (E,)}
    if width:
        shapes |= {"routed_expert_down_proj.weight": (width, d),
                   "routed_expert_up_proj.weight": (d, width)}
        shapes |= {"routed_expert_norm.weight": (width,)} if cfg.latent_moe_use_norm else {}
    if cfg.num_shared_experts:                                       # one MLP, wider
        shapes |= _mlp_shapes("shared_experts.", d,
                              cfg.num_shared_experts * cfg.moe_intermediate_size)
    inter, width = cfg.moe_intermediate_size, width or d
    for e in range(E):
        shapes |= {f"experts.{e}.w1.weight": (inter, width), f"experts.{e}.w2.weight":
                   (width, inter), f"experts.{e}.w3.weight": (inter, width)}
    return shapes


def _vision_shapes(cfg):
    v = cfg.vision_config
    _refuse_biases(v)
    D, Q, inter = v.vt_hidden_size, v.qkv_hidden_size, v.vt_intermediate_size
    merged, patch = v.mm_hidden_size * prod(v.merge_kernel_size), (v.patch_size, v.patch_size)
    grid = v.init_pos_emb_height, v.init_pos_emb_width
    shapes = {"vision_tower.patch_embed.proj.weight": (D, 3, *patch),
              "vision_tower.patch_embed.pos_emb.weight": (*grid, D),
              "vision_tower.encoder.final_layernorm.weight": (D,),
              "mm_projector.proj.0.weight": (merged, merged),
              "mm_projector.proj.2.weight": (v.text_hidden_size, merged),
              "mm_projector.post_norm.weight": (v.text_hidden_size,)}
    for i in range(v.vt_num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{i}."
        shapes |= {f"{block}norm0.weight": (D,), f"{block}norm1.weight": (D,),
                   f"{block}wqkv.weight": (3 * Q, D), f"{block}wo.weight": (D, Q),
                   f"{block}mlp.fc0.weight": (inter, D), f"{block}mlp.fc1.weight": (D, inter)}
    return shapes


def _group_size(cfg):
    """Weights that share one MXFP4 scale, or None for a config without quantisation."""
    q = cfg.quantization_config
    if not q:
        return None
    size = q["config_groups"]["group_0"]["weights"]["group_size"]
    for key in ("routed_expert_hidden_size", "moe_intermediate_size"):
        width = getattr(cfg, key) or cfg.hidden_size
        if width % size:
            raise ValueError(f"{key}={width} is not a multiple of the group size {size}")
    return size


def layer_shapes(cfg, i):
    """Shapes of the tensors of layer i (zero-based): dict from name inside the layer to shape."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    queries = []
    if cfg.attn_res_block_size:
        norms += ["self_attention_res_norm", "mlp_res_norm"]
        queries = ["self_attention_res_proj", "mlp_res_proj"]
    attention = _mla_shapes(cfg) if cfg.is_mla_layer(i) else _kda_shapes(cfg)
    dense = cfg.is_dense_layer(i)
    ffn = _mlp_shapes("", cfg.hidden_size, cfg.intermediate_size) if dense else _moe_shapes(cfg)
    return ({f"{name}.weight": (cfg.hidden_size,) for name in norms}
            | {f"{name}.weight": (1, cfg.hidden_size) for name in queries}
            | {f"self_attn.{name}": shape for name, shape in attention.items()}
            | {f"{'mlp' if dense else 'block_sparse_moe'}.{name}": shape
               for name, shape in ffn.items()})


def parameter_shapes(cfg):
    """Every tensor of a checkpoint in the released layout.

    With a `quantization_config` that is the file as released: each matrix of a routed expert is a
    pair of `weight_packed` and `weight_scale`, and A_log is padded. Without one it is the model
    as computed with: nothing packed, nothing padded.

    Args: cfg, K3Config.
    Returns: dict from tensor name to (shape, dtype name: a key of N_BYTES).
    Source: the released checkpoint's index for names; its modelling code for shapes; the dtypes
        are inferred, they give the index's total size to the byte.
    """
    group, text, shapes = _group_size(cfg), "language_model.model.", {}
    top = {"embed_tokens.weight": (cfg.vocab_size, cfg.hidden_size),
           "norm.weight": (cfg.hidden_size,)}
    if cfg.attn_res_block_size:
        top |= {"output_attn_res_norm.weight": (cfg.hidden_size,),
                "output_attn_res_proj.weight": (1, cfg.hidden_size)}
    shapes = {text + name: shape for name, shape in top.items()}
    if not cfg.tie_word_embeddings:
        shapes["language_model.lm_head.weight"] = (cfg.vocab_size, cfg.hidden_size)
    for i in range(cfg.num_hidden_layers):
        shapes |= {f"{text}layers.{i}.{n}": shape for n, shape in layer_shapes(cfg, i).items()}
    if cfg.vision_config:
        shapes |= _vision_shapes(cfg)
    typed = {}
    for name, shape in shapes.items():
        if group and ".experts." in name:
            typed[f"{name}_packed"] = (shape[0], shape[1] // 2), "uint8"
            typed[f"{name}_scale"] = (shape[0], shape[1] // group), "uint8"
        else:
            typed[name] = shape, "float32" if name.endswith(FLOAT32_NAMES) else cfg.dtype
    return typed


def checkpoint_bytes(cfg):
    """Bytes of all tensors in the released layout: the `total_size` of the checkpoint's index.

    Matrices in cfg.dtype; A_log (padded), dt_bias, convolutions, o_norm and the router bias in
    float32; routed experts, where quantised, in 4 bits and one byte for each group of 32.
    """
    p, n, group, H = parameters(cfg), layer_counts(cfg), _group_size(cfg), \
        cfg.linear_attn_config.num_heads
    if cfg.dtype not in N_BYTES:
        raise ValueError(f"dtype={cfg.dtype!r}; known are {', '.join(N_BYTES)}")
    in_float32 = n["kda"] * sum(_kda_layer(cfg)[1:]) + n["moe"] * cfg.num_experts
    routed = p["routed_experts"]
    padding = n["kda"] * (stored_heads(H) - H) if group else 0
    return (N_BYTES[cfg.dtype] * (p["total"] - routed - in_float32) + 4 * (in_float32 + padding)
            + (routed // 2 + routed // group if group else N_BYTES[cfg.dtype] * routed))


def cache_bytes(cfg, tokens, cache_itemsize=2, state_itemsize=4):
    """Bytes that decoding keeps for one sequence of `tokens` tokens.

    Args: tokens, length of the sequence; cache_itemsize, bytes of a value in the MLA cache and in
        the convolutions' tails (2: bfloat16); state_itemsize, of one in the KDA state (4: float32).
    Returns: dict: mla_per_token; mla, the latent and the shared key slots of all tokens; kda_state
        [H,K,V] a layer and kda_conv, the last W-1 inputs of three convolutions, both of constant
        size; total.
    """
    _check(tokens=tokens)
    lac, n = cfg.linear_attn_config, layer_counts(cfg)
    P = lac.num_heads * lac.head_dim
    per_token = n["mla"] * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * cache_itemsize
    parts = {"mla": per_token * tokens, "kda_state": n["kda"] * P * lac.head_dim * state_itemsize,
             "kda_conv": n["kda"] * 3 * (lac.short_conv_kernel_size - 1) * P * cache_itemsize}
    return {"mla_per_token": per_token, **parts, "total": sum(parts.values())}


def _check(**counts):
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"{name} must be a whole number, zero or more; got {count!r}")


def _per_token_flop(cfg):
    """FLOP that each token costs whatever its context: (matrices without lm_head, conv, attnres).

    The matrices multiply once: 2 FLOP a weight. Of MLA's `kv_b_proj` this holds both ways: it
    expands the latent of a new token, or, absorbed, maps its query in and its output out.
    A mix over n sources is n dot products and a sum of n rows: 4 d n. In front of the attention of
    layer l there are ceil(l/S) blocks and the running sum, in front of its feed-forward one block
    more if l starts a block, at the end all of them.
    """
    p, n, d, S = parameters(cfg), layer_counts(cfg), cfg.hidden_size, cfg.attn_res_block_size
    _, taps, vectors = _kda_layer(cfg)
    no_matrix = (p["norms"] + p["attnres"] + n["kda"] * (taps + vectors)
                 + n["mla"] * _mla_layer(cfg)[1] + n["moe"] * cfg.num_experts)
    if cfg.routed_expert_hidden_size and cfg.latent_moe_use_norm:
        no_matrix += n["moe"] * cfg.routed_expert_hidden_size
    sources = 0
    if S:
        L = cfg.num_hidden_layers
        sources = (sum(ceil(i / S) + 1 for i in range(1, L)) + ceil(L / S) + 1
                   + sum(i // S + 2 for i in range(L)))
    head = cfg.vocab_size * d
    return 2 * (p["active"] - no_matrix - head), 2 * n["kda"] * taps, 4 * d * sources


def decode_flop(cfg, context):
    """FLOP of computing one more token's logits when it attends to `context` tokens.

    attention: absorbed, a head and token costs a score over latent and shared slots (r + rope
    multiply-adds) and a sum over latents (r). kda: a head scales its state (K V), reads the old
    value, adds an outer product, reads the output (2 K V each).

    Args: context, tokens attended to, the new one among them.
    Returns: dict: matmul, attention, kda, conv, attnres, total.
    """
    _check(context=context)
    n, lac, r = layer_counts(cfg), cfg.linear_attn_config, cfg.kv_lora_rank
    matmul, conv, attnres = _per_token_flop(cfg)
    parts = {"matmul": matmul + 2 * cfg.vocab_size * cfg.hidden_size,
             "attention": n["mla"] * cfg.num_attention_heads * context
             * 2 * (2 * r + cfg.qk_rope_head_dim),
             "kda": n["kda"] * lac.num_heads * 7 * lac.head_dim ** 2,
             "conv": conv, "attnres": attnres}
    return {**parts, "total": sum(parts.values())}


def kda_chunk_flop(C, K, V):
    """FLOP of one head's chunk of C tokens in the chunk form of KDA.

    Scores of key with earlier key (C(C-1)/2 pairs) and query with key (C(C+1)/2) at 2K; forward
    substitution for K + V columns, C(C-1) each; scores times values, C(C+1)V; three products with
    the state, 2CKV each (what the state predicts, what the queries read, what the keys write);
    scaling the state, KV. At C = 1 that is the recurrence's 7KV and 2K + 2V for the one score.
    """
    return 2 * C * C * K + C * (C - 1) * (K + V) + C * (C + 1) * V + 6 * C * K * V + K * V


def prefill_flop(cfg, tokens, chunk_size=64, logits=1):
    """FLOP of reading a prompt of `tokens` tokens into an empty cache.

    attention: expanded, a head and pair of tokens costs a score over nope and rope slots and a sum
    of values; T(T+1)/2 pairs. kda: `kda_chunk_flop` for each full chunk and for the last one.

    Args: chunk_size of KDA; logits, number of positions whose logits are wanted (a server needs
        the last one, training all).
    Returns: dict: matmul, attention, kda, conv, attnres, total.
    """
    _check(tokens=tokens, logits=logits)
    if type(chunk_size) is not int or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive whole number; got {chunk_size!r}")
    n, lac = layer_counts(cfg), cfg.linear_attn_config
    K, (full, rest) = lac.head_dim, divmod(tokens, chunk_size)
    matmul, conv, attnres = _per_token_flop(cfg)
    chunks = full * kda_chunk_flop(chunk_size, K, K) + (kda_chunk_flop(rest, K, K) if rest else 0)
    parts = {"matmul": matmul * tokens
             + 2 * cfg.vocab_size * cfg.hidden_size * min(logits, tokens),
             "attention": n["mla"] * cfg.num_attention_heads * (tokens * (tokens + 1) // 2)
             * 2 * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim),
             "kda": n["kda"] * lac.num_heads * chunks,
             "conv": conv * tokens, "attnres": attnres * tokens}
    return {**parts, "total": sum(parts.values())}
