"""`python -m k3np`: look into a checkpoint, run it on token ids, or time a step of serving."""
import argparse
import collections
import math
import pathlib
import sys

import numpy as np

from k3np.checkpoint import inspect, run_streamed
from k3np.config import K3Config
from k3np.show import table
from k3np.supernode import serving
from k3np.supernode.trace import write_json


def main(argv=None):
    """Run a command. Returns: 0; 1 when a checkpoint is not what its config says, or a model fits
    nowhere; 2 for errors."""
    parser = argparse.ArgumentParser(prog="python -m k3np", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="names, shapes, dtypes, bytes; nothing is loaded")
    look.add_argument("folder")
    look.add_argument("--tensors", action="store_true", help="list every tensor")
    run = commands.add_parser("logits", help="the likeliest next tokens, one layer in memory")
    run.add_argument("folder")
    run.add_argument("--ids", required=True, type=_ids, help="token ids, such as 1,2,3")
    run.add_argument("--top", type=int, default=5, help="how many tokens to print")
    run.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    run.add_argument("--out", help="write the logits of all positions to this .npy file")
    _simulate_arguments(commands.add_parser(
        "simulate", help="a decode step of K3 on groups of accelerators, part by part"))
    args = parser.parse_args(argv)
    try:
        return {"inspect": _inspect, "logits": _logits, "simulate": _simulate}[args.command](args)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(f"k3np: {error or type(error).__name__}", file=sys.stderr)
        return 2


def _inspect(args):
    report = inspect(args.folder)
    cfg, by_dtype = report.cfg, collections.defaultdict(list)
    for tensor in report.tensors.values():
        by_dtype[tensor.dtype].append(tensor.n_bytes)
    shards = len({t.shard for t in report.tensors.values()})
    print(f"{cfg.num_hidden_layers} layers, width {cfg.hidden_size}, {cfg.num_experts} experts, "
          f"vocabulary {cfg.vocab_size}, {'with' if cfg.vision_config else 'without'} vision")
    print(f"{len(report.tensors):,} tensors in {shards} shards, {report.n_bytes:,} bytes")
    for dtype, sizes in sorted(by_dtype.items()):
        print(f"  {dtype:<9} {len(sizes):>8,} tensors {sum(sizes):>18,} bytes")
    if args.tensors:
        for t in sorted(report.tensors.values()):
            print(f"{t.name}  {list(t.shape)}  {t.dtype}  {t.n_bytes:,}  {t.shard}")
    for what, names in (("missing", report.missing), ("unexpected", report.unexpected),
                        ("wrong", report.wrong)):
        if names:
            print(f"{what}: {len(names):,}")
            print(*(f"  {name}" for name in names[:10]), sep="\n")
            if len(names) > 10:
                print("  ...")
    bad = report.missing or report.unexpected or report.wrong
    print("this is NOT the model that config.json describes" if bad else
          "every tensor is there, with the shape that config.json gives it")
    return 1 if bad else 0


def _logits(args):
    if args.top < 1:
        raise ValueError(f"--top is {args.top}; expected 1 or more")
    if args.out and not pathlib.Path(args.out).absolute().parent.is_dir():
        raise FileNotFoundError(f"--out {args.out}: no such folder "
                                f"{pathlib.Path(args.out).parent}")
    if args.out and pathlib.Path(args.out).is_dir():
        raise ValueError(f"--out {args.out} is a folder; expected a file's name")
    value = run_streamed(args.folder, np.array([args.ids]), dtype=np.dtype(args.dtype),
                         last=None if args.out else 1, progress=_bar(sys.stderr))
    if args.out:
        np.save(args.out, value)
    row = value[0, -1]
    log_p = row - row.max() - np.log(np.exp(row - row.max()).sum())
    for token in np.argsort(-row, kind="stable")[:args.top]:
        print(f"token {token:>6}  logit {row[token]:9.4f}  probability {np.exp(log_p[token]):.4f}")
    return 0


def _simulate_arguments(sim):
    sim.add_argument("--ep", type=int, nargs="+", default=[8, 16, 32, 64, 128], metavar="N",
                     help="accelerators that the experts are dealt over (8 16 32 64 128)")
    sim.add_argument("--fabric", nargs="+", default=["nvl72", "b200x8"], metavar="NAME",
                     help=f"among {', '.join(serving.MACHINES)}")
    many = sim.add_mutually_exclusive_group()
    many.add_argument("--batch", type=int, help="sequences in flight, on all together")
    many.add_argument("--per-gpu", type=int, default=64, help="the same for each accelerator (64)")
    sim.add_argument("--context", type=int, default=8192, help="tokens behind each (8192)")
    sim.add_argument("--tokens", type=int, default=1, help="new ones a step: 1 + drafted (1)")
    sim.add_argument("--tp", type=int, help="ranks that share attention (the fastest that fits)")
    sim.add_argument("--dcp", type=int, help="of those, ranks that share a cache (1); with --tp")
    for name, (value, word, _) in serving.FIXED.items():
        sim.add_argument(f"--{name[:-2].replace('_', '-')}-us", type=float, default=value * 1e6,
                         dest=name, help=f"fixed cost, {word.lower()} ({value * 1e6:g})")
    sim.add_argument("--config", help="a config.json in the released keys (K3's)")
    sim.add_argument("--trace", help="write the steps to this file, for Perfetto or Chrome")


def _check_simulate(args):
    """Refuse arguments of `simulate` by their names. Returns: the fixed costs in seconds."""
    for name in ("ep", "batch", "per_gpu", "context", "tokens", "tp", "dcp"):
        value = getattr(args, name)
        for n in value if name == "ep" else [value]:
            if n is not None and n < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {n}; expected 1 or more")
    if args.dcp is not None and args.tp is None:
        raise ValueError(f"--dcp {args.dcp} needs --tp: without it both are chosen")
    for name in serving.FIXED:
        value = getattr(args, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"--{name[:-2].replace('_', '-')}-us is {value}; fixed costs are "
                             "times: finite, zero or more")
    return {name: getattr(args, name) * 1e-6 for name in serving.FIXED}


def _simulate(args):
    fixed = _check_simulate(args)
    cfg = K3Config.from_json(args.config) if args.config else K3Config.released()
    tp, dcp = args.tp, args.dcp or 1
    rows, steps = [], []
    for machine in args.fabric:
        for n in args.ep:
            batch = args.per_gpu * n if args.batch is None else args.batch
            size = cfg, machine, n, batch, args.context
            if tp is None:
                best = serving.best_step(*size, tokens=args.tokens, **fixed)
            else:
                room = serving.capacity(cfg, machine, n, args.context, tp, dcp).batch
                step = serving.decode_step(*size, tp, dcp, tokens=args.tokens, **fixed)
                best = (step, tp, dcp) if room >= batch else None
            if best is None:
                rows.append([machine, n, batch, "", "", "does not fit"] + [""] * 8)
                continue
            step, *shared = best
            rows.append([machine, n, batch, *shared, f"{step.time_s * 1e3:.2f}",
                         f"{batch / step.time_s / n:,.0f}"]
                        + [f"{step.parts[x] * 1e3:.2f}" for x in serving.PARTS])
            steps.append((f"{machine}, EP{n}, {batch} sequences, TP{shared[0]}, "
                          f"DCP{shared[1]}", step))
    rate = "tok/s/GPU" if args.tokens == 1 else "steps/s/GPU"
    table(["fabric", "EP", "batch", "TP", "DCP", "step, ms", rate,
           *serving.PARTS], rows)
    print("\nParts in ms, added up, nothing overlapped. Fixed costs:")
    for name, (value, word, why) in serving.FIXED.items():
        given = "Given" if abs(fixed[name] - value) > 1e-12 else word
        print(f"  {name:<12} {fixed[name] * 1e6:6.1f} us  {given}: {why}")
    if args.trace:
        print(f"trace: {write_json(args.trace, serving.step_trace(steps))}")
    return 0 if steps else 1


def _bar(stream):
    """A progress bar, or None where nobody watches."""
    if not stream.isatty():
        return None

    def show(done, total):
        filled = 30 * done // total
        end = "\n" if done == total else ""
        print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total}", end=end, file=stream,
              flush=True)
    return show


def _ids(text):
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as "
                                         "1,2,3") from None


if __name__ == "__main__":
    sys.exit(main())
