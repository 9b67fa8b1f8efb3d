"""What a client of ``with_nvflare.py`` runs."""

from __future__ import annotations

import sys
from pathlib import Path

import nvflare.client
from common import Job


def main() -> None:
    work = Job(sys.argv[1], "", 0, Path())
    model = work.model()
    nvflare.client.init()
    client = int(nvflare.client.get_site_name().removeprefix("site-")) - 1
    while nvflare.client.is_running():
        received = nvflare.client.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        work.work(model, client)
        meta = {"NUM_STEPS_CURRENT_ROUND": 8}
        nvflare.client.send(nvflare.client.FLModel(params=model.state_dict(), meta=meta))


if __name__ == "__main__":
    main()
