"""NVIDIA FLARE's simulator with its FedAvg recipe; ``WAY`` is how models travel, as ``numpy`` or ``torch``.

Every client has a process, as by default: with fewer than clients (``num_threads``), a new one starts at every client's
turn. Rounds end where the server's log says that the new model has been written.
"""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

import torch
from common import MOVING, job
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.sim_env import SimEnv

ENDED = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+).*End persist model", re.MULTILINE)


def main() -> None:
    work, here, folder = job(), Path(__file__).parent, Path(os.environ["PEERS_FOLDER"])
    recipe = FedAvgRecipe(
        name="peers", min_clients=work.participants, num_rounds=work.rounds,
        model={"class_path": "common.resnet" if work.workload == MOVING else "common.CNN", "args": {}},
        train_script=str(here / "nvflare_client.py"), train_args=work.workload,
        server_expected_format=ExchangeFormat.PYTORCH if work.way == "torch" else ExchangeFormat.NUMPY,
    )  # fmt: skip
    recipe.execute(SimEnv(num_clients=work.clients, workspace_root=str(folder)))
    (log,) = (path for path in folder.rglob("log.txt") if "server" in path.parts)
    for moment in ENDED.findall(log.read_text()):
        work.round_ended(datetime.strptime(moment, "%Y-%m-%d %H:%M:%S,%f").timestamp())
    (written,) = folder.rglob("FL_global_model.pt")
    content, model = torch.load(written, weights_only=False), work.model()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in content.get("model", content).items()})
    work.finish(model)


if __name__ == "__main__":
    main()
