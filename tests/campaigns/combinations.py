"""Random combinations of a method, data, and settings: one result on every path, or refused in one line.

    python tests/campaigns/combinations.py --trials 100 --out one               one process
    mpirun -n 3 python tests/campaigns/combinations.py --trials 100 --out one   then the same bits on three ranks
    mpirun -n 4 python tests/campaigns/combinations.py --secure --trials 100 --out masked
    mpirun -n 6 python tests/campaigns/combinations.py --secure --trials 100 --out masked

In one process a run is repeated with several clients at once and on the generic engine, which must agree up to
rounding, and with a resume after a random round, which must have the same bits. With --secure the first number of ranks
compares masked sums with unmasked ones. Prints a row of a table for each path and each refusal; ends with 1 if a result
differed, or if anything but one line came of settings that do not fit each other.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import torch
from ranks import SIZE, barrier, communicator, is_root
from training_runs import without_times

from fedlada_mpi import algorithms
from fedlada_mpi.run import main as run

ROUNDS = 4
CLOSE = 1e-7  # of the largest parameter, in double precision
# Not exact, as their sums are taken in any order; bytes_mpi depends on the ranks.
INEXACT = {
    "bytes_mpi",
    "drift",
    "drift_ratio",
    "direction_cosine",
    "gradient_norm",
    "gradient_norm_z",
    "step_cosine",
    "step_change",
}
Settings = dict[str, Any]

# By the kind of campaign: what else is computed, with which change, and whether the bits must be the same.
PATHS: dict[str, list[tuple[str, Settings, bool]]] = {
    "alone": [("several at once", {"max_clients_at_once": 5}, False), ("generic", {"engine": "generic"}, False)],
    "ranks": [],
    "secure": [("unmasked", {"secure_neighbours": 0}, True)],
}


def draw(seed: int) -> Settings:
    """Most of the settings that decide what is computed."""
    r = random.Random(seed)

    def maybe(share: float, **choices: list[Any]) -> Settings:
        return {name: r.choice(values) for name, values in choices.items()} if r.random() < share else {}

    other = ["randhie", "dd", "digit-masks", "digit-mosaics"]
    settings = dict(
        dataset=r.choice(["digits"] * 6 + other), algorithm=r.choice(algorithms.names()), rounds=ROUNDS,
        precision="fp64", sums="exact", seed=r.randrange(100), lr=r.choice([0.003, 0.03]), device="cpu",
        batch_size=r.choice([0, 5, 7, 10]), checkpoint_every=1, eval_every=r.choice([0, 1, 2, 3]),
        lr_schedule=r.choice(["exponential", "constant", "cosine", "step"]), lr_horizon=ROUNDS + 2, lr_step=2,
    )  # fmt: skip
    for unread in {"cosine": ["lr_step"], "step": ["lr_horizon"]}.get(
        settings["lr_schedule"], ["lr_step", "lr_horizon"]
    ):
        del settings[unread]
    if settings["dataset"] == "digits":
        settings |= dict(clients=r.choice([8, 10, 13]), model=r.choice(["cnn", "cnn", "mlp"]))
        settings |= maybe(0.7, partition=["dirichlet", "iid", "pathological"], activation=["relu", "gelu", "smu"])
        settings |= maybe(0.5, augment=["paper"], crop=["half", "always", "never"], flip=[True, False])
        settings |= maybe(0.3, validation=[0.1]) | maybe(0.3, size_sigma=[0.5, 1.0])
    settings |= maybe(0.5, local_steps=[1, 3]) or {"local_epochs": 1}
    settings |= maybe(0.6, participation=[0.3, 0.5, 1.0]) | maybe(0.3, sampling=["bernoulli"])
    settings |= maybe(0.3, weighting=["size"]) | maybe(0.2, robust=["median", "trimmed", "clip"])
    settings |= maybe(0.3, lr_warmup=[2]) | maybe(0.3, server_lr=[0.5, 1.3]) | maybe(0.5, clip=[0, 0.5])
    settings |= maybe(0.7, weight_decay=[0, 0.01], decay_mode=["l2", "decoupled"], decay_on=["all", "weights"])
    settings |= maybe(0.3, eval_clients=[1, 2]) | maybe(0.3, eval_train_every=[0, 2]) | maybe(0.2, diagnose=[1, 2])
    settings |= maybe(0.2, on_nonfinite=["skip"]) | maybe(0.15, lora=[2]) | maybe(0.2, data_on=["host", "disk"])
    return settings | maybe(0.2, server_trains=[True])


def secure(settings: Settings) -> Settings:
    """Without what --secure has no room for, and with clients of all silos in every round."""
    names = "sums", "eval_clients", "diagnose", "robust", "server_trains", "sampling"
    return {k: v for k, v in settings.items() if k not in names} | {"secure": True, "participation": 1.0}


def words(settings: Settings) -> Iterator[str]:
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}={value}"


def result(folder: Path) -> tuple[torch.Tensor, list[Settings]]:
    """All parameters in one vector, and the records of the rounds without what is not exact."""
    state = torch.load(folder / "model.pt", weights_only=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in without_times(one).items() if k not in INEXACT} for one in records]
    return torch.cat([value.double().flatten() for value in tensors(state)]), kept


def tensors(state: Any) -> list[torch.Tensor]:
    """Those of a model, and of adapters, whose file has more than them."""
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors(value)]
    return [state] if isinstance(state, torch.Tensor) else []


class Campaign:
    def __init__(self, out: Path, secure: bool, ranks: int):
        self.out, self.secure, self.ranks = out, secure, ranks
        self.taken: Counter[tuple[str, str]] = Counter()
        self.failures = 0

    def trial(self, seed: int) -> None:
        settings, folder = draw(seed), self.out / str(seed)
        if self.secure:
            settings = secure(settings)
        kept = folder / "said.txt"
        known = kept.exists()
        barrier()
        said = self.run(folder / (f"{self.ranks}-ranks" if known else "first"), settings)
        if not is_root():
            pass
        elif known:
            self.compare(f"{self.ranks} ranks", seed, said, kept.read_text())
        else:
            folder.mkdir(parents=True, exist_ok=True)
            kept.write_text(said)
            good = not said or re.fullmatch(r"[23]: error: [^\n]+", said)
            self.count("first", "finished" if not said else re.sub(r"\d[\d.]*", "N", said), seed, bool(good))
        if known or said:
            return
        for name, change, exact in PATHS["secure" if self.secure else "alone" if self.ranks == 1 else "ranks"]:
            self.compare(name, seed, self.run(folder / name.replace(" ", "-"), settings | change), exact=exact)
        first_part = settings | {"rounds": random.Random(seed).randrange(1, ROUNDS)}
        if not self.secure and not self.run(folder / "resumed", first_part):
            self.compare("resumed", seed, self.run(folder / "resumed", settings, "--resume"))

    def run(self, folder: Path, settings: Settings, *more: str) -> str:
        """What a run that does not finish says, after its status."""
        printed = io.StringIO()
        given = {**settings, "out": folder, "data_dir": self.out / "data"}
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            try:
                status: Any = run([*words(given), *more])
            except SystemExit as end:
                status = end.code
            except BaseException:
                status = traceback.format_exc()
        barrier()
        return "" if status == 0 else f"{status}: {printed.getvalue()}".strip()

    def compare(self, path: str, seed: int, said: str, expected: str = "", exact: bool = True) -> None:
        if not is_root():
            return
        outcome = "the same" if said == expected else f"says {said!r}, not {expected!r}"
        if not said and not expected:
            outcome = self.difference(self.out / str(seed), path.replace(" ", "-"), exact) or outcome
        self.count(path, outcome, seed, outcome == "the same")

    def difference(self, folder: Path, path: str, exact: bool) -> str:
        (x, first), (other, records) = result(folder / "first"), result(folder / path)
        distance = (x - other).abs().max().item()
        if distance > (0.0 if exact else CLOSE * x.abs().max().item()):
            return f"differs by {distance:.1e}"
        pairs = [(k, a[k], b[k]) for a, b in zip(first, records, strict=True) for k in a] if exact else []
        # A run that is resumed has been evaluated after its last round before, too.
        odd = [pair for pair in pairs if pair[1] != pair[2] and not (path == "resumed" and pair[1] is None)]
        return f"differs in {odd}" if odd else ""

    def count(self, path: str, outcome: str, seed: int, good: bool) -> None:
        self.taken[path, outcome if good else "otherwise"] += 1
        if not good:
            self.failures += 1
            print(f"FAILED {path} of trial {seed}: {outcome[:900]}\n  {draw(seed)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next has the next one")
    parser.add_argument("--out", type=Path, required=True, help="where results are kept")
    parser.add_argument("--secure", action="store_true", help="masked sums, on at least 4 ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    campaign = Campaign(options.out, options.secure, communicator().size if SIZE > 1 else 1)
    for seed in range(options.seed, options.seed + options.trials):
        campaign.trial(seed)
    for (path, outcome), count in sorted(campaign.taken.items()):
        print(f"| {path} | {count} | {outcome} |")
    return int(campaign.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
