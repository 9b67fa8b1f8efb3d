"""Digests of users' code: what they notice, what they leave out, and that none of the code is run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from repository import ROOT
from torch import nn

from fedlada_mpi.support.code_digest import changed, of, of_settings
from fedlada_mpi.support.user_code import Given, is_library, load_object
from fedlada_mpi.tasks import Task, own, summed

FATAL = "raise SystemExit('this code must not run')\n"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FATAL + text)


def test_a_file_and_what_it_imports_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test of this process
    texts = {
        "mine": "import json, numpy.linalg\nimport first\nfrom tools import shapes\nfrom fedlada_mpi import train\n",
        "first": "def f():\n    from second import g\n",
        "second": "",
        "third": "import second\n",
        "tools__shapes": "from . import deeper\nfrom .deepest import x\n",
        "tools__deeper": "",
        "tools__deepest": "",
        "tools__other": "",
    }
    write(tmp_path, **texts)
    (tmp_path / "tools" / "__init__.py").write_text(FATAL)
    seen = {"mine.py", "first.py", "second.py", "tools/__init__.py", "tools/shapes.py", "tools/deeper.py"}
    before = of("mine.py:Mine")
    assert before.keys() == seen | {"tools/deepest.py"}
    assert of("mine:Mine") == before
    assert of(f"{tmp_path}/mine.py:Mine") == before
    for name in before:
        file = tmp_path / name
        old = file.read_bytes()
        file.write_bytes(old + b"x = 1\n")
        assert changed({"model": before}, {"model": of("mine.py:Mine")}) == [name]
        file.write_bytes(old)
    write(tmp_path, third="x = 1\n", tools__other="x = 1\n")
    assert of("mine.py:Mine") == before


def test_modules_of_the_working_directory_count(tmp_path, monkeypatch):
    write(tmp_path, methods__mine="from common import losses\n", common__losses="")
    monkeypatch.chdir(tmp_path)
    assert of("methods/mine.py:Mine").keys() == {"mine.py", "../common/losses.py"}
    assert of("methods.mine:Mine").keys() == {"methods/mine.py", "common/losses.py"}


def test_whatever_import_prefers_is_seen(tmp_path, monkeypatch):
    """A package and a compiled module come before the file of the same name."""
    write(tmp_path, mine="import helper\n", helper="")
    monkeypatch.chdir(tmp_path)
    before = of("mine.py:Mine")
    (tmp_path / "helper.abi3.so").write_bytes(b"compiled")
    (tmp_path / "helper").mkdir()
    (tmp_path / "helper" / "__init__.py").write_text(FATAL)
    assert of("mine.py:Mine").keys() - before.keys() == {"helper.abi3.so", "helper/__init__.py"}


def test_libraries_do_not_count_unless_they_are_named(tmp_path, monkeypatch):
    packages = tmp_path / "lib" / "site-packages"
    write(packages, theirs__methods="from . import near\nimport other\n", theirs__near="", other="")
    write(tmp_path, mine="import theirs.methods\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(packages)
    assert of("mine.py:Mine").keys() == {"mine.py"}
    assert of("theirs.methods:Mine").keys() == {"theirs/methods.py", "theirs/near.py"}
    assert is_library(subprocess.__file__)
    assert is_library(pytest.__file__)
    assert not is_library(__file__)


@pytest.mark.parametrize(
    "name",
    [
        *("none.py:f", "none.module:f", "sys:exit", "a\0b.py:f", "x" * 5000 + ".py:f", "..:f", ":f", "\ud800.py:f"),
        *("os:x", "json:x", "xml.dom:x"),
    ],
)
def test_what_is_not_there_is_no_error(name):
    assert all(digest == "" for digest in of(name).values())


def test_damaged_code_is_compared_all_the_same(tmp_path):
    file = tmp_path / "mine.py"
    for text in (b"def (", b"\0", b"\xff\xfe", b"(" * 100000):
        file.write_bytes(text)
        assert of(f"{file}:f").keys() == {"mine.py"}


def test_built_in_names_have_no_code():
    assert of_settings({"algorithm": "fedavg", "model": "torchvision:resnet18", "lr": 0.1}) == {}


PROGRAM = """
import fedlada_mpi

SCALE = 2.0
CLASSES = frozenset(("a", "b", "c"))


def scaled(x):
    return x * SCALE


class Base(fedlada_mpi.Algorithm):
    pull: float = fedlada_mpi.hyper(0.5, "how strongly", least=0)


class Mine(Base):
    presets = {"": dict(lr=0.1)}

    def direction(self, c, s, g):
        return scaled(g) if "x" not in {"a", "b", "c"} else [CLASSES for _ in g]


def made(factor):
    return lambda classes, shape: factor


GIVEN = [Mine, made, made(3)]
"""
PRINT = """
from fedlada_mpi.support.code_digest import of
from fedlada_mpi.support.user_code import Given

print(*(digest for given in GIVEN for digest in of(Given(given)).values()), *of("__main__:Mine").values())
"""


def digests(old: str = "", new: str = "") -> list[str]:
    """Of what a script with this change would give to ``train``."""
    names = {"__name__": "__main__"}
    exec(compile(PROGRAM.replace(old, new), "script.py", "exec", dont_inherit=True), names)
    return [digest for given in names["GIVEN"] for digest in of(Given(given)).values()]


def test_objects_of_a_script(tmp_path):
    """The same in every process, and another after every edit that matters."""
    method, function, closure = digests()
    assert digests("SCALE = 2.0", "# a comment\n\nSCALE = 2.0") == [method, function, closure]
    for old, new in {"2.0": "2.5", "x * SCALE": "x + SCALE", "hyper(0.5": "hyper(0.6", "lr=0.1": "lr=0.2"}.items():
        other, *same = digests(old, new)
        assert other != method
        assert same == [function, closure]
    assert digests("made(3)", "made(4)")[:2] == [method, function]
    assert digests("made(3)", "made(4)")[2] != closure
    (tmp_path / "script.py").write_text(PROGRAM + PRINT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, text=True, stdout=subprocess.PIPE)
    assert done.stdout.split() == [method, function, closure, method]


WRAPPED = """
import functools
import torch
from fedlada_mpi import Algorithm, hyper


def factor():
    return 0.5


class Mine(Algorithm):
    kind: str = hyper("a", "a choice", choices=("a", "b"))

    @torch.no_grad()
    def server(self, s, mean, r):
        s.x.mul_(0.25)

    @property
    def half(self):
        return 1 / 2.5

    @staticmethod
    def third():
        return 1 / 3.5

    fourth = functools.partialmethod(lambda self, by: by, 4.5)

    @functools.cached_property
    def fifth(self):
        return self.cached() + 5.5

    @functools.lru_cache
    def cached(self):
        return factor()
"""


@pytest.mark.parametrize("old", ["0.25", "2.5", "3.5", "4.5", "5.5", "0.5", '("a", "b")'])
def test_what_decorators_hide(old):
    def digest(text: str) -> list[str]:
        names = {"__name__": "__main__"}
        exec(compile(text, "script.py", "exec", dont_inherit=True), names)
        return [*of(Given(names["Mine"])).values()]

    assert digest(WRAPPED) == digest(WRAPPED)
    assert digest(WRAPPED) != digest(WRAPPED.replace(old, '("a", "c")' if "a" in old else "9.5"))


IMPORTS = (
    "import collections, dataclasses, decimal, enum, functools, operator, types\nimport torch\nfrom torch import nn\n"
)
EDITS = {  # what counts, and two values of it
    "def f(x, a={}): return a": ("1", "2"),
    "def f(x): return f.scale\nf.scale = {}": ("1", "2"),
    "def g(a): return lambda x: a\nf = g({})": ("[1]", "[2]"),
    "f = functools.partial({}, 1)": ("max", "min"),
    "N = {}\ndef f(x): return N": ("torch.relu", "torch.tanh"),
    "N = ({},)\ndef f(x): return N": ("torch.float32", "torch.float64"),
    "N = [{}]\ndef f(x): return N": ("range(3)", "range(4)"),
    "N = {}, 1\ndef f(x): return N": ("torch.tensor([1j])", "torch.tensor([2j])"),
    "N = types.SimpleNamespace(a={})\ndef f(x): return N.a": ("1", "2"),
    "N = operator.itemgetter({})\ndef f(x): return N(x)": ("0", "1"),
    "N = decimal.Decimal({})\ndef f(x): return N": ("'1'", "'2'"),
    "N = collections.deque([{}])\ndef f(x): return N": ("1", "2"),
    "N = {}\ndef f(x): return N['a']": ("dict(a=dict(b=1), c=2)", "dict(a=dict(b=1, c=2))"),
    "@dataclasses.dataclass(slots=True)\nclass N:\n    a: int\nM = N({})\ndef f(x): return M": ("1", "2"),
    "class N(dict):\n    def g(self): return {}\nM = N()\ndef f(x): return M.g()": ("1", "2"),
    "class N(float):\n    def g(self): return {}\nM = N(3)\ndef f(x): return M.g()": ("1", "2"),
    "class N(enum.IntEnum):\n    A = 1\n    def g(self): return {}\ndef f(x, n=N.A): return n.g()": ("1", "2"),
    "class M(type):\n    def g(cls): return {}\nclass f(metaclass=M): pass": ("1", "2"),
    "f = nn.CrossEntropyLoss(weight=torch.tensor([1.0, {}]))": ("1", "2"),
    "class N(nn.Module):\n    pass\nf = N()\nf.k = {}": ("(1, 2)", "(1, 3)"),
}  # fmt: skip


def in_memory(text: str, use: str = "None") -> list[list[str]]:
    """Digests of ``f`` in a script, before and after it is used."""
    names = {"__name__": "__main__"}
    exec(compile(IMPORTS + text, "script.py", "exec", dont_inherit=True), names)
    before = [*of(Given(names["f"])).values()]
    eval(use, names)
    return [before, [*of(Given(names["f"])).values()]]


@pytest.mark.parametrize("text", EDITS)
def test_whatever_an_object_holds_counts(text):
    one, same, other = (in_memory(text.replace("{}", value))[0] for value in (*EDITS[text][:1] * 2, EDITS[text][1]))
    assert one == same
    assert one != other


@pytest.mark.parametrize(
    ("text", "use"),
    {
        "class N:\n    __slots__ = ('a',)\nN0 = N()\nN0.a = 1\ndef f(x): return N0": "__import__('copy').copy(N0)",
        "class N:\n    @functools.cached_property\n    def a(self): return 1\nM = N()\ndef f(x): return M.a": "f(1)",
        "@functools.singledispatch\ndef g(x): return 0\ndef f(x): return g(x)": "f(1)",
        "class N:\n    pass\nA = N()\nA.both = {A, 'b'}\ndef f(x): return A": "f(1)",
        "class N:\n    def __getattr__(self, name): return None\nA = N()\ndef f(x): return A": "f(1)",
        "N = nn.BatchNorm1d(2)\ndef f(x): return N(x)": "f(torch.ones(2, 2))",
        "N = torch.Generator()\ndef f(x): return torch.rand(1, generator=N)": "f(1)",
    }.items(),
)
def test_use_is_no_edit(text, use):
    before, after = in_memory(text, use)
    assert before == after


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "import fresh.deep\ndef f(x): return fresh.deep.g(x)",
        "def f(x):\n    import fresh.deep\n    return fresh.deep.g(x)",
        "def f(x):\n    from fresh import deep\n    return deep.g(x)",
    ],
)
def test_modules_that_an_object_uses_count(tmp_path, monkeypatch, text, init):
    """Also those in a folder without __init__.py, and those that a function imports when it is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fresh").mkdir()
    if init:
        (tmp_path / "fresh" / "__init__.py").write_text("")
    digests = []
    for value in ("1", "1", "2"):
        (tmp_path / "fresh" / "deep.py").write_text(f"def g(x): return {value}\n")
        digests.append(in_memory(text)[0])
        for name in ("fresh.deep", "fresh"):
            sys.modules.pop(name, None)
    assert digests[0] == digests[1] != digests[2]


def test_a_compiled_copy_has_the_same_digest(tmp_path):
    """Its equal constants are one object, where they are several in code that was just compiled."""
    import marshal

    text = "def made():\n    def f(x=(1, 2)):\n        return x, (1, 2), {'a', 'b'}\n    return f, lambda: (1, 2)\n"
    fresh = compile(text, "m.py", "exec", dont_inherit=True)
    digests = []
    for code in (fresh, marshal.loads(marshal.dumps(fresh))):
        names = {"__name__": "__main__"}
        exec(code, names)
        digests.append([*of(Given(names["made"])).values()])
    assert digests[0] == digests[1]


def test_an_object_that_can_be_imported_is_its_file(tmp_path, monkeypatch):
    (tmp_path / "to_import.py").write_text(
        "def f(classes, shape):\n    return None\n\n\ndef g():\n    return lambda: 1\n"
    )
    monkeypatch.chdir(tmp_path)
    f = load_object("--model", "to_import:f", "")
    assert of(Given(f)) == of("to_import:f") == of("to_import.py:f")
    assert next(iter(of(Given(sys.modules["to_import"].g())))).startswith("to_import:g.<locals>.<lambda> (Python ")


def test_layers_of_a_module():
    from torch import nn

    plain, other = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert of(Given(plain)) == of(Given(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert of(Given(plain)) != of(Given(other))


def test_a_module_of_ones_own_may_have_the_name_of_a_standard_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "antigravity.py").write_text("f = 1\n")
    assert len(of("antigravity:f")["antigravity.py"]) == 64


def test_neighbours_of_an_installed_module_are_others_code(tmp_path, monkeypatch):
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "mine_alone.py").write_text("import others_alone\n")
    (packages / "others_alone.py").write_text("")
    monkeypatch.syspath_prepend(packages)
    assert list(of("mine_alone:f")) == ["mine_alone.py"]


def numbered(value):
    return lambda outputs, targets: outputs * value


class Weights:
    def __init__(self, weights):
        self.weights = weights


MADE = {
    "an array": lambda n: numbered(np.array([1, n])),
    "a tensor": lambda n: numbered(torch.tensor([1.0, n])),
    "a scalar of numpy": lambda n: numbered(np.float32(n)),
    "an object with an array": lambda n: numbered(Weights(np.array([n]))),
    "a partial function": lambda n: own.of_functions(Task, functools.partial(max, n), None, None),
    "a loss of a library": lambda n: own.of_functions(Task, nn.HuberLoss(reduction="none", delta=n), None, None),
    "the value of sums": lambda n: own.of_functions(Task, max, {"m": summed(max, lambda sums: sums[0] * n)}, "m"),
}


@pytest.mark.parametrize("what", MADE)
def test_what_functions_hold_counts(what):
    one, same, other = (Given(MADE[what](n)) for n in (1, 1, 2))
    assert of(one) == of(same)
    assert [*of(one).values()] != [*of(other).values()]
