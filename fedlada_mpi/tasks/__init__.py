"""What a run can learn; ``base.py`` has the interface."""

from .base import About, Array, Metric, Task, summed, whole

__all__ = ["About", "Array", "Metric", "Task", "summed", "whole"]
