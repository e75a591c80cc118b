"""Every differentiable function of the package is named in a test of the kind `grad`.

The tests are read, not run: in each tests/test_*.py the functions marked `grad` are found, with
their decorators and whatever module-level names of the same file they use, one through another.
"""
import ast
import importlib
import pathlib
import pkgutil

import pytest

import k3np
from k3np.ops import REGISTRY

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.book


def registered():
    """Import every module of the package; give the registered names, `module.function`."""
    for module in pkgutil.walk_packages(k3np.__path__, "k3np."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return sorted(name for name in REGISTRY if name.startswith("k3np."))


def marks(node):
    """Names in `pytest.mark.<name>` anywhere under a node."""
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
            and isinstance(n.value, ast.Attribute) and n.value.attr == "mark"}


def words(node):
    """Every name that the code under a node mentions."""
    return ({n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)})


def named_in_grad_tests(text):
    """Names that a test module's `grad` tests mention, directly or through module-level names."""
    body = ast.parse(text).body
    defines, everywhere = {}, set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            defines.setdefault(node.name, set()).update(words(node))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in words(target):
                    defines.setdefault(name, set()).update(words(node.value))
                    if name == "pytestmark":
                        everywhere |= marks(node.value)
    found, queue = set(), []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if "grad" in everywhere | {m for d in node.decorator_list for m in marks(d)}:
                queue.extend(words(node))
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue.extend(defines.get(name, ()))
    return found


def test_every_differentiable_function_has_a_grad_test():
    named = set().union(*(named_in_grad_tests(path.read_text(encoding="utf8"))
                          for path in HERE.glob("test_*.py") if path != pathlib.Path(__file__)))
    missing = [name for name in registered() if name.rsplit(".", 1)[-1] not in named]
    assert not missing, f"no test marked `grad` names: {', '.join(missing)}"


def test_the_search_sees_functions_decorators_and_tables_and_nothing_else():
    text = '''
import pytest
TWINS = [("slow", mod.by_table)]
def helper():
    return by_helper
def other():
    return not_named
@pytest.mark.grad
@pytest.mark.parametrize("f", [by_decorator])
def test_a(f):
    check(f, TWINS, helper)
@pytest.mark.golden
def test_b():
    in_another_kind()
'''
    named = named_in_grad_tests(text)
    assert {"by_table", "by_helper", "by_decorator"} <= named
    assert not {"not_named", "in_another_kind"} & named
    assert "in_another_kind" in named_in_grad_tests(text + "pytestmark = [pytest.mark.grad]\n")


def test_the_registry_is_not_empty():
    assert "k3np.ops.rms_norm" in registered() and len(registered()) >= 9
