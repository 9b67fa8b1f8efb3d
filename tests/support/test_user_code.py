import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from fedlada_mpi.support.user_code import load_object


def test_the_path_keeps_what_a_module_adds(tmp_path, monkeypatch):
    (tmp_path / "extends_the_path.py").write_text("import sys\nsys.path.insert(0, 'its folder')\nx = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    assert load_object("--model", "extends_the_path:x", "a number") == 3
    assert sys.path == ["its folder", *before]
    del sys.modules["extends_the_path"]


def test_two_threads_load_one_file(tmp_path, monkeypatch):
    """The second asks for it while its code is running for the first."""
    begun, known = threading.Event(), tmp_path / "slow.py"
    monkeypatch.setattr(threading, "begun", begun, raising=False)
    known.write_text("import threading, time\nthreading.begun.set()\ntime.sleep(0.2)\nx = 3\n")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(load_object, "--model", f"{known}:x", "a number")
        assert begun.wait(60)
        assert load_object("--model", f"{known}:x", "a number") == 3
        assert first.result() == 3
