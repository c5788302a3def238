"""Files with quantized kernels: round trips, use as base weights, merging, and damaged files."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.errors import UserError
from common.sharding import abstract, make_mesh
from common.train.command import fit
from common.variables import Params
from perception import adapter_commands, adapters, loading, quantized_files
from perception.hugging_face import Pretrained, export, open_model
from perception.quantized import KINDS, dequantize, quantize
from tests.perception.helpers import golden_json, structure_of, write_folder

SHARDED = {"data": 2, "fsdp": 2, "tensor": 2}
KERNEL = "stack/blocks/0/residuals/1/function/down/kernel"


def wanted(model: Pretrained, sizes: dict | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    devices = jax.devices()[: 8 if sizes else 1]
    return abstract(structure_of(model.shape).trainable, make_mesh(sizes or {}, devices))


def load(model: Pretrained, sizes: dict | None = None) -> Params:
    return {name: np.asarray(x) for name, x in model.load(wanted(model, sizes)).items()}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Pretrained]:
    """Returns {family: model}. Tensor names have a prefix. OpenELM stores two of our kernels as one tensor."""
    found = {}
    for family, prefix in (("bert", "bert."), ("openelm", "transformer.")):
        config, shapes = (golden_json(f"{family}/{name}") for name in ("config", "shapes"))
        directory = write_folder(tmp_path_factory.mktemp(family), config, shapes, prefix)
        (directory / "tokenizer.json").write_text('{"version": "1.0"}')
        found[family] = open_model(directory)
    return found


def write(base: Pretrained, kind: str, out: Path) -> Pretrained:
    quantized_files.write(out, base, wanted(base), kind)
    return open_model(out)


@pytest.mark.medium
@pytest.mark.parametrize("family", ["openelm", "bert"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_round_trip(kind: str, family: str, bases, tmp_path) -> None:
    """Quantized kernels of a file are dequantized when they are loaded. All other parameters are unchanged.

    Eight devices load the file.
    """
    base = bases[family]
    model = write(base, kind, tmp_path / "out")
    assert (model.shape, model.quantization.kind) == (base.shape, kind)
    before, after = load(base), load(model, SHARDED)
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.endswith("/kernel"):
            codes, scales = quantize(value, kind)
            value = dequantize(codes, scales, len(value))
            np.testing.assert_array_equal(quantize(after[name], kind)[0], codes)
        np.testing.assert_array_equal(after[name], value)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_files_have_the_bits_of_their_format(bases, tmp_path) -> None:
    """A block has 64 codes, a scale of 4 bytes and, in the format 4bit_minimum, also a minimum of 4 bytes.

    The kernels of this BERT have at most 48 inputs, so each output has one block, padded to 64 codes.
    """
    base = bases["bert"]
    names = [name for name in wanted(base) if name.endswith("/kernel")]
    values = load(base)

    def size(kind: str) -> int:
        write(base, kind, tmp_path / kind)
        stored = load_file(tmp_path / kind / "model.safetensors")
        theirs = base.stored_names(names)
        mine = [
            x
            for n, x in stored.items()
            if n.startswith("stack/") or n.removeprefix("bert.") in theirs
        ]
        return sum(x.nbytes for x in mine)

    outputs = sum(values[name].shape[1] for name in names)
    assert size("int8") == outputs * (64 + 4)
    assert size("4bit") == outputs * (32 + 4)
    assert size("4bit_minimum") == outputs * (32 + 8)
    assert size("bfloat16") == 2 * sum(values[name].size for name in names)


def test_bfloat16_kernels_are_rounded(bases, tmp_path) -> None:
    base = bases["openelm"]
    after = load(write(base, "bfloat16", tmp_path / "out"))
    for name, value in load(base).items():
        rounded = value.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(after[name], rounded if name.endswith("kernel") else value)


def test_export_of_a_quantized_base_is_unquantized(bases, tmp_path) -> None:
    """The export has dequantized kernels and the base's tensor names. Its config.json has no quantization."""
    base = bases["bert"]
    model = write(base, "4bit", tmp_path / "in")
    values = model.load(wanted(model))
    export(tmp_path / "out", model.shape, values, like=model)
    again, theirs = open_model(tmp_path / "out"), load_file(base.directory / "model.safetensors")
    assert again.quantization is None and again.files.names == theirs.keys()
    found = load(again)
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)


def test_quantized_weights_are_not_quantized_again(bases, tmp_path) -> None:
    model = write(bases["bert"], "int8", tmp_path / "in")
    with pytest.raises(UserError, match="in is quantized already"):
        write(model, "4bit", tmp_path / "out")
    assert not (tmp_path / "out").exists()


DAMAGE = {
    "codes": (lambda t: t.pop(f"{KERNEL}/codes"), f"has no tensor {KERNEL}/codes"),
    "blocks": (
        lambda t: t.update({f"{KERNEL}/scales": np.zeros((2, 32), np.float32)}),
        rf"{KERNEL}/scales has shape \(2, 32\), which does not fit a kernel of shape \(48, 32\) \(1 block of inputs",
    ),
    "dtype": (
        lambda t: t.update({f"{KERNEL}/codes": np.zeros((1, 64, 32), np.int32)}),
        "has dtype I32, but only I8, U8",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_codes_raise_errors(case: str, bases, tmp_path) -> None:
    write(bases["bert"], "int8", tmp_path / "out")
    damage, message = DAMAGE[case]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(open_model(tmp_path / "out"))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "use the unquantized model"),
        (
            {"quant_method": "train_less", "kind": "3bit", "base": ""},
            'kind="3bit" in quantization_config is none of int8, ',
        ),
        ({"quant_method": "train_less", "kind": "int8"}, "quantization_config has no 'base'"),
    ],
)
def test_unknown_quantization_is_refused(field: dict, message: str, bases, tmp_path) -> None:
    write(bases["bert"], "int8", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": field}))
    with pytest.raises(UserError, match=message):
        open_model(tmp_path / "out")


def call(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["adapters", *map(str, arguments)])
        adapters.main()


def test_warning_names_the_format_of_the_weights_that_are_used(bases, tmp_path, capsys) -> None:
    """A run on weights in one format can quantize them to another format, which cannot be written to files."""
    base, mesh = bases["bert"], make_mesh({"data": 1}, jax.devices()[:1])
    coded = write(base, "int8", tmp_path / "int8")
    shown = []
    for model in (base, coded):
        adapter_commands._check_base(model, model.fingerprint, "--run=R", "4bit", mesh)
        shown.append(capsys.readouterr().err)
    assert "to 4bit, but the unquantized weights are used here" in shown[0]
    assert f"quantize --pretrained={base.directory} --kind=4bit --save=DIR" in shown[0]
    assert "to 4bit, but weights quantized to int8 are used here" in shown[1]
    assert "--save" not in shown[1] and len(shown[1].splitlines()) == 1
    adapter_commands._check_base(coded, coded.fingerprint, "--run=R", "int8", mesh)
    adapter_commands._check_base(coded, base.fingerprint, "--run=R", "int8", mesh)
    assert capsys.readouterr().err == ""


@pytest.mark.medium
def test_merging_a_quantized_run_is_exact_on_quantized_weights(make, tmp_path, capsys) -> None:
    """Adapters of a run on 4-bit kernels merge into 4-bit weights or, with a warning, into unquantized weights.

    Only the merge into 4-bit weights has the hidden states of the run. int8 weights are refused.
    """
    workdir, mesh = tmp_path / "run", make_mesh({"data": 1}, jax.devices()[:1])
    config = make(**{"finetune": "lora", "quantize": "4bit", "optimizer.learning_rate": 0.03})
    fit(config, workdir, mesh)
    base = open_model(Path(config.pretrained))
    call(
        "quantize",
        f"--pretrained={base.directory}",
        "--kind=4bit",
        f"--save={tmp_path / 'quantized'}",
    )
    capsys.readouterr()
    call("merge", f"--adapter={workdir}", f"--out={tmp_path / 'plain'}")
    assert "trained on weights quantized to 4bit" in capsys.readouterr().err
    call(
        *("merge", f"--adapter={workdir}", f"--pretrained={tmp_path / 'quantized'}"),
        f"--out={tmp_path / 'exact'}",
    )
    assert capsys.readouterr().err == ""

    trained = loading.load(workdir, mesh)
    abstract_model = trained.values.abstract_model
    model = abstract_model.build(trained.values.trainable, trained.values.frozen)
    tokens_BL, lengths_B = jnp.arange(16, dtype=jnp.int32)[None] + 20, jnp.array([16])
    theirs = np.asarray(model.encoder(tokens_BL, lengths_B))

    def states(name: str) -> np.ndarray:
        merged = open_model(tmp_path / name)
        encoder = structure_of(merged.shape).build(merged.load(wanted(merged)), {})
        return np.asarray(encoder(tokens_BL, lengths_B))

    np.testing.assert_allclose(states("exact"), theirs, atol=1e-5)
    assert np.abs(states("plain") - theirs).max() > 1e-2
    call("quantize", f"--pretrained={base.directory}", "--kind=int8", f"--save={tmp_path / 'int8'}")
    with pytest.raises(UserError, match="was not trained on the weights in"):
        call(
            *("merge", f"--adapter={workdir}", f"--pretrained={tmp_path / 'int8'}"),
            f"--out={tmp_path / 'no'}",
        )

    # A folder in PEFT's format records how the base weights were quantized. The folder of a sum of adapters does, too.
    call(
        "peft",
        f"--run={workdir}",
        f"--pretrained={tmp_path / 'quantized'}",
        f"--out={tmp_path / 'peft'}",
    )
    call("add", "--adapters", f"{tmp_path / 'peft'}:1", f"--out={tmp_path / 'sum'}")
    for name in ("peft", "sum"):
        capsys.readouterr()
        adapter = f"--adapter={tmp_path / name}"
        plain, exact = tmp_path / f"{name}_plain", tmp_path / f"{name}_exact"
        call("merge", adapter, f"--pretrained={base.directory}", f"--out={plain}")
        assert "trained on weights quantized to 4bit" in capsys.readouterr().err
        call("merge", adapter, f"--pretrained={tmp_path / 'quantized'}", f"--out={exact}")
        assert capsys.readouterr().err == ""
        np.testing.assert_allclose(states(exact.name), theirs, atol=1e-5)
