"""`python -m k3np`: look into a checkpoint, or run it on a few token ids."""
import argparse
import collections
import sys

import numpy as np

from k3np.checkpoint import inspect, run_streamed


def main(argv=None):
    """Run a command. Returns: 0; 1 when a checkpoint is not what its config says; 2 for errors."""
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
    args = parser.parse_args(argv)
    try:
        return (_inspect if args.command == "inspect" else _logits)(args)
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
    value = run_streamed(args.folder, np.array([args.ids]), dtype=np.dtype(args.dtype),
                         last=None if args.out else 1, progress=_bar(sys.stderr))
    if args.out:
        np.save(args.out, value)
    row = value[0, -1]
    log_p = row - row.max() - np.log(np.exp(row - row.max()).sum())
    for token in np.argsort(-row, kind="stable")[:args.top]:
        print(f"token {token:>6}  logit {row[token]:9.4f}  probability {np.exp(log_p[token]):.4f}")
    return 0


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
