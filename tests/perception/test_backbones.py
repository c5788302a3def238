"""Exact parameter counts of the backbones (Table 2), without allocating the models."""

import jax
import pytest

from common.sharding import make_mesh
from perception import printed, tables
from perception.backbones import BACKBONES
from perception.experiments import ExperimentSuite
from perception.tables import RANKS

# Parameter counts: (backbone with an untied output layer, adapters of rank 2). For Qwen2, the first count is the
# published count plus the output layer (vocabulary * width), and the second is the count for rank 32, divided by 16.
TABLE_2 = {
    "openelm_270m": (312_487_168, 162_560),
    "openelm_450m": (506_331_136, 239_360),
    "openelm_1.1b": (1_145_427_456, 445_696),
    "openelm_3b": (3_134_951_424, 862_208),
    "phi_2": (2_779_632_640, 1_310_720),
    "arctic_xs": (34_285_824, 55_296),
    "arctic_s": (44_932_608, 110_592),
    "arctic_m": (132_332_544, 221_184),
    "arctic_l": (365_346_816, 589_824),
    "mistral_7b": (7_241_732_096, 1_179_648),
    "qwen2_0.5b": (494_032_768 + 151_936 * 896, 2_949_120 // 16),
    "qwen2_1.5b": (1_543_714_304 + 151_936 * 1536, 5_963_776 // 16),
}

PRINTED = {"qwen2_0.5b": 0, "qwen2_1.5b": 0} | dict.fromkeys(
    ("arctic_xs", "arctic_s", "arctic_m", "arctic_l", "mistral_7b"), 4
)
"""Backbone -> number of entries that the paper prints in this row of Table 2. Other rows have five entries."""

# Parameters of adapters of rank 32, in percent of the backbone's parameters. The paper's text says about 1 %.
SHARES = {"qwen2_0.5b": 0.6, "qwen2_1.5b": 0.39, "openelm_270m": 0.96, "arctic_xs": 3.92}
SHARES["mistral_7b"] = 0.27

OPENELM = {
    "openelm_270m": ([12] * 5 + [16] * 7 + [20] * 4, (768, 1024, 1280), (4608, 4864, 5120)),
    "openelm_450m": (
        [12] * 3 + [16] * 7 + [20] * 6 + [24] * 4,
        (768, 1024, 1280),
        (5632, 5888, 6144),
    ),
    "openelm_1.1b": (
        [16] * 3 + [20] * 7 + [24] * 8 + [28] * 6 + [32] * 4,
        (1024, 1280, 1536),
        (7680, 7936, 8192),
    ),
    "openelm_3b": (
        [12] * 4 + [16] * 14 + [20] * 12 + [24] * 6,
        (1536, 1792, 2048),
        (11776, 12032, 12288),
    ),
}


LARGE = ("openelm_3b", "openelm_1.1b", "openelm_450m", "mistral_7b", "arctic_l")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.medium] if name in LARGE else []) for name in TABLE_2],
)
def test_parameter_counts_match_table2(name: str) -> None:
    """Our counts equal TABLE_2. They also equal all 45 printed entries, to the last printed digit."""
    size, one = tables.parameters(name)
    total, rank_2 = TABLE_2[name]
    counts = (size + BACKBONES[name].vocabulary * BACKBONES[name].width, *(r * one for r in RANKS))
    assert counts[:2] == (total, rank_2)
    cells = printed.table2().get(name, ())
    assert len([cell for cell in cells if cell]) == PRINTED.get(name, 5)
    for count, cell in zip(counts, cells, strict=False):
        assert cell in ("", tables.shortened(count))
    if name in SHARES:
        assert round(100 * counts[-1] / size, 2) == SHARES[name]


@pytest.mark.medium
def test_table2_has_counted_and_printed_rows(tmp_path, capsys) -> None:
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    tables.table2(ExperimentSuite("tiny", 1, [], tmp_path, mesh))
    text = (tmp_path / "table2.csv").read_text().splitlines()
    assert "openelm_270m,counted,312487168,162560,325120,650240,1300480,2600960,0.96 %" in text
    assert "arctic_s,printed,44.93M,110.59K,221.18K,442.37K,,," in text and len(text) == 1 + 12 + 10
    assert "45 of 45 printed entries equal the counted entries" in capsys.readouterr().out


@pytest.mark.parametrize("name", OPENELM)
def test_openelm_layer_sizes_match_published_models(name: str) -> None:
    shape, (heads, first, last) = BACKBONES[name], OPENELM[name]
    assert list(shape.heads) == heads
    assert shape.hidden[:3] == first and shape.hidden[-3:] == last
