"""Configurations: files, command-line overrides, JSON."""

import json
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from common.arguments import check_file, check_folder, float_arg
from common.config import (
    check_choice,
    check_least,
    complete,
    flatten,
    from_json,
    load,
    override,
    parse,
    parser_for,
    run_module,
    to_json,
)
from common.errors import UserError
from common.user_parts import imported
from tests.programs import call

ROOT = Path(__file__).parents[1]
TINY = f"--config={ROOT}/configs/wmt_ffn_res.py:tiny"


@pytest.fixture
def config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 1,
            "model": {"width": 8, "dropout": 0.1, "remat": False, "norm": "pre"},
            "data": {"buckets": (16, 32), "names": ("a",), "splits": {"test": "test"}, "none": ()},
        }
    )


def test_config_argument_selects_the_size():
    full = load(f"{ROOT}/configs/wmt_ffn_res.py")
    tiny = load(f"{ROOT}/configs/wmt_ffn_res.py:tiny")
    assert (full.model.width, tiny.model.width) == (512, 128)
    assert flatten(full).keys() == flatten(tiny).keys()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "7", 7),
        ("seed", "-7", -7),
        ("model.width", "1024", 1024),
        ("model.dropout", "0.25", 0.25),
        ("model.dropout", "1e-3", 0.001),
        ("model.dropout", "0", 0.0),
        ("model.remat", "true", True),
        ("model.remat", "True", True),
        ("model.remat", "1", True),
        ("model.remat", "false", False),
        ("model.remat", "0", False),
        ("model.norm", "post", "post"),
        ("model.norm", "", ""),
        ("model.norm", "12", "12"),
        ("data.splits.test", "a=b c", "a=b c"),
        ("data.buckets", "8,16,64", (8, 16, 64)),
        ("data.buckets", "(8, 16)", (8, 16)),
        ("data.buckets", "[8]", (8,)),
        ("data.buckets", "8", (8,)),
        ("data.buckets", "8,", (8,)),
        ("data.buckets", "", ()),
        ("data.names", "'a','b'", ("a", "b")),
        ("data.none", "1,2", (1, 2)),
    ],
)
def test_overrides_have_the_type_of_their_field(config, key, text, value):
    override(config, key, text)
    result = flatten(config)[key]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("seed", "1.5", "--config.seed must be a whole number in digits, got '1.5'"),
        ("seed", "", "--config.seed must be a whole number in digits, got ''"),
        ("model.width", "1e3", "--config.model.width must be a whole number in digits, got '1e3'"),
        ("model.dropout", "half", "--config.model.dropout must be a finite number, got 'half'"),
        ("model.dropout", "nan", "--config.model.dropout must be a finite number, got 'nan'"),
        ("model.dropout", "inf", "--config.model.dropout must be a finite number, got 'inf'"),
        ("model.remat", "yes", "--config.model.remat must be true or false, got 'yes'"),
        ("data.buckets", "a,b", "must be a list of whole numbers such as 16,32, got 'a,b'"),
        ("data.buckets", "8,1.5", "must be a list of whole numbers such as 16,32"),
        ("data.buckets", "(8", "must be a list of whole numbers such as 16,32"),
        ("data.buckets", "{[]: 1}", "must be a list of whole numbers such as 16,32"),
        ("data.names", "a", "must be a list of quoted texts such as 'a', got 'a'"),
        ("data.none", "x y", "must be a list such as 1,2"),
        (
            "model.widht",
            "8",
            "unknown option --config.model.widht; did you mean --config.model.width?",
        ),
        ("widht", "8", "unknown option --config.widht; did you mean --config.model.width?"),
        ("model", "8", "--config.model is a group; set one of its fields"),
        ("data.splits", "x", "--config.data.splits is a group"),
        ("", "8", "unknown option --config."),
        ("zzz", "8", "unknown option --config.zzz"),
    ],
)
def test_invalid_overrides_raise_user_errors(config, key, text, told):
    before = to_json(config)
    with pytest.raises(UserError) as caught:
        override(config, key, text)
    assert told in str(caught.value)
    assert to_json(config) == before


@pytest.mark.parametrize("paper", ["", "resevoir", "a b", "common"])
def test_unknown_paper_raises_error(paper: str):
    with pytest.raises(UserError, match=rf"configuration is '{paper}', which is not a folder with"):
        run_module(ConfigDict({"paper": paper}))


def test_no_suggestion_without_a_similar_name(config):
    with pytest.raises(UserError, match=r"config\.zzz; the fields and groups of the configuration"):
        override(config, "zzz", "8")


def test_flatten(config):
    assert flatten(config) == {
        "seed": 1,
        "model.width": 8,
        "model.dropout": 0.1,
        "model.remat": False,
        "model.norm": "pre",
        "data.buckets": (16, 32),
        "data.names": ("a",),
        "data.splits.test": "test",
        "data.none": (),
    }


def test_json_round_trip(config):
    text = json.dumps(to_json(config))
    again = from_json(json.loads(text))
    assert flatten(again) == flatten(config)
    types = {key: type(value) for key, value in flatten(config).items()}
    assert {key: type(value) for key, value in flatten(again).items()} == types
    override(again, "data.buckets", "8,16")
    assert config.data.buckets == (16, 32)


def test_check_choice_names_the_choices_and_the_nearest():
    check_choice("--x", "adam", ("adam", "adamw"))
    with pytest.raises(UserError) as caught:
        check_choice("--x", "adamx", {"adam": 1, "lion": 2})
    assert str(caught.value) == "--x='adamx': choose one of adam, lion; did you mean adam?"


def test_check_folder_rejects_unwritable_folders_and_creates_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for wrong in ("file", "file/below/it"):
        with pytest.raises(
            UserError, match=rf"^cannot write to --out=.*{wrong}: .*file is not a folder;"
        ):
            check_folder("--out", tmp_path / wrong)
    check_folder("--out", tmp_path)
    check_folder("--out", tmp_path / "new" / "deep")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_command_line_gives_config_and_default_workdir():
    config, options = parse(
        "reservoir.train", [TINY, "--config.train.steps=7", "--config.data.buckets=8,16"]
    )
    assert (config.train.steps, config.data.buckets) == (7, (8, 16))
    assert options.workdir == Path("runs/wmt_ffn_res_tiny")


def test_an_invalid_value_of_an_option_keeps_its_own_message():
    """argparse by default replaces the message of a ValueError, and a UserError is a ValueError."""
    parser = parser_for("perception.worth")
    parser.add_argument("--margin", type=float_arg("--margin"))
    parser.add_argument("--rounds", type=int)
    with pytest.raises(UserError, match=r"^--margin must be a finite number, got 'x'$"):
        parser.parse_args(["--margin=x"])
    with pytest.raises(UserError, match="invalid int value: 'x'"):
        parser.parse_args(["--rounds=x"])


def test_config_of_another_paper_raises_user_error():
    with pytest.raises(
        UserError, match=r"is a configuration for reservoir, not for gmlp_lm\.train"
    ):
        parse("gmlp_lm.train", [TINY])
    with pytest.raises(
        UserError, match=r"is a configuration for gmlp_lm, not for reservoir\.train"
    ):
        parse("reservoir.train", [TINY, "--config.paper=gmlp_lm"])


def test_last_of_repeated_options_wins():
    config, _ = parse("reservoir.train", ["--config.seed=2", TINY, "--config.seed=3"])
    assert config.seed == 3


def test_default_workdir_is_named_after_the_configuration():
    _, options = parse("reservoir.train", [f"--config={ROOT}/configs/iwslt_t_res.py"])
    assert options.workdir == Path("runs/iwslt_t_res")
    _, options = parse("reservoir.train", [TINY, "--workdir", "elsewhere"])
    assert options.workdir == Path("elsewhere")


def test_argument_of_a_user_configuration_may_be_any_text(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(argument=''):\n"
        "    return ConfigDict({'a': {'b': argument}})\n"
    )
    config, options = parse("reservoir.train", [f"--config={path}:x=1/y"])
    assert config.a.b == "x=1/y"
    assert options.workdir == Path("runs/mine_x_1_y")


def test_file_may_import_the_recipe_of_its_name(tmp_path):
    path = tmp_path / "perception.py"
    path.write_text("from configs import perception\n\nget_config = perception.get_config\n")
    assert load(f"{path}:tiny") == load("configs/perception.py:tiny")


FILE = """
from configs import translation


def get_config(argument=""):
    config = translation.tiny(translation.iwslt("ffn"))
    {line}
    return config
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "config.model.encoder_layer = 4",
            "unknown field encoder_layer; did you mean encoder_layers?",
        ),
        (
            "config.model.update(encoder_layer=4)",
            "unknown field encoder_layer; did you mean encoder_layers?",
        ),
        ("config.modle = {}", "unknown field modle; did you mean model?"),
        ("config.zzz = 4", "unknown field zzz (new fields need `with config.unlocked():`)"),
        (
            "config.optimizer.learning_rate = 'fast'",
            "TypeError: Could not override field 'learning_rate'",
        ),
    ],
)
def test_wrong_fields_of_a_user_configuration_name_the_line_of_the_file(tmp_path, line, message):
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(line=line))
    with pytest.raises(UserError) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"get_config ({path}, line 7): {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("assert False", "get_config ({path}, line 7): AssertionError"),
        ("raise ValueError", "--config={path}: ValueError"),
    ],
)
def test_exception_without_text_is_described_by_its_type(tmp_path, line, message):
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(line=line))
    with pytest.raises(UserError) as caught:
        load(str(path))
    assert str(caught.value) == message.format(path=path)


def test_user_configuration_may_add_fields(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(line="with config.unlocked(): config.model.my_option = 4"))
    assert load(str(path)).model.my_option == 4


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (check_file, "is not a file that can be read"),
        (lambda option, path: load(f"{path}.py", option), "OSError: .*File name too long"),
    ],
)
def test_path_that_the_system_refuses_is_a_user_error(read, message):
    with pytest.raises(UserError, match=f"^--input={'a' * 300}.*{message}"):
        read("--input", Path("a" * 300))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("damaged:f", r": SyntaxError in {path}, line 2: invalid syntax; correct this line"),
        ("./damaged.py:f", r": TypeError: .*; correct the name, or add the folder"),
    ],
)
def test_import_error_names_a_line_of_the_user_only(tmp_path, monkeypatch, name, message):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "damaged.py"
    path.write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=message.format(path=path)):
        imported("--config.task", name)


def test_paper_must_be_a_folder():
    with pytest.raises(UserError, match="'os', which is not a folder with a module run"):
        run_module(ConfigDict({"paper": "os"}))


def test_configuration_without_a_mesh_raises_user_error(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(line="with config.unlocked(): del config.mesh"))
    output = call("reservoir.train", f"--config={path}", f"--workdir={tmp_path / 'run'}", code=2)
    assert "not a configuration of this program: the field mesh is missing; add the field" in output


def _set_kind(config: ConfigDict) -> None:
    config.lock().model.kind = 1


@pytest.mark.parametrize(
    "read",
    [lambda c: c.model.kind, lambda c: c["kind"], _set_kind],
    ids=["field", "key", "set"],
)
def test_missing_field_is_named(read):
    config = ConfigDict({"model": {"size": 1}, "empty": None})
    line = "--config is not a configuration of this program: the field kind is missing"
    with pytest.raises(UserError, match=line), complete("--config"):
        read(config)


@pytest.mark.parametrize("value", [None, 3, 0.5, True, (1, 2)], ids=str)
def test_value_of_a_wrong_type_is_not_reported_as_a_missing_field(value):
    config = ConfigDict({"model": value})
    line = (
        "^file is not a configuration of this program: a field has the value .*, of a wrong type"
        rf" .*{__file__}, line \d+.*{type(value).__name__}.* has no attribute 'kind'"
    )
    with pytest.raises(UserError, match=line), complete("file"):
        config.model.kind  # noqa: B018


def test_attribute_error_of_another_object_is_not_a_missing_field():
    with pytest.raises(AttributeError, match="module 're' has no"), complete("--config"):
        re.kind  # noqa: B018


@pytest.mark.parametrize("value", [0, None, "2", True])
def test_check_least_rejects_small_and_non_numeric_values(value):
    with pytest.raises(UserError, match=f"--config.a.b must be at least 1, got {value!r}"):
        check_least(ConfigDict({"a": {"b": value}}), ["a.b"])


def test_help_keeps_the_line_breaks_of_the_description():
    assert (
        "Draws.\n\n    python -m a\n" in parser_for("a", "Draws.\n\n    python -m a").format_help()
    )
