"""A traced module as a program: steps of stacked layers, each of which reads what earlier ones gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from .axes import Axes
from .form import Stored
from .layers import Reader
from .stack import Stack


@dataclass(eq=False)
class Value:
    """The result of a step, by its ``kind``.

    ``batch``: activations [C, N, ...]; ``parameter``: a parameter, or what was computed from parameters alone,
    [C, ...]; ``any``: other tensors with a row for every client; ``constant``: a tensor that all clients have in
    common, such as a buffer, without such rows; ``other``: anything else, such as a size.
    """

    slot: int
    kind: str
    axes: Axes = Axes((), (), ())
    shape: tuple[int, ...] = ()  # of a parameter
    name: str = ""  # of a parameter in the layout


Run: TypeAlias = Callable[..., Any]  # of a stack and the tensors that the step reads


@dataclass
class Step:
    run: Run
    reads: list[int]
    slot: int
    last_use: list[int] = field(default_factory=list)  # slots that nothing reads afterwards


@dataclass
class StackedProgram:
    """Stacked layers in order; called with a stack and images [C, N, rows, columns, channels], gives the logits.

    >>> import torch
    >>> from fedlada_mpi import models
    >>> network = models.build("cnn", outputs=10, inputs=(8, 8, 1))
    >>> two_clients = network.stack(network.initial().expand(2, -1))
    >>> network.forward.evaluation(two_clients, torch.zeros(2, 5, 8, 8, 1)).shape
    torch.Size([2, 5, 10])
    """

    steps: list[Step]
    slots: int
    result: int
    inputs: list[str]  # the arrays that the first slots hold; without a name where there is only one
    vmapped: list[str]  # the operations that no stacked step has
    head: list[int] | None = None  # what the last step reads, where it is a layer over a large vocabulary

    def __call__(self, p: Stack, inputs: Stored) -> Tensor:
        logits: Tensor = self._held(p, inputs, self.steps)[self.result]
        return logits

    def before_head(self, p: Stack, inputs: Stored) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inputs, weights and biases of the last layer."""
        assert self.head is not None
        held = self._held(p, inputs, self.steps[:-1])
        hidden, table, *bias = (held[slot] for slot in self.head)
        return hidden, table, bias[0] if bias else None

    def _held(self, p: Stack, inputs: Stored, steps: Sequence[Step]) -> list[Any]:
        """What is left in the slots after these steps."""
        held: list[Any] = [None] * self.slots
        for slot, name in enumerate(self.inputs):
            held[slot] = inputs[name] if isinstance(inputs, dict) else inputs
        for step in steps:
            held[step.slot] = step.run(p, *[held[slot] for slot in step.reads])
            for slot in step.last_use:
                held[slot] = None
        return held


class Builder:
    """Adds steps to a program."""

    def __init__(self, inputs: Sequence[str] = ("",)) -> None:
        self.inputs, self.vmapped = list(inputs), list[str]()
        self.heads: dict[int, list[int]] = {}  # what a last layer over a large vocabulary reads, by its slot
        self.norms: dict[int, Run] = {}  # steps that can give their result in the forms in which others read it
        self.convolutions: dict[int, Reader] = {}  # that may be given columns
        self.steps: list[Step] = []
        self.slots = len(inputs)  # the first hold the inputs
        self.used: set[str] = set()  # parameters

    def program(self, result: Value) -> StackedProgram:
        slot = self.seen(result).slot
        for given, run in self.norms.items():
            if given != slot:
                self._give_as_read(given, run)
        last = {held: i for i, step in enumerate(self.steps) for held in (*step.reads, step.slot)}
        for held, i in last.items():
            if held != slot:
                self.steps[i].last_use.append(held)
        head = self.heads.get(slot) if self.steps and self.steps[-1].slot == slot else None
        return StackedProgram(self.steps, self.slots, slot, self.inputs, self.vmapped, head)

    def _give_as_read(self, slot: int, run: Run) -> None:
        """Let a convolution that reads a slot have columns, and two steps that read it a result each.

        Their gradients then come to the slot's step apart, as columns and as a map, and it adds them.
        """
        at = next(i for i, step in enumerate(self.steps) if step.slot == slot)
        readers = [step for step in self.steps for read in step.reads if read == slot]
        convolution = next((step for step in readers if step.slot in self.convolutions), None)
        run = run if convolution is None else partial(run, reader=self.convolutions[convolution.slot])
        if len(readers) == 1:
            self.steps[at].run = run
        if len(readers) != 2 or readers[0] is readers[1]:
            return
        pair, second = self.slots, self.slots + 1
        self.slots += 2
        other = convolution or readers[1]
        other.reads = [second if read == slot else read for read in other.reads]
        self.steps[at : at + 1] = [
            Step(partial(run, twice=True), self.steps[at].reads, pair),
            Step(lambda p, held: held[0], [pair], slot),
            Step(lambda p, held: held[1], [pair], second),
        ]

    def emit(self, run: Run, reads: Sequence[Value], axes: Axes) -> Value:
        """A step that gives activations."""
        return self.new(run, reads, "batch", axes=axes)

    def new(self, run: Run, reads: Sequence[Value], kind: str, **about: Any) -> Value:
        value = Value(self.slots, kind, **about)
        self.slots += 1
        self.steps.append(Step(run, [self.slot(read) for read in reads], value.slot))
        return value

    def slot(self, value: Value) -> int:
        """Where a value is held; a parameter is brought there at its first use."""
        if value.kind == "parameter" and value.slot < 0:
            self.used.add(value.name)
            name = value.name
            value.slot = self.new(lambda p: p.parameter(name), [], "parameter").slot
        elif value.kind == "constant" and value.slot < 0:
            name = value.name
            value.slot = self.new(lambda p: p.value[name][0], [], "constant").slot
        return value.slot

    def arranged(self, value: Value, order: Sequence[int]) -> Value:
        """The value with its atoms in this order of memory."""
        axes = value.axes
        if axes.order == tuple(order):
            return value
        return self.emit(lambda p, x: axes.arranged(x, order), [value], Axes(axes.sizes, axes.parts, tuple(order)))

    def seen(self, value: Value) -> Value:
        """The value as [C, N, *shape], in the order of axes of the user's code."""
        axes, plain = value.axes, Axes.plain(value.axes.shape)
        return value if axes == plain else self.emit(lambda p, x: axes.as_seen(x), [value], plain)

    def regrouped(self, value: Value, shape: Sequence[int]) -> Value:
        """The value in another shape, in the memory as it is where that is possible."""
        if tuple(shape) == value.axes.shape:
            return value
        axes = value.axes.regrouped(shape)
        if axes is None:
            value, axes = self.seen(value), Axes.plain(shape)
        stored = axes.stored
        return self.emit(lambda p, x: x.reshape(*x.shape[:2], *stored), [value], axes)
