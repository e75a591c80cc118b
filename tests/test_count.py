"""Counts: the released figures, a second count from the list of tensors, and instrumented loops."""
import collections
import dataclasses
import json
import re
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from k3np import vectors
from k3np.config import K3Config, LinearAttnConfig
from k3np.count import (
    N_BYTES,
    cache_bytes,
    checkpoint_bytes,
    decode_flop,
    kda_chunk_flop,
    layer_counts,
    layer_shapes,
    parameter_shapes,
    parameters,
    parameters_of,
    prefill_flop,
    stored_heads,
)
from k3np.vectors import nest

K3, TINY = K3Config.released(), K3Config.tiny()
SAFETENSORS_DTYPE = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8"}


def config(n, mla, heads, head_dim, **keys):
    """A config with n layers of which those in `mla` (zero-based) are MLA, the rest KDA."""
    gate = {k: keys.pop(k) for k in ("use_full_rank_gate", "gate_lower_bound") if k in keys}
    return K3Config(num_hidden_layers=n, linear_attn_config=LinearAttnConfig(
        kda_layers=tuple(i + 1 for i in range(n) if i not in mla),
        full_attn_layers=tuple(i + 1 for i in sorted(mla)), num_heads=heads, head_dim=head_dim,
        **gate), **keys)


KIMI_K2 = config(
    61, set(range(61)), 1, 1, vocab_size=163840, hidden_size=7168, num_attention_heads=64,
    intermediate_size=18432, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, num_experts=384, num_experts_per_token=8,
    num_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=1)
KIMI_LINEAR = config(
    27, {3, 7, 11, 15, 19, 23, 26}, 32, 128, vocab_size=163840, hidden_size=2304,
    num_attention_heads=32, intermediate_size=9216, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, num_experts=256, num_experts_per_token=8,
    num_shared_experts=1, moe_intermediate_size=1024, first_k_dense_replace=1)


@st.composite
def configs(draw):
    """Small configs: with and without vision, latent experts, AttnRes, q-LoRA, full-rank gate."""
    size, n = st.integers(1, 9), draw(st.integers(1, 7))
    experts = draw(st.integers(2, 5))
    latent = draw(st.none() | size)
    cfg = config(
        n, draw(st.sets(st.integers(0, n - 1))), draw(size), draw(size),
        use_full_rank_gate=draw(st.booleans()), vocab_size=draw(size), hidden_size=draw(size),
        num_attention_heads=draw(size), intermediate_size=draw(size), kv_lora_rank=draw(size),
        q_lora_rank=draw(st.none() | size), qk_nope_head_dim=draw(size),
        qk_rope_head_dim=draw(size), v_head_dim=draw(size), num_experts=experts,
        num_experts_per_token=draw(st.integers(1, experts - 1)),
        num_shared_experts=draw(st.integers(0, 2)), moe_intermediate_size=draw(size),
        routed_expert_hidden_size=latent, latent_moe_use_norm=draw(st.booleans()),
        attn_res_block_size=draw(st.none() | size), mla_use_output_gate=draw(st.booleans()),
        first_k_dense_replace=draw(st.integers(0, n)), moe_layer_freq=draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()))
    if draw(st.booleans()):
        vision = dataclasses.replace(TINY.vision_config, text_hidden_size=cfg.hidden_size,
                                     vt_num_hidden_layers=draw(st.integers(1, 3)))
        cfg = dataclasses.replace(cfg, vision_config=vision)
    return cfg


def arrays(cfg):
    return {name: np.empty(shape, np.uint8) for name, (shape, _) in parameter_shapes(cfg).items()}


@pytest.mark.property
def test_released_figures_to_the_unit():
    p = parameters(K3)
    assert p["text_total"] == 2_779_484_476_000
    assert p["total"] == 2_779_931_834_976
    assert p["active"] == 104_189_612_640
    assert checkpoint_bytes(K3) == 1_560_860_324_864                 # the index's total_size
    cache = cache_bytes(K3, 2 ** 20)
    assert cache["mla_per_token"] == 27_648 and cache["mla"] == 27_648 * 2 ** 20
    assert cache["kda_state"] == 434_110_464
    assert cache["kda_conv"] == 69 * 221_184
    assert all(type(v) is int for d in (p, cache, decode_flop(K3, 9), prefill_flop(K3, 9))
               for v in d.values())


@pytest.mark.property
def test_released_parts():
    p = parameters(K3)
    assert layer_counts(K3) == {"kda": 69, "mla": 24, "dense": 1, "moe": 92}
    assert p["kda"] == 69 * 443_740_384 and p["mla"] == 24 * 232_196_096
    assert p["routed_experts"] == 92 * 896 * 33_030_144
    assert p["router"] + p["latent"] + p["shared"] == 92 * 189_927_808
    assert p["dense"] == 726_663_168 and p["embed"] == p["lm_head"] == 1_174_405_120
    assert p["norms"] + p["attnres"] == 3_999_744 + 21_504
    assert (p["vision"], p["projector"]) == (401_214_464, 46_144_512)


@pytest.mark.golden
def test_released_tensors_agree_with_the_index_and_with_an_inventory_by_others():
    """497,220 tensors in the index; the counts by kind are vessl's, for one tensor a matrix."""
    shapes = parameter_shapes(K3)
    assert len(shapes) == 497_220
    assert sum(prod(s) * N_BYTES[d] for s, d in shapes.values()) == checkpoint_bytes(K3)
    assert shapes["language_model.model.layers.0.self_attn.A_log"] == ((128,), "float32")
    expert = "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight"
    assert shapes[f"{expert}_packed"] == ((3584, 1536), "uint8")
    assert shapes[f"{expert}_scale"] == ((3584, 96), "uint8")
    names = [n.removesuffix("_packed") for n in shapes if n.endswith((".weight", "_packed"))]
    assert len(names) == 249_694
    kinds = collections.Counter(
        "experts" if ".experts." in n else "attention" if ".self_attn." in n else
        "shared" if ".shared_experts." in n else "vision" if n.startswith(("vision", "mm_")) else
        "dense" if ".mlp." in n or "lm_head" in n else "rest" for n in names)
    assert kinds == {"experts": 247_296, "attention": 1_020, "shared": 276, "vision": 168,
                     "dense": 4, "rest": 930}


@pytest.mark.property
@settings(deadline=None, max_examples=50)
@given(configs())
def test_closed_form_equals_the_count_of_a_tree(cfg):
    flat = arrays(cfg)
    p = parameters(cfg)
    tree = nest(flat)
    assert parameters_of(tree) == parameters_of(flat) == p["total"]
    assert parameters_of(tree["language_model"]) == p["text_total"]
    assert parameters_of(tree.get("vision_tower", {})) == p["vision"]
    assert parameters_of(tree.get("mm_projector", {})) == p["projector"]

    def part(pattern):
        return sum(a.size for name, a in flat.items() if re.search(pattern, name))
    mla = "|".join(str(i) for i in range(cfg.num_hidden_layers) if cfg.is_mla_layer(i)) or "none"
    assert part(rf"layers\.({mla})\.self_attn\.") == p["mla"]
    assert part(r"self_attn\.") == p["mla"] + p["kda"]
    assert part(r"\.experts\.") == p["routed_experts"] and part(r"_moe\.gate\.") == p["router"]
    assert part(r"routed_expert_(up|down|norm)") == p["latent"]
    assert part(r"shared_experts") == p["shared"] and part(r"layers\.\d+\.mlp\.") == p["dense"]
    assert part(r"_res_(norm|proj)") == p["attnres"]
    assert part(r"(put_layernorm|attention_layernorm|model\.norm)\.weight") == p["norms"]
    assert checkpoint_bytes(cfg) == sum(
        prod(s) * N_BYTES[d] for s, d in parameter_shapes(cfg).values())


@pytest.mark.property
@settings(deadline=None, max_examples=20)
@given(configs(), st.sampled_from([32, 64, None]), st.sampled_from([32, 96]))
def test_bytes_of_a_quantised_layout(cfg, latent, inter):
    cfg = dataclasses.replace(cfg, routed_expert_hidden_size=latent, moe_intermediate_size=inter,
                              hidden_size=32, vision_config=None,
                              quantization_config=K3.quantization_config)
    shapes = parameter_shapes(cfg)
    assert checkpoint_bytes(cfg) == sum(prod(s) * N_BYTES[d] for s, d in shapes.values())
    plain = parameter_shapes(dataclasses.replace(cfg, quantization_config=None))
    assert set(plain) == {re.sub("_(packed|scale)$", "", name) for name in shapes}


@pytest.mark.property
@settings(deadline=None, max_examples=30)
@given(configs())
def test_active_counts_what_one_token_multiplies_by(cfg):
    """Leave out the experts that are not chosen, the vision and the table that is looked up."""
    chosen = cfg.num_experts_per_token
    keep = sum(a.size for name, a in arrays(cfg).items()
               if name.startswith("language_model.")
               and (cfg.tie_word_embeddings or "embed_tokens" not in name)
               and int((re.search(r"\.experts\.(\d+)\.", name) or [0, -1])[1]) < chosen)
    assert parameters(cfg)["active"] == keep


@pytest.mark.golden
def test_a_checkpoint_in_the_released_layout_has_these_tensors():
    folder = vectors._folder() / "k3_tiny_released"
    cfg = K3Config.from_json(folder / "config.json")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(folder / file, "np") as tensors:
            for name in tensors.keys():
                piece = tensors.get_slice(name)
                found[name] = tuple(piece.get_shape()), SAFETENSORS_DTYPE[piece.get_dtype()]
    assert parameter_shapes(cfg) == found
    assert checkpoint_bytes(cfg) == index["metadata"]["total_size"]


@pytest.mark.golden
@pytest.mark.parametrize("name, layer", [("decoder_layer_0", 0), ("decoder_layer_1", 1)])
def test_a_layer_of_the_released_code_has_these_tensors(name, layer):
    path = vectors._folder() / f"{name}.npz"
    cfg = K3Config.from_json(json.loads(path.with_suffix(".json").read_text())["config"])
    with np.load(path) as case:
        found = {key.removeprefix("param."): case[key].shape for key in case.files
                 if key.startswith("param.")}
    assert layer_shapes(cfg, layer) == found


@pytest.mark.property
def test_two_older_models_whose_size_is_known():
    """Kimi K2: 1 T and 32 B; Kimi Linear: 48 B (49.1 B in the file) and 3 B (model cards)."""
    k2, linear = parameters(KIMI_K2), parameters(KIMI_LINEAR)
    assert round(k2["total"] / 1e12, 2) == 1.03 and round(k2["active"] / 1e9) == 32
    assert round(linear["total"] / 1e9) == 49 and round(linear["active"] / 1e9) == 3


@pytest.mark.traps
def test_the_count_with_experts_at_full_width_is_twice_the_truth():
    full = dataclasses.replace(K3, routed_expert_hidden_size=None, quantization_config=None)
    wrong = parameters(full)["text_total"]
    assert 5.4e12 < wrong < 5.6e12 and wrong > 1.9 * parameters(K3)["text_total"]


@pytest.mark.traps
def test_a_count_of_the_stored_A_log_is_off():
    """The stored vector of 128 would make 69 * 32 parameters too many; 96 give too few bytes."""
    logical = dataclasses.replace(TINY, quantization_config=None)
    padded = arrays(dataclasses.replace(TINY, quantization_config=K3.quantization_config))
    assert padded["language_model.model.layers.0.self_attn.A_log"].size == 8
    assert arrays(logical)["language_model.model.layers.0.self_attn.A_log"].size == 2
    assert stored_heads(96) == 128 and stored_heads(128) == 128
    assert checkpoint_bytes(K3) - 69 * 32 * 4 != 1_560_860_324_864


@pytest.mark.property
def test_cache():
    """A hybrid's cache is 24/93 of an all-MLA one and its state, even at about 5,653 tokens."""
    lac = K3.linear_attn_config
    all_mla = dataclasses.replace(K3, linear_attn_config=dataclasses.replace(
        lac, kda_layers=(), full_attn_layers=tuple(range(1, 94))))
    for tokens, less in ((5_653, False), (5_654, True)):
        a, b = cache_bytes(K3, tokens)["total"], cache_bytes(all_mla, tokens)["total"]
        assert (a < b) is less
    assert cache_bytes(all_mla, 7)["mla"] * 24 == cache_bytes(K3, 7)["mla"] * 93
    assert cache_bytes(K3, 0)["mla"] == 0 and cache_bytes(all_mla, 5)["kda_state"] == 0
    half = cache_bytes(K3, 10, cache_itemsize=1, state_itemsize=2)
    assert half["mla_per_token"] == 13_824 and half["kda_state"] == 434_110_464 // 2


# Operations, counted one by one in loops that also compute the right thing.

class Counter:
    def __init__(self):
        self.flop = 0

    def matmul(self, a, b, keep=None):
        """a @ b, one multiply-add at a time, for the entries that `keep` wants."""
        out = np.zeros((a.shape[0], b.shape[1]))
        for i, j in np.ndindex(out.shape):
            if keep is None or keep[i, j]:
                for k in range(a.shape[1]):
                    out[i, j] += a[i, k] * b[k, j]
                    self.flop += 2
        return out

    def add_outer(self, S, k, u):
        """S + k u^T."""
        S = S.copy()
        for i, j in np.ndindex(S.shape):
            S[i, j] += k[i] * u[j]
            self.flop += 2
        return S

    def scale_rows(self, a, S):
        self.flop += S.size
        return a[:, None] * S

    def substitute(self, A, rhs):
        """Solve (I + A) x = rhs for strictly lower A."""
        x = rhs.copy()
        for i in range(len(A)):
            for j in range(i):
                for c in range(rhs.shape[1]):
                    x[i, c] -= A[i, j] * x[j, c]
                    self.flop += 2
        return x


def head(C, K, V, seed=0):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, C, K))
    return (q, k / np.linalg.norm(k, axis=1, keepdims=True), rng.standard_normal((C, V)),
            -rng.random((C, K)), rng.random(C), rng.standard_normal((K, V)))


def recurrence(count, q, k, v, g, beta, S):
    """KDA of one head, token by token, with its operations counted."""
    rows = []
    for t in range(len(q)):
        S = count.scale_rows(np.exp(g[t]), S)
        old = count.matmul(k[t:t + 1], S)[0]
        S = count.add_outer(S, k[t], beta[t] * (v[t] - old))
        rows.append(count.matmul(q[t:t + 1], S)[0])
    return np.array(rows), S


def chunk_form(count, q, k, v, g, beta, S):
    """KDA of one head, one chunk at once, with its operations counted."""
    C, G = len(q), np.cumsum(g, axis=0)
    decayed, ahead = k * np.exp(G), k * np.exp(-G)              # small sizes: nothing overflows
    below, upto = np.tri(C, k=-1), np.tri(C)
    A = beta[:, None] * count.matmul(decayed, ahead.T, below)
    scores = count.matmul(q * np.exp(G), ahead.T, upto)
    wu = count.substitute(A, beta[:, None] * np.concatenate([decayed, v], axis=1))
    w, u = wu[:, :k.shape[1]], wu[:, k.shape[1]:]
    new = u - count.matmul(w, S)
    o = count.matmul(q * np.exp(G), S)
    for i in range(C):                                          # tril(scores) @ new
        o[i] += count.matmul(scores[i:i + 1, :i + 1], new[:i + 1])[0]
    S = count.scale_rows(np.exp(G[-1]), S)
    return o, S + count.matmul((k * np.exp(G[-1] - G)).T, new)


@pytest.mark.property
@pytest.mark.parametrize("C, K, V", [(1, 3, 3), (1, 4, 2), (5, 3, 4), (8, 2, 2)])
def test_kda_operations_counted_one_by_one(C, K, V):
    slow, fast = Counter(), Counter()
    args = head(C, K, V)
    o, S = recurrence(slow, *args)
    o2, S2 = chunk_form(fast, *args)
    assert np.allclose(o, o2, atol=1e-12) and np.allclose(S, S2, atol=1e-12)
    assert slow.flop == C * 7 * K * V
    assert fast.flop == kda_chunk_flop(C, K, V)
    if C == 1:
        assert fast.flop == slow.flop + 2 * K + 2 * V


def mla_absorbed(count, q_nope, q_rope, latent, shared):
    scores = count.matmul(q_nope, latent.T) + count.matmul(q_rope, shared.T)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return count.matmul(p / p.sum(-1, keepdims=True), latent)


@pytest.mark.property
def test_mla_operations_counted_one_by_one():
    """One head: the absorbed step over a context, and the expanded pairs under a causal mask."""
    r, nope, rope, V, T = 4, 3, 2, 3, 6
    rng = np.random.default_rng(0)
    latent, shared = rng.standard_normal((T, r)), rng.standard_normal((T, rope))
    wk, wv = rng.standard_normal((nope, r)), rng.standard_normal((V, r))
    q_nope, q_rope = rng.standard_normal((T, nope)), rng.standard_normal((T, rope))
    last, project = Counter(), Counter()
    mixed = mla_absorbed(last, project.matmul(q_nope[-1:], wk), q_rope[-1:], latent, shared)
    o_absorbed = project.matmul(mixed, wv.T)
    assert last.flop == T * 2 * (2 * r + rope)
    assert project.flop == 2 * (wk.size + wv.size)             # both ways: 2 FLOP a weight
    pairs, project = Counter(), Counter()
    keys, values = project.matmul(latent, wk.T), project.matmul(latent, wv.T)
    assert project.flop == T * 2 * (wk.size + wv.size)
    mask = np.tri(T)
    scores = pairs.matmul(q_nope, keys.T, mask) + pairs.matmul(q_rope, shared.T, mask)
    scores = np.where(mask > 0, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.array([pairs.matmul(p[i:i + 1, :i + 1], values[:i + 1])[0] for i in range(T)])
    assert np.allclose(o[-1], o_absorbed[0], atol=1e-12)
    assert pairs.flop == T * (T + 1) // 2 * 2 * (nope + rope + V)


def mixed_sources(cfg):
    """Sources of every mix of Attention Residuals, by walking the layers as the model does."""
    S, blocks, sizes = cfg.attn_res_block_size, 0, []
    for i in range(cfg.num_hidden_layers if S else 0):
        if blocks:
            sizes.append(blocks + 1)
        blocks += i % S == 0
        sizes.append(blocks + 1)
    return sizes + ([blocks + 1] if S else [])


@pytest.mark.property
def test_released_mixes_end_with_nine_sources():
    assert mixed_sources(K3)[-1] == 9 and len(mixed_sources(K3)) == 2 * 93


@pytest.mark.property
@settings(deadline=None, max_examples=40)
@given(configs(), st.integers(0, 20), st.integers(1, 5), st.integers(0, 3))
def test_flop_equals_a_sum_over_tensors_and_loops(cfg, tokens, chunk, logits):
    """The same totals from the list of tensors: 2 FLOP a weight of every matrix that is used."""
    n, lac, d = layer_counts(cfg), cfg.linear_attn_config, cfg.hidden_size
    body = conv = 0
    for name, (shape, _) in parameter_shapes(cfg).items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if not name.startswith("language_model.model.layers.") or (
                expert and int(expert[1]) >= cfg.num_experts_per_token):
            continue
        if "_conv1d" in name:
            conv += 2 * prod(shape)
        elif len(shape) == 2 and "_res_proj" not in name:
            body += 2 * prod(shape)
    mixes = sum(4 * d * s for s in mixed_sources(cfg))
    one = decode_flop(cfg, tokens)
    assert one["matmul"] == body + 2 * cfg.vocab_size * d
    assert one["conv"] == conv and one["attnres"] == mixes
    K, heads = lac.head_dim, n["kda"] * lac.num_heads
    assert one["kda"] == heads * 7 * K * K
    assert one["attention"] == sum(
        2 * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) + 2 * cfg.kv_lora_rank
        for _ in range(n["mla"] * cfg.num_attention_heads) for _ in range(tokens))
    assert one["total"] == sum(v for k, v in one.items() if k != "total")
    many = prefill_flop(cfg, tokens, chunk_size=chunk, logits=logits)
    assert many["matmul"] == tokens * body + min(logits, tokens) * 2 * cfg.vocab_size * d
    assert many["kda"] == heads * sum(kda_chunk_flop(min(chunk, tokens - start), K, K)
                                      for start in range(0, tokens, chunk))
    pairs = sum(t + 1 for t in range(tokens))
    assert many["attention"] == n["mla"] * cfg.num_attention_heads * pairs * 2 * (
        cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim)
    assert (many["conv"], many["attnres"]) == (conv * tokens, mixes * tokens)


@pytest.mark.property
def test_parameters_of_reads_sequences_and_scalars():
    assert parameters_of({"a": np.zeros((2, 3)), "b": [np.zeros(4), np.zeros(5)]}) == 15
    assert parameters_of(np.float64(1)) == 1 and parameters_of({}) == 0


@pytest.mark.errors
def test_messages():
    with pytest.raises(ValueError, match="tokens must be a whole number, zero or more; got -1"):
        cache_bytes(K3, -1)
    with pytest.raises(ValueError, match="context must be a whole number"):
        decode_flop(K3, 1.5)
    with pytest.raises(ValueError, match="chunk_size must be a positive whole number; got 0"):
        prefill_flop(K3, 4, chunk_size=0)
    with pytest.raises(ValueError, match="logits must be"):
        prefill_flop(K3, 4, logits=-1)
    with pytest.raises(ValueError, match="dtype='int3'"):
        checkpoint_bytes(dataclasses.replace(K3, dtype="int3"))
    with pytest.raises(ValueError, match="quantization_config.format='gptq'"):
        parameter_shapes(dataclasses.replace(TINY, quantization_config={"format": "gptq"}))
    with pytest.raises(ValueError, match="routed_expert_hidden_size=40 is not a multiple"):
        checkpoint_bytes(dataclasses.replace(K3, routed_expert_hidden_size=40))
    biased = dataclasses.replace(TINY.vision_config, attn_bias=True)
    with pytest.raises(ValueError, match="biases"):
        parameters(dataclasses.replace(TINY, vision_config=biased))
    for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        biased = dataclasses.replace(TINY.vision_config, **{key: True})
        with pytest.raises(ValueError, match="biases"):
            parameter_shapes(dataclasses.replace(TINY, vision_config=biased))
