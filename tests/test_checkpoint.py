"""The released layout: what is read and written, what is refused, what a dying process leaves."""
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from helpers import leaves, map_tree, rel
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from k3np import __main__, vectors
from k3np.checkpoint import ExpertMatrices, decode, inspect, load, run_streamed, stream
from k3np.checkpoint_files import INDEX
from k3np.checkpoint_save import save
from k3np.config import K3Config
from k3np.count import checkpoint_bytes
from k3np.embed import Images
from k3np.init import init_params
from k3np.model import forward

RELEASED, PLAIN = (vectors._folder() / name for name in ("k3_tiny_released", "k3_tiny"))
EPS = float(np.finfo(np.float64).eps)
LAYER = "language_model.model.layers.1.block_sparse_moe"
EXPERT = f"{LAYER}.experts.3.w1.weight"


@pytest.fixture
def folder(tmp_path):
    """A copy of the released tiny checkpoint, to be damaged."""
    return shutil.copytree(RELEASED, tmp_path / "model", ignore=shutil.ignore_patterns("*.npz"))


def arrays():
    with np.load(RELEASED / "io_f64.npz", allow_pickle=False) as io:
        return dict(io)


def tensor_bytes(folder):
    """Every tensor of a folder, as (dtype, shape, bytes)."""
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, array in load_file(path).items():
            found[name] = array.dtype.name, array.shape, array.tobytes()
    return found


@pytest.mark.golden
@pytest.mark.parametrize("packed", (False, True))
def test_logits_and_greedy_tokens_of_the_released_layout(packed):
    io = arrays()
    cfg, params = load(RELEASED, np.float64, packed)
    assert isinstance(params["language_model"]["model"]["layers"]["1"]["block_sparse_moe"][
        "experts"]["w1"], ExpertMatrices if packed else np.ndarray)
    assert rel(forward(params, io["input_ids"], cfg)[0], io["logits"]) < 1e-9
    pictures = Images(io["pixel_values"], io["grid_thws"], EPS)
    value, _ = forward(params, io["mm_input_ids"], cfg, images=pictures)
    assert rel(value, io["mm_logits"]) < 1e-6               # a clip: see tests/test_model.py
    tokens, piece, cache = [], io["greedy_prompt"], None
    for _ in io["greedy_tokens"]:
        value, cache = forward(params, piece, cfg, cache, last=1)
        piece = value.argmax(axis=-1)
        tokens.append(int(piece[0, 0]))
    assert tokens == io["greedy_tokens"].tolist()


@pytest.mark.golden
@pytest.mark.property
@pytest.mark.parametrize("path", (RELEASED, PLAIN), ids=("packed", "plain"))
def test_streaming_gives_the_same_logits_and_the_same_tensors(path):
    io, seen = arrays(), []
    cfg, params = load(path, np.float64)
    value = run_streamed(path, io["input_ids"], dtype=np.float64,
                         progress=lambda *a: seen.append(a))
    assert rel(value, forward(params, io["input_ids"], cfg)[0]) < 1e-13
    assert seen == [(i, 7) for i in range(8)]
    eager = dict(stream(path, np.float64, lazy=False))
    assert list(eager) == ["embed", *range(6), "head"]
    model = params["language_model"]["model"]
    for i in range(6):
        assert all(map(np.array_equal, leaves(eager[i]), leaves(model["layers"][str(i)])))
    assert set(eager["head"]["language_model"]) == {"model", "lm_head"}
    assert set(eager["embed"]) == {"language_model", "vision_tower", "mm_projector"}
    total = sum(len(leaves(tree)) for tree in eager.values())
    assert total == len(leaves(params))


@pytest.mark.property
def test_a_tied_model_streams_its_matrix_twice(tmp_path):
    cfg = dataclasses.replace(K3Config.tiny(), tie_word_embeddings=True)
    params = init_params(cfg, np.random.default_rng(0), np.float32)
    save(tmp_path / "tied", cfg, params)
    ids = np.array([[3, 1, 2]])
    whole, _ = forward(params, ids, cfg, last=1)
    assert rel(run_streamed(tmp_path / "tied", ids, last=1), whole) == 0


@pytest.mark.property
@pytest.mark.parametrize("path", (RELEASED, PLAIN), ids=("released", "plain"))
@pytest.mark.parametrize("packed", (False, True))
def test_save_then_load_gives_the_same_bytes(path, packed, tmp_path):
    cfg, params = load(path, np.float32, packed)
    save(tmp_path / "copy", cfg, params)
    assert tensor_bytes(tmp_path / "copy") == tensor_bytes(path)
    report = inspect(tmp_path / "copy")
    assert report.cfg == cfg and report.n_bytes == checkpoint_bytes(cfg)
    assert not (report.missing or report.unexpected or report.wrong)
    index = json.loads((tmp_path / "copy" / INDEX).read_text())
    assert index["metadata"]["total_size"] == report.n_bytes
    again_cfg, again = load(tmp_path / "copy", np.float32)
    assert again_cfg == cfg
    assert all(map(np.array_equal, leaves(again), leaves(load(path, np.float32)[1])))
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


@pytest.mark.property
def test_inspect_reads_no_tensor():
    tracemalloc.start()
    report = inspect(RELEASED)
    assert tracemalloc.get_traced_memory()[1] < 3e6
    tracemalloc.stop()
    assert report.n_bytes == 606528 and len(report.tensors) == 414
    tensor = report.tensors[f"{EXPERT}_packed"]
    assert (tensor.dtype, tensor.shape, tensor.n_bytes) == ("uint8", (32, 16), 512)


@pytest.mark.property
def test_lazy_experts_are_decoded_when_used():
    pieces = dict(stream(RELEASED, np.float64))
    w1 = pieces[1]["block_sparse_moe"]["experts"]["w1"]
    with safe_open(RELEASED / inspect(RELEASED).tensors[f"{EXPERT}_scale"].shard, "np") as shard:
        expected = decode(shard.get_tensor(f"{EXPERT}_packed"),
                          shard.get_tensor(f"{EXPERT}_scale"), np.float64)
    assert len(w1) == 8 and w1.shape == (8, 32, 32) and np.array_equal(w1[3], expected)
    with pytest.raises(IndexError, match=r"expert 8 is outside 0\.\.7"):
        w1[8]


@pytest.mark.property
def test_plain_experts_beside_a_quantization_config_and_a_live_A_log(folder):
    cfg, params = load(RELEASED, np.float32)
    plain = dataclasses.replace(cfg, quantization_config=None)
    params = map_tree(lambda a: a, params)
    for layer in params["language_model"]["model"]["layers"].values():
        if "A_log" in layer["self_attn"]:
            layer["self_attn"]["A_log"] = layer["self_attn"]["A_log"][:2]
    save(folder, plain, params, overwrite=True)
    shutil.copy(RELEASED / "config.json", folder)
    assert all(map(np.array_equal, leaves(load(folder)[1]), leaves(params)))


@pytest.mark.property
def test_one_file_without_an_index(tmp_path):
    shutil.copy(RELEASED / "config.json", tmp_path)
    save_file({name: array for path in RELEASED.glob("*.safetensors")
               for name, array in load_file(path).items()}, tmp_path / "model.safetensors")
    assert all(map(np.array_equal, leaves(load(tmp_path)[1]), leaves(load(RELEASED)[1])))


DIE = """
import os, shutil, signal, sys
import k3np.checkpoint_save as module
from k3np.checkpoint import load
source, target, where, count = sys.argv[1:]
place = {"rename": os, "rmtree": shutil}.get(where, module)
original, calls = getattr(place, where), 0
def deadly(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
cfg, params = load(source)
params["language_model"]["lm_head"] = params["language_model"]["lm_head"] + 1
setattr(place, where, deadly)
module.save(target, cfg, params, overwrite=True)
"""
POINTS = [("_stored", 1), ("_stored", 150), ("_sync", 1), ("_sync", 9), ("_put_in_place", 1),
          ("_exchange", 1), ("rmtree", 2)]


@pytest.mark.property
@pytest.mark.parametrize("where,count", POINTS, ids=lambda p: str(p))
def test_a_process_killed_while_saving_leaves_a_whole_folder(where, count, folder):
    before = tensor_bytes(folder)
    done = subprocess.run([sys.executable, "-c", DIE, RELEASED, folder, where,
                           str(count)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    after = tensor_bytes(folder)
    changed = {name for name in before if before[name] != after[name]}
    if where == "rmtree":                                # after the folders changed places
        assert changed == {"language_model.lm_head.weight"}
    else:
        assert after == before
    load(folder)
    save(folder, *load(folder), overwrite=True)          # the next process is not in the way


@pytest.mark.property
def test_where_folders_cannot_change_places_two_renames_do(folder, monkeypatch):
    monkeypatch.setattr("k3np.checkpoint_save._exchange", lambda a, b: False)
    before = tensor_bytes(folder)
    save(folder, *load(folder, packed=True), overwrite=True)
    assert tensor_bytes(folder) == before and len(list(folder.parent.iterdir())) == 1


@pytest.mark.errors
def test_what_save_refuses_leaves_nothing(tmp_path):
    cfg, params = load(RELEASED)
    place = tmp_path / "x"
    lm = params["language_model"]

    def refused(message, error=ValueError, where=place, overwrite=False, **changed):
        with pytest.raises(error, match=message):
            save(where, cfg, {**params, "language_model": {**lm, **changed}}, overwrite)
        assert sorted(p.name for p in tmp_path.iterdir()) == left
    left = []
    refused(r"lm_head.weight has shape \(3, 3\); cfg gives \(128, 64\)", lm_head=np.ones((3, 3)))
    refused("lm_head.weight holds NaN", lm_head=np.full((128, 64), np.nan))
    refused("language_model.extra is not in the model", extra=np.ones(2))
    refused(r"language_model.model.embed_tokens.weight is missing", model={})
    save(place, cfg, params)
    left = ["x"]
    refused("already there: .* overwrite=True", FileExistsError)
    refused("holds NaN", overwrite=True, lm_head=np.full((128, 64), np.nan))
    assert tensor_bytes(place) == tensor_bytes(RELEASED)
    (tmp_path / "file").write_text("")
    left = ["file", "x"]
    refused("already there", FileExistsError, where=tmp_path / "file", overwrite=True)


def shard_of(folder, name):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_header(path, change):
    """Change a shard's header and leave its data."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + n])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n:])


def edit_tensors(folder, name, change):
    path = shard_of(folder, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def drop(folder, name):
    edit_tensors(folder, name, lambda t: t.pop(name))
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(name))


def put(folder, name, array):
    edit_tensors(folder, name, lambda t: t.update({name: array}))


def point(name):
    def damage(folder):
        edit_json(folder / INDEX, lambda i: i["weight_map"].update({f"{EXPERT}_scale": name}))
    return damage


def link(folder, name="model-00001-of-000002.safetensors"):
    shutil.move(folder / name, folder.parent / "outside")
    (folder / name).symlink_to(folder.parent / "outside")


def cut(folder, share=0.5):
    path = shard_of(folder, f"{EXPERT}_scale")
    raw = path.read_bytes()
    path.write_bytes(raw[:int(share * len(raw))])


def lie(folder, **entry):
    edit_header(shard_of(folder, f"{EXPERT}_scale"), lambda h: h[f"{EXPERT}_scale"].update(entry))


def huge_header(folder):
    path = shard_of(folder, f"{EXPERT}_scale")
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def config(**changed):
    def damage(folder):
        edit_json(folder / "config.json", lambda c: c["text_config"].update(changed))
    return damage


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def group_size(folder, size=16):
    def change(c):
        weights = c["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
        weights["group_size"] = size
    edit_json(folder / "config.json", change)


SHARD = r"model-0000\d-of-000002\.safetensors"
HOSTILE = {
    "cut shard": (cut, f"{SHARD}: not a whole safetensors file"),
    "cut header": (lambda f: cut(f, 0.001), f"{SHARD}: not a whole safetensors file"),
    "empty shard": (lambda f: cut(f, 0), f"{SHARD}: not a whole safetensors file"),
    "header of 2^60 bytes": (huge_header, f"{SHARD}: not a whole safetensors file"),
    "offsets beyond the file": (lambda f: lie(f, data_offsets=[0, 1 << 40]), SHARD),
    "offsets of another tensor": (lambda f: lie(f, data_offsets=[0, 32]), SHARD),
    "offsets backwards": (lambda f: lie(f, data_offsets=[32, 0]), SHARD),
    "shape that overflows": (lambda f: lie(f, shape=[1 << 62, 1 << 62]), SHARD),
    "unknown dtype": (lambda f: lie(f, dtype="P7"), SHARD),
    "index to ../x": (point("../x"), rf"{INDEX}: shard name '\.\./x' is not a plain file name"),
    "index to an absolute path": (point("/etc/passwd"), "'/etc/passwd' is not a plain file name"),
    "index to a folder": (point(".."), "is not a plain file name"),
    "index to nothing": (point(""), "is not a plain file name"),
    "index to a missing shard": (point("model-3.safetensors"), "model-3.safetensors: no such file"),
    "index to a number": (point(3), f"{INDEX}: weight_map must map"),
    "index to the wrong shard": (point("model-00002-of-000002.safetensors"),
                                 rf"{SHARD}: tensor .* is missing; {INDEX} says"),
    "index without a map": (write(INDEX, "{}"), f"{INDEX}: weight_map must map"),
    "index that is no JSON": (write(INDEX, "{"), f"{INDEX}: not valid JSON"),
    "index too deep": (write(INDEX, "[" * 200_000), f"{INDEX}: not valid JSON"),
    "config of 2 MB": (write("config.json", " " * (2 << 20)), "config.json: 2097152 bytes; such a"),
    "no index": (lambda f: (f / INDEX).unlink(), f"{INDEX}: no such file"),
    "half a pair, no scale": (lambda f: drop(f, f"{EXPERT}_scale"),
                              rf"{SHARD}: tensor {EXPERT}_scale is missing"),
    "half a pair, no codes": (lambda f: drop(f, f"{EXPERT}_packed"),
                              rf"{SHARD}: tensor {EXPERT}_packed is missing"),
    "a tensor is missing": (lambda f: drop(f, f"{LAYER}.gate.weight"),
                            f"{INDEX}: tensor {LAYER}.gate.weight is missing"),
    "a tensor too many": (lambda f: edit_tensors(
        f, f"{EXPERT}_scale", lambda t: t.update({"backdoor": np.ones(2, np.float32)})),
        f"{SHARD}: tensor backdoor is not in the model"),
    "codes that are floats": (
        lambda f: put(f, f"{EXPERT}_packed", np.ones((32, 16), np.float32)),
        rf"{SHARD}: tensor {EXPERT}_packed has dtype float32; expected uint8"),
    "matrix of bytes": (lambda f: put(f, f"{LAYER}.gate.weight", np.ones((8, 64), np.uint8)),
                        rf"{SHARD}: tensor {LAYER}.gate.weight has dtype uint8; expected bfloat16"),
    "matrix of integers": (lambda f: put(f, f"{LAYER}.gate.weight", np.ones((8, 64), np.int64)),
                           rf"{SHARD}: tensor {LAYER}.gate.weight has dtype I64; known are BF16"),
    "wrong shape": (lambda f: put(f, f"{LAYER}.gate.weight",
                                  np.ones((8, 63), ml_dtypes.bfloat16)),
                    rf"{SHARD}: tensor {LAYER}.gate.weight has shape \(8, 63\); config.json gives"),
    "NaN scale": (lambda f: put(f, f"{EXPERT}_scale", np.full((32, 1), 255, np.uint8)),
                  rf"{SHARD}: tensor {EXPERT}_scale has the byte 255, NaN, at row 0, group 0"),
    "groups of 16": (group_size, rf"{SHARD}: tensor .*_scale has shape \(32, 1\); config.json"),
    "group size that is no number": (lambda f: group_size(f, "x"), "config.json: "),
    "group size of zero": (lambda f: group_size(f, 0), "config.json: "),
    "wider config": (config(hidden_size=128), "config.json: vision_config.text_hidden_size=64"),
    "other latent": (config(kv_lora_rank=8), rf"{SHARD}: tensor .* has shape .* config.json gives"),
    "more experts": (config(num_experts=9), "tensor .*experts.8.* is missing"),
    "layers of another kind": (config(linear_attn_config={
        "kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6], "num_heads": 2, "head_dim": 16,
        "gate_lower_bound": -5.0, "use_full_rank_gate": True}), "tensor .*layers.2.* is missing"),
    "10^12 layers": (config(num_hidden_layers=10 ** 12), "config.json: .*num_hidden_layers"),
    "10^12 experts": (config(num_experts=10 ** 12), "config.json: .* are no model"),
    "10^12 vision layers": (lambda f: edit_json(
        f / "config.json", lambda c: c["vision_config"].update(vt_num_hidden_layers=10 ** 12)),
        "config.json: .* are no model"),
    "quantization_config that is a list": (config(quantization_config=[1]), "config.json: "),
    "config that is a list": (write("config.json", "[]"), "config.json: not a JSON object"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "link to a shard outside": (link, "model-00001-of-000002.safetensors: a link that leaves"),
    "link to a config outside": (lambda f: link(f, "config.json"), "config.json: a link that"),
    "link to an index outside": (lambda f: link(f, INDEX), f"{INDEX}: a link that leaves"),
    "pickle": (lambda f: shard_of(f, f"{EXPERT}_scale").write_bytes(
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93."),
        f"{SHARD}: not a whole safetensors file"),
}


@pytest.mark.errors
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders_are_refused_by_name_in_bounded_memory(case, folder, capsys):
    damage, message = HOSTILE[case]
    damage(folder)
    tracemalloc.start()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(folder)
    assert tracemalloc.get_traced_memory()[1] < 3e7
    tracemalloc.stop()
    with pytest.raises((ValueError, FileNotFoundError)):
        for _, tree in stream(folder):
            for layer in (tree.get("block_sparse_moe"),):
                for e in range(8 if layer else 0):
                    _ = [layer["experts"][w][e] for w in ("w1", "w2", "w3")]
    code = __main__.main(["logits", str(folder), "--ids", "1,2"])
    out, err = capsys.readouterr()
    assert code == 2 or case == "NaN scale"              # an expert that is not chosen is not read
    assert err.count("\n") <= 1 and "Traceback" not in err


@pytest.mark.errors
@pytest.mark.parametrize("name", ("config.json", INDEX, "model-00002-of-000002.safetensors"))
def test_changed_bytes_are_refused_or_make_no_difference_to_the_reader(name, folder):
    """Bytes of each file's beginning are changed at random: an answer or a clear error, always."""
    rng = np.random.default_rng(0)
    original = (folder / name).read_bytes()
    refused = 0
    for _ in range(40):
        raw = bytearray(original)
        for at in rng.integers(0, min(len(raw), 4000), rng.integers(1, 4)):
            raw[at] = rng.integers(256)
        (folder / name).write_bytes(raw)
        try:
            load(folder)
        except (ValueError, FileNotFoundError) as error:
            refused += 1
            assert str(folder) in str(error), error
    assert refused > 10


@pytest.mark.errors
def test_no_pickle_is_named_anywhere_near():
    for name in ("checkpoint", "checkpoint_files", "checkpoint_save"):
        text = (vectors._folder().parent.parent / "k3np" / f"{name}.py").read_text()
        assert not any(word in text for word in ("pickle", "eval(", "exec(", "np.load", "torch"))


@pytest.mark.book
def test_inspect_on_the_command_line(capsys, folder):
    assert __main__.main(["inspect", str(RELEASED)]) == 0
    out = capsys.readouterr().out
    assert "414 tensors in 2 shards, 606,528 bytes" in out and "every tensor is there" in out
    assert __main__.main(["inspect", str(RELEASED), "--tensors"]) == 0
    assert capsys.readouterr().out.count("\n") == 414 + 6
    drop(folder, f"{LAYER}.gate.weight")
    put(folder, f"{EXPERT}_packed", np.ones((32, 15), np.uint8))
    assert __main__.main(["inspect", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"missing: 1\n  {LAYER}.gate.weight" in out and "wrong: 1\n" in out and "NOT" in out


@pytest.mark.golden
def test_logits_on_the_command_line(capsys, tmp_path):
    io = arrays()
    ids = ",".join(map(str, io["greedy_prompt"][0]))
    target = tmp_path / "logits.npy"
    assert __main__.main(["logits", str(RELEASED), "--ids", ids, "--dtype", "float64", "--top",
                          "3", "--out", str(target)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"token {io['greedy_tokens'][0]:>6}") and out.count("\n") == 3
    assert err == ""                                     # no bar where nobody watches
    assert np.load(target, allow_pickle=False).shape == (1, 9, 128)


@pytest.mark.errors
@pytest.mark.parametrize("arguments,message", (
    (["logits", "{}", "--ids", "1,200"], r"input_ids must lie in 0\.\.127"),
    (["logits", "{}", "--ids", "1", "--top", "0"], "--top is 0"),
    (["logits", "{}", "--ids", "1", "--out", "no/folder/x.npy"], "--out .*: no such folder"),
    (["logits", "{}", "--ids", "1", "--out", "."], r"--out \. is a folder"),
    (["inspect", "{}/none"], "none: no such folder"),
    (["inspect", "{}/README.json"], "no such folder")), ids=str)
def test_errors_on_the_command_line(arguments, message, capsys):
    assert __main__.main([a.format(RELEASED) for a in arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.errors
@pytest.mark.parametrize("arguments", (["logits", "x", "--ids", "1,a"], ["logits", "x"], ["no"],
                                       []), ids=str)
def test_usage_on_the_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(arguments)
    assert stop.value.code == 2 and "usage: python -m k3np" in capsys.readouterr().err


@pytest.mark.book
def test_the_command_runs_as_a_module_and_its_bar_moves():
    done = subprocess.run([sys.executable, "-m", "k3np", "inspect", RELEASED / "none"],
                          capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 2 and done.stderr.startswith("k3np: ") and not done.stdout

    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass
    screen = Terminal()
    bar = __main__._bar(screen)
    for i in range(8):
        bar(i, 7)
    assert screen.text.count("\r") == 8 and screen.text.endswith(f"[{'#' * 30}] 7/7\n")


@pytest.mark.errors
def test_without_the_extra(monkeypatch, tmp_path):
    cfg, params = load(RELEASED)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.numpy", raising=False)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[checkpoint\]'"):
        save(tmp_path / "x", cfg, params)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ImportError, match=r"pip install -e '\.\[checkpoint\]'"):
        inspect(RELEASED)


@pytest.mark.errors
@pytest.mark.parametrize("dtype, value",
                         [("bfloat16", 3.4e38), ("float16", 1e6), ("float32", 1e300)])
def test_a_value_that_the_stored_dtype_cannot_hold_is_refused(tmp_path, dtype, value):
    cfg = dataclasses.replace(K3Config.tiny(), dtype=dtype)
    params = init_params(cfg, np.random.default_rng(0))
    params["language_model"]["lm_head"] = np.full_like(params["language_model"]["lm_head"], value)
    with pytest.raises(ValueError, match=f"lm_head.weight has entries up to .*{dtype} can hold"):
        save(tmp_path / "model", cfg, params)
    assert not (tmp_path / "model").exists()


@pytest.mark.errors
def test_only_dtypes_of_weights_are_configured():
    for dtype in ("int8", "torch.bfloat16", None):
        with pytest.raises(ValueError, match="dtype="):
            dataclasses.replace(K3Config.tiny(), dtype=dtype)


@pytest.mark.errors
@pytest.mark.parametrize("dtype", (int, np.float16, "uint8", "nonsense", None), ids=str)
def test_weights_are_read_as_float32_or_float64_only(dtype):
    with pytest.raises(ValueError, match="dtype=.*float32 or float64"):
        load(RELEASED, dtype)
    with pytest.raises(ValueError, match="dtype=.*float32 or float64"):
        next(stream(RELEASED, dtype))


@pytest.mark.errors
@pytest.mark.parametrize("key", ("attn_bias", "linear_bias", "patch_embed_proj_bias"))
def test_inspect_refuses_biases_that_no_tensor_stands_for(key, folder):
    edit_json(folder / "config.json", lambda c: c["vision_config"].update({key: True}))
    with pytest.raises(ValueError, match="config.json: .*biases"):
        inspect(folder)
