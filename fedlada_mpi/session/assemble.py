"""A run put together on this rank: device, data, model, method, transport."""

from __future__ import annotations

import copy
import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .. import algorithms, models, mpi, tasks
from ..algorithms import Vectors
from ..algorithms.hook_draws import server_draws
from ..data.manifest import Manifest
from ..data.owners import Ownership
from ..data.silos.sums import SumOf
from ..gpu.graphs import capture_on
from ..gpu.sharing import gpu_id
from ..models.form import each
from ..models.initial import load_initial
from ..models.lora import Lora, merged
from ..models.parameters import dtype_of, in_type, tensors
from ..mpi.plan import plan_transport
from ..privacy.agreement import Epoch, agree, refuse_too_few
from ..privacy.budget import Budget, SiloBudget
from ..privacy.masks import Masks
from ..privacy.mechanism import Mechanism
from ..privacy.names import own_name
from ..privacy.silo_files import SiloFiles, inputs_digest, same_batches, seed_matters, silo_folder
from ..rounds import aggregate
from ..rounds.aggregate import PrivateSecureSums, PrivateSums, SecureSums
from ..rounds.augmentation import Augmentation
from ..rounds.batches import LocalData
from ..rounds.costs import trains_alone
from ..rounds.device import asked_threads, choose_device, device_name, limit_threads, set_precision
from ..rounds.evaluate import BATCH, OWN, Evaluations, Evaluator, batches
from ..rounds.examples import Examples
from ..rounds.gradients import create_engine
from ..rounds.silo import Silo
from ..rounds.trainer import Trainer
from ..rounds.vectors import named_rows
from ..rundir import checkpoint, provenance, silo_state
from ..rundir.client_values import Clients
from ..rundir.columns import Columns, of_task
from ..rundir.sinks import check_installed
from ..settings import Config
from ..settings.privacy import neighbours
from ..support.errors import PublicError, UserError
from ..support.user_code import users_code
from ..tasks import Scores, Task
from ..tasks.client_loss import COUNTED, ClientLoss
from ..tasks.dry_run import dry_run
from ..tasks.own import objective_of
from .loading import Loading
from .run_data import RUN, RunData, SharedShards

TRIED = 4  # examples, of which one may be without an event or a class


class Session:
    """The parts of a run on this rank; ``silo`` has what its rounds need.

    >>> session = Session(world, config, directory, start=0, owners=lambda manifest: shared_out(manifest, world.size))
    >>> session.silo.train(r, participants)
    """

    def __init__(
        self,
        world: mpi.World,
        config: Config,
        directory: Path,
        start: int,
        owners: Callable[[Manifest], Ownership],
        report: Callable[[str], None] = print,
        silos: RunData | None = None,
    ):
        """To go on after round ``start`` (0: a new run); ``owners`` says which rank trains which clients.

        ``silos``: instead of the directory, where each has one of its own.
        """
        self.world, self.start, self.started = world, start, provenance.now()
        world.forget()
        world.on_root(lambda: check_installed(config))
        number = world.original_size - int(root_only_serves(world, config))
        self.data = silos or SharedShards(directory, number, report)
        self.data.open(world, config)
        self.owners = owners(self.data.manifest)
        self.silo_name = world.collectively(lambda: self._silo_name(config, number)) if config.secure else ""
        self.epoch: Epoch | None = None  # of masks
        self.void_until = 0  # the last round that was sent with other silos
        self.files = world.collectively(lambda: self._files(config)) if config.secure else None
        threads = asked_threads(world)
        self.device = world.collectively(lambda: choose_device(world, config, threads))
        if trains_alone(config):
            # Stacks of one client, unless wider ones are asked for (``stack_width``).
            config = replace(config, max_clients_at_once=config.max_clients_at_once or 1)
        self.config, self.dtype = config, set_precision(config.precision)
        self.masks = self._masks() if config.secure else None
        self.data.settle(world, config, self._sum_of())
        self.manifest: Manifest = self.data.manifest
        self.about = self.manifest.about()
        self.task = world.collectively(self._task)
        world.collectively(lambda: self.data.verify(world, self.owners))
        about = (self.data.readable, self.task, self.device, self.dtype)
        self.loading = Loading(*about, config.data_on, world.node.size)
        data = world.collectively(self._local_data)
        held_out = self.data.held_out(world, self.loading)

        self.network = world.collectively(self._network)
        # Products on several threads depend on how many there are.
        work = 0 if trains_alone(config) else self.network.work * self._images_per_step()
        limit_threads(world, self.device, work, threads)
        self.digests = {checkpoint.DATA: self.manifest.digest, checkpoint.MODEL: self.network.digest()}
        self.digests |= {checkpoint.ORDER: self.network.layout.order}
        self.digests |= {RUN: self.data.run_id} if self.data.run_id else {}
        if ":" in config.model or config.lora:
            self._refuse_different_models()
        self.algorithm = world.collectively(lambda: algorithms.create(config, self.network.layout.tensors))
        if ":" in config.task:  # before any other use of it: a rank without clients has no examples to try it on
            world.collectively(lambda: self._try_task(data))
        self.scores = world.collectively(self._scores)
        self.columns = self._columns()
        self.config.columns = self.columns.record()
        self.silo = self._silo(data, held_out)
        here = {"host": platform.node(), "cpu": provenance.cpu_model(), "device": device_name(self.device)}
        places = [] if config.secure else sorted(self.loading.places)  # they depend on how much data a rank has
        gpu = gpu_id(torch.cuda.current_device()) if self.device.type == "cuda" else ""
        self.ranks = world.allgather_json({**here, "gpu": gpu, "data": places})

    def _silo_name(self, config: Config, silos: int) -> str:
        """Of this rank with ``--secure``; empty for the server."""
        rank = self.world.original_ranks[self.world.rank]
        server = int(root_only_serves(self.world, config))
        if self.world.original_ranks[0] == 0 and len(self.world.original_ranks) == self.world.original_size:
            refuse_too_few(silos, config)
        if rank < server:
            return ""
        return self.data.silo_name or own_name(config, rank - server, silos)

    def _files(self, config: Config) -> SiloFiles | None:
        """This silo's own; from now on, its errors are written there."""
        self.world.conceal = None
        if not self.silo_name:
            return None
        sizes = self.data.sizes_of(self.owners.clients_of[self.world.rank])
        inputs = inputs_digest(config, self.data.own_digest, sizes)
        files = SiloFiles(self.data.log_folder or silo_folder(config, self.silo_name), self.silo_name, inputs)
        if self.world.rank:
            self.world.conceal = files.conceal
        return files

    def _who(self, epoch: Epoch) -> str:
        """Of the silos of an epoch, and of the clients of this one."""
        clients = self.owners.clients_of[self.world.rank].tolist()
        return hashlib.sha256(json.dumps([epoch.silos, epoch.own, clients]).encode()).hexdigest()

    def begin(self) -> None:
        """On the root, the server's vectors at t = 0."""
        s = self.silo.s
        s.x.copy_(self.network.initial(self.dtype))
        with server_draws(self.algorithm, "start", 0, self.silo.trainer.buffers.real):
            self.algorithm.start(s)

    def load_own_state(self) -> None:
        """What this silo's clients keep, from its own files."""
        silo = self.silo
        state, files = silo.trainer.client_state.vectors, self.files
        if files is None or not state:
            return
        clients = set(silo.trainer.data.client_ids.tolist())
        found = silo_state.load(files.folder, self.start, silo.s.x, state, clients)
        if not found and any(number <= self.start for number in files.sent):
            raise PublicError(
                f"--resume: {files.name} has not kept what its clients need after round {self.start}: put its folder "
                "back, or remove it, and they start anew"
            )

    @property
    def masked(self) -> bool:
        """Whether the sums of silos are to be masked, which a silo that is left alone cannot do."""
        return self.epoch is not None and neighbours(self.config.secure_neighbours) != 0

    @property
    def clients(self) -> Clients:
        """Who the clients are, for their own records."""
        m = self.manifest
        tested = m.test_sizes if m.own_tests else None
        return Clients(m.sizes, m.places[0] + 1, tested, m.client_names, self.columns)

    def _silo(self, data: LocalData, held_out: dict[str, Examples]) -> Silo:
        world, config, a, device, dtype = self.world, self.config, self.algorithm, self.device, self.dtype
        loss = tasks.client_loss(self.task)
        engine = world.collectively(lambda: create_engine(self.network, config, device, loss))
        # A user's loss, metric or augmentation may ask the host in the middle, which a graph cannot.
        own = ":" in config.task or ":" in config.augment
        capture = capture_on(device) if engine.capturable and not own else None
        augmentation = world.collectively(self._augmentation)
        trainer = world.collectively(lambda: Trainer(config, a, engine, data, device, dtype, capture, augmentation))
        if a.full_gradient:
            trainer.counts = world.collectively(lambda: self._counts(loss, data.examples))
        size = self.network.layout.size
        wire = aggregate.wire_type(config, dtype)
        transport = plan_transport(world, size, wire, device, config.transport, config.wire)
        world.at_close.callback(transport.close)
        # The root's own vectors are on every rank where any may have to serve.
        private = a.private if world.rank == 0 or world.tolerant else ()
        s = Vectors(**named_rows((*a.down, *a.derived, *private), size, dtype, device))
        secure = self._secure(s, data) if config.secure else None
        aggregation = aggregate.create(world, config, a, transport, dtype, secure)
        evaluator = Evaluator(engine, data.normalise, trainer.compute, capture, self.scores)
        tested = self.clients.test_sizes
        sizes = {"train": self.manifest.sizes} | ({} if tested is None else {OWN: tested})
        concealed = aggregation.client_sums if isinstance(aggregation, SecureSums) else None
        about = (s.x, data, held_out, self.columns, sizes, concealed, self.data.in_silos)
        evaluations = Evaluations(world, config, evaluator, *about)
        self.without_outputs = world.on_root(evaluations.without_outputs) or []
        whose = (self.data.sizes(), self.owners.mask(self.manifest.clients), self.digests, self.files, self.data.folder)
        silo = Silo(world, config, a, trainer, transport, aggregation, s, evaluations, *whose)
        if isinstance(aggregation, PrivateSums):
            silo.budget = world.on_root(lambda: self._budget(silo.clients_left))
            noise = world.broadcast_json({"z": silo.budget.mechanism.noise} if silo.budget else None)["z"]
            mechanism = Mechanism.of(config, noise, silo.clients_left)
            world.collectively(lambda: self._protect(aggregation, mechanism, s))
        return silo

    def _protect(self, aggregation: PrivateSums, mechanism: Mechanism, s: Vectors) -> None:
        aggregation.protect(mechanism, s, self.network.layout.real)
        if self.files is not None and isinstance(aggregation, PrivateSecureSums):
            kept = self.data.folder.path if self.data.folder else None
            aggregation.spend = SiloBudget(self.config, kept or self.files.folder, mechanism).spend

    def _budget(self, clients: int) -> Budget:
        """Of a private run with so many clients, from its data and settings."""
        if self.manifest.own_tests:
            raise UserError(
                "--dp client: clients of this data have test examples of their own, which no noise protects: "
                "prepare it without"
            )
        if self.algorithm.uniform:
            raise UserError("--dp client: all weights are equal: leave uniform out of the method")
        return Budget(self.config, self.start, clients)

    def _masks(self) -> Masks:
        """Of a new epoch; collective."""
        # By which silos know who else takes part in a round.
        about = [clients.tolist() for clients in self.owners.clients_of]
        self.epoch = agree(self.world, self.config, self.silo_name, self.device.type == "cuda", about)
        return Masks(self.epoch, lambda: self.world.heard.hexdigest())

    def _sum_of(self) -> SumOf | None:
        """Sums of words that only all ranks together know; None where they need not be masked."""
        masks = self.masks
        if masks is None:
            return None

        def added(words: np.ndarray) -> np.ndarray:
            masks.words(words, [])
            total = self.world.reduce_words(words).tolist()
            return np.array(self.world.broadcast_json({"words": total})["words"], np.int64)

        return added

    def _secure(self, s: Vectors, data: LocalData) -> aggregate.Secure:
        c = self.config
        assert self.masks is not None
        assert self.epoch is not None
        weight = float(self.data.all_rows) if c.weighting == "size" else aggregate.most_participants(c)
        secure = aggregate.Secure(self.masks, s, weight)
        if not self.epoch.degree:
            return secure
        files = self.files
        if files is not None:
            files.silos = self._who(self.epoch)
            secure = replace(secure, begun=files.begun)
        (least,) = self.world.allreduce_min([-files.void_until if files else 0])
        self.void_until = -least
        if self.void_until > self.start:
            self.world.collectively(lambda: self._refuse_same_batches(data.sizes))
        return secure

    def _refuse_same_batches(self, sizes: np.ndarray) -> None:
        """After void rounds the model is as it was; sums of it again, over other silos, must be of other batches."""
        if same_batches(self.config, sizes):
            other_model = "another --seed, or " if seed_matters(self.config) else ""
            raise PublicError(
                f"round {self.void_until} was sent with other silos, and with whole data sets as batches the next "
                f"rounds would repeat its sums: give {other_model}a smaller --batch-size"
            )

    def _counts(self, loss: ClientLoss, examples: Examples) -> Tensor | None:
        """Of every example, where the loss gives sums and counts."""
        found = []
        for part in batches([0, len(examples)], COUNTED):
            counts = loss.counts(examples.targets(part), self.scores.output_shape)
            if counts is None:
                return None
            found.append(counts)
        return torch.cat(found) if found else None  # a rank may have no clients

    def _task(self) -> Task:
        """What is learned, from data that fits it."""
        c = self.config
        if not self.about.image and c.augment == "paper":
            raise UserError("--augment paper: flips and crops are for images, and this data has none: leave it out")
        shape = () if self.about.targets is None else self.about.targets.shape
        if c.augment == "paper" and len(shape) > 1:
            what = f"it would flip and crop images, and leave their targets {list(shape)} as they are"
            raise UserError(f"--augment paper: {what}: leave it out")
        return tasks.create(c.task, self.about, c.loss, c.metrics)

    def _scores(self) -> Scores:
        """What is added up of every example, by a task that can be trained as it is asked for."""
        shape = self._output_shape()
        with users_code(f"--task {self.config.task}", f"a task for outputs {list(shape)}, or a model with others"):
            scores = tasks.scores(self.task, shape)
        self._refuse_losses_that_do_not_add_up(of_examples=scores.widths["loss"] == 1)
        return scores

    def _try_task(self, data: LocalData) -> None:
        """A user's own, on the first examples of this rank."""
        taken, targets = data.examples.take(slice(0, TRIED))
        if not len(targets):
            return
        inputs = each(taken, lambda values: data.normalise(values, self.dtype).cpu())
        arguments, named = self.network.form.seen(inputs)
        with torch.no_grad():
            outputs = self.network.module.to(self.dtype).eval()(*arguments, **named)
        dry_run(self.config.task, self.task, outputs, targets.cpu())

    def _refuse_losses_that_do_not_add_up(self, of_examples: bool) -> None:
        """Gradients over all of a client's examples are summed up from batches; those of ``--diagnose`` mix clients."""
        of_batches = self.task.batch_loss is not None
        what = "--diagnose" if self.config.diagnose else f"--algorithm {self.config.algorithm}"
        full = self.config.diagnose or self.algorithm.full_gradient
        if (of_batches and full) or (self.config.diagnose and not of_examples):
            raise UserError(
                f"{what} takes gradients over all examples of a client, and the loss of {self.config.task} is no mean "
                "over examples, which batches would add up to: leave it out, or choose another"
            )

    def _columns(self) -> Columns:
        shown = {name: (m.title, m.percent, bool(m.larger_is_better)) for name, m in self.scores.metrics.items()}
        return of_task(shown, *objective_of(self.task, self.config.objective))

    def _network(self) -> models.Network:
        c = self.config
        about, lora = (c.model, self.task.outputs(), self.about), Lora.of(c.record())
        network = models.build(*about, c.activation, c.seed, c.engine != "generic", c.norm, c.smu_mu, lora)
        if c.init and (network.constants or (self.world.rank == 0 and not self.start)):
            load_initial(Path(c.init), network, self.dtype, c.init_partial)
        return network

    def _augmentation(self) -> Augmentation | None:
        return Augmentation(self.config.augment, self.network.form) if ":" in self.config.augment else None

    def _output_shape(self) -> tuple[int, ...]:
        """Of the model, for one example."""
        if (asked := self.task.outputs()) is not None:
            return asked
        arguments, named = self.network.form.seen(self.network.form.zeros(1, dtype=dtype_of(self.network.module)))
        with torch.no_grad():
            return tuple(self.network.module.eval()(*arguments, **named).shape[1:])

    def _images_per_step(self) -> int:
        """That a rank's threads share, the same number on all ranks; an evaluation's batch has a forward pass only."""
        c = self.config
        most = max(map(len, self.owners.clients_of))
        largest = self.data.most_rows(c)
        batch = min(c.batch_size or largest, largest)
        return max(round(c.participation * most) * batch, BATCH["cpu"] // 3)

    def _refuse_different_models(self) -> None:
        """A user's function may read files, or depend on the machine; and so may the values of frozen parameters."""
        first, *others = self.world.allgather_json(self.digests[checkpoint.MODEL])
        different = [rank for rank, other in enumerate(others, 1) if other != first]
        if different:
            raise UserError(
                f"--model {self.config.model}: rank {different[0]} has other frozen parameters, buffers or shapes than "
                "rank 0; expected the same model on every rank"
            )

    def _local_data(self) -> LocalData:
        data = self.data.of_clients(self.world, self.owners, self.loading)
        data.largest = self.data.most_rows(self.config) if trains_alone(self.config) else 0
        return data

    def trained_module(self) -> nn.Module:
        """The network's own module, on the CPU, with the values of the last round; adapters are merged."""
        module = self.network.module.cpu()
        if self.network.lora:
            module = copy.deepcopy(module)
        values = self.network.state_dict(self.silo.s.x.cpu())
        for name, tensor in tensors(module).items():
            if name in values:
                tensor.data = values[name]
        return merged(in_type(module, self.dtype))


def root_only_serves(world: mpi.World, config: Config) -> bool:
    """Whether rank 0 of the world as it began has no clients: unless it is alone, or asked to train."""
    return world.original_size > 1 and not config.server_trains
