"""MX formats: rounding, encoding and decoding beside a plain copy, and beside other libraries.

python benchmarks/mx.py      4096 x 4096 float32, one thread, one process, all in turn.
"""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import statistics
import time
import tracemalloc

import numpy as np
from timing import seconds_in_turn

from k3np.mx.pack import pack, unpack
from k3np.mx.quantize import dequantize, fake_quantize, quantize

REPEATS = 9


def ours(x, out):
    four, eight = quantize(x), quantize(x, "e4m3")
    bytes_ = pack(four)
    return {
        "np.copyto": lambda: np.copyto(out, x),
        "fake_quantize MXFP4 floor": lambda: fake_quantize(x, out=out),
        "fake_quantize MXFP4 even": lambda: fake_quantize(x, "e2m1", "even", out=out),
        "fake_quantize MXFP4 rceil": lambda: fake_quantize(x, "e2m1", "rceil", out=out),
        "fake_quantize MXFP8 floor": lambda: fake_quantize(x, "e4m3", out=out),
        "fake_quantize MXFP8 rceil": lambda: fake_quantize(x, "e4m3", "rceil", out=out),
        "fake_quantize MXFP4, axis 0": lambda: fake_quantize(x, axis=0, out=out),
        "quantize MXFP4 and pack": lambda: pack(quantize(x)),
        "quantize MXFP8": lambda: quantize(x, "e4m3"),
        "dequantize MXFP4": lambda: dequantize(four, out=out),
        "dequantize MXFP8": lambda: dequantize(eight, out=out),
        "unpack and dequantize MXFP4": lambda: dequantize(unpack(bytes_), out=out),
        "there and back MXFP4, packed": lambda: dequantize(unpack(pack(quantize(x))), out=out)}


BOUNDS = {"fake_quantize MXFP4 floor": 6, "fake_quantize MXFP4 even": 6,
          "fake_quantize MXFP4 rceil": 6, "fake_quantize MXFP8 floor": 6,
          "fake_quantize MXFP8 rceil": 6, "quantize MXFP4 and pack": 7, "dequantize MXFP4": 2.5,
          "dequantize MXFP8": 2.5}


def theirs(x):
    """Calls of other libraries that round x and give it back, with ours to divide by."""
    calls, absent = {}, []
    try:
        import torch
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
        torch.set_num_threads(1)
        t, floor = torch.from_numpy(x), ScaleCalculationMode.FLOOR

        def torchao(kind):
            scale, data = to_mx(t, kind, 32, floor)
            return to_dtype(data, scale, kind, 32, torch.float32)
        assert np.array_equal(torchao(torch.float4_e2m1fn_x2).numpy(), fake_quantize(x))
        calls["torchao MXFP4"] = lambda: torchao(torch.float4_e2m1fn_x2)
        calls["torchao MXFP8"] = lambda: torchao(torch.float8_e4m3fn)
    except ImportError:
        absent.append("torchao")
    try:
        import mlx.core as mx
        mx.set_default_device(mx.cpu)
        m = mx.array(x)

        def mlx(mode, bits):
            q = mx.quantize(m, group_size=32, bits=bits, mode=mode)
            y = mx.dequantize(*q, group_size=32, bits=bits, mode=mode, dtype=mx.float32)
            mx.eval(y)
            return y
        assert np.array_equal(np.array(mlx("mxfp8", 8)), fake_quantize(x, "e4m3", "rceil"))
        calls["mlx MXFP4"] = lambda: mlx("mxfp4", 4)
        calls["mlx MXFP8"] = lambda: mlx("mxfp8", 8)
    except ImportError:
        absent.append("mlx")
    return calls, absent


def memory(x, out):
    four = quantize(x)
    print("\nmemory beyond x and out, MiB, with out= given")
    for name, call in (("fake_quantize", lambda: fake_quantize(x, out=out)),
                       ("fake_quantize, axis 0", lambda: fake_quantize(x, axis=0, out=out)),
                       ("dequantize", lambda: dequantize(four, out=out))):
        tracemalloc.start()
        call()
        print(f"  {name:<24} {tracemalloc.get_traced_memory()[1] / 2 ** 20:6.1f} "
              f"(x holds {x.nbytes / 2 ** 20:.0f})")
        tracemalloc.stop()


def main():
    x = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    out = np.zeros_like(x)
    seconds = seconds_in_turn(ours(x, out), REPEATS, time.process_time)
    copy = seconds["np.copyto"]
    print(f"{'':<32} {'ms':>7} {'x copy':>7} {'bound':>6}   (medians of {REPEATS})")
    for name, s in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(s, copy, strict=True))
        print(f"{name:<32} {1e3 * statistics.median(s):>7.1f} {ratio:>7.2f} "
              f"{BOUNDS.get(name, ''):>6}")
    memory(x, out)
    calls, absent = theirs(x)
    if calls:
        codes = {"MXFP4": lambda: dequantize(unpack(pack(quantize(x))), out=out),
                 "MXFP8": lambda: dequantize(quantize(x, "e4m3"), out=out)}
        values = {"MXFP4 ": lambda: fake_quantize(x, out=out),
                  "MXFP8 ": lambda: fake_quantize(x, "e4m3", "rceil", out=out)}
        seconds = seconds_in_turn(calls | codes | values, 5, time.process_time)
        print(f"\n{'there and back':<32} {'ms':>7} {'/ ours by codes':>16} {'/ fake_quantize':>16}")
        for name in calls:
            kind = name.split()[-1]
            by = [statistics.median(a / b for a, b in zip(seconds[name], s, strict=True))
                  for s in (seconds[kind], seconds[kind + " "])]
            print(f"{name:<32} {1e3 * statistics.median(seconds[name]):>7.0f} "
                  f"{by[0]:>16.1f} {by[1]:>16.1f}")
    for name in absent:
        print(f"{name}: NOT RUN")


if __name__ == "__main__":
    main()
