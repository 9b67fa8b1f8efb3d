"""The model of a round's time, against sums by hand."""

from __future__ import annotations

import pytest

from fedlada_mpi import scaling
from fedlada_mpi.mpi import relay

SETUP = scaling.Setup(
    participants=6, ranks_per_node=2, elements=4 * scaling.PIECE, up=1, down=2, latency=0.25, bandwidth=scaling.PIECE,
    fixed=1.0, per_client=0.5, node_bcast=8.0, node_reduce=100.0, server=0.125,
)  # fmt: skip


def test_pieces_are_those_of_the_transport():
    assert scaling.PIECE == relay.PIECE


def test_two_nodes():
    """Four pieces of four seconds and the latency; in the node, a sum takes longer than that, a copy less."""
    phases = scaling.round_seconds(2, SETUP)
    assert phases["train"] == 1.0 + 0.5 * 2  # six participants on three silos
    assert phases["transport"] == pytest.approx((100 + 17 / 4) + 2 * (17 + 8 / 4))
    assert phases["messages"] == pytest.approx(10 * (2 * 0.25 + 1e-4))
    assert phases["server"] == 0.375


def test_many_nodes_and_one():
    assert scaling.wire_seconds(1, 4, SETUP) == 0
    assert scaling.wire_seconds(3, 4, SETUP) == 5 * 4.25
    assert scaling.wire_seconds(64, 4, SETUP) == 2 * (4 + 6 - 1) * 4.25, "a tree"
    rounded = scaling.round_seconds(2, scaling.replace(SETUP, wire="bf16", node_bcast=0.0, node_reduce=0.0))
    assert rounded["transport"] == pytest.approx(2 * 4 * 2.25 + 17)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--bandwidth 0", "--bandwidth: got 0.0, expected at least 1"),
        ("--elements 0", "--elements: got 0, expected at least 1"),
        ("--latency -1", "--latency: got -1.0, expected at least 0"),
        ("--per-client nan", "--per-client: got nan, expected at least 0"),
        ("--fixed inf", "--fixed: got inf, expected at most 1000000000000000"),
        ("--plot {}/none/x.png", "cannot write {}/none/x.png: No such file or directory: put its directory back, then"),
        ("--plot {}/x.foo", "--plot: got {}/x.foo, expected a name that ends in ."),
    ],
)
def test_what_is_refused(tmp_path, capsys, arguments, message):
    assert scaling.main(arguments.format(tmp_path).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: " + message.format(tmp_path))
    assert error.count("\n") == 1


def test_the_table_and_the_picture(tmp_path, capsys):
    assert scaling.main(["--participants", "8", "--plot", str(tmp_path / "s.png")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(scaling.NODES)
    assert (tmp_path / "s.png").stat().st_size > 10_000
