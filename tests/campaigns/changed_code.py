"""Users' code that is edited while runs are under way, and run directories of strangers, at random.

    python -m tests.campaigns.changed_code --trials 60 --seed 0

A trial writes a method, a model and what they import, in one of several layouts. Of a run, or of a grid, that was
started with them, the next start must refuse every edit of that code and of nothing else, name the file, and go on
where that is accepted. Of a stranger's run, no command may run a line of code without --trust. Prints one row per kind:
what was tried | how often. Ends with 1 if anything was otherwise, naming the trial.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from fork_server import ForkServer
from PIL import Image

from data_prep import PrepareSettings, prepare

METHOD = """from fedlada_mpi.algorithms import Algorithm, hyper
{import_helper}

class Mine(Algorithm):
    pull: float = hyper(0.5, "how strongly")

    def direction(self, c, s, g):
        return g.mul_({helper}.FACTOR)
"""
MODEL = """from torch import nn
{import_helper}

def net(classes, image_shape):
    rows, columns, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(rows * columns * channels, classes))
"""
HELPER = "from {below} import BASE\n\nFACTOR = 0.5 * BASE\n"
# Files of a layout: method, model, helper, what the helper imports, and one that nobody imports.
LAYOUTS = {
    "files": ("mine.py", "net.py", "factors.py", "base.py", "other.py"),
    "folder": ("methods/mine.py", "methods/net.py", "factors.py", "common/base.py", "methods/other.py"),
    "package": ("own/mine.py", "own/net.py", "own/factors.py", "own/deep/base.py", "own/other.py"),
}
EDITS = {
    "a comment": lambda text: text + "# edited\n",
    "a line at the top": lambda text: "EDITED = 1\n" + text,
    "a number": lambda text: text.replace("0.5", "0.25").replace("1.0", "1.5") + "\n",
    "a function": lambda text: text + "\n\ndef added():\n    return 1\n",
}
LEAVES_A_MARK = "import os\nopen(os.environ['MARK'], 'a').close()\n"


class Project:
    """A folder with code of one's own in one of the layouts; ``first``: a line that every file begins with."""

    def __init__(self, folder: Path, chance: random.Random, first: str):
        self.folder, self.layout = folder, chance.choice(sorted(LAYOUTS))
        files = LAYOUTS[self.layout]
        helper, below = (name.removesuffix(".py").replace("/", ".") for name in files[2:4])
        imports = f"import {helper}\n"
        texts = [METHOD.format(import_helper=imports, helper=helper), MODEL.format(import_helper=imports)]
        for name, text in zip(files, [*texts, HELPER.format(below=below), "BASE = 1.0\n", "BASE = 1.0\n"], strict=True):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(first + text)
        self.counts, self.unrelated = [folder / name for name in files[:4]], folder / files[4]
        by_module = self.layout == "package" or chance.random() < 0.5
        method, model = (name.removesuffix(".py").replace("/", ".") if by_module else name for name in files[:2])
        self.names = {"algorithm": f"{method}:Mine", "model": f"{model}:net"}
        self.own = [word for setting, name in self.names.items() for word in (f"--{setting}", name)]


class Campaign:
    def __init__(self, work: Path, seed: int, server: ForkServer):
        self.work, self.seed, self.random, self.server = work, seed, random.Random(seed), server
        self.tried: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.trial = 0
        self.data = work / "digits"
        prepare(PrepareSettings("digits", self.data, silos=2))
        self.quick = ["--dataset", str(self.data), "--participation", "0.04", "--local-steps", "1", "--device", "cpu"]

    def command(self, project: Project, *arguments: object, module: str = "fedlada_mpi.run") -> tuple[int, str]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OMPI_")},
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(self.work / "state"),
            "MARK": str(self.work / "mark"),
        }
        command = [self.server.python, "-m", module, *map(str, arguments)]
        done = subprocess.run(command, cwd=project.folder, env=environment, text=True, capture_output=True)
        return done.returncode, done.stdout + done.stderr

    def expect(self, what: str, good: bool, output: str) -> None:
        self.tried[what] += 1
        if not good:
            self.wrong.append(f"trial {self.trial} of seed {self.seed}, {what}: {output[-600:]}")

    def project(self, mark: bool = False) -> Project:
        folder = self.work / f"trial{self.trial}"
        folder.mkdir()
        # No other trial has the same code, which would be known then.
        return Project(folder, self.random, f"# trial {self.trial}\n" + LEAVES_A_MARK * mark)

    def edit(self, project: Project) -> tuple[str, str]:
        """Edit a file, or nothing that counts; returns its name, empty for the latter, and what was done."""
        if self.random.random() < 0.3:
            how = self.random.choice(["nothing", "another file", "the time of a file", "a new file"])
            if how == "another file":
                project.unrelated.write_text("raise SystemExit(1)\n")
            elif how == "the time of a file":
                os.utime(self.random.choice(project.counts), (1, 1))
            elif how == "a new file":
                (project.folder / "new.py").write_text("raise SystemExit(1)\n")
            return "", how
        path, how = self.random.choice(project.counts), self.random.choice(sorted(EDITS))
        path.write_text(EDITS[how](path.read_text()))
        return path.name, how

    def resumed(self) -> None:
        project = self.project()
        by_name = [*self.quick, *project.own, "--out", "run", "--resume"]
        code, output = self.command(project, *by_name, "--rounds", 1)
        self.expect("runs started", code == 0, output)
        name, how = self.edit(project)
        record = self.random.random() < 0.5
        again = ["--resume", "run", "--rounds", 2] if record else [*by_name, "--rounds", 2]
        code, output = self.command(project, *again)
        if not name:
            self.expect("resumed after an edit that does not count", code == 0, f"{how}: {output}")
            return
        # A changed default is a changed setting, unless the settings are those of the record.
        said = code == 2 and (name in output or "pull: 0.5 in the checkpoint" in output) and output.count("\n") == 1
        self.expect("resumed after an edit: refused", said, f"{name}, {how}: {output}")
        accept = ["--accept-changed-code", *(["--trust"] if record else ["--pull", 0.5])]
        code, output = self.command(project, *again, *accept)
        self.expect("the same with --accept-changed-code: goes on", code == 0 and "round 2/2" in output, output)
        code, output = self.command(project, "--resume", "run", "--rounds", 3)
        self.expect("and once more without it", code == 0, output)

    def grid(self) -> None:
        project = self.project()
        settings = [f'{setting} = "{name}"' for setting, name in project.names.items()]
        quick = ['device = "cpu"', "participation = 0.04", "local_steps = 1", "rounds = 1"]
        settings += [f'dataset = "{self.data}"', *quick]
        (project.folder / "mine.toml").write_text("\n".join(["[base]", *settings]) + "\n")
        grid = ["mine.toml", "--runs", "runs", "--all"]
        code, output = self.command(project, *grid, module="fedlada_mpi.grid")
        self.expect("grids run", code == 0, output)
        name, how = self.edit(project)
        code, output = self.command(project, *grid, module="fedlada_mpi.grid")
        if not name:
            good = code == 0 and "already finished" in output
            self.expect("grids after an edit that does not count", good, f"{how}: {output}")
            return
        said = code == 1 and "finished with other code" in output and name in output
        self.expect("grids after an edit: finished with other code", said, f"{name}, {how}: {output}")
        choice = self.random.choice(["--overwrite", "--accept-changed-code"])
        code, output = self.command(project, *grid, choice, module="fedlada_mpi.grid")
        good = code == 0 and ("already finished" in output) == (choice != "--overwrite")
        self.expect(f"the same with {choice}", good, output)
        if choice == "--overwrite":
            code, output = self.command(project, *grid, module="fedlada_mpi.grid")
            self.expect("and once more without it", code == 0 and "already finished" in output, output)

    def stranger(self) -> None:
        """A run whose code this user has never run, though it may be known in part."""
        project, mark, state = self.project(mark=True), self.work / "mark", self.work / "state"
        if self.random.random() < 0.3:
            self.command(project, *self.quick, *project.own, "--out", "known", "--rounds", 0)
            path = self.random.choice(project.counts[2:])  # which both the method and the model import
            path.write_text(path.read_text() + "# of a stranger\n")
        aside = shutil.copytree(state, self.work / "aside") if state.exists() else None
        code, output = self.command(project, *self.quick, *project.own, "--out", "run", "--rounds", 1)
        self.expect("runs of strangers", code == 0 and mark.exists(), output)
        shutil.rmtree(state)
        if aside:
            aside.rename(state)
        mark.unlink(missing_ok=True)
        Image.new("L", (8, 8)).save(project.folder / "x.png")
        python = f"import fedlada_mpi; fedlada_mpi.{self.random.choice(['load(%r).evaluate()', 'train(config=%r)'])}"
        where = "run" if "load" in python else "run/config.json"
        (project.folder / "door.py").write_text(python % where + "\n")
        door, *arguments = self.random.choice(
            [
                ("fedlada_mpi.run", "--resume", "run", "--rounds", 2),
                ("fedlada_mpi.run", "--resume", "run", "--print-config"),
                ("fedlada_mpi.run", "--resume", "run", "--help"),
                ("fedlada_mpi.run", "--resume", "run", "--rounds", 2, "--accept-changed-code"),
                ("fedlada_mpi.run", "--config", "run/config.json", "--out", "new"),
                ("fedlada_mpi.run", "--config", "run/config.json", "--out", "new", "--algorithm", "fedavg"),
                ("fedlada_mpi.predict", "run", "x.png"),
                ("door",),
                ("fedlada_mpi.report", "run", "--out", "report"),
            ]
        )
        code, output = self.command(project, *arguments, module=door)
        report = door.endswith("report")
        good = not mark.exists() and (code == 0 if report else code != 0 and "names code" in output)
        self.expect("directories of strangers: nothing runs", good, f"{door} {arguments}: {output}")
        other_method = "fedavg" in arguments  # which does not have the settings of the record
        if door in ("fedlada_mpi.run", "fedlada_mpi.predict") and not other_method:
            mark.unlink(missing_ok=True)
            code, output = self.command(project, *arguments, "--trust", module=door)
            self.expect("the same with --trust: it runs", code == 0 and mark.exists(), output)

    def run(self, trials: int) -> int:
        kinds = (self.resumed, self.grid, self.stranger)
        for self.trial in range(trials):
            kinds[self.trial % len(kinds)]()
            shutil.rmtree(self.work / f"trial{self.trial}", ignore_errors=True)
        for what, count in self.tried.items():
            print(f"{what:<55} | {count}")
        for wrong in self.wrong:
            print(f"wrong: {wrong}")
        print(f"{sum(self.tried.values())} checks in {trials} trials, {len(self.wrong)} wrong")
        return int(bool(self.wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, ForkServer() as server:
        return Campaign(Path(work).resolve(), options.seed, server).run(options.trials)


if __name__ == "__main__":
    sys.exit(main())
