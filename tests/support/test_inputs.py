"""Hostile command lines, settings files and paths: settings, or one line.

``python tests/campaigns/inputs.py --trials 10000`` tries many more.
"""

from __future__ import annotations

import contextlib
import os

import pytest
from hostile import DAMAGES, DEEP, LONG, OBSTACLES, damage_file, one_line
from hostile_trials import flags, settings_files, to_toml, try_flags, try_settings
from hypothesis import example, given, settings

from fedlada_mpi.algorithms import resolve
from fedlada_mpi.run import main
from fedlada_mpi.settings import load
from fedlada_mpi.support import inputs
from fedlada_mpi.support.errors import UserError, printable


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(flags)
@example([("config", "--")])  # argparse makes a list of it
@example([("config", "")])
@example([("config", "\0")])
@example([("out", LONG)])
@example([("out", "a/" * 3000)])
@example([("data_dir", "\0")])
@example([("dataset", LONG)])
@example([("dataset", "\udcff")])
@example([("model", "\udcff")])
@example([("lr", "1e300")])
@example([("crop_padding", "2147483648")])
@example([("rounds", "9" * 5000)])
@example([("batch_size", "9223372036854775808")])
def test_any_command_line_is_settings_or_one_line(given):
    try_flags(given)


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(settings_files)
@example(("toml", b"\xff\xfe"))
@example(("json", b"\xff"))
@example(("toml", b"lr = " + DEEP.encode()))
@example(("json", DEEP.encode()))
@example(("toml", b"[lr]\nx = 1\n"))
@example(("toml", b"rounds = [[1]]\n"))
@example(("toml", b"rounds = 1979-05-27\n"))
@example(("json", b'{"dataset": "\\ud800"}'))
@example(("json", b'{"rounds": ' + b"9" * 5000 + b"}"))
@example(("toml", to_toml({"targets": [float("inf")]})))
def test_any_settings_file_is_settings_or_one_line(tmp_path_factory, file):
    try_settings(file, tmp_path_factory.mktemp("settings"))


@pytest.mark.parametrize("kind", [*OBSTACLES, "not UTF-8", "garbage", "nested"])
def test_a_file_that_is_none(kind, tmp_path, capsys):
    path = tmp_path / "settings.toml"
    path.write_text("rounds = 3\n")
    damage_file(path, kind)
    assert main(["--config", str(path), "--print-config"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --config: ")
    assert one_line(message.removesuffix("\n"))


def test_a_byte_order_mark_is_no_setting(tmp_path):
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbfrounds = 3\r\n")
    assert load(tmp_path / "windows.toml") == {"rounds": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\0b", r"--out: got 'a\x00b', expected a path, which has no NUL characters"),
        ("x" * 256, f"--out: got '{'x' * 78}…, a name of 256 bytes, expected at most 255"),
        ("ä" * 128, f"--out: got '{'ä' * 78}…, a name of 256 bytes, expected at most 255"),
        ("/" + "a/" * 2000, f"--out: got '/{'a/' * 38}a…, a path of 4000 bytes, expected at most 3840"),
    ],
)
def test_paths_that_no_file_can_have(text, words):
    with pytest.raises(UserError) as found:
        inputs.check_path(text, "--out")
    assert str(found.value) == words
    inputs.check_path("x" * 255, "--out")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": 1e300}, "--lr: got 1e+300, expected at most 1000000000000"),
        ({"crop_padding": 2**31}, f"--crop-padding: got {2**31}, expected at most {2**19 - 1}"),
        ({"rounds": 2**31}, f"--rounds: got {2**31}, expected at most {2**31 - 1}"),
        ({"partition_seed": 2**32}, f"--partition-seed: got {2**32}, expected at most {2**32 - 1}"),
    ],
)
def test_numbers_that_would_overflow(given, words):
    with pytest.raises(UserError) as found:
        resolve(given)
    assert str(found.value) == words


def test_errors_are_one_printable_line():
    assert str(UserError("two\nlines\x1b \udcff ä")) == r"two lines\x1b \udcff ä"
    assert printable("a\tb") == r"a\tb"


@pytest.mark.parametrize("kind", [*DAMAGES, *OBSTACLES])
def test_a_reader_waits_for_nothing_and_raises_what_callers_expect(kind, tmp_path):
    path = tmp_path / "file"
    path.write_text('{"a": 1}')
    damage_file(path, kind)
    for read in (inputs.read_json, inputs.read_toml):
        with contextlib.suppress(OSError, ValueError):
            read(path)


def test_text_in_figures_is_no_formula():
    from matplotlib.figure import Figure

    figure = Figure()
    for text in ("$x_{", "$a$", r"\$x$", "\0", "\udcff", "a\nb", "x" * 5000):
        figure.text(0, 0, inputs.figure_text(text))
    figure.savefig(os.devnull, format="png")
    assert inputs.figure_text("x" * 99, 10) == "xxxxxxxxx…"
