"""The metrics of every client, with ``--eval-clients``: all values in clients.h5, their spread in the metrics.

    rounds         [R]     after which the global model was evaluated
    clients        [m]     numbers of the clients
    images         [m]     training examples of each
    silos          [m]     number of the silo file that holds it, from 1
    names          [m]     of the clients, where the data has them
    test_examples  [m]     test examples of each, where clients have their own
    train_acc      [R, m]  on the client's own training examples; other metrics of the task alike
    test_acc       [R, m]  on the client's own test examples, where clients have them

A metric is NaN where it is undefined, as on no examples. The file is replaced before every checkpoint, and a resumed
run repeats the rounds after its checkpoint. So the file has all rounds that the metrics have.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..support.errors import UserError, first_line
from ..support.inputs import require_regular
from .columns import CLASSIFICATION, PARTS, Columns
from .files import write_atomically

if TYPE_CHECKING:
    import h5py

CLIENTS = "clients.h5"
TESTED = "test_examples"


@dataclass(frozen=True, eq=False)
class Clients:
    """Who the clients are: training and test examples, silos and names of each; and the metrics of their task."""

    sizes: np.ndarray
    silos: np.ndarray
    test_sizes: np.ndarray | None = None  # None: clients have no test examples of their own
    names: tuple[str, ...] = ()
    columns: Columns = CLASSIFICATION

    @property
    def parts(self) -> tuple[str, ...]:
        """Of the data, on which clients are evaluated."""
        return ("train",) if self.test_sizes is None else ("train", "test")

    @property
    def values(self) -> tuple[str, ...]:
        """The names of their values."""
        return self.columns.of(*self.parts)

    def spread(self, values: Mapping[str, np.ndarray]) -> dict[str, float | None]:
        """Of the objective over clients that have a value: mean, standard deviation, and mean of the worst tenth."""
        objective, found = self.columns.objective, dict[str, float | None]()
        for part in reversed(self.parts):
            each = values[objective.of(part)]
            known = np.sort(each[~np.isnan(each)])
            tenth = -(-len(known) // 10)
            worst = known[:tenth] if objective.larger_is_better else known[len(known) - tenth :]
            with np.errstate(invalid="ignore"):  # values may be infinite
                numbers = (known.mean(), known.std(), worst.mean()) if len(known) else (None, None, None)
            for column, number in zip(self.columns.spread[part], numbers, strict=True):
                found[column] = None if number is None else float(number)
        return found


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """The file, open and checked; raises ValueError if its arrays are not those that a run writes."""
    import h5py  # here, because it is slow to import and readers of metrics do not need it

    try:
        require_regular(path)
        with h5py.File(path) as file:
            rows, columns = (len(file[name]) for name in ("rounds", "clients"))
            shapes = dict.fromkeys(_values(file), (rows, columns)) | {"rounds": (rows,), "clients": (columns,)}
            about = [name for name in ("silos", "names", TESTED) if name in file]  # not in files of every version
            shapes |= dict.fromkeys(("images", *about), (columns,))
            kinds = {"names": "O", **dict.fromkeys(_values(file), "f")}  # others are integers
            for name, shape in shapes.items():
                kind = kinds.get(name, "i")
                if file[name].shape != shape or file[name].dtype.kind != kind:
                    raise ValueError(f"{name} is {file[name].dtype} {list(file[name].shape)}")
            yield file
    except FileNotFoundError:
        raise
    # What h5py raises on a damaged file.
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(first_line(error)) from None


def _values(file: h5py.File) -> list[str]:
    """The names of the clients' values in a file."""
    return [name for name in file if name != TESTED and name.startswith(tuple(f"{part}_" for part in PARTS))]


def read(path: Path) -> dict[str, np.ndarray]:
    """All numbers of a file; raises ValueError if they are not those that a run writes."""
    with _opened(path) as file:
        return {name: file[name][:] for name in ("rounds", "clients", "images", *_values(file))}


def latest(path: Path, until: int) -> dict[str, np.ndarray]:
    """The clients' values after the last round up to ``until``, empty if there is none; and what the file says of
    the clients."""
    with _opened(path) as file:
        rows = np.flatnonzero(file["rounds"][:] <= until)
        if not len(rows):
            return {}
        about = {name: file[name][:] for name in ("images", "silos", TESTED) if name in file}
        if "names" in file:
            about["names"] = file["names"].asstr()[:]
        return {name: file[name][int(rows[-1])] for name in _values(file)} | about


class ClientValues:
    """The values of the rounds so far; a run that goes on after ``resumed_at`` keeps those up to there."""

    def __init__(self, out: Path, resumed_at: int, clients: Clients):
        self.path, self.clients = out / CLIENTS, clients
        self.rounds: list[int] = []
        self.values: dict[str, list[np.ndarray]] = {name: [] for name in clients.values}
        self.changed = False
        if resumed_at:
            self._read(resumed_at)

    def _read(self, until: int) -> None:
        try:
            stored, count = read(self.path), len(self.clients.sizes)
            if stored["clients"].tolist() != list(range(count)):
                raise ValueError(f"it has {len(stored['clients'])} clients, not {count}")
            if missing := [name for name in self.values if name not in stored]:
                raise ValueError(f"it has no {missing[0]}")
        except FileNotFoundError:
            return
        except ValueError as error:
            raise UserError(
                f"{self.path} is damaged ({error}): rm {self.path}, then --resume goes on without the values in it"
            ) from None
        kept = np.flatnonzero(stored["rounds"] <= until)
        self.rounds = stored["rounds"][kept].tolist()
        self.values = {name: [*stored[name][kept]] for name in self.values}
        if len(kept) < len(stored["rounds"]):
            self.changed = True
            self.write()

    def known(self) -> dict[str, Any]:
        """The values as JSON, for ``restored``."""
        return {"rounds": self.rounds, **{name: [row.tolist() for row in rows] for name, rows in self.values.items()}}

    @classmethod
    def restored(cls, out: Path, clients: Clients, known: dict[str, Any]) -> ClientValues:
        """With the values that another rank had (``known``), without reading the file."""
        values = cls(out, 0, clients)
        values.rounds = list(known["rounds"])
        values.values = {name: [np.array(row, np.float32) for row in known[name]] for name in values.values}
        values.changed = bool(values.rounds)
        return values

    def add(self, number: int, values: Mapping[str, np.ndarray]) -> dict[str, float | None]:
        """Take the clients' values after round ``number``; returns what the metrics record of them."""
        self.append(number, values)
        return self.clients.spread(values)

    def append(self, number: int, values: Mapping[str, Any]) -> None:
        """The clients' values after round ``number``."""
        self.rounds.append(number)
        for name, rows in self.values.items():
            rows.append(np.asarray(values[name]).astype(np.float32))
        self.changed = True

    def row(self, number: int) -> dict[str, list[float]] | None:
        """The clients' values after round ``number``, as JSON takes them; None if it has none."""
        if number not in self.rounds[-1:]:
            return None
        return {name: rows[-1].tolist() for name, rows in self.values.items()}

    def is_missing(self) -> bool:
        """Whether the file was written, and is not there."""
        return bool(self.rounds) and not self.changed and not self.path.is_file()

    def write(self) -> None:
        """Replace the file, if there is something new."""
        if not self.changed:
            return
        sizes = self.clients.sizes
        arrays: dict[str, np.ndarray] = {
            "rounds": np.array(self.rounds, np.int64),
            "clients": np.arange(len(sizes)),
            "images": sizes,
            "silos": self.clients.silos,
            **({"names": np.array(self.clients.names, object)} if self.clients.names else {}),
            **({TESTED: self.clients.test_sizes} if self.clients.test_sizes is not None else {}),
            **{name: np.reshape(rows, (len(rows), len(sizes))) for name, rows in self.values.items()},
        }
        import h5py

        content = io.BytesIO()
        with h5py.File(content, "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array, fletcher32=bool(array.size) and array.dtype != object)
        write_atomically(self.path, content.getvalue())
        self.changed = False
