"""What a run records, in numbers computed by hand."""

from fedlada_mpi.rundir.metrics import summarise


def test_targets_by_hand():
    seen = {2: 0.3, 4: 0.7, 6: 0.65, 8: 0.7}
    same = dict(
        train_acc=0.1,
        train_loss=1.0,
        test_loss=2.0,
        seconds={"total": 0.5},
        bytes_down=6,
        bytes_up=3,
        bytes_mpi=8,
        paper_units=2,
    )
    records = [dict(same, round=t, test_acc=seen.get(t)) for t in range(1, 10)]
    found = summarise(records, [0.3, 0.65, 0.9])
    assert found["targets"] == {"0.3": 2, "0.65": 4, "0.9": None}
    assert found["best"] == {"round": 4, "test_acc": 0.7}
    assert (found["rounds"], found["final"]["round"], found["seconds"]) == (9, 8, 4.5)
    spent = dict(bytes_down=54, bytes_up=27, bytes_mpi=72, paper_units=18)
    assert {name: found[name] for name in spent} == spent
    nothing = dict.fromkeys(("seconds", *spent), 0)
    assert summarise([], [0.5]) == {"rounds": 0, "final": None, "best": None, "targets": {"0.5": None}, **nothing}
