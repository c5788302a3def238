"""Loads configurations from Python files, and overrides their fields from the command line."""

import argparse
import ast
import difflib
import importlib
import importlib.util
import json
import math
import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

from ml_collections import ConfigDict

from common.errors import UserError, check, named, place_of, raised, reason_of
from common.storage.folders import open_folder


def load(spec: str, option: str = "--config") -> ConfigDict:
    """Returns the configuration that the function `get_config` of a file returns.

    "configs/x.py:tiny" calls `get_config("tiny")` of configs/x.py.

    Args:
      option: command-line option with the value `spec`, for error messages.

    Raises:
      UserError: the file or its `get_config` is missing or fails, or `get_config` does not return a ConfigDict.
    """
    path, _, argument = spec.partition(":")
    near = _nearest(path, Path("configs").glob("*.py"))
    near = near or "; give the path of a configuration file, such as configs/wmt_ffn_res.py"
    with suppress(OSError):  # Permission denied: loading the file, below, raises the same error.
        check(Path(path).is_file(), f"{option}={spec}: no configuration file {path}{near}")
    check(
        path.endswith(".py"),
        f"{option}={spec}: {path} is not a Python file; give a file whose name ends in .py",
    )
    try:
        # No module has this run_name, so a user's file may have the name of a module of `configs` that it imports.
        module = runpy.run_path(path, run_name=f"configs.<{Path(path).stem}>")
        check(
            "get_config" in module,
            f'{path} has no function get_config: define get_config(argument=""), which returns a ConfigDict',
        )
        config = module["get_config"](argument) if argument else module["get_config"]()
    except UserError:
        raise
    except ValueError as error:  # `get_config` raises a ValueError for an unknown argument.
        raise UserError(f"{option}={spec}: {reason_of(error)}") from error
    except Exception as error:  # The user's code may raise any type of exception.
        reason = named(error)
        if "config is locked" in str(error):
            # Shorten the message of ml_collections, which lists all fields of the configuration.
            unknown, *near = re.findall(r'(?:Key|Did you mean) "(.+?)"', str(error))
            near = f"; did you mean {near[0]}?" if near else ""
            reason = f"unknown field {unknown}{near} (new fields need `with config.unlocked():`)"
        raise UserError(f"{place_of(error) or f'{option}={spec}'}: {reason}") from error
    check(
        isinstance(config, ConfigDict),
        f"get_config of {path} must return a ConfigDict, got {type(config).__name__}",
    )
    return config


def override(config: ConfigDict, key: str, text: str, prefix: str = "--config.") -> None:
    """Sets the field `key` ("a.b") to `text`, converted to the type of the field's current value.

    If `config` lacks the field, and the paper has a module `options`, first calls its function `add_to`, which adds the
    options (`common.user_parts.Option`) of parts such as a kind of layer or a method of fine-tuning.

    Args:
      prefix: text before the names of fields in error messages.

    Raises:
      UserError: the field does not exist or is a group, `text` cannot be converted, or `add_to` raises a UserError.
    """
    known = flatten(config)
    if key not in known and (options := paper_module(config.get("paper", ""), "options")):
        options.add_to(config)
        known = flatten(config)
    fields = [name for name in known if name.startswith(f"{key}.")]
    check(
        not fields,
        f"{prefix}{key} is a group; set one of its fields: {', '.join(f'{prefix}{f}' for f in fields)}",
    )
    near = _nearest(key, known, prefix)
    near = near or f"; the fields and groups of the configuration are {', '.join(config)}"
    check(key in known, f"unknown option {prefix}{key}{near}")
    config.update_from_flattened_dict({key: _read(f"{prefix}{key}", text, known[key])})


def paper_module(paper: str, name: str) -> ModuleType | None:
    """Imports and returns the module `name` of a paper's folder; None if the module or the folder is missing."""
    find = importlib.util.find_spec
    spec = find(paper) if paper.isidentifier() else None
    if not (spec and spec.submodule_search_locations and find(f"{paper}.{name}")):
        return None
    return importlib.import_module(f"{paper}.{name}")


def run_module(config: ConfigDict) -> ModuleType:
    """Imports and returns the module `run` of a configuration's paper. Raises a UserError if the module is missing."""
    paper = str(config.get("paper") or "")
    module = paper_module(paper, "run")
    check(
        module is not None,
        f"the field paper of the configuration is {paper!r}, which is not a folder with a module run.py: set this field"
        " to the name of a paper's folder",
    )
    return module


def _read(option: str, text: str, current: Any) -> Any:
    """Converts `text` to the type of a field's value, `current`. Raises a UserError if `text` cannot be converted."""
    try:
        if isinstance(current, bool):
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if isinstance(current, int):
            return int(text)
        if isinstance(current, float):
            return finite(text)
        if isinstance(current, tuple):
            value = ast.literal_eval(text if text.strip() else "()")
            value = tuple(value) if isinstance(value, tuple | list) else (value,)
            if current and isinstance(current[0], float):
                value = tuple(float(v) if isinstance(v, int) else v for v in value)
            if current and not all(isinstance(item, type(current[0])) for item in value):
                raise ValueError
            return value
    except (ValueError, TypeError, KeyError, SyntaxError) as error:
        raise UserError(f"{option} must be {_form(current)}, got {text!r}") from error
    return text


def _form(current: Any) -> str:
    """Returns a description, for messages, of the texts that `_read` accepts for a field with the value `current`."""
    if isinstance(current, tuple):
        items = {int: "of whole numbers ", float: "of numbers ", str: "of quoted texts "}
        kind = items.get(type(current[0]), "") if current else ""
        return f"a list {kind}such as {','.join(map(repr, current)) or '1,2'}"
    kinds = {bool: "true or false", int: "a whole number in digits"}
    return kinds.get(type(current), "a finite number")


def float_or_text(text: str) -> float | str:
    """Converts text to a float if possible, so that 1e-3 equals 0.001; returns any other text unchanged."""
    try:
        return float(text)
    except ValueError:
        return text


def finite(text: str) -> float:
    """Converts text to a float. Raises a ValueError unless the text is a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def flatten(config: Mapping, prefix: str = "") -> dict[str, Any]:
    """Flattens a nested configuration to {"a.b": value}."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_json(config: ConfigDict) -> dict:
    """Returns a configuration as plain dictionaries and lists."""
    return json.loads(json.dumps(config.to_dict()))


def from_json(values: dict) -> ConfigDict:
    """Inverse of `to_json`: returns a configuration. Lists become tuples."""

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: restore(item) for key, item in value.items()}
        return tuple(restore(item) for item in value) if isinstance(value, list) else value

    return ConfigDict(restore(values))


def check_choice(option: str, value: str, known: Mapping[str, Any] | tuple) -> None:
    """Raises a UserError if `value` is not in `known`. The message suggests the most similar choice, if any."""
    check(
        isinstance(value, str) and value in known,
        f"{option}={value!r:.80}: choose one of {', '.join(known)}{_nearest(value, known)}",
    )


def check_rate(option: str, rate: float) -> None:
    """Raises a UserError unless `rate`, a rate of dropout or of skipped layers, is from 0 to 0.99."""
    check(
        _is_real(rate) and 0 <= rate <= 0.99,
        f"{option} must be a number from 0 to 0.99, got {rate!r}",
    )


def check_int(option: str, value: int, least: int = 1) -> None:
    """Raises a UserError unless `value` is an integer of at least `least`. A bool or a float is not an integer."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    kind = "" if whole else f" of type {type(value).__name__}"
    check(
        whole and value >= least,
        f"{option} must be a whole number of at least {least}, got {value!r}{kind}",
    )


def check_least(config: Mapping, names: Iterable[str], least: float = 1) -> None:
    """Raises a UserError unless the configuration fields `names`, each "a.b", are numbers of at least `least`."""
    values = flatten(config)
    for name in names:
        check(
            _is_real(values[name]) and values[name] >= least,
            f"--config.{name} must be at least {least}, got {values[name]!r}",
        )


def check_number(option: str, value: float, *, positive: bool = False) -> None:
    """Raises a UserError unless `value` is a finite number that is at least 0, or above 0 if `positive`."""
    check(
        _is_real(value) and math.isfinite(value) and (value > 0 if positive else value >= 0),
        f"{option} must be a finite number {'above' if positive else 'of at least'} 0, got {value!r}",
    )


def check_seed(option: str, seed: int) -> None:
    """Raises a UserError unless `seed` is an integer from 0 to 2**32 - 1, as JAX and NumPy need."""
    check_int(option, seed, 0)
    check(seed < 2**32, f"{option} must be below {2**32}, got {seed}")


_PLAIN = (NoneType, bool, int, float, str, tuple, list)
"""Types of the values of configuration fields."""


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@contextmanager
def complete(source: object) -> Iterator[None]:
    """Context manager that turns the exception for a missing configuration field into a UserError.

    Does the same for the AttributeError that a field with a value of a wrong type causes. The message begins with
    `source`, the file or option of the configuration. A UserError that the block raises gets the same beginning, unless
    `source` is "--config", because its message then already names the option.
    """
    try:
        yield
    except UserError as error:
        raise UserError(str(error) if source == "--config" else f"{source}: {error}") from error
    except (AttributeError, KeyError) as error:
        found = getattr(error, "obj", None)
        text = str(error).splitlines()[0]
        if getattr(error, "name", None) and not isinstance(found, ConfigDict):
            if not isinstance(found, _PLAIN):
                raise  # A fault of the program, not of a configuration's value.
            raise UserError(
                f"{source} is not a configuration of this program: a field has the value {found!r:.80}, of a wrong"
                f" type ({raised(error)}); correct the field or choose another configuration"
            ) from error
        # The field is the last word of the text, or NAME in 'Key "NAME" does not exist', the error of setting a field.
        field = (re.findall(r'Key "(.+?)"', text) or re.findall(r"[\w.]+", text))[-1]
        raise UserError(
            f"{source} is not a configuration of this program: the field {field} is missing; add the field or choose"
            " another configuration"
        ) from error


def check_paper(file: str, config: ConfigDict, program: str) -> None:
    """Raises a UserError if the field `paper` of `config` is neither empty nor the PAPER of `program`, "PAPER.NAME".

    `file` is the file of the configuration, for the message.
    """
    expected, paper = program.split(".")[0], config.get("paper", "")
    check(
        paper in ("", expected),
        f"--config={file} is a configuration for {paper}, not for {program}: choose a configuration for {expected}",
    )


def split_fields(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into overrides and other arguments. Raises a UserError if an override lacks "=VALUE"."""
    fields = [a for a in argv if a.startswith("--config.")]
    for field in fields:
        check("=" in field, f"{field} needs a value: {field}=VALUE")
    return fields, [a for a in argv if a not in fields]


def override_all(config: ConfigDict, fields: list[str], prefix: str = "--config.") -> None:
    """Applies overrides to `config`: each of `fields` is `prefix` plus "a.b=VALUE". For the errors see `override`.

    Sets existing fields first, because they may name a part, such as a kind of layer, whose options are new fields.
    """
    known = flatten(config)
    pairs = [field.removeprefix(prefix).partition("=")[::2] for field in fields]
    for key, text in sorted(pairs, key=lambda pair: pair[0] not in known):
        override(config, key, text, prefix)


def parse(
    program: str, argv: list[str] | None = None, flags: Mapping[str, str] | None = None
) -> tuple[ConfigDict, argparse.Namespace]:
    """Parses the command line of a training program: --config=FILE[:ARG] --config.a.b=V ... --workdir=DIR.

    The default workdir is named after the configuration file and its argument, so the same command resumes the run.
    Returns the configuration with the overrides of the command line, and all other options.

    Args:
      flags: additional options without a value, name -> help text.

    Raises:
      UserError: the command line is wrong, the configuration cannot be loaded or is for another paper, or
        `open_folder` cannot open the workdir.
    """
    parser = parser_for(program)
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE[:ARG]",
        help="configuration file and its argument; the argument 'tiny' is a small run without a download",
    )
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        help="folder of checkpoints, curves and summary, also gs://BUCKET/DIR or s3://BUCKET/DIR (default: a folder in"
        " runs/ with the name of the configuration file and its argument)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the parameters, the first batch, and memory and FLOPs of a step; train nothing",
    )
    parser.add_argument(
        "--profile",
        default="",
        metavar="FIRST:LAST",
        help="write a trace of the steps FIRST to LAST to the workdir, for xprof or TensorBoard",
    )
    for flag, text in (flags or {}).items():
        parser.add_argument(flag, action="store_true", help=text)
    parser.epilog = "Any field of the configuration is an option: --config.seed=2"
    fields, rest = split_fields(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(rest)
    config = load(options.config)
    override_all(config, fields)
    check_paper(options.config, config, program)
    path, _, argument = options.config.partition(":")
    name = Path(path).stem + (f"_{re.sub(r'[^A-Za-z0-9]+', '_', argument)}" if argument else "")
    options.workdir = open_folder(options.workdir or f"runs/{name}")
    return config, options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the options)")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # Such as --workdir="$RUN" with an unset variable. argparse also passes defaults, which may be empty.
        name = "/".join(action.option_strings) or action.metavar or action.dest
        remedy = "" if action.required else ", or leave out the option"
        check(bool(text) or text == action.default, f"{name} is empty: give a value{remedy}")
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            # argparse replaces the message of every ValueError. Keep the message of a UserError.
            if isinstance(error.__context__, UserError):
                raise error.__context__ from None
            raise


def parser_for(program: str, description: str | None = None) -> argparse.ArgumentParser:
    """Returns an argument parser that raises a UserError for a wrong command line, instead of printing the usage.

    `description` is printed by --help with its line breaks.
    """
    layout = argparse.RawDescriptionHelpFormatter
    name = f"python -m {program}"
    return _Parser(name, description=description, formatter_class=layout, allow_abbrev=False)


def _nearest(name: str, known: Any, prefix: str = "") -> str:
    match = difflib.get_close_matches(str(name), [str(item) for item in known], n=1, cutoff=0.5)
    return f"; did you mean {prefix}{match[0]}?" if match else ""
