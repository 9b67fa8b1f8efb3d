"""Settings: their declarations, presets, resolution, files and command lines; no method is imported here.

from fedlada_mpi.settings import Config, SETTINGS
from fedlada_mpi.algorithms import resolve          the settings of a run, with those of its method
"""

from .checks import check_value, norm_groups, trimmed
from .configurable import Configurable
from .earlier import is_of_0_1, own_settings
from .fields import DATASETS, MOST, SETTINGS, SHIPPED, TASKS, Config, Setting, coerce, flag, grouped, hyper
from .files import CODE, COLUMNS, as_code, differences, dumps, fixes_result, is_record, load, recorded_code
from .options import Parser, add_arguments
from .presets import PRESETS, not_in_paper
from .resolve import Resolved, chosen, resolve

__all__ = [
    "CODE",
    "COLUMNS",
    "DATASETS",
    "MOST",
    "PRESETS",
    "SETTINGS",
    "SHIPPED",
    "TASKS",
    "Config",
    "Configurable",
    "Parser",
    "Resolved",
    "Setting",
    "add_arguments",
    "as_code",
    "check_value",
    "chosen",
    "coerce",
    "differences",
    "dumps",
    "fixes_result",
    "flag",
    "grouped",
    "hyper",
    "is_of_0_1",
    "is_record",
    "load",
    "norm_groups",
    "own_settings",
    "not_in_paper",
    "recorded_code",
    "resolve",
    "trimmed",
]
