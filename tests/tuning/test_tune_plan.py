"""Plans: what a file may say, and the runs that follow from it."""

import pytest

from fedlada_mpi import tune
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tuning.plan import load, parse_plan, plans

PLAN = {
    "base": {"algorithm": ["fedlada", "fedavg"], "local_epochs": 1},
    "search": {"lr": {"low": 0.001, "high": 0.1, "log": True}, "fedlada": {"alpha": [0.1, 0.5]}},
    "tune": {"strategy": "halving", "trials": 9, "rounds": 90},
}


def plan(path, **changes):
    """``PLAN`` with other sections: a table is merged, and None in it removes a key."""
    data = {**PLAN}
    for section, table in changes.items():
        merged = {**PLAN.get(section, {}), **table} if isinstance(table, dict) else table
        data[section] = {k: v for k, v in merged.items() if v is not None} if isinstance(merged, dict) else merged
    return parse_plan(data, "p", path)


def test_runs_of_trials_and_winners(tmp_path):
    found = plan(tmp_path)
    run = found.trial("fedlada", 0, 0)
    point = found.searches[0].points[0]
    assert run.rounds == run.given["rounds"] == 10
    assert run.given["eval_test"] == "never"
    assert run.given["validation"] == 0.1
    assert run.given["alpha"] == point["alpha"]
    assert "alpha" not in found.trial("fedavg", 0, 0).given
    later = found.trial("fedlada", 0, 2)
    assert (later.directory, later.rounds) == (run.directory, 90)
    assert later.directory.parent == tmp_path / "trials"
    winners = found.winner("fedlada", 0)
    assert [each.given["seed"] for each in winners] == [1, 2, 3]
    assert {each.given["eval_test"] for each in winners} == {"end"}
    assert {each.directory.parent for each in winners} == {tmp_path / "winner"}
    assert {each.rounds for each in winners} == {90}


def test_winners_may_run_longer(tmp_path):
    """A cosine, too: each run has its own horizon."""
    found = plan(tmp_path, base={"lr_schedule": "cosine"}, tune={"winner_rounds": 200})
    trial, winner = found.trial("fedavg", 0, 2), found.winner("fedavg", 0)[0]
    assert (trial.rounds, trial.given["rounds"], trial.given["lr_horizon"]) == (90, 90, 90)
    assert (winner.rounds, winner.given["rounds"], winner.given["lr_horizon"]) == (200, 200, 200)
    assert found.settings(found.searches[0], {})["rounds"] == 200


def test_the_error_names_the_method(tmp_path):
    """The one of several that refuses a setting of all."""
    with pytest.raises(UserError, match=r"^fedpd: --participation: got 0\.5, expected 1\.0 for fedpd"):
        plan(tmp_path, base={"algorithm": ["fedavg", "fedpd"], "participation": 0.5}, search={"fedlada": None})


def test_seeds_of_the_winner_are_not_that_of_the_trials(tmp_path):
    assert plan(tmp_path, base={"seed": 7}, tune={"seeds": 2}).seeds == [8, 9]
    assert plan(tmp_path, tune={"seeds": [5, 9]}).seeds == [5, 9]
    with pytest.raises(UserError, match="seeds: got 7, with which the trials ran"):
        plan(tmp_path, base={"seed": 7}, tune={"seeds": [7, 8]})


def test_a_cosine_schedule_has_the_horizon_of_the_whole_search(tmp_path):
    """Or a trial that goes on would have had other rates on the rungs before."""
    found = plan(tmp_path, base={"lr_schedule": "cosine"})
    assert {found.trial("fedavg", 3, rung).given["lr_horizon"] for rung in range(3)} == {90}
    assert (
        plan(tmp_path, base={"lr_schedule": "cosine", "lr_horizon": 50}).trial("fedavg", 0, 0).given["lr_horizon"] == 50
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"serach": {}}, "unknown key 'serach' (did you mean 'search'?)"),
        ({"search": {"lrr": [1]}}, "unknown setting 'lrr' (did you mean 'lr'?)"),
        ({"base": {"lcoal_epochs": 1}}, "unknown setting 'lcoal_epochs' (did you mean 'local_epochs'?)"),
        ({"search": {"alpha": [0.1, 0.2], "fedlada": None}}, "alpha is not a setting of fedavg (its own are: none)"),
        ({"search": {"fedlda": {"alpha": [0.1]}}}, "[search.fedlda]: got a table, expected one of a method of this"),
        ({"base": {"fedprox": {"mu": 1}}}, "[base.fedprox]: got a table, expected one of a method"),
        ({"base": {"algorithm": ["fedlada", "fedavgg"]}}, "did you mean 'fedavg'?"),
        ({"base": {"algorithm": ["fedavg", "fedavg"]}}, "expected a method, or a list of different ones"),
        ({"base": {"algorithm": 3}}, "algorithm: got 3"),
        ({"tune": {"trails": 3}}, "unknown key of [tune] 'trails' (did you mean 'trials'?)"),
        ({"tune": {"strategy": "halvng"}}, "strategy: got 'halvng', expected one of grid, random, halving (did you"),
        ({"tune": {"trials": None}}, "[tune] has no trials"),
        ({"tune": {"trials": 0}}, "trials: got 0, expected an integer, at least 1"),
        ({"tune": {"trials": 2.5}}, "trials: got 2.5"),
        ({"tune": {"rounds": None}}, "[tune] has no rounds"),
        ({"tune": {"rounds": True}}, "rounds: got True"),
        ({"tune": {"rounds": 2**31}}, "rounds: got 2147483648, expected an integer, at least 1 and less than 2^31"),
        ({"tune": {"factor": 1}}, "factor: got 1, expected an integer, at least 2"),
        ({"tune": {"first_rounds": 91}}, "first_rounds: got 91, expected at most rounds, which is 90"),
        ({"tune": {"strategy": "random", "factor": 3}}, "factor has no effect on strategy random"),
        ({"tune": {"validation": 0}}, "validation: got 0, expected a share of the training examples, more than 0"),
        ({"tune": {"validation": 1.0}}, "validation: got 1.0"),
        ({"tune": {"validation": float("nan")}}, "validation: got nan"),
        ({"tune": {"seeds": [1, 1]}}, "seeds: got [1, 1], expected how many, or a list of different ones"),
        ({"tune": {"seeds": -1}}, "seeds: got -1"),
        ({"tune": {"seeds": [1, 2**63]}}, "--seed: got 9223372036854775808, expected at most 9223372036854775807"),
        ({"base": {"rounds": 5}}, "base.rounds belongs into [tune]"),
        ({"base": {"validation": 0.2}}, "base.validation belongs into [tune]"),
        ({"base": {"out": "x"}}, "base.out belongs into the option --out"),
        ({"base": {"eval_test": "always"}}, "base.eval_test belongs into nowhere: trials leave the test set alone"),
        ({"base": {"fedlada": {"objective": "loss"}}}, "base.fedlada.objective: the trials of all"),
        ({"base": {"fedavg": {"seed": 3}}}, "base.fedavg.seed: the trials of all methods must share it: put it into"),
        ({"base": {"weight_decay": [0, 1]}}, "base.weight_decay: got a list, expected one value"),
        ({"base": {"lr": 0.1}}, "lr is in [base] and in [search]"),
        ({"base": {"eval_clients": 1}}, "--eval-clients evaluates the test examples, too"),
        ({"search": {"dirichlet": [0.1, 0.6]}}, "search.dirichlet cannot be varied, as trials must share it"),
        ({"search": {"seed": [0, 1]}}, "search.seed cannot be varied, as trials must share it"),
        ({"search": {"objective": ["acc", "-loss"]}}, "search.objective cannot be varied"),
        ({"search": {"device": ["cpu", "cuda"]}}, "search.device cannot be varied, as results do not depend on it"),
        ({"search": {"lr": None, "fedlada": None}}, "[search] is empty"),
        ({"search": 3}, "search: got 3, expected a table [search]"),
        ({"search": {"fedlada": 3}}, "search.fedlada: got 3, expected a table [search.fedlada]"),
        ({"base": {"silo_dir": "x"}}, "--validation 0.1 needs examples that belong to no silo"),
        ({"base": {"participation": 0.001}}, "selects none"),
        ({"search": {"lr_step": [10, 20]}}, "--lr-step has no effect on --lr-schedule exponential"),
        ({"base": {"dp": "client", "epsilon": 3, "delta": 1e-5, "clip_norm": 1.0}}, "--dp client: got --validation"),
    ],
)  # fmt: skip
def test_what_a_plan_must_not_say(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        plan(tmp_path, **changes)
    assert message in str(error.value)


def test_methods_of_a_grid_have_as_many_trials(tmp_path):
    grid = {"tune": {"strategy": "grid", "trials": None}, "search": {"lr": [0.01, 0.1]}}
    with pytest.raises(UserError, match=r"the same number of trials.*: fedlada has 4, fedavg has 2"):
        plan(tmp_path, **grid)
    even = {**grid, "search": {"lr": [0.01, 0.1], "fedavg": {"weight_decay": [0, 0.01]}}}
    assert [len(search.points) for search in plan(tmp_path, **even).searches] == [4, 4]


def test_the_error_names_the_file(tmp_path, capsys):
    path = tmp_path / "p.toml"
    path.write_text("[search]\nlr = {low = 1.0, high = 0.1}\n[tune]\ntrials = 3\nrounds = 4\n")
    assert tune.main([str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {path}: search.lr: got low 1.0 and high 0.1, expected low to be less than high\n"
    )
    path.write_text("[search\n")
    assert tune.main([str(path)]) == 2
    assert "is not valid TOML" in capsys.readouterr().err
    assert tune.main(["digts"]) == 2
    assert "unknown plan 'digts' (did you mean 'digits'?)" in capsys.readouterr().err


def test_the_plans_of_the_package(tmp_path):
    assert plans() == ["cifar10", "digits", "methods"]
    rungs = {name: load(name, str(tmp_path)).rungs for name in plans()}
    assert rungs["cifar10"] == [(25, 18), (75, 6), (200, 2)]
    assert rungs["digits"] == [(4, 9), (12, 3), (36, 1)]
