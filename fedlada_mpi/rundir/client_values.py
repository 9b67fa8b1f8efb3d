"""Loss and accuracy of every client, with ``--eval-clients``: all values in clients.h5, their spread in the metrics.

    rounds       [R]     after which the global model was evaluated
    clients      [m]     numbers of the clients
    images       [m]     training images of each
    silos        [m]     number of the silo file that holds it, from 1
    train_acc    [R, m]  on the client's own training images; train_loss alike
    test_acc     [R, m]  on the test images, weighted as the client's classes are; test_loss alike

There is one test set for all clients. Its images count by class: a client's test accuracy is the mean of the classes'
test accuracies, weighted by the shares of the classes in the client's training images. That is the expectation of any
test set drawn with the client's label distribution, and has less noise than a small part of the test images would have.

The file is replaced before every checkpoint, and a resumed run repeats the rounds after its checkpoint. So the file has
all rounds that the metrics have.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..support.errors import UserError, first_line
from ..support.inputs import require_regular
from .columns import LOSS, OBJECTIVE, SPREAD
from .files import write_atomically

if TYPE_CHECKING:
    import h5py

CLIENTS = "clients.h5"
VALUES = tuple(metric.of(part) for part in ("train", "test") for metric in (OBJECTIVE, LOSS))


def by_client(counts: np.ndarray, train: np.ndarray, test: np.ndarray) -> dict[str, np.ndarray]:
    """The values of every client, NaN where there is nothing to evaluate on.

    ``counts``: training images by client and class. ``train`` and ``test``: sum of losses, number correct and number of
    images, of the clients' own training images and of the test images of each class.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        train_loss, train_acc = train[:2] / train[2]
        known = np.flatnonzero(test[2])
        class_loss, class_acc = test[:2, known] / test[2, known]
        shares = counts[:, known] / counts[:, known].sum(axis=1, keepdims=True)
    return dict(zip(VALUES, (train_acc, train_loss, shares @ class_acc, shares @ class_loss), strict=True))


def spread(values: dict[str, np.ndarray]) -> dict[str, float | None]:
    """The numbers of SPREAD."""
    found: dict[str, float | None] = {}
    columns = iter(SPREAD)
    for part in ("test", "train"):
        each = values[OBJECTIVE.of(part)]
        known = np.sort(each[~np.isnan(each)])
        worst = known[: -(-len(known) // 10)]
        for number in (known.mean(), known.std(), worst.mean()) if len(known) else (None, None, None):
            found[next(columns)] = None if number is None else float(number)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """The file, open and checked; raises ValueError if its arrays are not those that a run writes."""
    import h5py  # here, because it is slow to import and readers of metrics do not need it

    try:
        require_regular(path)
        with h5py.File(path) as file:
            rows, columns = (len(file[name]) for name in ("rounds", "clients"))
            shapes = dict.fromkeys(VALUES, (rows, columns)) | {"rounds": (rows,), "clients": (columns,)}
            shapes |= dict.fromkeys(("images", *(("silos",) if "silos" in file else ())), (columns,))
            for name, shape in shapes.items():
                if file[name].shape != shape or file[name].dtype.kind != ("f" if name in VALUES else "i"):
                    raise ValueError(f"{name} is {file[name].dtype} {list(file[name].shape)}")
            yield file
    except FileNotFoundError:
        raise
    # What h5py raises on a damaged file.
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(first_line(error)) from None


def read(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file; raises ValueError if they are not those that a run writes."""
    with _opened(path) as file:
        return {name: file[name][:] for name in ("rounds", "clients", "images", *VALUES)}


def latest(path: Path, until: int) -> dict[str, np.ndarray]:
    """The clients' values after the last round up to ``until``, empty if there is none; their images and silos."""
    with _opened(path) as file:
        rows = np.flatnonzero(file["rounds"][:] <= until)
        if not len(rows):
            return {}
        # Files of version 0.1 have no silos.
        about = {name: file[name][:] for name in ("images", "silos") if name in file}
        return {name: file[name][int(rows[-1])] for name in VALUES} | about


class ClientValues:
    """The values of the rounds so far; a run that goes on after ``resumed_at`` keeps those up to there.

    ``counts``: training images by client and class; ``silos``: the number of each client's silo file, from 1.
    """

    def __init__(self, out: Path, resumed_at: int, counts: np.ndarray, silos: np.ndarray):
        self.path, self.counts, self.silos = out / CLIENTS, counts, silos
        self.rounds: list[int] = []
        self.values: dict[str, list[np.ndarray]] = {name: [] for name in VALUES}
        self.changed = False
        if resumed_at:
            self._read(resumed_at)

    def _read(self, until: int) -> None:
        try:
            stored = read(self.path)
            if stored["clients"].tolist() != list(range(len(self.counts))):
                raise ValueError(f"it has {len(stored['clients'])} clients, not {len(self.counts)}")
        except FileNotFoundError:
            return
        except ValueError as error:
            raise UserError(
                f"{self.path} is damaged ({error}): rm {self.path}, then --resume goes on without the values in it"
            ) from None
        kept = np.flatnonzero(stored["rounds"] <= until)
        self.rounds = stored["rounds"][kept].tolist()
        self.values = {name: [*stored[name][kept]] for name in VALUES}
        if len(kept) < len(stored["rounds"]):
            self.changed = True
            self.write()

    def known(self) -> dict[str, Any]:
        """The values as JSON, for ``restored``."""
        return {"rounds": self.rounds, **{name: [row.tolist() for row in self.values[name]] for name in VALUES}}

    @classmethod
    def restored(cls, out: Path, counts: np.ndarray, silos: np.ndarray, known: dict[str, Any]) -> ClientValues:
        """With the values that another rank had (``known``), without reading the file."""
        values = cls(out, 0, counts, silos)
        values.rounds = list(known["rounds"])
        values.values = {name: [np.array(row, np.float32) for row in known[name]] for name in VALUES}
        values.changed = bool(values.rounds)
        return values

    def add(self, number: int, train: np.ndarray, test: np.ndarray) -> dict[str, float | None]:
        """Take the sums of round ``number`` (see ``by_client``); returns what the metrics record of them."""
        values = by_client(self.counts, train, test)
        self.append(number, values)
        return spread(values)

    def append(self, number: int, values: Mapping[str, Any]) -> None:
        """The clients' values after round ``number``."""
        self.rounds.append(number)
        for name in VALUES:
            self.values[name].append(np.asarray(values[name]).astype(np.float32))
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
        arrays = {
            "rounds": np.array(self.rounds, np.int64),
            "clients": np.arange(len(self.counts)),
            "images": self.counts.sum(axis=1),
            "silos": self.silos,
            **{name: np.reshape(rows, (len(rows), len(self.counts))) for name, rows in self.values.items()},
        }
        import h5py

        content = io.BytesIO()
        with h5py.File(content, "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array, fletcher32=bool(array.size))
        write_atomically(self.path, content.getvalue())
        self.changed = False
