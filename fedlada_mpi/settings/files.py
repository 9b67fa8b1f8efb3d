"""Settings in files: what users write in TOML, and what a run records of its own in JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..support.code_digest import Code
from ..support.errors import UserError
from ..support.inputs import check_path, read_json, read_toml, reason
from .earlier import own_settings
from .fields import SETTINGS, Config, shown

CODE, COLUMNS = "code", "columns"  # in a record, next to the settings
OTHER_FILES = (".yaml", ".yml", ".ini", ".cfg", ".conf", ".py", ".xml", ".csv")  # that people give for settings


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings from a TOML file, or from JSON as a run records them."""
    check_path(os.fspath(path), "--config")
    path = Path(path)
    if path.suffix.lower() in OTHER_FILES:
        kind = path.suffix[1:].upper()
        raise UserError(f"--config: got {path}, a {kind} file; settings are TOML, one NAME = VALUE per line: FILE.toml")
    try:
        data = read_json(path, once=True) if is_record(path) else read_toml(path)
    except OSError as error:
        raise UserError(f"--config: cannot read {path}: {reason(error)}") from None
    except ValueError as error:
        raise UserError(f"--config: {path} is not valid {path.suffix[1:].upper() or 'TOML'}: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"--config: {path} holds {type(data).__name__}, expected one table of settings")
    if not is_record(path):
        return data
    return own_settings({name: value for name, value in data.items() if name not in (CODE, COLUMNS)})


def is_record(path: str | os.PathLike[str]) -> bool:
    """Whether a settings file was written by a run: runs write JSON, people write TOML."""
    return Path(path).suffix == ".json"


def dumps(config: Config) -> str:
    """The record of a run's settings, with the digests of a user's code, and the metrics where it does not classify."""
    more = {name: value for name, value in ((CODE, config.code), (COLUMNS, config.columns)) if value}
    return json.dumps(config.record() | more, indent=2) + "\n"


def recorded_code(path: str | os.PathLike[str]) -> Code:
    """What the record of a run has of a user's code; nothing in records of earlier versions."""
    try:
        return as_code(read_json(Path(path)).get(CODE))
    except (OSError, ValueError, AttributeError):
        return {}


def as_code(value: Any) -> Code:
    """Digests of code as JSON has them, without what is none."""
    tables = value.items() if isinstance(value, dict) else ()
    return {setting: {str(n): str(d) for n, d in table.items()} for setting, table in tables if isinstance(table, dict)}


def differences(old: Mapping[str, Any], new: Config) -> list[str]:
    """Settings that change the result and differ between a checkpoint and this run."""
    record = new.record()
    return [
        f"{name}: {shown(old[name])} in the checkpoint, {shown(record[name])} now"
        for name, value in record.items()
        if fixes_result(name) and name in old and old[name] != value
    ]


def fixes_result(name: str) -> bool:
    """Whether a setting must stay as it is when a run is resumed."""
    return not (name in SETTINGS and SETTINGS[name].runtime)
