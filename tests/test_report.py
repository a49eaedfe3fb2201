"""`hotcold report`: its numbers are NumPy's, its page is whole, harmless and needs nothing from outside."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small_models import Spec, all_of, make_tensors, write_model

from hotcold.placement.identity import model_id
from hotcold.placement.profile import Profile, save_profile, skew
from hotcold.placement.report_facts import Facts, cumulative, gather
from hotcold.runtime import cli, schema
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extras report and dev have it)")

TOKENS = 1000
NASTY = "<script>alert(1)</script> & \"quotes\" 'x' \x1b[31m <img src=http://evil.example/x.png onerror=y>"
PREDICTOR_KEYS: dict[str, Any] = {
    schema.KEY_PREDICTOR_KIND: ["lowrank", "none"], schema.KEY_PREDICTOR_INPUT: [0, 0],
    schema.KEY_PREDICTOR_RANK: [32, 0], schema.KEY_PREDICTOR_THRESHOLD: [0.0, 0.0],
    schema.KEY_PREDICTOR_RECALL: [0.75, 0.0], schema.KEY_PREDICTOR_RECALL_MAGNITUDE: [0.875, 0.0],
    schema.KEY_PREDICTOR_PRECISION: [0.5, 0.0], schema.KEY_PREDICTOR_DENSITY: [0.25, 0.0],
}  # fmt: skip
RELUFY_KEYS: dict[str, Any] = {
    schema.KEY_RELUFY_RANK: 16, schema.KEY_RELUFY_TOKENS: 777, schema.KEY_RELUFY_ERROR: [0.125, 0.0625],
}  # fmt: skip


def counts(spec: Spec, seed: int = 1) -> list[np.ndarray]:
    """Per layer i64 [n_ff], descending."""
    rng = np.random.default_rng(seed)
    return [np.sort((TOKENS * rng.random(n) ** 2.5).astype(np.int64))[::-1].copy() for n in spec.neurons()]


def write(path: Path, *, with_counts: bool = True, predictors: bool = False, name: str = "", **options: Any) -> Path:
    metadata = dict(options.pop("metadata", {}))
    metadata |= {"general.name": name} if name else {}
    if with_counts:
        metadata |= {schema.KEY_PROFILE_TOKENS: TOKENS, schema.KEY_PROFILE_CORPUS: f"a text {name}",
                     schema.KEY_PROFILE_SHA256: "00" * 32}  # fmt: skip
    if predictors:
        metadata |= PREDICTOR_KEYS
    spec = Spec(metadata=metadata, **options)
    tensors = make_tensors(spec)
    for layer, fired in enumerate(counts(spec) if with_counts else []):
        tensors[schema.block(layer, schema.FFN_NEURON_COUNT)] = (Type.I64, fired)
    if predictors:
        n_ff = spec.neurons()[0]
        tensors |= {
            schema.block(0, schema.FFN_PRED_IN): (Type.F16, np.ones((32, spec.n_embd), np.float32)),
            schema.block(0, schema.FFN_PRED_OUT): (Type.F16, np.ones((n_ff, 32), np.float32)),
            schema.block(0, schema.FFN_PRED_OUT_BIAS): (Type.F32, np.zeros(n_ff, np.float32)),
        }
    return write_model(path, spec, tensors)


def facts_of(path: Path, profile: Profile | None = None) -> Facts:
    with open_gguf(path) as file:
        return gather(file, ModelConfig.from_gguf(file), profile)


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    try:
        code = cli.main(["report", *map(str, arguments)])
    except SystemExit as e:
        code = int(e.code or 0)
    return code, capsys.readouterr().err


class Page(HTMLParser):
    """Checks nesting, unique ids and references; collects tables, headings and alternative texts."""

    VOID = {"meta", "img", "br", "link"}

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.alts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._text = ""
        self._rows: list[list[str]] = []
        self._caption = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert len(values) == len(attrs), f"<{tag}> has an attribute twice"
        assert not [k for k in values if k.startswith("on")]
        self.tags.append(tag)
        if values.get("id"):
            self.ids.append(values["id"] or "")
        for name in ("src", "href"):
            if name in values:
                value = values[name] or ""
                assert value.startswith(("data:image/svg+xml;base64,", "#")), value[:80]
                self.links.append(value)
        if tag == "img":
            assert values.get("alt")
            self.alts.append(values["alt"] or "")
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        self._text = ""
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self._rows[-1].append(self._text)
        elif tag == "caption":
            self._caption = self._text
        elif tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        self._text += data


def page_of(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    assert {"script", "link", "iframe", "object", "form"}.isdisjoint(page.tags)
    for target in page.links:
        assert not target.startswith("#") or target[1:] in page.ids
    assert not re.search(r"url\(|@import", text)
    return page


def percent(value: float, digits: int) -> str:
    return f"{100 * value:.{digits}f} %"


# ------------------------------------------------------------------ numbers


def test_numbers_are_numpys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write(tmp_path / "m.gguf", n_ff=(96, 160)), tmp_path / "r.html"
    assert report(capsys, model, "-o", out)[0] == 0
    tables = page_of(out).tables
    fired = counts(Spec(n_ff=(96, 160)))
    rows = tables["Sparsity and skew per layer"]
    activity = next(t for name, t in tables.items() if name.startswith("Activity"))
    size = tables["FFN bytes per layer and token, as a share of dense"]
    assert len(rows) == 2 + 2
    all_off = 1 - sum(f.sum() for f in fired) / (TOKENS * (96 + 160))  # layers weigh by their neurons
    assert rows[-1][:2] == ["mean", percent(all_off, 2)]
    for layer, f in enumerate(fired):
        n, total = len(f), f.sum()
        assert rows[layer + 1] == [str(layer), percent(1 - total / (TOKENS * n), 2), percent(skew(f), 2)]
        least = next(k for k in range(1, n + 1) if f[:k].sum() >= 0.8 * total)
        assert skew(f) == pytest.approx(least / n)
        top = f[: round(0.1 * n)].sum() / total
        assert activity[layer + 1] == [str(layer), str(n), percent((f == 0).mean(), 1), percent(f[0] / TOKENS, 1),
                                       percent(float(np.median(f)) / TOKENS, 2), percent(top, 1)]  # fmt: skip
        # gated, three rows of one size per neuron: the key rows always, the other two where it fires
        assert size[layer + 1][2] == percent((1 + 2 * total / (TOKENS * n)) / 3, 2)


def test_cumulative_share() -> None:
    np.testing.assert_allclose(cumulative(np.array([6, 3, 1, 0])), [0, 0.6, 0.9, 1, 1])
    np.testing.assert_array_equal(cumulative(np.zeros(3, np.int64)), np.zeros(4))


@pytest.mark.parametrize("gated", [True, False])
def test_bytes_with_predictors(tmp_path: Path, gated: bool) -> None:
    options: dict[str, Any] = {} if gated else {"gated": False, "arch": "arcee", "activation": "relu2"}
    path = write(tmp_path / "m.gguf", predictors=True, **options)
    facts = facts_of(path)
    rows = 3 if gated else 2  # of n_embd f32 per neuron
    n_ff, row = 96, 4 * 64
    a = [f.sum() / (TOKENS * n_ff) for f in counts(Spec())]
    dense = rows * row * n_ff
    own = 2 * 32 * 64 + 2 * 32 * n_ff + 4 * n_ff  # f16 matrices and a f32 bias
    exact = [(row * n_ff + (rows - 1) * row * n_ff * share) / dense for share in a]
    predict = (own + row * n_ff * 0.25 + (rows - 1) * row * n_ff * a[0] * 0.75) / dense
    np.testing.assert_allclose(facts.ffn_bytes, dense)
    np.testing.assert_allclose(facts.exact, exact)
    assert facts.predict is not None and facts.predictors is not None
    np.testing.assert_allclose(facts.predict, [predict, exact[1]])  # layer 1 has none: exact
    assert facts.predictors.n_bytes.tolist() == [own, 0]


def test_threshold_mode_also_reads_up_rows(tmp_path: Path) -> None:
    facts = facts_of(write(tmp_path / "m.gguf", activation="silu", threshold=0.125))
    a = [f.sum() / (TOKENS * 96) for f in counts(Spec())]
    np.testing.assert_allclose(facts.exact, [(2 + share) / 3 for share in a])


def test_sections_of_predictors_and_relufication(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write(tmp_path / "m.gguf", predictors=True, metadata=RELUFY_KEYS), tmp_path / "r.html"
    assert report(capsys, model, "-o", out)[0] == 0
    page = page_of(out)
    rows = page.tables["Predictors per layer"]
    assert rows[0][6:] == ["recall", "by magnitude", "precision", "density"]
    assert rows[1][1:4] == ["lowrank", "own", "32"]
    assert rows[1][6:] == ["75.00 %", "87.50 %", "50.00 %", "25.00 %"]
    assert rows[2][1] == "none" and rows[2][6:] == [""] * 4
    assert [r[1] for r in page.tables["Error after the fit"][1:]] == ["0.125", "0.0625", "0.09375"]
    assert "777 tokens" in out.read_text()
    assert {"predictors", "relufication", "missing"} <= set(page.ids) and "placement" not in page.ids
    assert len(page.alts) == 5
    assert "hotcold place with --vram-budget adds" in out.read_text()


def test_placements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "m.gguf", n_ff=256, **all_of(Type.F16))
    placed, out = tmp_path / "placed.gguf", tmp_path / "r.html"
    code = cli.main(["place", str(model), "-o", str(placed), "--vram-budget", "560MiB", "--vram-budget", "600MiB",
                     "--n-ctx", "64", "--hardware", "rtx-4090"])  # fmt: skip
    capsys.readouterr()
    assert code == 0
    assert report(capsys, placed, "-o", out)[0] == 0
    page, plans = page_of(out), facts_of(placed).placements
    assert len(plans) == 2
    rows = page.tables["Placements"]
    assert [r[6] for r in rows[1:]] == [f"{sum(p.hot)} of 512" for p in plans]
    per_layer = [t for name, t in page.tables.items() if name.startswith("Per layer, with")]
    for table, plan in zip(per_layer, plans, strict=True):
        assert [r[1] for r in table[1:]] == [f"{hot} of 256" for hot in plan.hot]
        assert [r[8] for r in table[1:]] == [f"{1e6 * t:.1f}" for t in plan.t_layer]
    speeds = page.tables["Expected speed"]
    assert [r[3] for r in speeds[1:]] == [f"{p.tokens_per_second:.1f}" for p in plans]


def test_a_placement_of_another_model_is_named_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "m.gguf", metadata={
        schema.KEY_PLACEMENT_MODEL: "another", schema.KEY_PLACEMENT_BUDGET: [1 << 30],
        schema.KEY_PLACEMENT_N_CTX: [64], schema.KEY_PLACEMENT_OBJECTIVE: ["time"],
        schema.KEY_PLACEMENT_HARDWARE: ["{}"], schema.KEY_PLACEMENT_HOT: [1, 1],
        schema.KEY_PLACEMENT_KEYS_ON_GPU: [0, 0], schema.KEY_PLACEMENT_LAYER_ON_GPU: [1, 1],
    })  # fmt: skip
    out = tmp_path / "r.html"
    assert report(capsys, model, "-o", out)[0] == 0
    assert "placement" not in page_of(out).ids
    assert "of another model" in out.read_text()


# ------------------------------------------------------------------ where counts come from


def profile_of(path: Path, fired: list[np.ndarray]) -> Profile:
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        model = model_id(file, config)
    return Profile(
        model=model, n_tokens=TOKENS, n_pairs=TOKENS - 1, corpus="a book", sha256="11" * 32,
        fired=tuple(fired), pairs=tuple(f // 2 for f in fired), magnitude=tuple(f * 0.5 for f in fired),
        samples=tuple(np.zeros((0, config.n_embd), np.float16) for _ in fired), sample_text=np.zeros(0, np.int64),
    )  # fmt: skip


def test_a_profile_stands_in_for_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write(tmp_path / "m.gguf", with_counts=False), tmp_path / "r.html"
    fired = [np.random.default_rng(5).permutation(f) for f in counts(Spec())]
    save_profile(tmp_path / "p.gguf", profile_of(model, fired))
    assert report(capsys, model, "--profile", tmp_path / "p.gguf", "-o", out)[0] == 0
    rows = page_of(out).tables["Sparsity and skew per layer"]
    assert rows[1][1] == percent(1 - fired[0].sum() / (TOKENS * 96), 2)
    facts = facts_of(model, profile_of(model, fired))
    assert facts.persistence is not None
    np.testing.assert_allclose(facts.persistence, 0.5, atol=0.02)
    assert not facts.sorted


def test_a_profile_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = write(tmp_path / "m.gguf"), write(tmp_path / "other.gguf", seed=9)
    save_profile(tmp_path / "p.gguf", profile_of(other, counts(Spec())))
    code, err = report(capsys, model, "--profile", tmp_path / "p.gguf", "-o", tmp_path / "r.html")
    assert code == 1 and "another model" in err


def test_a_model_without_counts_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "m.gguf", with_counts=False)
    code, err = report(capsys, model, "-o", tmp_path / "r.html")
    assert code == 1 and "hotcold profile" in err and "hotcold place" in err and err.count("\n") == 1
    stock = write_model(tmp_path / "stock.gguf", Spec(layout="stock"))
    code, err = report(capsys, stock, "-o", tmp_path / "r.html")
    assert code == 1 and "is a stock file" in err
    assert not (tmp_path / "r.html").exists()


def test_a_model_that_never_fires(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "m.gguf", with_counts=False, patterns=("off",))
    save_profile(tmp_path / "p.gguf", profile_of(model, [np.zeros(96, np.int64)]))
    assert report(capsys, model, "--profile", tmp_path / "p.gguf", "-o", tmp_path / "r.html")[0] == 0
    assert page_of(tmp_path / "r.html").tables["Sparsity and skew per layer"][1] == ["0", "100.00 %", "100.00 %"]


def test_counts_whose_sum_overflows_are_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", with_counts=False)
    profile = profile_of(model, [np.full(96, 1 << 60), np.full(96, 1 << 60)])
    object.__setattr__(profile, "n_tokens", 1 << 60)
    with pytest.raises(HotcoldError, match="tokens profiled, allowed are 1 to"):
        facts_of(model, profile)


# ------------------------------------------------------------------ the page


def test_texts_of_strangers_are_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write(tmp_path / "m<b>.gguf", name=NASTY), tmp_path / "r.html"
    assert report(capsys, model, "-o", out)[0] == 0
    text = out.read_text()
    page = page_of(out)
    assert "<script" not in text and "<img src=http" not in text and "\x1b" not in text and "<b>" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert {"b", "script"}.isdisjoint(page.tags)
    assert "default-src 'none'" in text


def test_pictures_are_whole_and_the_page_is_the_same_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import base64
    import xml.etree.ElementTree as ET

    model = write(tmp_path / "m.gguf", predictors=True, metadata=RELUFY_KEYS)
    pages = []
    for name in ("a.html", "b.html"):
        assert report(capsys, model, "-o", tmp_path / name)[0] == 0
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    for picture in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', pages[0]):
        assert b"<!DOCTYPE" not in base64.b64decode(picture)
        root = ET.fromstring(base64.b64decode(picture))
        assert root.tag.endswith("svg")
        for element in root.iter():
            for key, value in element.attrib.items():
                assert not key.endswith("href") or value.startswith(("#", "data:"))


def test_output_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = write(tmp_path / "m.gguf"), tmp_path / "r.html"
    out.write_text("mine")
    code, err = report(capsys, model, "-o", out)
    assert code == 1 and "--force" in err and out.read_text() == "mine"
    assert report(capsys, model, "-o", out, "--force")[0] == 0 and out.read_text() != "mine"
    assert report(capsys, model, "-o", model, "--force")[0] == 1
    assert report(capsys, model, "-o", tmp_path / "no" / "r.html")[0] == 1
    assert not list(tmp_path.glob(".*"))
    monkeypatch.chdir(tmp_path)
    assert report(capsys, "m.gguf")[0] == 0 and (tmp_path / "m.report.html").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    model, out = write(tmp_path / "m.gguf"), tmp_path / "r.html"
    out.write_text("mine")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, err = report(capsys, model, "-o", out, "--force")
    assert code == 1 and "no space left" in err
    assert out.read_text() == "mine" and not list(tmp_path.glob(".*"))


def test_without_matplotlib_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, err = report(capsys, model, "-o", tmp_path / "r.html")
    assert code == 1 and "need matplotlib" in err and err.count("\n") == 1
