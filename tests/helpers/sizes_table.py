"""The table of docs/sizes.md, from the code: python tests/helpers/sizes_table.py"""

from __future__ import annotations

import torch

from fedlada_mpi.algorithms import create, resolve
from fedlada_mpi.bench import Bench, Images, Text, Workload

MODELS = {
    "cnn": "digits",
    "mlp": "digits",
    "lenet": "cifar10",
    "resnet18": "cifar10",
    "vit_tiny": "cifar10",
    "lstm": "shakespeare",
    "gpt": "shakespeare",
}
METHODS = ("fedavg", "fedlada", "scaffold")
BATCH = {"digits": 10, "cifar10": 50, "shakespeare": 10}


def row(model: str, dataset: str) -> str:
    data = Text(80, 90) if dataset == "shakespeare" else Images(dataset)
    cells = []
    for method in METHODS:
        flags = {"dataset": dataset, "model": model, "algorithm": method, "batch_size": BATCH[dataset]}
        trainer = Bench(Workload(data, resolve(flags).config), 1, torch.device("cpu")).trainer
        cells.append(f"{trainer.memory.per_client / 1e6:,.1f}")
        vector = trainer.engine.network.layout.numel
        activations = trainer.memory.per_client - trainer.buffers.state_bytes
    shape = {"digits": "8x8", "cifar10": "32x32x3", "shakespeare": "80 tokens"}[dataset]
    about = (
        f"| `{model}` | {BATCH[dataset]} of {shape} | {vector:,} | {4 * vector / 1e6:,.2f} | {activations / 1e6:,.1f} |"
    )
    return f"{about} {' | '.join(cells)} |"


def models(chosen: dict[str, str]) -> str:
    """What a client takes while it trains, by model."""
    head = "| model | batch | parameters | a vector, MB | activations, MB | " + " | ".join(
        f"a client of {name}, MB" for name in METHODS
    )
    return "\n".join(
        [f"{head} |", "| --- | --- |" + " ---: |" * (3 + len(METHODS)), *(row(*each) for each in chosen.items())]
    )


def vectors() -> str:
    """What each method moves and holds, in vectors of the model's length."""
    lines = [
        "| method | down | up | of a client, while it trains | that a client keeps |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in ("fedavg", "fedprox", "fedadam", "fedcm", "localadam", "fedlada", "scaffold"):
        a = create(resolve({"algorithm": name}).config)
        held = ["x", *a.slots, *a.client_state, "g"]
        words = (" ".join(a.down), " ".join(a.up), " ".join(held), " ".join(a.client_state))
        lines.append(
            f"| `{name}` | " + " | ".join(f"{len(each.split())}: {each}" if each else "0" for each in words) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(vectors(), models(MODELS), sep="\n\n")
