"""LatentMoE: tokens sorted by expert beside the loop over tokens, forward and with the pullback.

python benchmarks/moe.py      2,048 tokens, 64 experts, top 8, float32, one thread.
"""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import dataclasses

import numpy as np
from timing import interleaved

from k3np.balance import route
from k3np.config import K3Config
from k3np.moe import mix_experts, mix_experts_loop
from k3np.ops import sigmoid

N, E, K = 2048, 64, 8


def draw(width, inter):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
    experts = {"w1": normal(E, inter, width), "w3": normal(E, inter, width),
               "w2": normal(E, width, inter)}
    scores = sigmoid(rng.standard_normal((N, E), np.float32))
    indices, weights = route(scores, np.zeros(E, np.float32), K)
    return rng.standard_normal((N, width), np.float32), indices, weights, experts


def main():
    cfg = dataclasses.replace(K3Config.tiny(), num_experts=E, num_experts_per_token=K)
    print(f"{N} tokens, {E} experts, top {K}; ms (median), ratio loop / grouped")
    print("  latent  inner |  forward: loop  grouped  ratio | with pullback: loop  grouped  ratio")
    for width, inter in ((64, 64), (256, 256)):
        z, indices, weights, experts = draw(width, inter)
        args = z, indices, weights, experts, cfg
        gap = np.abs(mix_experts(*args) - mix_experts_loop(*args)).max()
        assert gap < 1e-5, gap

        def both(mix):
            u, pull = mix.vjp(*args)
            pull(u)
        s = interleaved({"loop": lambda: mix_experts_loop(*args),
                         "grouped": lambda: mix_experts(*args)}, 3)
        t = interleaved({"loop": lambda: both(mix_experts_loop),
                         "grouped": lambda: both(mix_experts)}, 1)
        print(f"{width:>8} {inter:>6} | {1e3 * s['loop']:>14.0f} {1e3 * s['grouped']:>8.0f} "
              f"{s['loop'] / s['grouped']:>6.1f} | {1e3 * t['loop']:>19.0f} "
              f"{1e3 * t['grouped']:>8.0f} {t['loop'] / t['grouped']:>6.1f}")


if __name__ == "__main__":
    main()
