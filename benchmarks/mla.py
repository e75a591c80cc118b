"""Gated MLA: tiles beside torch's attention, steps on latents beside steps that expand them.

python benchmarks/mla.py      float32, B=1, H=4, queries and keys of 192, values of 128, one thread.
"""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import dataclasses
import importlib.util
import tracemalloc

import numpy as np
from timing import interleaved

from k3np.attention import attention, attention_slow
from k3np.config import K3Config
from k3np.mla import MLACache, mla_layer, mla_shapes

SCALE = 192 ** -0.5
LAYER = dataclasses.replace(
    K3Config.tiny(), hidden_size=1024, num_attention_heads=4, num_key_value_heads=4,
    q_lora_rank=384, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    vision_config=None)


def draw(T, H=4):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, T, H, width), np.float32) for width in (192, 192, 128)]


def prefill():
    torch = None
    if importlib.util.find_spec("torch"):
        import torch
        torch.set_num_threads(1)
    print("attention, causal, forward, ms (median)")
    names = ["tiles", "one matrix"] + (["torch sdpa", "torch by hand"] if torch else [])
    print("      T " + " ".join(f"{n:>14}" for n in names))
    for T in (512, 1024, 2048, 4096):
        q, k, v = draw(T)
        calls = {"tiles": lambda: attention(q, k, v, SCALE),
                 "one matrix": lambda: attention_slow(q, k, v, SCALE)}
        if torch:
            tq, tk, tv = (torch.from_numpy(a).transpose(1, 2).contiguous() for a in (q, k, v))
            hidden = torch.ones(T, T, dtype=torch.bool).triu(1)

            def by_hand():
                scores = (tq @ tk.transpose(-1, -2) * SCALE).masked_fill(hidden, float("-inf"))
                return torch.softmax(scores, -1) @ tv
            calls["torch sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
                tq, tk, tv, is_causal=True, scale=SCALE)
            calls["torch by hand"] = by_hand
            for name in names[2:]:
                gap = np.abs(calls[name]().transpose(1, 2).numpy() - calls["tiles"]()).max()
                assert gap < 1e-5, gap
        s = interleaved(calls, 7)
        print(f"{T:>7} " + " ".join(f"{1e3 * s[n]:>14.1f}" for n in names))
        if T == 2048 and torch:
            print(f"        torch sdpa / tiles {s['torch sdpa'] / s['tiles']:.2f}, torch by hand / "
                  f"tiles {s['torch by hand'] / s['tiles']:.2f}")
    if not torch:
        print("torch comparison NOT RUN: needs torch")
    q, k, v = draw(2048)
    s = interleaved({"forward": lambda: attention(q, k, v, SCALE),
                     "both": lambda: attention.vjp(q, k, v, SCALE)[1](v)}, 5)
    print(f"forward and backward, T=2048: {1e3 * s['both']:.0f} ms, "
          f"{s['both'] / s['forward']:.1f} times the forward")


def layer(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)
            for name, shape in mla_shapes(LAYER).items()}


def peak(call):
    """Bytes held at once beyond what stays."""
    tracemalloc.start()
    result = call()
    stays, top = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return top - stays


def memory():
    p, rng = layer(), np.random.default_rng(0)
    print("memory beyond the result, MiB")
    print("      T      attention  forward and backward   whole layer")
    for T in (1024, 2048, 4096, 8192):
        q, k, v = draw(T)
        x = rng.standard_normal((1, T, 1024), np.float32)
        figures = (peak(lambda: attention(q, k, v, SCALE)),
                   peak(lambda: attention.vjp(q, k, v, SCALE)[1](v)),
                   peak(lambda: mla_layer(x, p, LAYER)))
        print(f"{T:>7} {figures[0] / 2**20:>14.1f} {figures[1] / 2**20:>21.1f} "
              f"{figures[2] / 2**20:>13.1f}")


def steps(context=16384):
    p, rng = layer(), np.random.default_rng(0)
    x = rng.standard_normal((1, 1, 1024), np.float32)
    entries = rng.standard_normal((1, context, 576), np.float32)
    _, cache = mla_layer(x, p, LAYER, MLACache(entries))       # has room behind it now
    states = {"absorbed": cache, "expanded": cache, "copying": cache}

    def step(name, absorbed, keep_room=True):
        y, after = mla_layer(x, p, LAYER, states[name], absorbed)
        states[name] = after if keep_room else MLACache(after.entries)
        return y
    assert np.abs(step("absorbed", True) - step("expanded", False)).max() < 1e-4
    s = interleaved({"absorbed": lambda: step("absorbed", True),
                     "expanded": lambda: step("expanded", False),
                     "copying": lambda: step("copying", True, False)}, 9)
    print(f"a step at {context} tokens, ms: absorbed {1e3 * s['absorbed']:.1f}, expanding the "
          f"cache {1e3 * s['expanded']:.1f} ({s['expanded'] / s['absorbed']:.1f} times), absorbed "
          f"but copying the cache {1e3 * s['copying']:.1f}")
    for n in (1024, 4096, 16384, 65536):
        short = MLACache(rng.standard_normal((1, n, 576), np.float32))
        states["absorbed"] = mla_layer(x, p, LAYER, short)[1]
        t = interleaved({"absorbed": lambda: step("absorbed", True)}, 9)["absorbed"]
        print(f"  absorbed at {n:>6} tokens: {1e3 * t:6.2f} ms")


if __name__ == "__main__":
    prefill()
    memory()
    steps()
