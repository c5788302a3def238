"""Configuration files and command lines: one Python file per experiment, any field overridden by an option."""

import argparse
import ast
import difflib
import importlib.util
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from common.errors import UserError


def load(spec: str) -> ConfigDict:
    """Calls `get_config` of a file: "configs/x.py", or with an argument "configs/x.py:tiny"."""
    path, _, argument = spec.partition(":")
    if not Path(path).is_file():
        raise UserError(
            f"no configuration file {path}{_nearest(path, Path('configs').glob('*.py'))}"
        )
    module_spec = importlib.util.spec_from_file_location(f"configs.{Path(path).stem}", path)
    if module_spec is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise UserError(f"{path} has no function get_config")
        config = module.get_config(argument) if argument else module.get_config()
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{error.filename or path}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # how a configuration refuses its argument
        raise UserError(f"--config={spec}: {error}") from error
    except Exception as error:  # whatever else the user's code raises
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    check(isinstance(config, ConfigDict), f"get_config of {path} returns no ConfigDict")
    return config


def override(config: ConfigDict, key: str, text: str) -> None:
    """Sets the field "a.b" from text, converted to the type of the field's current value.

    Raises:
      UserError: there is no such field, or the text does not convert.
    """
    known = flatten(config)
    if key not in known:
        if any(name.startswith(f"{key}.") for name in known):
            raise UserError(
                f"--config.{key} is a group; set one of its fields, --config.{key}.NAME=VALUE"
            )
        raise UserError(f"unknown option --config.{key}{_nearest(key, known)}")
    parent = config
    *groups, name = key.split(".")
    for group in groups:
        parent = parent[group]
    parent[name] = _read(f"--config.{key}", text, known[key])


def _read(option: str, text: str, current: Any) -> Any:
    """`text` as a value of the type of `current`."""
    try:
        if isinstance(current, bool):
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if isinstance(current, int):
            return int(text)
        if isinstance(current, float):
            return _finite(text)
        if isinstance(current, tuple):
            value = ast.literal_eval(text if text.strip() else "()")
            value = tuple(value) if isinstance(value, tuple | list) else (value,)
            if current and isinstance(current[0], float):
                value = tuple(float(v) if isinstance(v, int) else v for v in value)
            if current and not all(isinstance(item, type(current[0])) for item in value):
                raise ValueError
            return value
    except (ValueError, TypeError, KeyError, SyntaxError) as error:
        kinds = {bool: "true or false", int: "a whole number", float: "a number"}
        kind = kinds.get(type(current))
        if kind is None:
            kind = f"a list such as {','.join(map(str, current or (1, 2)))}"
        raise UserError(f"{option} must be {kind}, got {text!r}") from error
    return text


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def flatten(config: Mapping, prefix: str = "") -> dict[str, Any]:
    """A nested configuration as {"a.b": value}."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_json(config: ConfigDict) -> dict:
    """A configuration as plain dictionaries and lists."""
    return json.loads(json.dumps(config.to_dict()))


def from_json(values: dict) -> ConfigDict:
    """The inverse of `to_json`; lists become tuples."""

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: restore(item) for key, item in value.items()}
        return tuple(restore(item) for item in value) if isinstance(value, list) else value

    return ConfigDict(restore(values))


def check(condition: bool, message: str) -> None:
    """Raises a UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


def check_choice(option: str, value: str, known: Mapping[str, Any] | tuple) -> None:
    """Raises a UserError unless `value` is one of `known`; it names the nearest one."""
    check(
        value in known,
        f"{option}={value!r}: choose one of {', '.join(known)}{_nearest(value, known)}",
    )


def check_folder(option: str, folder: Path) -> None:
    """Checks that `folder` exists or can be made, before the work whose results go there. Makes nothing.

    Raises:
      UserError: a parent is no folder, or is not writable.
    """
    place = folder.absolute()
    there = next(path for path in (place, *place.parents) if path.exists())
    check(there.is_dir(), f"cannot write to {option}={folder}: {there} is no folder")
    check(os.access(there, os.W_OK), f"cannot write to {option}={folder}: no right to do so")


def check_rate(option: str, rate: float) -> None:
    """Checks 0 <= rate <= 0.99, for dropout."""
    check(0 <= rate <= 0.99, f"{option} must be from 0 to 0.99, got {rate}")


@contextmanager
def complete(source: object) -> Iterator[None]:
    """Turns a missing configuration field into a UserError.

    Args:
      source: the file or option that the configuration comes from.
    """
    try:
        yield
    except (AttributeError, KeyError) as error:
        field = str(error).splitlines()[0].strip("\"'")
        raise UserError(
            f"{source} is no configuration of this program: no field {field}"
        ) from error


def split_fields(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into overrides, "--config.a.b=VALUE", and all other arguments.

    Raises:
      UserError: an override has no value.
    """
    fields = [a for a in argv if a.startswith("--config.")]
    for field in fields:
        check("=" in field, f"{field} needs a value: {field}=VALUE")
    return fields, [a for a in argv if a not in fields]


def override_all(config: ConfigDict, fields: list[str]) -> None:
    """Applies overrides "--config.a.b=VALUE" in their order."""
    for field in fields:
        key, _, text = field.removeprefix("--config.").partition("=")
        override(config, key, text)


def parse(program: str, argv: list[str] | None = None) -> tuple[ConfigDict, argparse.Namespace]:
    """Parses the command line of a training program: --config=FILE[:ARG] --config.a.b=V ... --workdir=DIR.

    The default workdir is named after the configuration, so the same command resumes its own run.
    """
    parser = parser_for(program)
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE[:ARG]",
        help="configuration; ':tiny' is a small run on embedded data",
    )
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        help="where checkpoints, curves and summary go (default runs/NAME)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        dest="dry_run",
        help="parameters, first batch, memory and operations of a step; nothing is trained",
    )
    parser.add_argument(
        "--profile",
        default="",
        metavar="FIRST:LAST",
        help="trace these steps for xprof or TensorBoard, in the workdir",
    )
    parser.epilog = "Any field of the configuration is an option: --config.seed=2"
    fields, rest = split_fields(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(rest)
    config = load(options.config)
    override_all(config, fields)
    paper, own = program.split(".")[0], config.get("paper", "")
    check(
        own in ("", paper),
        f"--config={options.config} is an experiment of {own}, which {program} does not train",
    )
    path, _, argument = options.config.partition(":")
    name = Path(path).stem + (f"_{re.sub(r'[^A-Za-z0-9]+', '_', argument)}" if argument else "")
    options.workdir = Path(options.workdir or f"runs/{name}")
    return config, options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the options)")


def parser_for(program: str) -> argparse.ArgumentParser:
    """An argument parser that reports errors as one-line UserErrors."""
    return _Parser(prog=f"python -m {program}", allow_abbrev=False)


def int_arg(option: str, least: int = 0) -> Callable[[str], int]:
    """An argparse type: an integer of at least `least`."""

    def read(text: str) -> int:
        check(
            text.isdecimal() and int(text) >= least,
            f"{option} must be a whole number of at least {least}, got {text!r}",
        )
        return int(text)

    return read


def positive_int_arg(option: str) -> Callable[[str], int]:
    """An argparse type: an integer of at least 1."""
    return int_arg(option, 1)


def float_arg(option: str) -> Callable[[str], float]:
    """An argparse type: a finite float."""

    def read(text: str) -> float:
        try:
            return _finite(text)
        except ValueError as error:
            raise UserError(f"{option} must be a number, got {text!r}") from error

    return read


def _nearest(name: str, known: Any) -> str:
    match = difflib.get_close_matches(str(name), [str(item) for item in known], n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""
