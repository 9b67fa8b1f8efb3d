"""The doctor reports every fault in its line, and none of them keeps it from the others."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
from repository import ROOT

from fedlada_mpi.doctor import installation, machine
from fedlada_mpi.doctor.__main__ import Row, elsewhere, examine
from fedlada_mpi.doctor.check import CHECKS, FAIL, OK, SKIP, WARN, Check, Here
from fedlada_mpi.support.errors import UserError

DOCTOR = {"module": "fedlada_mpi.doctor"}
# Rank 1 does something else first.
ONE_DIFFERS = """
import os, sys, time
from fedlada_mpi.doctor import __main__ as doctor
doctor.PATIENCE = {patience}
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {first}
sys.exit(doctor.main())
"""


def states(output: str) -> dict[str, str]:
    """Status by name, of the rows that start with two blanks."""
    return {name: status for status, name in re.findall(r"^  (ok|warn|FAIL|skip) +(\S+)", output, re.M)}


def world(rank: int = 0, on_node: int = 1) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, node=SimpleNamespace(size=on_node))


def node(*cores: list[int]) -> Here:
    return Here(world=world(), ranks=[{"machine": "a", "cores": c, "torch": True, "gpu": ""} for c in cores])


@pytest.mark.slow
def test_a_sound_machine(mpirun, tmp_path):
    out = tmp_path / "doctor.json"
    done = mpirun(1, "--json", out, **DOCTOR, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["failed"] == 0
    names = [check.name for check in CHECKS]
    assert list(states(done.stdout)) == names
    assert [row["name"] for row in found["ranks"][0]["rows"]] == names
    assert "nothing failed" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_ranks_print_one_report_and_test_the_transport(mpirun, tmp_path):
    done = mpirun(3, "--json", "found.json", **DOCTOR, cwd=tmp_path, check=True)
    assert done.stdout.count("transport") == 1
    assert "3 on this machine: a server and 2 silos" in done.stdout
    assert states(done.stdout)["transport"] == OK
    assert "45 MB over 3 ranks" in done.stdout
    assert len(json.loads((tmp_path / "found.json").read_text())["ranks"]) == 3


@pytest.mark.slow
def test_broken_torch_on_one_rank_is_reported_with_its_rank(mpirun, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: not there\\nsecond line')")
    program = ONE_DIFFERS.format(patience=60, first=f"sys.path.insert(0, {str(tmp_path)!r})")
    done = mpirun(2, command=("-c", program), interpreter=sys.executable)
    assert done.returncode != 0
    assert re.search(r"^  FAIL  torch +rank 1 on \S+: OSError: libcudart.so: not there$", done.stdout, re.M), (
        done.stdout
    )
    assert re.search(r"^  skip  transport", done.stdout, re.M)
    assert done.stdout.splitlines()[-1].startswith("1 failed")


@pytest.mark.slow
def test_wrong_sums_on_one_rank_are_reported_and_hang_no_rank(mpirun, tmp_path):
    spoil = "from fedlada_mpi.mpi.transport import Transport as T"
    spoil += "; T.reduce = lambda t, v, plain=T.reduce: plain(t, v) or v[0].zero_()"
    done = mpirun(2, command=("-c", ONE_DIFFERS.format(patience=60, first=spoil)), cwd=tmp_path)
    assert done.returncode != 0
    expected = r"^  FAIL  transport +rank 1 on \S+: shared: Reduce gave 0, expected 2$"
    assert re.search(expected, done.stdout, re.M), done.stdout + done.stderr


@pytest.mark.slow
def test_missing_rank_does_not_hang_the_others(mpirun):
    program = ONE_DIFFERS.format(patience=8, first="time.sleep(60)")
    done = mpirun(2, command=("-c", program))
    assert done.returncode != 0
    assert "Timeout (0:00:08)!" in done.stderr
    assert "mpi_loads" in done.stderr or "ranks" in done.stderr
    assert states(done.stdout)["packages"] == OK


@pytest.mark.slow
def test_without_an_mpi_library_the_rest_is_examined(mpirun, tmp_path):
    done = mpirun(1, **DOCTOR, cwd=tmp_path, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    found = states(done.stdout)
    assert done.returncode == 1
    assert [found[n] for n in ("MPI", "ranks", "launcher", "transport", "torch")] == [FAIL, SKIP, SKIP, SKIP, OK]
    assert "pip install '.[mpi]'" in done.stdout
    assert "1 failed" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_world_of_one_by_mistake(mpirun, tmp_path):
    done = mpirun(1, **DOCTOR, cwd=tmp_path, env={"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"})
    assert done.returncode == 1
    assert states(done.stdout)["ranks"] == FAIL
    assert "srun --mpi=pmix" in done.stdout
    quiet = mpirun(1, **DOCTOR, cwd=tmp_path, env={"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"})
    assert (quiet.returncode, quiet.stdout) == (1, "")


@pytest.mark.parametrize(("version", "status"), [("4.1.6", OK), ("5.0.9", OK), ("5.0.10", WARN), ("5.1.0", WARN)])
def test_an_open_mpi_that_crashes_at_a_second_loss(monkeypatch, version, status):
    monkeypatch.setattr("fedlada_mpi.mpi.implementation", lambda: f"Open MPI v{version}")
    monkeypatch.setattr("importlib.metadata.distributions", list)
    assert installation.mpi_loads(Here())[0] == status


@pytest.mark.parametrize(("version", "status"), [("mpirun (Open MPI) 5.0.8", OK), ("HYDRA build details:", WARN)])
def test_launcher_of_another_family(tmp_path, monkeypatch, version, status):
    monkeypatch.setattr("fedlada_mpi.mpi.implementation", lambda: "Open MPI v5.0.8")
    for name, text in {"mpirun": version, "srun": "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}' >&2\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = installation.launcher(Here())
    assert found[0] == status
    assert "srun --mpi=pmi2|pmix" in found[1]
    assert status == OK or found[2].endswith("or srun --mpi=pmix")


def test_torch_that_is_compiled_at_every_start(monkeypatch, tmp_path):
    import torch

    cached = tmp_path / "torch.pyc"
    monkeypatch.setattr(torch.__spec__, "cached", str(cached))
    found = installation.torch_works(Here())
    assert found[0] == WARN
    assert "PYTHONDONTWRITEBYTECODE" in found[2]
    cached.touch()
    assert installation.torch_works(Here())[0] == OK


def test_an_exception_becomes_one_line_and_its_followers_are_skipped():
    def broken(here):
        raise RuntimeError("\nfirst line\nsecond line")

    def refused(here):
        raise UserError("found this: do that")

    row = examine(Here(), Check("broken", broken, "fix it", ""))
    assert row == Row("broken", FAIL, "RuntimeError: first line", "fix it")
    assert examine(Here(), Check("refused", refused, "", "")).found == "found this: do that"
    second = examine(Here(), Check("second", broken, "", "broken"), [row])
    assert second == Row("second", SKIP, "it needs broken")
    assert examine(Here(), Check("third", broken, "", "other second"), [row, second]).status == SKIP


def test_what_other_ranks_found_is_reported_once():
    mine = [Row("torch", OK, "2.4"), Row("cores", WARN, "few"), Row("GPU", OK, "1 x A")]
    older = [Row("torch", OK, "2.3"), Row("cores", WARN, "fewer"), Row("GPU", OK, "1 x B")]
    lost = [Row("torch", OK, "2.4"), Row("cores", OK, "many"), Row("GPU", FAIL, "busy", "wait")]
    found = elsewhere(mine, [("n0", mine), ("n1", older), ("n2", lost), ("n3", lost)])
    assert [row[:3] for row in found] == [
        ("torch", WARN, "rank 1 on n1: 2.3"),
        ("GPU", FAIL, "rank 2 on n2, 3 on n3: busy"),
    ]


def test_cores_threads_and_bindings(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "core_limit", lambda: math.inf)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert machine.cores(node([0, 1], [2, 3]))[0] == OK
    assert machine.cores(node([0, 1, 2], [0, 1, 2]))[2] == "export OMP_NUM_THREADS=1"
    assert "--cpu-bind=none" in machine.cores(node([0], [0], [0]))[2]
    assert "take turns" in machine.cores(node(*[list(range(8))] * 9))[1]
    monkeypatch.setattr(machine, "core_limit", lambda: 3.5)
    found = "4 of 8 for 2 ranks, OMP_NUM_THREADS=2; the container may use 3.5: more threads than cores"
    assert machine.cores(node([0, 1], [2, 3])) == (WARN, found, "export OMP_NUM_THREADS=1")


def test_spinning_is_found_under_srun_only(monkeypatch):
    monkeypatch.setattr("fedlada_mpi.mpi.implementation", lambda: "Open MPI v5.0.8")
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_mpi_yield_when_idle"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert machine.waiting(node([0], [1]))[0] == OK
    assert machine.waiting(node([0], [0]))[2] == "export OMPI_MCA_mpi_yield_when_idle=1"
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    assert machine.waiting(node([0], [0]))[0] == OK


def test_small_shared_memory_is_a_warning(monkeypatch):
    # 1.2 x 2 ranks x 45.1 MB = 108.3 MB
    for free, status in ((109, OK), (108, WARN)):
        monkeypatch.setattr(os, "statvfs", lambda _, free=free: SimpleNamespace(f_bavail=free, f_frsize=10**6))
        found = machine.shared_memory(Here(world=world(on_node=2)))
        assert found[0] == status
        assert "0.11 GB for 2 ranks" in found[1]


def test_largest_vector_is_that_of_tinyimagenet():
    from fedlada_mpi.models import build

    assert build("resnet18", 200, (64, 64, 3)).layout.numel == machine.RESNET18


def test_prepared_data_is_found_and_a_cut_file_too(digits_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLADA_DATA", str(tmp_path))
    assert "nothing prepared" in machine.data(Here())[1]
    shutil.copytree(digits_dir, tmp_path / "digits")
    status, found = machine.data(Here())
    assert status == OK
    assert found.endswith("digits (1500 examples, 50 clients)")
    file = tmp_path / "digits" / "silo_0002.h5"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    status, found, do = machine.data(Here())
    assert status == FAIL
    assert found == f"{file} has {size - 1} bytes, expected {size}"
    assert "data_prep --dataset digits" in do
    file.unlink()
    assert machine.data(Here())[1] == f"{file} is missing"


def test_full_disk(tmp_path, monkeypatch):
    here = Here(out=tmp_path / "not" / "yet")
    for free, status in ((5.1e9, OK), (4.9e9, WARN)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        found = machine.output(here)
        assert found[0] == status
        assert str(tmp_path) in found[1]


def test_versions_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    wanted = dict(re.findall(r'^    "([a-z0-9]+)>=([\d.]+)",', text.split("[project.optional")[0], re.M))
    assert wanted.pop("torch") == installation.LEAST_TORCH
    wanted.pop("mpi4py")
    assert wanted == {name: least for name, least in installation.LEAST.items() if least != "0"}
    assert f'requires-python = ">={".".join(map(str, installation.LEAST_PYTHON))}"' in text
