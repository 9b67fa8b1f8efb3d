"""Tests whose jobs run at the same time, because most of their time is SLURM's own waiting.

    @at_once
    def test_something(user):
        ...

The first of them that pytest runs starts all that were selected, each in a thread and with a user of its own; every one
reports how its own story ended.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Story = Callable[[Any], None]
STORIES: dict[str, Story] = {}


def at_once(story: Story) -> Callable[[dict[str, Future[None]]], None]:
    name = story.__name__
    STORIES[name] = story

    def test(stories: dict[str, Future[None]]) -> None:
        stories[name].result()

    test.__name__, test.__doc__ = name, story.__doc__
    return test
