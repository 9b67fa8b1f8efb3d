import sys

from fedlada_mpi.support.user_code import load_object


def test_the_path_keeps_what_a_module_adds(tmp_path, monkeypatch):
    (tmp_path / "extends_the_path.py").write_text("import sys\nsys.path.insert(0, 'its folder')\nx = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    assert load_object("--model", "extends_the_path:x", "a number") == 3
    assert sys.path == ["its folder", *before]
    del sys.modules["extends_the_path"]
