"""The whole model: tokens a second, memory, and cost against context, beside torch for one layer.

python benchmarks/model.py      float32, one thread, random parameters.
"""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import dataclasses
import statistics
import time
import tracemalloc

import numpy as np
from kda import torch_functions
from timing import interleaved

from k3np.config import K3Config, LinearAttnConfig
from k3np.count import parameters_of
from k3np.init import init_params
from k3np.kda import KDACache, init_kda_cache, kda_layer
from k3np.mla import MLACache, init_mla_cache, mla_layer
from k3np.model import forward

TINY = K3Config.tiny()
TOY = dataclasses.replace(
    TINY, hidden_size=512, num_hidden_layers=16, num_attention_heads=4, intermediate_size=1024,
    q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    num_experts=16, num_experts_per_token=2, moe_intermediate_size=256,
    routed_expert_hidden_size=256, vocab_size=4096, max_position_embeddings=1 << 20,
    vision_config=None, linear_attn_config=LinearAttnConfig(
        kda_layers=tuple(i for i in range(1, 17) if i % 4), full_attn_layers=(4, 8, 12, 16),
        num_heads=4, head_dim=128, gate_lower_bound=-5.0, use_full_rank_gate=True))


def seconds(call, repeats=3):
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def peak_mb(call):
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def whole():
    print("model              parameters  prompt  prefill tok/s  decode tok/s  peak of prefill, MB")
    for name, cfg, prompts in (("tiny, d=64", TINY, (512, 2048)),
                               ("16 layers, d=512", TOY, (512, 2048, 4096))):
        params = init_params(cfg, np.random.default_rng(0), np.float32)
        for T in prompts:
            ids = np.random.default_rng(1).integers(0, cfg.vocab_size, (1, T))

            def prefill():
                return forward(params, ids, cfg, last=1)
            _, cache = prefill()

            def decode(n=16):
                after = cache
                for _ in range(n):
                    _, after = forward(params, ids[:, :1], cfg, after)
            print(f"{name:<17} {parameters_of(params):>11,} {T:>7} {T / seconds(prefill):>14,.0f} "
                  f"{16 / seconds(decode):>13,.0f} {peak_mb(prefill):>20,.1f}")


def against_context():
    """A step of one token against what came before: KDA's does not grow."""
    params = init_params(TOY, np.random.default_rng(0), np.float32)
    layers = params["language_model"]["model"]["layers"]
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 1, TOY.hidden_size), np.float32)
    contexts = (1024, 4096, 16384, 65536, 262144)
    print("\none token after `context` tokens, d=512: ms a layer and kB of its cache")
    print("context      KDA ms  cache kB      MLA ms  cache kB")
    kda = init_kda_cache(TOY, 1)
    kda = KDACache(*kda[:3], rng.standard_normal(kda.state.shape, np.float32))
    empty = init_mla_cache(TOY, 1).entries
    for S in contexts:
        mla = MLACache(rng.standard_normal((1, S, empty.shape[-1]), np.float32))
        _, mla = mla_layer(x, layers["3"]["self_attn"], TOY, mla)      # makes room once
        ms = interleaved({
            "kda": lambda: kda_layer(x, layers["0"]["self_attn"], TOY, kda),
            "mla": lambda: mla_layer(x, layers["3"]["self_attn"], TOY, mla)}, 5)
        print(f"{S:>7,} {1e3 * ms['kda']:>11.2f} {sum(a.nbytes for a in kda) / 1e3:>9,.0f} "
              f"{1e3 * ms['mla']:>11.2f} {mla.entries.nbytes / 1e3:>9,.0f}")


def beside_torch():
    judges = torch_functions()
    if judges is None:
        print("\nbeside torch: NOT RUN, torch with flash-linear-attention is not installed")
        return
    torch, naive = judges
    F = torch.nn.functional
    params = init_params(TOY, np.random.default_rng(0), np.float32)
    layers = params["language_model"]["model"]["layers"]
    H, K = 4, 128

    def tensors(p):
        return {name: torch.from_numpy(a) for name, a in p.items()}
    w_kda, w_mla = tensors(layers["0"]["self_attn"]), tensors(layers["3"]["self_attn"])

    def rms(x, w, eps):
        return F.rms_norm(x, x.shape[-1:], w, eps)

    def torch_kda(x):
        T, w, u = x.shape[1], w_kda, []
        for n in "qkv":
            a = F.linear(x, w[f"{n}_proj"]).transpose(1, 2)
            a = F.silu(F.conv1d(F.pad(a, (3, 0)), w[f"{n}_conv1d"], groups=a.shape[1]))
            u.append(a.transpose(1, 2).reshape(1, T, H, K))
        q, k = (a * torch.rsqrt((a * a).sum(-1, keepdim=True) + 1e-6) for a in u[:2])
        z = F.linear(F.linear(x, w["f_a_proj"]), w["f_b_proj"]) + w["dt_bias"]
        g = -5 * torch.sigmoid(torch.exp(w["A_log"])[:, None] * z.reshape(1, T, H, K))
        beta = torch.sigmoid(F.linear(x, w["b_proj"]))
        o, _ = naive.naive_chunk_kda(q, k, u[2], g, beta, chunk_size=64)
        s = torch.sigmoid(F.linear(x, w["g_proj"]))
        return F.linear(rms(o, w["o_norm"], 1e-5).reshape(1, T, -1) * s, w["o_proj"])

    def torch_mla(x):
        T, w = x.shape[1], w_mla
        low = rms(F.linear(x, w["q_a_proj"]), w["q_a_layernorm"], 1e-6)
        q = F.linear(low, w["q_b_proj"]).reshape(1, T, 4, 192).transpose(1, 2)
        c = F.linear(x, w["kv_a_proj_with_mqa"])
        kv = F.linear(rms(c[..., :128], w["kv_a_layernorm"], 1e-6), w["kv_b_proj"])
        kv = kv.reshape(1, T, 4, 256).transpose(1, 2)
        shared = c[:, None, :, 128:].expand(1, 4, T, 64)
        o = F.scaled_dot_product_attention(q, torch.cat([kv[..., :128], shared], -1),
                                           kv[..., 128:], is_causal=True, scale=192 ** -0.5)
        s = torch.sigmoid(F.linear(x, w["g_proj"]))
        return F.linear(o.transpose(1, 2).reshape(1, T, -1) * s, w["o_proj"])
    print("\none layer of d=512 beside torch, one thread, prefill, ms (median, interleaved)")
    print("      T   KDA here   torch  torch/here   MLA here   torch  torch/here")
    for T in (512, 1024, 2048):
        x = np.random.default_rng(3).standard_normal((1, T, 512), np.float32)
        t = torch.from_numpy(x)
        with torch.no_grad():
            calls = {"kda": lambda: kda_layer(x, layers["0"]["self_attn"], TOY)[0],
                     "torch kda": lambda: torch_kda(t),
                     "mla": lambda: mla_layer(x, layers["3"]["self_attn"], TOY)[0],
                     "torch mla": lambda: torch_mla(t)}
            for ours, theirs in (("kda", "torch kda"), ("mla", "torch mla")):
                a, b = calls[ours](), calls[theirs]().numpy()
                assert np.abs(a - b).max() < 1e-3 * np.abs(a).max(), ours
            ms = {name: 1e3 * s for name, s in interleaved(calls, 5).items()}
        print(f"{T:>7} {ms['kda']:>10.1f} {ms['torch kda']:>7.1f} "
              f"{ms['torch kda'] / ms['kda']:>11.1f} {ms['mla']:>10.1f} {ms['torch mla']:>7.1f} "
              f"{ms['torch mla'] / ms['mla']:>11.1f}")


if __name__ == "__main__":
    whole()
    against_context()
    beside_torch()
