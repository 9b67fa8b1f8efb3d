"""A user's model tried on small batches, before a run writes anything: what cannot train is refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn

from ..support.errors import UserError, shortened
from ..support.randomness import Draws, SameDraws
from ..support.user_code import users_code
from . import state
from .form import Form, Stored, as_stored, each
from .norms import has_batch_norm
from .parameters import dense, dtype_of, outputs_with, refuse_untrainable, tensors, tied, trained

BATCHES = (1, 2, 3, 7)  # images; clients' batches have many sizes, and are padded
# Added to every parameter, at most, as a model may act on its weights only where they are large; None: they are zero.
CHANGES = (0.01, 1.0, 30.0, None)
LARGE = 1000  # integers whose range is not known
ROUNDING = 1e-6  # added to parameters, at most, to see how much a model makes of it
DRAWS = 3  # by Dropout, of which one may keep the same elements in two batches by chance
CLOSE, NEGLIGIBLE = 1e-3, 1e-5  # of the outputs of an image
ROUNDED = 0.1  # of a gradient


def dry_run(model: str, module: object, expected: tuple[int, ...] | None, form: Form) -> nn.Module:
    """The module, if it turns examples into outputs of the ``expected`` shape (None: any), each by itself."""
    if not isinstance(module, nn.Module):
        raise UserError(f"--model {model}: got {shortened(module)} from the function, expected an nn.Module")
    module.cpu()
    trial = _Trial(model, module, expected, form)
    trial.outputs(training=False, count=2)  # also gives lazy layers their shapes and initial values
    if not trained(module):
        raise UserError(f"--model {model} has nothing to train: expected parameters with requires_grad")
    refuse_untrainable(model, module)
    with trial.unchanged():
        trial.refuse_random_evaluation()
        trial.outputs(training=True, count=2)
    trial.refuse_state()
    trial.refuse_mixed_images()
    trial.refuse_sizes_that_matter()
    _refuse_mixed_integers(model, module, expected, form)
    trial.refuse_changes_of_parameters()
    trial.refuse_other_values()
    trial.refuse_no_gradient()
    trial.refuse_counted_padding()
    module.train()
    return module


def _refuse_mixed_integers(model: str, module: nn.Module, expected: tuple[int, ...] | None, form: Form) -> None:
    """With large ones, too: of 0 and 1 a model that divides by thousands makes next to nothing."""
    if not form.unbounded:
        return
    trial = _Trial(model, module, expected, form, LARGE)
    try:
        trial.outputs(training=False)
    except UserError:  # as where the model looks them up in a table
        return
    trial.refuse_mixed_images()
    trial.refuse_sizes_that_matter()


class _Trial:
    """A module of a user's, and examples that it is tried on; ``most``: their largest integer, if that is not known."""

    def __init__(self, model: str, module: nn.Module, expected: tuple[int, ...] | None, form: Form, most: int = 1):
        self.model, self.module, self.expected, self.form = model, module, expected, form
        self.draw = torch.Generator().manual_seed(0)
        self.images, self.others = (form.random(BATCHES[-1], draw=self.draw, most=most) for _ in range(2))

    def outputs(
        self, training: bool, count: int = BATCHES[-1], draws: Draws | None = None, images: Stored | None = None
    ) -> Tensor:
        """Of a forward pass over the first ``count`` examples, checked."""
        found = self.forward(training, self.first(count) if images is None else images, draws)
        self.check(found, count)
        return found

    @cached_property
    def trained_on(self) -> tuple[Tensor, bool]:
        """The outputs of all examples in training, and whether the pass draws random numbers."""
        draws = _draws()
        return self.outputs(training=True, draws=draws), bool(draws.count)

    def first(self, count: int) -> Stored:
        return each(self.images, lambda value: value[:count])

    def seen(self, images: Stored) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What the module takes, in the type of its numbers."""
        kind = dtype_of(self.module)
        return self.form.seen(each(images, lambda value: as_stored(value, kind)))

    def forward(self, training: bool, images: Stored, draws: Draws | None = None) -> Tensor:
        expected = f"a model that takes {self.form.seen_shape}"
        if training:
            draws = draws or _draws()
        self.module.train(training)
        modes = {name: layer.training for name, layer in self.module.named_modules()}
        trains = {name: p.requires_grad for name, p in self.module.named_parameters()}
        with torch.no_grad(), users_code(f"--model {self.model}", expected), draws or nullcontext():
            arguments, named = self.seen(images)
            outputs = self.module(*arguments, **named)
        if modes != {name: layer.training for name, layer in self.module.named_modules()}:
            raise UserError(f"--model {self.model} calls train() or eval() in its forward pass: leave that to the run")
        toggled = [name for name, p in self.module.named_parameters() if p.requires_grad != trains.get(name)]
        if toggled:
            raise UserError(
                f"--model {self.model} changes requires_grad of {toggled[0]} in its forward pass: set it before, in "
                "the function that makes the model"
            )
        return outputs

    def check(self, outputs: object, images: int) -> None:
        model = self.model
        if not isinstance(outputs, Tensor):
            raise UserError(f"--model {model}: got a {type(outputs).__name__} from its forward pass, expected a tensor")
        wanted = outputs.shape[1:] if self.expected is None else self.expected
        if tuple(outputs.shape) != (images, *wanted):
            got, number = list(outputs.shape), f"{images} image{'s' * (images > 1)}"
            if not self.form.image:
                number = number.replace("image", "example")
            classes = f": one for each of the {wanted[0]} classes" if self.form.image and len(wanted) == 1 else ""
            raise UserError(
                f"--model {model}: got outputs of shape {got} for {number}, expected {[images, *wanted]}{classes}"
            )
        if not outputs.is_floating_point():
            raise UserError(f"--model {model}: got outputs of type {outputs.dtype}, expected floating-point numbers")
        if not outputs.isfinite().all():
            raise UserError(
                f"--model {model}: its outputs are not finite before any training; check its initial values"
            )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Refuse a model that changes one of its tensors in the block."""
        before = {name: value.detach().clone() for name, value in tensors(self.module).items()}
        yield
        now = tensors(self.module)
        changed = [name for name, value in before.items() if name not in now or not _same(now[name], value)]
        if changed:
            self._refuse_changes(changed)

    def _refuse_changes(self, changed: list[str]) -> None:
        names = ", ".join(changed[:3])
        if set(changed) & dict(self.module.named_parameters()).keys():
            raise UserError(
                f"--model {self.model} changes {names} in its forward pass: a run's parameters change by its method "
                "alone; compute with a bounded copy of them instead, such as w.renorm(2, 0, bound)"
            )
        raise UserError(
            f"--model {self.model} changes {names} in its forward pass: layers with running statistics, "
            f"such as BatchNorm, have no federated mean; {self._instead()}"
        )

    def _instead(self) -> str:
        """What to use in place of BatchNorm."""
        exchange = ", or give --norm group:2" if has_batch_norm(self.module) else ""
        return f"use GroupNorm or LayerNorm{exchange}"

    def refuse_random_evaluation(self) -> None:
        draws = _draws()
        self.outputs(training=False, count=2, draws=draws)
        if draws.count:
            raise UserError(
                f"--model {self.model} draws random numbers in evaluation; F.dropout needs training=self.training"
            )

    def refuse_state(self) -> None:
        """What a pass leaves behind, such as a counter, would depend on the ranks and on when the run was resumed."""
        for training in (True, False):
            states, results = [], []
            for _ in range(3):
                results.append(self.outputs(training, count=2))
                states.append(state.of(self.module))
            if not all(_close(results[0], other) for other in results[1:]):
                raise UserError(
                    f"--model {self.model}: two passes over the same batch differ; layers must not keep state, and "
                    "must draw random numbers with torch, not with random or numpy"
                )
            if changed := state.changed_every_time(states):
                raise UserError(
                    f"--model {self.model}: {changed[0]} changes with every pass; layers must not keep state, such as "
                    "a counter, as passes differ in number from rank to rank and after a resume"
                )

    def refuse_mixed_images(self) -> None:
        first, _ = self.trained_on
        for own in (slice(0, 1), slice(1, None)):
            mixed = self.mixed(own)
            # Batches are padded, so that those of all clients have one size.
            if not _close(first[own], self.outputs(training=True, images=mixed)[own]):
                raise UserError(
                    f"--model {self.model}: the outputs of an example depend on the other examples of its batch, as "
                    f"with BatchNorm; {self._instead()}"
                )

    def mixed(self, own: slice) -> Stored:
        """The examples ``own``, among others."""

        def joined(images: Tensor, others: Tensor) -> Tensor:
            mixed = others.clone()
            mixed[own] = images[own]
            return mixed

        return each(self.images, joined, self.others)

    def refuse_sizes_that_matter(self) -> None:
        for training in (False, True):
            whole, random = self.trained_on
            draws = SameDraws() if training else None  # also of a model that draws for small batches alone
            if random or not training:
                whole = self.outputs(training, draws=draws)
            for count in BATCHES[:-1]:
                if not _close(self.outputs(training, count, draws), whole[:count]):
                    raise UserError(
                        f"--model {self.model}: the outputs of an example depend on the number of examples in its "
                        f"batch ({count} or {BATCHES[-1]}): expected those of the example alone, as batches are padded"
                    )
        self._refuse_draws_by_size()

    def _refuse_draws_by_size(self) -> None:
        """With numbers of their own for all elements of a batch, whose places may depend on its size."""
        _, random = self.trained_on
        for key in range(DRAWS if random else 0):
            whole = self.outputs(training=True, draws=_draws(key))
            if not all(_close(self.outputs(True, count, _draws(key)), whole[:count]) for count in BATCHES[:-1]):
                raise UserError(
                    f"--model {self.model}: the random numbers of an example depend on the number of examples in its "
                    "batch: draw them for tensors whose first axis is the examples, as with batch_first=True"
                )

    def refuse_changes_of_parameters(self) -> None:
        """Also by a pass that changes them only where they are large, negative or zero."""
        images, parameters = self.first(1), dict(self.module.named_parameters())
        for change in (0.0, *CHANGES):
            with self.with_others(change):
                versions = {name: p._version for name, p in parameters.items()}
                with self.unchanged():
                    for training in (True, False):
                        try:
                            self.forward(training, images)
                        except UserError:  # an operation that is not defined for such weights
                            if change == 0.0:
                                raise
                written = [name for name, p in parameters.items() if p._version != versions[name]]
                if written:
                    self._refuse_changes(written)

    @contextmanager
    def with_others(self, change: float | None) -> Iterator[None]:
        """The module with other values of the parameters that are trained, inside the block."""
        before = [(p, p.detach().clone()) for p in trained(self.module).values()]
        with torch.no_grad():
            for p, _ in before:
                if change is None:
                    p.zero_()
                else:
                    p += torch.empty(p.shape).uniform_(-change, change, generator=self.draw)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in before:
                    p.copy_(value)

    def refuse_other_values(self) -> None:
        """A run calls the module with values of its own, all in the type that --precision has."""
        expected = "a model that torch.func.functional_call takes"
        for change in CHANGES[:2]:
            with self.with_others(change):
                values = {name: value.detach().clone() for name, value in tensors(self.module).items()}
                try:
                    plain = self.forward(False, self.first(2))
                    with self.with_others(ROUNDING):
                        moved = self.forward(False, self.first(2))
                except UserError:  # an operation that is not defined for such weights
                    continue
            with users_code(f"--model {self.model}", expected):
                found = self._functional(values, dtype_of(self.module))
            # Deep models with large weights turn rounding, which depends on where values are in memory, into much more.
            sensitive = (plain - found).norm() <= 10 * (plain - moved).norm()
            if plain.isfinite().all() and not sensitive and not _close(plain, found):
                raise UserError(
                    f"--model {self.model} computes with views of its parameters that it has made before: make them in "
                    "forward, where a run has other values for every client"
                )
        values = {name: value.detach() for name, value in tensors(self.module).items()}
        single = {name: value.float() if value.is_floating_point() else value for name, value in values.items()}
        try:
            with users_code(f"--model {self.model}", expected):
                self._functional(single, torch.float32)
        except UserError as error:
            raise UserError(
                f"{error}: a run has all parameters and inputs in one type, that of --precision: leave out .double() "
                "and .half(), and convert to the type of a parameter, as in x.to(self.weight.dtype)"
            ) from None

    def _functional(self, values: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        images = each(self.first(2), lambda value: as_stored(value, dtype))
        with torch.no_grad():
            return outputs_with(self.module.eval(), values, tied(self.module), self.form, images)

    def refuse_no_gradient(self) -> None:
        self.module.train()
        expected = "a model that autograd can differentiate"
        with torch.enable_grad(), users_code(f"--model {self.model}", expected), SameDraws():
            arguments, named = self.seen(self.first(2))
            outputs = self.module(*arguments, **named)
        if not outputs.requires_grad:
            raise UserError(
                f"--model {self.model}: no parameter has a gradient: leave out torch.no_grad() and .detach() on the "
                "way from them to the outputs"
            )

    def refuse_counted_padding(self) -> None:
        """Padding has no weight in the loss, but a layer may count it in its backward pass."""
        (alone, size), (padded, _) = self._gradients(1), self._gradients(2)
        whole = size + torch.stack([gradient.norm() for gradient in alone.values()]).norm()
        for name, gradient in alone.items():
            if (padded[name] - gradient).norm() > ROUNDED * gradient.norm() + NEGLIGIBLE * whole:
                raise UserError(
                    f"--model {self.model}: an example's gradient of {name} depends on the number of examples in its "
                    "batch: expected that of the example alone, as batches are padded; leave out scale_grad_by_freq"
                )

    def _gradients(self, times: int) -> tuple[dict[str, Tensor], Tensor]:
        """Of a sum of the outputs of the first example, which the whole batch consists of; and the size of the sum."""
        own, expected = trained(self.module), "a model that autograd can differentiate"
        with torch.enable_grad(), users_code(f"--model {self.model}", expected), SameDraws():
            arguments, named = self.seen(each(self.images, lambda value: value[:1].expand(times, *value.shape[1:])))
            outputs = self.module(*arguments, **named)[0]
            weights = torch.linspace(1, 2, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
            terms = outputs * weights
            found = torch.autograd.grad(terms.sum(), [*own.values()], allow_unused=True, materialize_grads=True)
        return {name: dense(value) for name, value in zip(own, found, strict=True)}, terms.detach().abs().sum()


def _draws(key: int = 0) -> Draws:
    return Draws(torch.tensor([key]), stacked=False)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all()))


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether the outputs of each image are the same up to rounding, which depends on the size of a batch."""
    tolerance = max(CLOSE, 8 * torch.finfo(b.dtype).eps)
    a, b = a.double(), b.double()
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    return bool(((a - b).norm(dim=1) <= tolerance * b.norm(dim=1) + NEGLIGIBLE).all())
