"""A method as its settings see it: those of its own, and its presets of any settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..support.suggestions import did_you_mean
from .fields import SETTINGS, Setting, flag

# Attributes of every method's objects, options of the command, and keywords of ``fedlada_mpi.train``.
RESERVED = (
    *("config", "tensors", "eta_g", "decay", "moves_point", "help", "resume", "overwrite", "print_config", "ranks"),
    *("data", "on_round", "quiet", "accept_changed_code", "trust", "code"),
)


class Configurable:
    """A class whose ``hyper`` attributes are settings.

    >>> class Mine(Configurable):
    ...     mu: float = hyper(0.1, "weight of my term", least=0)
    ...     presets = {"": dict(lr=0.05), "cifar100": dict(mu=0.2)}
    """

    name: ClassVar[str] = ""  # of a built-in method, on the command line
    amends: ClassVar[bool] = False  # whether a client's direction is alpha times its own and 1 - alpha times g_a

    # Settings that the method needs, of those that all methods have.
    requires: ClassVar[Mapping[str, Any]] = {}
    # Its values of any settings, by data set; "" is for all of them.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # What differs from these under --preset tuned, by data set; chosen for this method, hence not inherited.
    tuned: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # Likewise under --preset closest: the nearest to the paper's results of all that was tried, whatever its text says.
    closest: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    hypers: ClassVar[dict[str, Setting]] = {}  # its own settings; collected from the class

    def __init_subclass__(cls) -> None:
        cls.hypers = {
            name: value.named(name)
            for parent in reversed(cls.__mro__)
            for name, value in vars(parent).items()
            if isinstance(value, Setting)
        }
        cls._refuse_taken_names()
        if cls.amends and "alpha" not in cls.hypers:
            raise TypeError(f"{cls.__name__} declares amends and has no setting alpha: add alpha = hyper(...)")
        cls.tuned, cls.closest = vars(cls).get("tuned", {}), vars(cls).get("closest", {})
        known = [*SETTINGS, *cls.hypers]
        presets = (*cls.presets.values(), *cls.tuned.values(), *cls.closest.values())
        for name in (*cls.requires, *(name for preset in presets for name in preset)):
            if name not in known:
                raise TypeError(
                    f"{cls.__name__}: its preset has an unknown setting {name!r}{did_you_mean(name, known)}"
                )

    @classmethod
    def _refuse_taken_names(cls) -> None:
        interface = [parent for parent in cls.__mro__[1:] if parent is Configurable or Configurable in parent.__bases__]
        taken = {*(name for parent in interface for name in vars(parent)), *SETTINGS, *RESERVED}
        # A switch --flip has --no-flip, too.
        switches = {f"no_{name}": name for name, s in {**SETTINGS, **cls.hypers}.items() if s.kind == "bool"}
        for name in cls.hypers:
            if name in taken:
                raise TypeError(f"{cls.__name__}: {name} cannot be its own setting, as all methods have it: rename it")
            if name in switches:
                switch = flag(switches[name])
                raise TypeError(
                    f"{cls.__name__}: {name} cannot be its own setting, as --no-{switch} is the opposite of "
                    f"--{switch}: rename it"
                )
            nearest = next(vars(parent)[name] for parent in cls.__mro__ if name in vars(parent))
            if not isinstance(nearest, Setting):
                raise TypeError(
                    f"{cls.__name__}: {name} is a setting that it inherits, so that {name} = {nearest!r} has no "
                    f"effect: write {name} = hyper({nearest!r}, ...), or dict({name}={nearest!r}) into presets"
                )

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> None:
        """Raise ``UserError`` for settings that contradict each other."""

    @classmethod
    def check_dp(cls, algorithm: str, values: Mapping[str, Any]) -> None:
        """Raise ``UserError`` where ``--dp`` cannot make the method private."""
