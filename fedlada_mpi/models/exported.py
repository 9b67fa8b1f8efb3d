"""What ``torch.fx`` cannot trace, ``torch.export`` may: its graph, in the functions that ``torch.fx`` records.

It follows assertions, loops and branches on shapes, but takes seconds, most of them to import torch's compiler.
"""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate

from . import low_rank
from .client_axis import OPERATIONS, convert
from .form import Form
from .parameters import dtype_of

TRACED = torch.float64
# Those whose arguments are torch's, but for further ones at the end.
FUNCTIONS: dict[str, tuple[Any, int]] = {
    **{name: (getattr(F, name), 7) for name in ("linear", "conv1d", "conv2d", "conv3d")},
    **{name: (getattr(F, name), 8) for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")},
    "adapted": (low_rank.adapted, 7),
    "layer_norm": (F.layer_norm, 5),
    "group_norm": (F.group_norm, 5),
    "dropout": (F.dropout, 3),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, 6),
    "elu": (F.elu, 2),
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), (torch.reshape, 2)),
    "squeeze": (torch.squeeze, 2),
    "flatten": (torch.flatten, 3),
    "unflatten": (torch.unflatten, 3),
    **({"rms_norm": (F.rms_norm, 4)} if hasattr(F, "rms_norm") else {}),
    **{name: (getattr(F, name), 6) for name in ("max_pool1d", "max_pool2d", "max_pool3d")},
    **{name: (getattr(F, name), 7) for name in ("avg_pool1d", "avg_pool2d", "avg_pool3d")},
    **{name: (getattr(F, name), 2) for name in ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")},
    "pad": (F.pad, 4),
    "split_with_sizes": (torch.split, 3),
}
# Without an effect on numbers.
PASSED_ON = ("alias", "lift_fresh_copy", "lift_fresh", "detach_")
CREATING = ("arange", "full", "zeros", "ones", "empty", "eye", "linspace", "scalar_tensor")
CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


def exported(module: nn.Module, form: Form, examples: int) -> fx.Graph:
    """The operations of a module; tensors that it makes become attributes of it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    positional, named = form.seen(form.zeros(examples, dtype=TRACED))
    batch = torch.export.Dim("batch", min=2)
    shapes = {name: {0: batch} for name in named} if named else tuple({0: batch} for _ in positional)
    # Where torch cannot follow a model it writes its graph and advice there; the run says in a line of its own.
    with torch.no_grad(), redirect_stderr(io.StringIO()):
        program = torch.export.export(
            _in_double(module, mode), tuple(map(mode.from_tensor, positional)),
            {name: mode.from_tensor(value) for name, value in named.items()}, dynamic_shapes=shapes, strict=False,
        )  # fmt: skip
    return _Rewriting(module, program).graph


def _in_double(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a module in double precision, whose tensors take no memory.

    In its trace the module's own type then differs from types that its code names, such as float32 for a norm.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        value: Tensor = mode.from_tensor(tensor.detach())
        value = value.to(TRACED) if value.is_floating_point() else value
        parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if parameter else value
    return copy.deepcopy(module, memo)


class _Rewriting:
    """An exported program with parameters as attributes, and with torch's functions in place of its operators."""

    def __init__(self, module: nn.Module, program: Any):
        self.module, self.graph = module, program.graph
        signature = program.graph_signature
        tensors = {
            **signature.inputs_to_parameters, **signature.inputs_to_buffers,
            **getattr(signature, "inputs_to_lifted_tensor_constants", {}),
        }  # fmt: skip
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and node.name in tensors:
                self._attribute(node, tensors[node.name], program.constants)
        first = next(node for node in self.graph.nodes if node.op == "get_attr" and self._floats(node))
        with self.graph.inserting_after(first):
            self.own_dtype = self.graph.call_function(getattr, (first, "dtype"))
        for node in list(self.graph.nodes):
            if isinstance(node.target, torch._ops.OpOverload):
                self._rewrite(node, node.target._schema.name.partition("::")[2])
            if node.op == "output":
                (outputs,) = node.args
                node.args = (outputs[0],)
        self.graph.owning_module = None  # whose attributes are not those of the module
        self.graph.eliminate_dead_code()

    def _floats(self, node: fx.Node) -> bool:
        owner, _, name = str(node.target).rpartition(".")
        return bool(getattr(self.module.get_submodule(owner), name).is_floating_point())

    def _attribute(self, node: fx.Node, name: str, constants: dict[str, Any]) -> None:
        owner, _, attribute = name.rpartition(".")
        if not hasattr(self.module.get_submodule(owner), attribute):  # a tensor that the module makes
            value, name = constants[name], f"_exported_{node.name}"
            if isinstance(value, FakeTensor):
                raise TypeError(f"the values of {name} are not in the trace")
            setattr(self.module, name, value.to(dtype_of(self.module)) if value.dtype is TRACED else value)
        with self.graph.inserting_before(node):
            read = self.graph.create_node("get_attr", name)
        node.replace_all_uses_with(read)
        self.graph.erase_node(node)

    def _rewrite(self, node: fx.Node, name: str) -> None:
        if name in CHECKS:
            self.graph.erase_node(node)
            return
        if name in PASSED_ON:
            (same,) = node.all_input_nodes
            node.replace_all_uses_with(same)
            self.graph.erase_node(node)
            return
        node.args, node.kwargs = self._own_types(node, (node.args, node.kwargs))
        if name in REWRITTEN:
            node.target, node.args, node.kwargs = REWRITTEN[name](*node.args, **node.kwargs)
            node.op = "call_method" if isinstance(node.target, str) else "call_function"
        elif name in FUNCTIONS:
            function, count = FUNCTIONS[name]
            node.target, node.args = function, node.args[:count]
        elif getattr(torch, name, None) in OPERATIONS or name in CREATING:
            node.target = getattr(torch, name)
        elif getattr(F, name, None) in OPERATIONS:
            node.target = getattr(F, name)
        elif name in OPERATIONS and hasattr(Tensor, name):
            node.target, node.op = name, "call_method"

    def _own_types(self, node: fx.Node, arguments: Any) -> Any:
        """Types and their limits, which a trace has as numbers, as those of the run."""
        limits = torch.finfo(TRACED)

        def own(value: Any) -> Any:
            if value is TRACED:
                return self.own_dtype
            if isinstance(value, float) and value in (limits.min, limits.max):
                with self.graph.inserting_before(node):
                    of_type = self.graph.call_function(torch.finfo, (self.own_dtype,))
                    return self.graph.call_function(getattr, (of_type, "min" if value < 0 else "max"))
            return value

        return map_aggregate(arguments, own)


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Call:
    padding = None if padding_idx < 0 else padding_idx
    return F.embedding, (indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse), {}


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Call:
    end = None if isinstance(end, int) and end >= 2**63 - 1 else end
    everything = slice(None)
    index = (..., slice(start, end, step), *(everything,) * (-1 - dim)) if dim < 0 else (
        *(everything,) * dim, slice(start, end, step)
    )  # fmt: skip
    return operator.getitem, (x, index), {}


def _index(x: Any, indices: Any) -> Call:
    return operator.getitem, (x, tuple(slice(None) if i is None else i for i in indices)), {}


def _to(x: Any, *others: Any, dtype: Any = None, **options: Any) -> Call:
    types = [value for value in (dtype, *others) if isinstance(value, (torch.dtype, fx.Node))]
    return convert, (x, types[0] if types else None), {}


def _operator(function: Any, *arguments: Any) -> Call:
    return function, arguments, {}


REWRITTEN: dict[str, Callable[..., Call]] = {
    "embedding": _embedding,
    "slice": _slice,
    "index": _index,
    "to": _to,
    "_to_copy": _to,
    "sym_size": lambda x, dim: ("size", (x, dim), {}),
    "addmm": lambda bias, a, b: (torch.addmm, (bias, a, b), {}),
    **{f"__{name}__": partial(_operator, getattr(operator, f"{name}_")) for name in ("and", "or")},
    "rsub": lambda x, other, alpha=1: (operator.sub, (other, x), {}),
}
