"""Processes that tests start: forked whatever other tests have set, with the package that they find themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from limits import LIMIT
from ranks import python
from repository import ROOT

import fedlada_mpi


def printed(code: str, folder: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [python(), "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_variables_that_torch_sets_while_tests_run_need_no_new_interpreter(tmp_path):
    loaded = "import sys; print('torch' in sys.modules)"
    assert printed(loaded, tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path)) == "True"
    assert printed(loaded, tmp_path, TORCH_SHOW_CPP_STACKTRACES="1") == "False"  # is read when torch is loaded


def test_the_package_is_the_one_on_the_path(tmp_path):
    (tmp_path / "fedlada_mpi").mkdir()
    (tmp_path / "fedlada_mpi" / "__init__.py").write_text("copy = True\n")
    found = "import sys, fedlada_mpi; print(fedlada_mpi.__file__, 'fedlada_mpi.models' in sys.modules)"
    assert printed(found, tmp_path) == f"{tmp_path}/fedlada_mpi/__init__.py False"
    assert printed(found, tmp_path.parent) == f"{fedlada_mpi.__file__} True"
