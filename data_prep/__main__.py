"""Prepare the shards of a data set.

python -m data_prep --dataset digits --out data/digits --silos 3
python -m data_prep --dataset cifar10 --raw cifar-10-python.tar.gz --out data/cifar10 --clients 100 --silos 10
python -m data_prep --dataset imagefolder --raw photos --resize 64
python -m data_prep --dataset npz --raw mine.npz --out data/mine --partition natural --silos 4
python -m data_prep --dataset csv --raw visits.csv --target cost --client hospital
python -m data_prep --silo berlin --dataset imagefolder --raw scans --classes classes.txt --out /secure/berlin
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlada_mpi.data.manifest import NORMALISE
from fedlada_mpi.data.partition import KINDS, USED_BY
from fedlada_mpi.data.picture import PICTURE
from fedlada_mpi.data.prepare import prepare
from fedlada_mpi.data.settings import DEFAULT_SILOS, IMAGES_PER_CLIENT, STRATA, PrepareSettings
from fedlada_mpi.data.silos.files import PUBLIC
from fedlada_mpi.data.silos.prepare import TEST_SHARE as SILO_TEST_SHARE
from fedlada_mpi.data.silos.prepare import prepare_silo, read_classes
from fedlada_mpi.data.sources import LOADERS, table
from fedlada_mpi.data.sources.imagefolder import TEST_SHARE
from fedlada_mpi.data.sources.text import LENGTH
from fedlada_mpi.settings import TASKS, Parser
from fedlada_mpi.support.errors import UserError


def parser() -> Parser:
    parser = Parser(
        prog="python -m data_prep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    add = parser.add_argument
    add("--dataset", required=True, metavar="NAME", help=f"one of {', '.join(LOADERS)}")
    add("--out", type=Path, metavar="DIR", help="directory of the shards [data/NAME; your own data: the name of --raw]")
    add("--raw", type=Path, metavar="PATH", help="archive, folder, .npz or .csv [what is in DIR/../raw, or a download]")
    add("--resize", type=int, metavar="N", help="imagefolder: the middle of every image, resized to NxN [as they are]")
    add(
        "--test-share",
        type=float,
        metavar="SHARE",
        help=f"imagefolder without test/: of every class, the images to test on [{TEST_SHARE}]; csv: of every client, "
        f"its rows [{table.TEST_SHARE}]; with --silo [{SILO_TEST_SHARE}]",
    )
    add("--target", nargs="+", metavar="COLUMN", help="csv: what is learnt; --task survival: EVENT TIME")
    add("--client", metavar="COLUMN", help="csv: whose a row is [nobody's: rows are dealt to --clients]")
    add("--drop", nargs="+", metavar="COLUMN", help="csv: columns to leave out")
    add("--task", metavar="NAME", help=f"what runs learn unless told otherwise: {', '.join(TASKS)} [as the target is]")
    add("--normalise", metavar="HOW", help=f"floats: {', '.join(NORMALISE)} [csv: pooled, by all training rows]")
    add("--length", type=int, metavar="N", help=f"text: bytes of a row [{LENGTH}]")
    add("--strata", type=int, metavar="N", help=f"quantile bins of a number that stand for its classes [{STRATA}]")
    add(
        "--clients",
        type=int,
        metavar="M",
        help="number of clients [the paper's 100; digits: 50; natural: the data's own; imagefolder, csv: at most one "
        f"per {IMAGES_PER_CLIENT} images or rows; with --silo: 1]",
    )
    add("--silos", type=int, metavar="N", help=f"number of silo files [{DEFAULT_SILOS}, or as many as clients]")
    add("--partition", metavar="KIND", help=f"{', '.join(KINDS)} [natural where the data has owners, else dirichlet]")
    add("--dirichlet", type=float, metavar="ALPHA", help="concentration of the label priors [0.6; digits: 0.3]")
    add("--exhausted", metavar="MODE", help=f"when a class runs out: refill or exact [{PrepareSettings.exhausted}]")
    add("--classes-per-client", type=int, metavar="C", help=f"for pathological [{PrepareSettings.classes_per_client}]")
    add("--size-sigma", type=float, metavar="SIGMA", help="unequal client sizes, lognormal [0 = equal]")
    add("--silo", metavar="NAME", help="prepare the data of this silo alone, where it is, for run --silo-dir")
    add("--classes", type=Path, metavar="FILE", help="--silo: the classes of all silos, a name on each line")
    add("--edges", type=float, nargs="+", metavar="TIME", help="--silo, survival: the ends of the bins of time")
    add("--seed", type=int, metavar="SEED", help=f"seed of the partition [{PrepareSettings.seed}]")
    add(
        "--validation",
        type=float,
        metavar="SHARE",
        help="of the training examples, held out before the partition to choose the best round by [0 = none]",
    )
    add("--workers", type=int, metavar="W", help="processes that decode images [0 = all cores this process may use]")
    add("--force", action="store_true", help="replace shards that are already there")
    add("--no-download", dest="download", action="store_false", help="fail rather than download raw data")
    return parser


def main(arguments: list[str] | None = None) -> int:
    try:
        flags = vars(parser().parse_all(arguments))
        kind = flags.get("partition", "dirichlet")
        for name, kinds in USED_BY.items():
            if name in flags and kind in KINDS and kind not in kinds:
                raise UserError(f"--{name.replace('_', '-')} has no effect on --partition {kind}: leave it out")
        silo, classes, edges = (flags.pop(name, None) for name in ("silo", "classes", "edges"))
        if silo is not None:
            return _prepare_silo(silo, classes, edges or (), flags)
        for name, value in (("classes", classes), ("edges", edges)):
            if value is not None:
                raise UserError(f"--{name} is for the data of one silo: got no --silo, expected --silo NAME")
        manifest = prepare(PrepareSettings(**flags), report=print)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was left behind, run it again", file=sys.stderr)
        return 130
    print(f"{manifest.root}: {manifest.clients} clients in {manifest.silos} silos; look at {manifest.root / PICTURE}")
    return 0


def _prepare_silo(name: str, classes: Path | None, edges: Sequence[float], flags: dict[str, Any]) -> int:
    if "out" not in flags:
        raise UserError("--silo: got no --out, expected the silo's own directory, such as --out /secure/NAME")
    names = [] if classes is None else read_classes(classes)
    manifest = prepare_silo(PrepareSettings(**flags), name, names, edges, report=print)
    print(
        f"{manifest.root}: silo {manifest.silo}, {manifest.clients} clients; others see {manifest.root / PUBLIC} alone"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
