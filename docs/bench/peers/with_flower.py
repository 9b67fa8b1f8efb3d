"""Flower's simulation engine: Ray's worker processes, as many as ``WAY`` says, with one core each.

A worker keeps its model between messages, in place of building it anew for each as the quickstart does.
"""

from __future__ import annotations

import common
import torch
from common import IMAGES, job
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

work = job()
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    if not hasattr(common, "kept_model"):  # a module of the worker; this file's globals travel with each message
        common.kept_model = work.model()
    model, client = common.kept_model, int(context.node_config["partition-id"])
    torch.manual_seed(1000 * message.content["config"]["server-round"] + client)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.work(model, client)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": IMAGES})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    class TimedFedAvg(FedAvg):
        def aggregate_train(self, *arguments, **named):
            aggregated = super().aggregate_train(*arguments, **named)
            work.round_ended()
            return aggregated

    model = work.model()
    strategy = TimedFedAvg(
        fraction_train=work.participants / work.clients, fraction_evaluate=0.0,
        min_train_nodes=work.participants, min_available_nodes=work.clients,
    )  # fmt: skip
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=work.rounds)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    work.finish(model)


if __name__ == "__main__":
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend = {"client_resources": resources, "init_args": {"num_cpus": int(work.way)}}
    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=backend)
