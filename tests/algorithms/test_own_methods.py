"""A user's own method that is wrong is refused in one line, before the run has written anything."""

from __future__ import annotations

import pytest
import torch
from method_cases import PAPER
from ranks import is_root
from tiers import slow

from fedlada_mpi.algorithms import Algorithm, create, find, hyper, names, resolve
from fedlada_mpi.algorithms.base import Traits
from fedlada_mpi.algorithms.declarations import check_names
from fedlada_mpi.algorithms.dry_run import dry_run
from fedlada_mpi.algorithms.fedadam import FedAdam
from fedlada_mpi.run import main, parse
from fedlada_mpi.support.errors import UserError

HEAD = """\
import random

import numpy as np
import torch

from fedlada_mpi.algorithms import Algorithm, hyper

SEEN = []


class Mine(Algorithm):
    """

TENSORS = [[slice(0, 4)], [slice(4, 7)]]

WRONG = {
    "lr: float = hyper(0.1, 'a rate')": "lr cannot be its own setting, as all methods have it: rename it",
    "slots: float = hyper(0.1, 'a share')": "slots cannot be its own setting",
    "resume: bool = hyper(False, 'go on')": "resume cannot be its own setting",
    "no_flip: bool = hyper(False, 'as they are')": "no_flip cannot be its own setting, as --no-flip is the opposite of",
    "cut: bool = hyper(True, 'cut')\n    no_cut: float = hyper(0.1, 'share')": "no_cut cannot be its own setting",
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
    "def direction(self, c, s, g): return g + s.v": (
        "s.v is none of the vectors here, which are x: declare it in down or derived, or for server alone in private ("
    ),
    "private = ('h',)\n    def direction(self, c, s, g): return g + s.h": "s.h is none of the vectors here",
    "slots = ('mm',)\n    def direction(self, c, s, g): return g + c.m": (
        "c.m is none of the vectors here, which are x, g, mm, steps, compute_copy (did you mean 'mm'?): declare it in "
        "slots or client_state"
    ),
    "def direction(self, c, s, g): return g * c.k": "c.k is none of the vectors here",
    "def finish(self, c, s, r): return {**super().finish(c, s, r), 'v': c.x}": (
        "finish returns 'v', expected offset: declare it in up or scalars, or leave it out"
    ),
    "def direction(self, c, s, g): return g / g.norm()": (
        "direction mixes clients: the result of one depends on who trains with it; g is [C, d], a row for each client: "
        "reduce over dim=1, keepdim=True"
    ),
    "def direction(self, c, s, g): return g - g.mean(0)": "direction mixes clients",
    "def direction(self, c, s, g): return g / g.norm(dim=1, keepdim=True) if g.norm() > 1 else g": "direction mixes",
    # Thresholds that no trial comes near, although a run may.
    "def finish(self, c, s, r):\n        v = s.x - c.x\n        far = v.norm() < 12.8\n"
    "        return {'offset': v if far else v / v.norm(dim=1, keepdim=True)}": (
        "finish mixes clients: it decides by a number of all that train together, as in if g.norm() > 1"
    ),
    "def direction(self, c, s, g): return -g if g.abs().max().item() > 1e30 else g": "direction mixes clients: it",
    "def begin(self, c, s, r):\n        super().begin(c, s, r)\n        float(c.steps.max())": "begin mixes clients",
    "def before_clip(self, c, s, g): return g * 2 if (g.norm(dim=1) > 50).any() else g": "before_clip mixes clients",
    "def after_decay(self, c, s, d): return d / len(d)": "after_decay mixes clients",
    "def point(self, c, s, lr): return c.x + c.x.std(0, correction=0)": "point mixes clients: the point of one",
    "def begin(self, c, s, r):\n        super().begin(c, s, r)\n        c.x.mul_(len(c.x))": "begin mixes clients: c.x",
    "client_state = ('h',)\n    def finish(self, c, s, r):\n        c.h.add_(c.x.mean(0))\n"
    "        return super().finish(c, s, r)": "finish mixes clients: c.h",
    # Far below x, which the clip keeps close together, and below its last digits in single precision.
    "def point(self, c, s, lr): return c.x + 1e-3 * (c.x - c.x.median(0).values)": "point mixes clients: the point",
    "def finish(self, c, s, r):\n        v = super().finish(c, s, r)['offset'] * 1e-3\n"
    "        return {'offset': v @ v.T @ v}": "finish mixes clients: offset",
    "def directon(self, c, s, g): return -g": (
        "directon is none of a method's hooks and declarations (did you mean 'direction'?): rename it, with _ in front "
        "if it is your own"
    ),
    "def server_step(self, s, mean, r): super().server(s, mean, r)": "(did you mean 'server'?)",
    "def beforeClip(self, c, s, g): return -g": "(did you mean 'before_clip'?)",
    "ups = ('offset', 'v')": "ups is none of a method's hooks and declarations (did you mean 'up'?)",
    "client_states = ('h',)": "(did you mean 'client_state'?)",
    "def __init__(self, *given):\n        super().__init__(*given)\n        self.slot = ('m',)": "mean 'slots'?",
    "def direction(self, c, s, g):\n        self.m = g.clone()\n        return g": (
        "direction changes self.m, which other ranks do not see and a resume does not bring back: keep it in slots (of "
        "a round), client_state (of a client, from round to round) or private (of the server); set what stays as it is"
    ),
    "seen = []\n    def server(self, s, mean, r):\n        self.seen.append(r.t)\n        super().server(s, mean, r)": (
        "server changes self.seen"
    ),
    "def __init__(self, *given):\n        super().__init__(*given)\n        self.m = torch.zeros(1)\n"
    "    def direction(self, c, s, g): return g + self.m.add_(1)": "direction changes self.m",
    "def __init__(self, *given):\n        super().__init__(*given)\n        self.kept = {'m': [torch.zeros(1)]}\n"
    "    def derive(self, s, x_previous, r): self.kept['m'][0].add_(1)": "derive changes self.kept",
    "def begin(self, c, s, r):\n        s.x.mul_(0.5)\n        super().begin(c, s, r)": (
        "begin writes to s.x, which belongs to all clients: only start, server and derive may"
    ),
    "down = ('x', 'v')\n    def direction(self, c, s, g):\n        s.v.add_(1)\n        return g": (
        "direction writes to s.v"
    ),
    "def finish(self, c, s, r):\n        s.x.sub_(1)\n        return super().finish(c, s, r)": "finish writes to s.x",
    "def server(self, s, mean, r): s.x.add_(np.random.default_rng().random())": "server gives another result",
    "derived = ('v',)\n    def derive(self, s, x_previous, r): s.v.fill_(random.random())": "derive gives another",
    "def point(self, c, s, lr): return c.x - lr.mul_(0.5)": "point writes to lr, which later steps read",
    "derived = ('v',)\n    def server(self, s, mean, r):\n        super().server(s, mean, r)\n        s.v.copy_(s.x)": (
        "server writes to s.v, which every rank computes for itself: write it in derive, or declare it in down"
    ),
    "def direction(self, c, s, g): return g + torch.randn(7)": (
        "direction: got random numbers of shape [7] for 2 clients at once, expected [2, ...]: a row for each client"
    ),
    "def direction(self, c, s, g): return g * torch.rand(())": "direction: got random numbers of shape []",
    "def direction(self, c, s, g): return g[:, torch.randperm(7)]": "direction: the random operation randperm",
    "def direction(self, c, s, g): return g * random.random()": (
        "direction gives another result for the same vectors, which no other rank and no resume would repeat: draw "
        "random numbers with torch, not with random or numpy"
    ),
    "def server(self, s, mean, r): s.x.sub_(mean['offset'], alpha=np.random.rand())": "server gives another result",
    "def finish(self, c, s, r): return {'offset': (s.x - c.x) * np.random.default_rng().random()}": "finish gives",
    "def direction(self, c, s, g):\n        SEEN.append(1)\n        return g * len(SEEN)": "direction gives another",
    "def __init__(self, *given):\n        super().__init__(*given)\n        self.share = random.random()": (
        "__init__ gives self.share another value each time"
    ),
    "def communicates(self, t): return torch.rand(()) < 0.5": "communicates(t) gives another answer each time",
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
    return create(resolve(dict(algorithm=name)).config, TENSORS)


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


RIGHT = {
    # A threshold for each client.
    "def direction(self, c, s, g): return g / g.norm(dim=1, keepdim=True).clamp(min=1)": (),
    "def direction(self, c, s, g):\n        for row in g:\n            if row.norm() > 1: row.div_(row.norm())\n"
    "        return g": (),
    "step_index = True\n    def point(self, c, s, lr): return c.x - float(lr) * c.x if c.k[0] == 0 else None": (),
    # Helpers, private names, and a base class of the user's.
    "def direction(self, c, s, g): return self.directions(g)\n    def directions(self, g): return -g": (),
    "_directon = 3\n    def server(self, s, mean, r): getattr(self, 'server_step')(s, mean)\n"
    "    def server_step(self, s, mean): s.x.sub_(mean['offset'])": (),
    "def direction(self, c, s, g): return _shared(g)": (),
    # What it draws, and a generator of its own that is made anew.
    "def direction(self, c, s, g): return g + torch.randn_like(g)": (),
    "def __init__(self, *given):\n        super().__init__(*given)\n        self.mask = torch.rand(3)": (),
    "def direction(self, c, s, g):\n        own = torch.Generator().manual_seed(1)\n"
    "        return g[:, torch.randperm(g.shape[1], generator=own)]": (),
    "mu: float = 0.1\n    def direction(self, c, s, g): return g * self.mu": (
        "mu = 0.1 is a constant: mu: float = hyper(0.1, ...) makes it a setting of Mine",
    ),
    "EPS = 1e-8\n    def direction(self, c, s, g): return g + self.EPS": (),
    "def describe(self): return 'mine'": (
        "nothing calls Mine.describe: it is none of a method's hooks and declarations",
    ),
}


@pytest.mark.parametrize("body", RIGHT)
def test_what_is_right_is_taken_and_may_get_a_note(own, body):
    method = made(own(f"{body}\n\n\ndef _shared(g): return torch.where(torch.rand_like(g) < 0.5, g, 0)"))
    assert method.traits.notes == RIGHT[body]
    assert method.traits.draws == any(word in body for word in ("torch.rand(", "rand_like", "randn_like", "_shared"))


def test_a_note_is_printed_once(own, tmp_path, capsys):
    name = own("mu = 0.1\n    def direction(self, c, s, g): return g * self.mu")
    assert main(["--algorithm", name, "--rounds", "1", "--out", str(tmp_path / "out"), "--eval-every", "0"]) == 0
    assert capsys.readouterr().out.count("mu = 0.1 is a constant: mu: float = hyper(0.1, ...)") == 1


def test_names_of_mixins_and_of_what_is_inherited():
    class Mixin:
        def directon(self, g):
            return g

    class Mine(Mixin, FedAdam):
        def second_moment(self, v, delta):
            super().second_moment(v, delta)

    with pytest.raises(UserError, match=r"directon .* \(did you mean 'direction'\?\)"):
        check_names(Mine(resolve(dict(algorithm="fedadam")).config))
    del Mixin.directon
    assert check_names(Mine(resolve(dict(algorithm="fedadam")).config)) == []


def test_a_constant_in_place_of_an_inherited_setting_is_refused():
    with pytest.raises(TypeError, match=r"beta1 is a setting that it inherits, so that beta1 = 0\.5 has no"):
        type("Mine", (FedAdam,), {"beta1": 0.5})
    assert type("Mine", (FedAdam,), {"beta1": hyper(0.5, "mine")}).hypers["beta1"].default == 0.5


def test_settings_of_a_mixin_take_no_names_either():
    with pytest.raises(TypeError, match="lr cannot be its own setting"):
        type("Mine", (type("Mixin", (), {"lr": hyper(0.5, "mine")}), Algorithm), {})


def test_a_setting_that_negates_a_switch_of_another_method(own):
    name = own("no_nesterov: float = hyper(0.5, 'how much')")
    assert parse(["--algorithm", name, "--no-nesterov", "0.25"])[0].settings["no_nesterov"] == "0.25"


MODES = [(name, mode) for name in names() for mode in ("l2", "decoupled", *(["inside"] * find(name).amends))]


@pytest.mark.parametrize(("name", "mode"), [pair if pair[0] in PAPER else slow(*pair) for pair in MODES])
def test_the_trial_accepts_every_built_in_method(name, mode):
    config = resolve(dict(algorithm=name, decay_mode=mode, clip=0.5, weight_decay=0.1, decay_on="weights")).config
    assert dry_run(create(config, TENSORS), TENSORS) == Traits()
