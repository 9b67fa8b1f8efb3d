"""The class of image files, by the model of a run.

python -m fedlada_mpi.predict runs/photos-fedlada-seed0 new.jpg another.png
"""

from __future__ import annotations

import argparse
import sys

from .settings import Parser
from .support.errors import UserError, printable
from .support.processes import reader_may_leave


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m fedlada_mpi.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files, of any size")
    parser.add_argument(
        "--best", action="store_true", help="by the model of the round that was best on the validation examples"
    )
    parser.add_argument("--trust", action="store_true", help="run a model's code that you have not run here before")
    parser.add_argument("--accept-changed-code", action="store_true", help="take a model's code as it is now")
    try:
        options = parser.parse_all(arguments)
        # Imported here: --help must not wait for torch.
        from .trained import load

        how = {"trust": options.trust, "accept_changed_code": options.accept_changed_code, "best": options.best}
        run = load(options.run, **how)
        if not run.takes_images:
            raise UserError(f"{options.run} was trained on arrays, no images: fedlada_mpi.load(DIR).predict(arrays)")
        probabilities = run.predict(options.images, probabilities=True)
        names = run.classes
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    width = max(map(len, options.images))
    with reader_may_leave():
        for path, row in zip(options.images, probabilities, strict=True):
            print(f"{printable(path):<{width}}  {row.max():6.1%}  {printable(names[row.argmax()])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
