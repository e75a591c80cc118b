"""The rules of the house: imports go downwards, NumPy is enough, the map is true."""
import ast
import pathlib
import re
import sys
import tomllib

import pytest

import k3np

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "k3np"
pytestmark = pytest.mark.book

# Bottom to top: a file imports only from files before it.
ORDER = ["__init__", "config", "count", "tree", "ops", "situ", "kda.recurrent", "kda.chunk",
         "kda.parallel", "kda.layer", "kda", "attention", "mla", "attnres", "balance",
         "moe", "gelu", "preprocess", "vision_positions", "vision",
         "init", "embed", "model",
         "mx.formats", "mx.exact", "mx.fast", "mx.quantize", "mx.pack", "mx.dot", "mx.qat",
         "mx.nvfp4",
         "mx",
         "checkpoint_files", "checkpoint", "checkpoint_save", "traps",
         "generate", "chat", "prefix_cache", "muon", "train",
         "supernode.fabric", "supernode.flow", "supernode.schedules", "supernode.engine",
         "supernode.collectives", "supernode.measured", "supernode",
         "supernode.copies", "supernode.expert_parallel", "supernode.moonep", "supernode.pipeline",
         "supernode.serving", "supernode.fleet", "show", "supernode.trace", "vectors", "__main__"]
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "_ipython" not in p.parts)


def module_of(path):
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports(tree, module, top_level_only=False):
    """Absolute names of what a file imports, relative imports resolved."""
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = f"k3np.{module}".split(".")[:-node.level]
                base = ".".join([*parts, base] if base else parts)
            for a in node.names:
                deeper = PACKAGE.joinpath(*base.split(".")[1:], a.name) if base else PACKAGE
                is_module = base.split(".")[0] == "k3np" and (
                    deeper.with_suffix(".py").is_file() or deeper.is_dir())
                yield f"{base}.{a.name}" if is_module else base


def place(name):
    """Where a dotted name of the package stands in ORDER."""
    name = name.removeprefix("k3np").removeprefix(".") or "__init__"
    while name not in ORDER and "." in name:
        name = name.rpartition(".")[0]
    return ORDER.index(name)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_downwards_and_need_only_numpy(path):
    module = module_of(path)
    assert module in ORDER, f"{module}: say in ORDER (and in the README) where it stands"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name in imports(tree, module):
        if name.split(".")[0] == "k3np":
            assert place(name) < ORDER.index(module), f"{module} imports {name}, which is above it"
    outside = {name.split(".")[0] for name in imports(tree, module, top_level_only=True)}
    outside -= {"k3np", "numpy", *sys.stdlib_module_names}
    assert not outside, f"{module} imports {outside} at the top: only NumPy is needed to run"


def test_the_readme_map_is_true():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+(?:\.py|/))`", text, re.M))
    files = {p.name for p in PACKAGE.glob("*.py")} - {"__init__.py"}
    folders = {f"{p.parent.name}/" for p in PACKAGE.glob("*/__init__.py")}
    listed_files = {n for n in listed if n.endswith(".py")}
    assert listed_files == files, "the README's table of k3np/ and the folder differ"
    assert folders <= listed, f"the README does not list {folders - listed}"
    for name in re.findall(r"^\| `([\w./]+)` \|", text, re.M):
        assert (ROOT / name).exists() or (PACKAGE / name).exists(), f"README lists {name}"


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert k3np.__version__ == project["version"]
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_lock_is_hashed_and_names_no_host():
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text and "index-url" not in text
    for block in re.split(r"\n(?=\w)", text.strip()):
        assert "==" in block and "--hash=sha256:" in block, block.splitlines()[0]
