"""Users' own methods by the hundred: refused in one line, or the same bits in turns, together and after a resume.

    python tests/campaigns/own_methods.py --trials 300
    python tests/campaigns/own_methods.py --trials 50 --seed 7 --show

Half of the methods are right; the others have one of the errors that would otherwise end in a wrong result without a
message. Prints one row for each kind: how many were tried and how they ended. A right method that is refused, a wrong
one that is taken, an error of another kind and a difference in any bit are wrong; each is printed with its source.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import torch
from training_runs import Data, make_data, without_times

from fedlada_mpi import UserError, train

SIZES = [4, 9, 6, 3, 8]
COMMON = dict(
    sums="exact", rounds=3, local_epochs=1, batch_size=3, participation=0.6, lr=0.01, eval_every=1, model="cnn",
    device="cpu", augment="none", quiet=True, overwrite=True, on_nonfinite="skip",
)  # fmt: skip
HEAD = """\
import random
import numpy as np
import torch
import torch.nn.functional as F
from fedlada_mpi.algorithms import Algorithm, hyper
SEEN = []

class Mine(Algorithm):
    down, derived, private = ("x", "a"), ("b",), ("p",)
    slots, client_state = ("m",), ("h",)
    scalars = ("n",)
    step_index = True
    mu: float = hyper(0.1, "a weight", least=0)
"""
# Hooks in the order of a round, each with its arguments and, with {v}, what it must do and return.
STEP = ("before_clip", "direction", "after_decay")
BODIES = {
    "start": ("s", ["s.a.fill_(0.01)"]),
    "enter": ("c, s", ["c.h.fill_(0.01)"]),
    "begin": ("c, s, r", ["super().begin(c, s, r)", "c.m.zero_()"]),
    "point": ("c, s, lr", ["return c.x + 0.001 * ({v})"]),
    **{hook: (f"c, s, {'d' if hook == 'after_decay' else 'g'}", ["return {v}"]) for hook in STEP},
    "finish": ("c, s, r", ["c.h.mul_(0.5)", "v = s.x - c.x", "return {{'offset': {v}, 'n': c.steps}}"]),
    "server": ("s, mean, r", ["super().server(s, mean, r)", "s.p.add_(mean['n'].item())"]),
    "derive": ("s, x_previous, r", ["s.b.copy_(x_previous).sub_(s.x)"]),
}
RIGHT = (
    "v * 0.5",
    "v / v.norm(dim=1, keepdim=True).clamp(min=1)",
    "v.sign() * v.abs().mean(1, keepdim=True)",
    "v - v.mean(1, keepdim=True)",
    "torch.where(v.abs() >= v.abs().median(1, keepdim=True).values, v, 0)",
    "v.clamp(-1, 1) + self.mu * (c.x - s.x)",
    "v + 0.1 * c.h + s.a + 0.1 * s.b",
    "c.m.mul_(0.9).add_(v).clone()",
    "v * (1 + 0.1 * (c.k % 2))",
    "v / c.steps",
    "v + 0.01 * torch.randn_like(v)",
    "v * torch.bernoulli(torch.full_like(v, 0.5))",
    "F.dropout(v, 0.1)",
    "v + 0.01 * torch.rand(len(v), 1, dtype=v.dtype)",
    "v + 0.01 * torch.empty_like(v).exponential_()",
    "v + 0.01 * torch.distributions.Laplace(torch.zeros_like(v), 1.0).sample()",
)
MIXED = (
    "v / v.norm()",
    "v - v.mean(0)",
    "v / len(v)",
    "v / v.abs().max()",
    "v.cumsum(0)",
    "v - v.median(0).values",
    "torch.roll(v, 1, 0)",
    "v @ v.T @ v",
    "(v if v.norm() < {threshold} else v / v.norm(dim=1, keepdim=True))",
    "(v * 2 if (v.norm(dim=1) > {threshold}).any() else v)",
    "v + 0.1 * v[:1]",
)
UNREPEATABLE = (
    "v * random.random()",
    "v + np.random.randn()",
    "v * float(np.random.default_rng().random())",
    "v * (SEEN.append(1) or len(SEEN))",
    "v + torch.randn(v.shape[1])",
    "v * torch.rand(())",
    "v[:, torch.randperm(v.shape[1])]",
    "v + time.time()",
)
STATE = (
    "self.count = getattr(self, 'count', 0) + 1",
    "self.seen.append(1)",
    "self.buffer.add_(1)",
    "self.table['k'] = self.table.get('k', 0) + 1",
    "self.config.clip *= 0.9",
    "type(self).seen.append(1)",
)
UNKNOWN = ("v + c.momentum", "v + s.velocity", "v + s.p", "v * c.full_g")
DECLARED = ("down", "derived", "private", "scalars", "slots", "client_state", "uniform", "gradients", "presets")


class Source:
    """A method that is right, until one of the errors is put into it."""

    def __init__(self, draw: random.Random):
        self.draw = draw
        self.lines = {hook: list(body) for hook, (_, body) in BODIES.items()}
        self.names = {hook: hook for hook in BODIES}
        self.more: list[str] = []
        self.values = {hook: draw.choice(RIGHT) for hook in (*STEP, "point", "finish")}
        self.left_out = set(draw.sample(sorted(BODIES), draw.randrange(5))) - {"finish", "begin"}

    def text(self) -> str:
        text = HEAD.replace("import random", "import random\nimport time") + "".join(f"    {m}\n" for m in self.more)
        for hook, lines in self.lines.items():
            if hook in self.left_out:
                continue
            arguments = BODIES[hook][0]
            given = arguments.rpartition(", ")[2] if hook in STEP else "c.x.clone()"
            first = [] if hook not in (*STEP, "point") else [f"v = {given}"]
            text += f"    def {self.names[hook]}(self, {arguments}):\n"
            value = self.values.get(hook, "")
            text += "".join(f"        {line.format(v=value) if '{' in line else line}\n" for line in (*first, *lines))
        return text

    def some_hook(self, *hooks: str) -> str:
        hook = self.draw.choice(hooks)
        self.left_out.discard(hook)
        return hook


def mixed(source: Source) -> None:
    hook = source.some_hook(*STEP, "point", "finish")
    threshold = 10 ** source.draw.uniform(-3, 3)
    source.values[hook] = source.draw.choice(MIXED).format(threshold=threshold)


def misspelt(source: Source) -> None:
    name = source.draw.choice((*BODIES, *DECLARED, "up"))
    at = source.draw.randrange(1, len(name) - 1) if len(name) > 2 else 0
    edits = [f"{name}s"]
    if len(name) > 4:
        edits += [name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:]]
        edits += [name[:at] + name[at + 1] + name[at] + name[at + 2 :]] * (name[at] != name[at + 1])
    wrong = source.draw.choice(edits)
    if name in BODIES:
        source.left_out.discard(name)
        source.names[name] = wrong
    else:
        source.more.append(f"{wrong} = ('x', 'y')")


def undeclared(source: Source) -> None:
    source.lines["finish"][-1] = "return {{'offset': {v}, 'n': c.steps, 'w': c.x}}"


def state(source: Source) -> None:
    hook = source.some_hook(*BODIES)
    source.more += ["seen, table, buffer = [], {}, torch.zeros(1)"]
    source.lines[hook].insert(0, source.draw.choice(STATE))


def server_written(source: Source) -> None:
    hook = source.some_hook("enter", "begin", "point", *STEP, "finish")
    name = source.draw.choice(("x", "a", "b"))
    source.lines[hook].insert(0, source.draw.choice((f"s.{name}.mul_(0.5)", f"s.{name} += 1")))


def derived_on_root(source: Source) -> None:
    source.left_out.discard("server")
    source.lines["server"].append("s.b.add_(1)")


def unrepeatable(source: Source) -> None:
    hook = source.some_hook(*STEP, "point", "finish")
    source.values[hook] = source.draw.choice(UNREPEATABLE)


def unrepeatable_server(source: Source) -> None:
    hook = source.some_hook("server", "derive")
    source.lines[hook].append(f"s.{'b' if hook == 'derive' else 'a'}.add_({source.draw.choice(RANDOM_NUMBERS)})")


RANDOM_NUMBERS = ("random.random()", "np.random.rand()", "np.random.default_rng().random()", "time.time() % 1")


def unknown(source: Source) -> None:
    hook = source.some_hook(*STEP)
    source.values[hook] = source.draw.choice(UNKNOWN)


ERRORS: dict[str, Callable[[Source], None]] = {
    "clients mixed": mixed,
    "misspelt": misspelt,
    "undeclared in finish": undeclared,
    "state on self": state,
    "server's vectors written by clients": server_written,
    "derived written by server": derived_on_root,
    "unrepeatable, clients": unrepeatable,
    "unrepeatable, server": unrepeatable_server,
    "unknown vectors": unknown,
}


def results(run: Any) -> tuple[Any, torch.Tensor]:
    """The metrics without times, and the model; a signal ends the campaign, as a run that it stopped has other ones."""
    if run.summary["status"] == "stopped":
        raise KeyboardInterrupt
    records = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    model = torch.load(run.dir / "model.pt", weights_only=True)
    kept = [{k: v for k, v in without_times(record).items() if k != "bytes_mpi"} for record in records]
    return kept, torch.cat([value.flatten() for value in model.values()])


def same(a: tuple[Any, torch.Tensor], b: tuple[Any, torch.Tensor]) -> bool:
    return a[0] == b[0] and torch.equal(a[1], b[1])


def close(a: tuple[Any, torch.Tensor], b: tuple[Any, torch.Tensor]) -> bool:
    return bool((a[1] - b[1]).norm() < 1e-4 * a[1].norm())


def attempt(path: Path, data: Data, folder: Path, draw: random.Random) -> str:
    """How the method in ``path`` is taken: refused, same bits, or what is wrong."""
    given = {**COMMON, "dataset": data.shards, "algorithm": f"{path}:Mine", "seed": draw.randrange(100)}
    try:
        together = results(train(**given, out=folder / "together", max_clients_at_once=3))
        in_turns = results(train(**given, out=folder / "turns", max_clients_at_once=1))
        results(train(**{**given, "rounds": draw.choice((1, 2))}, out=folder / "resumed"))
        resumed = results(train(**{**given, "overwrite": False, "resume": True}, out=folder / "resumed"))
    except UserError as error:
        return "refused" if "\n" not in str(error) else f"several lines: {error}"
    except Exception:
        return f"no message: {traceback.format_exc()}"
    # Torch sums a row alone in another order than in a stack.
    sums_rows = re.search(r"dim=1|\(1, keepdim", path.read_text())
    if not (close if sums_rows else same)(in_turns, together):
        return "other bits in turns"
    return "same bits" if same(resumed, in_turns) else "other bits after a resume"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200, help="methods [200]")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of the methods [the time]")
    parser.add_argument("--show", action="store_true", help="print how each is taken")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    taken: defaultdict[str, Counter[str]] = defaultdict(Counter)
    wrong, start = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder / "data", SIZES)
        for trial in range(arguments.trials):
            draw = random.Random(f"{arguments.seed} {trial}")
            source, kind = Source(draw), "right"
            if trial % 2:
                kind = draw.choice(sorted(ERRORS))
                ERRORS[kind](source)
            path = folder / f"method_{trial}.py"
            path.write_text(source.text())
            how = attempt(path, data, folder, draw)
            good = how == ("same bits" if kind == "right" else "refused")
            taken[kind][how if good else "WRONG"] += 1
            wrong += not good
            if arguments.show or not good:
                print(f"{trial} {kind}: {how}" + ("" if good else f"\n{source.text()}"), flush=True)
    for kind, counts in sorted(taken.items()):
        print(f"| {kind} | {counts.total()} | {', '.join(f'{n} {how}' for how, n in counts.most_common())} |")
    print(f"{arguments.trials} methods, {wrong} wrong, {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
