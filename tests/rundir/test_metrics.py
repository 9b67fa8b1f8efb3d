"""What a run records, in numbers computed by hand."""

from fedlada_mpi.rundir.metrics import summarise


def test_targets_by_hand():
    seen = {2: 0.3, 4: 0.7, 6: 0.65, 8: 0.7}
    same = dict(train_acc=0.1, train_loss=1.0, test_loss=2.0, seconds={"total": 0.5})
    records = [dict(same, round=t, test_acc=seen.get(t)) for t in range(1, 10)]
    found = summarise(records, [0.3, 0.65, 0.9])
    assert found["targets"] == {"0.3": 2, "0.65": 4, "0.9": None}
    assert found["best"] == {"round": 4, "test_acc": 0.7}
    assert (found["rounds"], found["final"]["round"], found["seconds"]) == (9, 8, 4.5)
    assert summarise([], [0.5]) == {"rounds": 0, "final": None, "best": None, "targets": {"0.5": None}, "seconds": 0}
