"""``tune.json``: the plan of a search, what came of every trial, and which ones went on.

A search decides from its plan and from outcomes alone, so that whoever reads them decides alike. What the journal has,
need not be in the directories of the runs any more; what it has not, is read from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from ..rundir.columns import Metric
from ..rundir.files import to_json, write_atomically
from ..settings import SETTINGS
from ..support import code_digest, disk
from ..support.errors import UserError, shortened
from ..support.inputs import read_json, reason
from .outcomes import Outcome, of_record
from .plan import TunePlan

NAME, LOCK = "tune.json", "tune.lock"
FORMAT = 1
# Of [tune] what may change from one call to the next: the search decides without it.
FREE = ("seeds",)


class Place(NamedTuple):
    """A run of a search: a trial on a rung, or the winner with one of its seeds."""

    stage: int
    method: str
    number: int  # of the trial or, on the last stage, the seed


class Journal:
    """The outcomes that are known."""

    def __init__(self, plan: TunePlan, accept_changed_code: bool = False):
        self.plan, self.path = plan, plan.root / NAME
        self.code = plan.code  # as it was when the search began
        self.outcomes: dict[Place, Outcome] = {}
        self.objective: Metric | None = None  # of the runs, once one has begun
        self.written = ""
        if content := self._read():
            self._check_plan(content.get("plan"))
            try:
                for record in content["outcomes"]:
                    place = Place(int(record["stage"]), str(record["method"]), int(record["number"]))
                    self.outcomes[place] = of_record(record)
                self.objective = _metric(content.get("objective"))
                if not accept_changed_code and "code" in content:
                    self.code = {str(name): dict(files) for name, files in content["code"].items()}
            except (AttributeError, TypeError, ValueError, LookupError):
                raise self._damaged("its outcomes are not those of a search") from None
            self.written = _text(content)

    def _read(self) -> dict[str, Any]:
        try:
            content = read_json(self.path)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {reason(error)}") from None
        except ValueError as error:
            raise self._damaged(str(error)) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT or "outcomes" not in content:
            raise self._damaged("it is not the journal of a search")
        return content

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path}: {why}; remove it, and the same command writes it again from the runs")

    def _check_plan(self, stored: Any) -> None:
        old, new = (_flat(decisive(content)) for content in (stored or {}, self.plan.content))
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                before, now = (shortened(each[name]) if name in each else "not there" for each in (old, new))
                raise UserError(
                    f"{self.plan.root} holds the search of another plan: {name} was {before}, and is {now} now; give "
                    f"another --out, or remove {self.plan.root} to begin again"
                )
        # Trials of a grid are numbered in this order, by which the journal names them.
        before, now = (", ".join(_in_order(tables["search"])) for tables in (stored, self.plan.content))
        if self.plan.strategy == "grid" and before != now:
            raise UserError(
                f"{self.plan.root}: the search began with [search] in another order: got {now}, expected {before}; "
                "give another --out to begin again"
            )

    def refuse_other_code(self) -> None:
        """Raise if a user's own code is not what the runs that have ended were made with."""
        if names := code_digest.changed(self.code, self.plan.code):
            have = "have" if len(names) > 1 else "has"
            raise UserError(
                f"{self.plan.root}: {', '.join(names)} {have} changed since the search began: restore the code, give "
                "another --out, or go on with it as it is by --accept-changed-code"
            )

    def write(self, stages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the file where there is something new; ``stages`` are for people: what was decided on each rung."""
        content = {
            "format": FORMAT,
            "plan": self.plan.content,
            "code": self.code,
            "objective": None if self.objective is None else asdict(self.objective),
            "outcomes": [{**place._asdict(), **outcome.record()} for place, outcome in sorted(self.outcomes.items())],
            "decisions": list(stages),
        }
        text = _text(content)
        if text != self.written:
            with disk.writing(self.path, "then give the same command again"):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text)
            self.written = text


def _text(content: Mapping[str, Any]) -> str:
    return to_json(content, indent=1) + "\n"


def _metric(record: Any) -> Metric | None:
    if record is None:
        return None
    return Metric(str(record["name"]), str(record["title"]), bool(record["percent"]), bool(record["larger_is_better"]))


def decisive(content: Any) -> dict[str, dict[str, Any]]:
    """What the decisions of a search depend on, of the content of its plan."""
    tables = {name: dict(table) for name, table in dict(content).items() if isinstance(table, Mapping)}
    tables["tune"] = {key: value for key, value in tables.get("tune", {}).items() if key not in FREE}
    runtime = {name for name, setting in SETTINGS.items() if setting.runtime and name != "eval_every"}
    tables["base"] = {name: value for name, value in tables.get("base", {}).items() if name not in runtime}
    return tables


def _in_order(search: Mapping[str, Any]) -> list[str]:
    """The settings to vary as they are in the plan: those of all methods, then those of each in its own table."""
    return sorted(_flat(search), key=lambda name: name.rpartition(".")[0])


def _flat(tables: Mapping[str, Any], over: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= _flat(value, f"{over}{name}.") if isinstance(value, Mapping) else {over + name: value}
    return found
