"""``--model torchvision:NAME``: torchvision's classification models, without their pretrained weights."""

from __future__ import annotations

import torch
from torch import nn

from ..support.errors import UserError, first_line
from ..support.suggestions import did_you_mean
from ..support.user_code import TORCHVISION, users_code
from ..support.warning_filters import warning_filter

NORM = "group:2"  # the paper's


def torchvision_model(name: str, classes: int, channels: int) -> tuple[nn.Module, list[str]]:
    """The model ``torchvision:NAME`` with ``classes`` outputs for images of ``channels``, and what was adapted."""
    try:
        from torchvision import models as zoo  # here, as importing it takes seconds
    except (ImportError, RuntimeError) as error:  # RuntimeError: one that was built for another torch
        raise UserError(
            f"--model {name}: cannot import torchvision ({first_line(error)}); install the one for torch "
            f"{torch.__version__}: pip install torchvision"
        ) from None
    short, known = name.removeprefix(TORCHVISION), zoo.list_models(module=zoo)
    if short not in known:
        raise UserError(
            f"--model {name}: torchvision has no classification model of that name{did_you_mean(short, known)}"
        )
    on_first_values = warning_filter("ignore", FutureWarning)  # of GoogLeNet and Inception
    with on_first_values, users_code(f"--model {name}", "a model that takes num_classes"):
        module = zoo.get_model(short, weights=None, num_classes=classes)
    return module, [] if channels == 3 else [_adapt_channels(module, channels)]


def _adapt_channels(module: nn.Module, channels: int) -> str:
    """Let the first convolution take ``channels`` in place of 3: its initial values for red, green, blue in turn."""
    name, old = next((n, m) for n, m in module.named_modules() if isinstance(m, nn.Conv2d))
    old.in_channels = channels
    old.weight = nn.Parameter(old.weight.detach()[:, [i % 3 for i in range(channels)]].clone())
    return f"{name} takes {channels} channel{'s' * (channels > 1)} in place of 3"
