"""A user's own method that is wrong is refused in one line, before the run has written anything."""

from __future__ import annotations

import pytest
import torch
from ranks import is_root

from fedlada_mpi.algorithms import create, find, names, resolve
from fedlada_mpi.algorithms.dry_run import dry_run
from fedlada_mpi.run import main
from fedlada_mpi.support.errors import UserError

HEAD = "import torch\nfrom fedlada_mpi.algorithms import Algorithm, hyper\n\n\nclass Mine(Algorithm):\n    "

WRONG = {
    "lr: float = hyper(0.1, 'a rate')": "lr cannot be its own setting, as all methods have it: rename it",
    "slots: float = hyper(0.1, 'a share')": "slots cannot be its own setting",
    "resume: bool = hyper(False, 'go on')": "resume cannot be its own setting",
    "presets = {'': dict(weight_deca=0.1)}": "unknown setting 'weight_deca' (did you mean 'weight_decay'?)",
    "requires = dict(sever_lr=1.0)": "unknown setting 'sever_lr' (did you mean 'server_lr'?)",
    "down = ('x', 'v', 'v')": "v is declared twice in down, derived and private: leave one of them",
    "private = ('x',)": "x is declared twice in down, derived and private",
    "down = ('v',)": "down: got ('v',), expected x among them",
    "slots = ('m')": """slots: got 'm', expected a tuple of names, such as ("x",)""",
    "private = None": "private: got None, expected a tuple of names",
    "slots = ('g',)": "slots and client_state: g is one that all clients have",
    "uniform = ('v',)": "uniform: v is neither in up nor in scalars",
    "gradients = 3": "gradients: got 3, expected 1 or 2",
    "up = ('offset', 'v')": "finish returns offset, expected a dict with v, which is declared in up or scalars",
    "def finish(self, c, s, r): pass": "finish returns NoneType, expected a dict with offset",
    "def finish(self, c, s, r): return {'offset': s.x}": "finish, offset returns [7], expected a tensor [C, d], here",
    "scalars = ('n',)\n    def finish(self, c, s, r): return {**super().finish(c, s, r), 'n': c.x}": (
        "finish, n returns [2, 7], expected a tensor [C, 1], here [2, 1]"
    ),
    "def direction(self, c, s, g): g.add_(1)": "direction returns NoneType, expected a tensor [C, d], here [2, 7]",
    "def point(self, c, s, lr): return s.x": "point returns [7], expected a tensor [C, d]",
    "def direction(self, c, s, g): return g + s.v": "'Vectors' object has no attribute 'v' (",
    "private = ('h',)\n    def direction(self, c, s, g): return g + s.h": "'Vectors' object has no attribute 'h' (",
    "def server(self, s, mean, r): s.x = s.x - mean['offset']": "x = ... does not update the vector x: write in place",
    "slots = ('m',)\n    def direction(self, c, s, g): return c.m.mul_(0.9).add_(g)": (
        "direction returns c.m, which the step would overwrite: return c.m.clone()"
    ),
    "slots = ('m',)\n    def direction(self, c, s, g): return g.copy_(c.m.mul_(0.9).add_(g))": (
        "begin leaves values of another client in c.m: set all slots"
    ),
    "def begin(self, c, s): pass": "takes 3 positional arguments but 4 were given",
}


@pytest.fixture
def own(tmp_path):
    def write(body: str) -> str:
        (tmp_path / "mine.py").write_text(HEAD + body + "\n")
        return f"{tmp_path / 'mine.py'}:Mine"

    return write


def made(name: str):
    return create(resolve(dict(algorithm=name)).config, [[slice(0, 4)], [slice(4, 7)]])


@pytest.mark.parametrize("body", WRONG)
def test_a_wrong_method_is_one_clear_line(own, body):
    name = own(body)
    with pytest.raises(UserError) as found:
        made(name)
    message = str(found.value)
    assert message.startswith(f"--algorithm {name}: ")
    assert WRONG[body] in message
    assert "\n" not in message


def test_what_is_no_method(own, tmp_path):
    path = own("pass").removesuffix(":Mine")
    for name, expected in {
        f"{tmp_path}/none.py:Mine": "No such file",
        f"{path}:torch": "expected a subclass of fedlada_mpi.algorithms.Algorithm",
        f"{path}:hyper": "expected a subclass of fedlada_mpi.algorithms.Algorithm",
        f"{path}:Nine": "has no attribute 'Nine'",
        "fedavgg": "did you mean 'fedavg'?",
    }.items():
        with pytest.raises(UserError) as found:
            find(name)
        assert expected in str(found.value)


def test_a_refused_method_leaves_nothing(own, tmp_path, capsys):
    name, out = own("def direction(self, c, s, g): pass"), tmp_path / "out"
    assert main(["--algorithm", name, "--rounds", "1", "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --algorithm {name}: direction returns NoneType")
    assert not out.exists()


def test_settings_that_it_does_not_have(own, capsys):
    name = own("pull: float = hyper(0.5, 'how strongly', least=0)")
    assert resolve(dict(algorithm=name, pull="0.25")).config.hyper == {"pull": 0.25}
    with pytest.raises(UserError, match=r"unknown setting 'pul' \(did you mean 'pull'\?\)"):
        resolve(dict(algorithm=name, pul=1))
    with pytest.raises(UserError, match=r"--pull: got -1\.0, expected at least 0"):
        resolve(dict(algorithm=name, pull=-1))
    assert main(["--algorithm", name, "--pul", "1"]) == 2
    expected = "error: got '--pul' (did you mean '--pull'?): --help lists the options\n"
    assert capsys.readouterr().err == (expected if is_root() else "")


def test_a_trial_does_not_change_what_is_drawn_later(own):
    name = own("def start(self, s): torch.rand(3)")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    made(name)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("name", names())
def test_the_trial_accepts_every_built_in_method(name):
    dry_run(made(name), [[slice(0, 4)], [slice(4, 7)]])
