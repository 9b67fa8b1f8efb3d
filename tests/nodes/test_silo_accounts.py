"""Silos that are protected from each other: a node and an account for each, in one run that mpirun starts by ssh."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig

import numpy as np
import pytest
from pretend import FIRST_ACCOUNT, Nodes, missing
from ranks import SIZE, find_mpirun
from repository import ROOT
from training_runs import CLASSES, structured_images

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.timeout(900)]

MPIRUN = find_mpirun() or "mpirun"
SILOS = ("n2", "n3", "n4")
PATHS = os.pathsep.join((str(ROOT), sysconfig.get_path("purelib")))


@pytest.fixture(scope="module")
def apart():
    if SIZE > 1:
        pytest.skip("starts processes of its own: runs in a world of one rank")
    if reason := missing():
        pytest.skip(reason)
    with Nodes(4, accounts=True) as nodes:
        nodes.folder.chmod(0o755)
        yield nodes


def as_account(nodes, name: str, *words):
    """Through a shell: setpriv itself may still start what only root can."""
    return nodes.as_account(
        name, "env", f"PYTHONPATH={PATHS}", "OMP_NUM_THREADS=1", "sh", "-c", 'exec "$@"', "-", *words
    )


@pytest.fixture(scope="module")
def python(apart) -> str:
    """An interpreter that other accounts may use, as they do on a cluster: root's own may be in its home."""
    tried = ""
    for program in (sys.executable, "/usr/bin/python3"):
        done = as_account(apart, "n2", program, "-c", "import fedlada_mpi.run, torch, h5py, mpi4py")
        if done.returncode == 0:
            return program
        tried = (done.stderr.strip().splitlines() or [f"{program} does not start"])[-1]
    pytest.skip(f"no Python that other accounts may use: {tried}")


@pytest.fixture(scope="module")
def prepared(apart, python):
    """Each silo prepares its data on its own node, as its own account."""
    (apart.folder / "classes.txt").write_text("left\nmiddle\nright\n")
    for number, silo in enumerate(SILOS, 2):
        random, labels = np.random.default_rng(number), np.arange(8 + number) % CLASSES
        images, raw = structured_images(random, labels), apart.folder / silo / "scans.npz"
        np.savez(raw, train_images=images, train_labels=labels, test_images=images[:4], test_labels=labels[:4])
        os.chown(raw, FIRST_ACCOUNT + number, FIRST_ACCOUNT + number)
        raw.chmod(0o600)
        words = ["--silo", silo, "--dataset", "npz", "--raw", raw, "--classes", apart.folder / "classes.txt"]
        out = apart.folder / silo / "data"
        done = as_account(apart, silo, python, "-m", "data_prep", *words, "--out", out)
        assert done.returncode == 0, done.stderr
        assert out.stat().st_uid == FIRST_ACCOUNT + number
    return apart


def run(nodes, python, mpi_env, *words):
    ranks = [MPIRUN, "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "-n", 4, python, "-m", "fedlada_mpi.run"]
    common = ["--rounds", 2, "--batch-size", 4, "--local-epochs", 1, "--silo-dir", nodes.folder / "{silo}" / "data"]
    env = {**mpi_env, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    return nodes.start([*ranks, *common, *words], (1, 1, 1, 1), env).finish(400)


def test_nobody_but_a_silo_can_read_what_is_its_own(prepared, python, mpi_env):
    out = prepared.folder / "n1" / "out"
    done = run(prepared, python, mpi_env, "--secure", "--silos", ",".join(SILOS), "--out", out)
    assert done.returncode == 0, done.stderr
    assert "run as the same account" not in done.stdout
    assert "share" not in done.stdout
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    for silo in SILOS:
        own = prepared.folder / silo / "data"
        (results,) = own.glob("runs/*/metrics.jsonl")
        assert len(results.read_text().splitlines()) == 2
        secrets = [path for path in own.rglob("*") if path.is_file()]
        assert len(secrets) > 5
        for other in {"n1", *SILOS} - {silo}:
            for path in secrets:
                tried = prepared.as_account(other, "sh", "-c", 'exec cat "$0"', path)
                assert tried.returncode != 0
                assert "Permission denied" in tried.stderr
    shutil.rmtree(out)


def test_a_rank_is_refused_the_directory_of_another_account(prepared, python, mpi_env):
    out = prepared.folder / "n1" / "wrong"
    done = run(prepared, python, mpi_env, "--silos", "n3,n2,n4", "--out", out)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"rank 1 must not read {prepared.folder / 'n3' / 'data'}, which belongs to another account" in errors[0]
    assert not out.exists()
