"""Replaying tokens: by hand in small cases, equal to what is expected where every token is alike."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_choose import large, predicting
from test_plan_vram import SPECS, counted

from hotcold.placement.activations import Activations, draw, load_activations, pack, record, save_activations
from hotcold.placement.counting import source_positions
from hotcold.placement.hardware import PRESETS, Hardware, to_json
from hotcold.placement.memory import LayerBytes, ModelBytes
from hotcold.placement.plan_model import PlanModel
from hotcold.placement.plan_vram import Placement, evaluate, plan
from hotcold.placement.profiling import profile_model
from hotcold.placement.simulate import replay
from hotcold.placement.simulate_command import LLAMA_CPP, default_budgets, simulate, split_of_llama_cpp
from hotcold.runtime.config import ModelConfig
from hotcold.runtime.corpus import Corpus
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.gguf_file import open_gguf
from hotcold.runtime.gpu.placement import GpuPlacement, LayerPlacement

MACHINE = Hardware("m", cpu_bandwidth=10e9, threads=2, ram=1 << 34, gpu="card", gpu_bandwidth=100e9, pcie=10e9,
                   vram=1 << 34, gpu_context=0, t_sync=5e-6, gpu_overhead=2e-6, cpu_efficiency=1.0,
                   cpu_sparse_efficiency=0.5, gpu_efficiency=1.0, gpu_sparse_efficiency=0.5)  # fmt: skip
CPU, GPU, CPU_ROWS, GPU_ROWS = 1 / 10e9, 1 / 100e9, 1 / 5e9, 1 / 50e9
N_EMBD, N_VOCAB, KEY, VALUE, ATTENTION, HEAD = 1000, 500, 1000, 2000, 40_000, 60_000
HANDOVER = 8 * N_EMBD / 10e9


def model(bits: np.ndarray | None = None, **changes: Any) -> PlanModel:
    """Two layers of four neurons, without a KV cache; frequencies are those of `bits` [tokens, 4]."""
    f = np.array([1.0, 0.5, 0.5, 0.0]) if bits is None else bits.mean(axis=0)
    layer = LayerBytes(4, ATTENTION, 0, 0, KEY, VALUE, False)
    fields: dict[str, Any] = {
        "sizes": ModelBytes((layer, layer), HEAD, 0, False, 0), "n_ctx": 64, "n_embd": N_EMBD, "n_vocab": N_VOCAB,
        "window": (0, 0), "gated": True, "split": True, "fires": True, "by_key": True, "frequency": (f, f),
        "density": (None, None), "gpu_from": {"exact": 0, "predict": 0},
    }  # fmt: skip
    return PlanModel(**fields | changes)


def placed(of: PlanModel, kind: str, sparsity: str, *layers: LayerPlacement) -> Placement:
    return evaluate(of, MACHINE, 1 << 30, kind, sparsity, "time", GpuPlacement(kind, layers, 1 << 30, of.n_ctx))


def one(of: PlanModel, placement: Placement, *bits: np.ndarray) -> Any:
    (found,) = replay(of, [placement], pack(bits, "by hand", True))
    return found


# ---- by hand


TOKENS = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]], bool)
OUTSIDE = HEAD * GPU + 4 * N_VOCAB / 10e9


def test_keys_on_the_gpu_by_hand() -> None:
    """Layer 0 on the CPU; in layer 1 the GPU has all keys and two neurons."""
    m = model()
    found = one(m, placed(m, "keys", "exact", LayerPlacement(False), LayerPlacement(True, 2, True)), TOKENS, TOKENS)
    cold = TOKENS[:, 2:].sum(axis=1)
    layer_0 = ATTENTION * CPU + 4 * KEY * CPU + TOKENS.sum(axis=1) * VALUE * CPU_ROWS
    gpu, cpu = TOKENS[:, :2].sum(axis=1) * VALUE * GPU_ROWS, cold * VALUE * CPU_ROWS
    layer_1 = ATTENTION * GPU + 2e-6 + 4 * KEY * GPU + np.maximum(gpu, cpu) + (5e-6 + HANDOVER) * (cold > 0)
    assert found.seconds == pytest.approx(layer_0 + layer_1 + OUTSIDE + 2 * 5e-6)
    assert found.waits.tolist() == [0, 1, 1, 0] and found.shared == 1 and found.skipped == 0.5
    assert found.cpu == pytest.approx(layer_0 + cpu)
    assert found.gpu == pytest.approx(ATTENTION * GPU + 2e-6 + 4 * KEY * GPU + gpu + OUTSIDE + 2 * 5e-6)
    assert found.tokens_per_second == pytest.approx(4 / found.seconds.sum())


def test_keys_on_both_sides_by_hand() -> None:
    """Without all keys on the GPU the CPU always has some to look at."""
    m = model()
    found = one(m, placed(m, "keys", "exact", LayerPlacement(True, 4, True), LayerPlacement(True, 2)), TOKENS, TOKENS)
    whole = ATTENTION * GPU + 2e-6 + 4 * KEY * GPU + TOKENS.sum(axis=1) * VALUE * GPU_ROWS
    gpu = 2 * KEY * GPU + TOKENS[:, :2].sum(axis=1) * VALUE * GPU_ROWS
    cpu = 2 * KEY * CPU + TOKENS[:, 2:].sum(axis=1) * VALUE * CPU_ROWS
    half = ATTENTION * GPU + 2e-6 + np.maximum(gpu, cpu) + 5e-6 + HANDOVER
    assert found.seconds == pytest.approx(whole + half + OUTSIDE + 5e-6)
    assert found.waits.tolist() == [1] * 4 and found.shared == 1 and found.skipped == 0


def test_dense_does_not_depend_on_the_tokens() -> None:
    m = model()
    p = placed(m, "layers", "dense", LayerPlacement(False), LayerPlacement(True, 4, True))
    found = one(m, p, TOKENS, TOKENS)
    ffn = 4 * (KEY + VALUE)
    total = (ATTENTION + ffn) * CPU + (ATTENTION + ffn) * GPU + 2e-6 + OUTSIDE + 2 * 5e-6
    assert found.seconds == pytest.approx(np.full(4, total)) and p.t_token == pytest.approx(total)
    assert found.shared == 0 and found.skipped == 0


def test_predicted_neurons_by_hand() -> None:
    """A predictor that names just what fires: keys of those are read, as chosen rows."""
    m = model(density=(0.5, None))
    p = placed(m, "predict", "predict", LayerPlacement(True, 2), LayerPlacement(True, 4, True))
    found = one(m, p, TOKENS, TOKENS)
    hot, cold = TOKENS[:, :2].sum(axis=1), TOKENS[:, 2:].sum(axis=1)
    shared = np.maximum(hot * GPU_ROWS, cold * CPU_ROWS) * (KEY + VALUE) + (5e-6 + HANDOVER) * (cold > 0)
    whole = 4 * KEY * GPU + TOKENS.sum(axis=1) * VALUE * GPU_ROWS
    fixed = 2 * (ATTENTION * GPU + 2e-6)
    assert found.seconds == pytest.approx(shared + whole + fixed + OUTSIDE + 5e-6)
    assert found.waits.tolist() == [0, 1, 1, 0]


# ---- against what is expected


@pytest.mark.parametrize("kind", ["all", "keys", "predict", "layers", "cpu"])
def test_tokens_that_are_all_alike_take_what_is_expected(kind: str) -> None:
    n_layer, n_ff = 3, 512
    f = (np.arange(n_ff) < 100).astype(float)
    m = predicting(large(n_layer, n_ff, 1024, frequency=(f,) * n_layer), density=100 / n_ff)
    least = PRESETS["rtx-4090"].gpu_context + m.sizes.workspace + m.sizes.head
    ffn = m.sizes.layers[0].ffn if kind != "all" else 1 << 30
    budget = least + sum(layer.fixed for layer in m.sizes.layers) + ffn
    sparsity = "predict" if kind == "predict" else "exact"
    p = plan(m, PRESETS["rtx-4090"], budget, kind, sparsity)
    found = one(m, p, *[np.tile(f > 0, (3, 1))] * n_layer)
    assert found.seconds == pytest.approx(np.full(3, p.t_token), rel=1e-9)
    assert found.waits == pytest.approx(np.full(3, sum(p.p_cold)))


def test_many_tokens_come_close_to_what_is_expected() -> None:
    """A little above it: the slower side of each token is never faster than that of the mean."""
    m = large(4, 4096, 1024)
    p = plan(m, PRESETS["rtx-3060-12g"], 700 << 20, "keys", "exact")
    tokens = draw(m.frequency, None, 200, "drawn")
    (found,) = replay(m, [p], tokens)
    assert p.t_token * 0.995 <= found.seconds.mean() <= p.t_token * 1.1
    assert found.waits.mean() == pytest.approx(sum(p.p_cold), abs=0.3)


def test_more_vram_is_never_slower_and_never_over_budget() -> None:
    m, card = predicting(large()), PRESETS["rtx-2080-ti"]
    tokens = draw(m.frequency, None, 24, "drawn")
    rows = simulate(m, card, [*default_budgets(m, card), card.vram + 1], tokens)
    assert len(rows) == 4 and rows[-1].budget <= card.vram
    for kind in rows[0].plans:
        speeds = [row.speed(kind) for row in rows]
        assert all(b >= a * 0.999 for a, b in zip(speeds, speeds[1:], strict=False)), kind
        assert all(found.placement.used <= row.budget for row in rows if (found := row.plans[kind]) is not None)
    assert all(row.speed(row.best) >= row.speed(LLAMA_CPP) for row in rows)
    assert rows[0].best == "keys" and rows[0].plans["keys"].skipped < 1  # type: ignore[union-attr]


def test_what_llama_cpp_does() -> None:
    m, card = large(), PRESETS["rtx-3060-12g"]
    p = split_of_llama_cpp(m, card, 3 << 30)
    assert p is not None and (p.kind, p.sparsity) == ("layers", "dense") and 0 < p.n_on_gpu < m.n_layer
    each = m.sizes.layers[0].fixed + m.sizes.layers[0].ffn
    assert (3 << 30) - each < p.used <= 3 << 30, "as many layers as fit"
    nothing = split_of_llama_cpp(m, card, 600 << 20)
    assert nothing is not None and nothing.kind == "cpu" and nothing.used == 0


# ---- activations


def test_bits_are_counted_wherever_the_hot_neurons_end() -> None:
    rng = np.random.default_rng(1)
    bits = rng.random((5, 77)) < 0.3
    layer = LayerBytes(77, ATTENTION, 0, 0, KEY, VALUE, False)
    m = model(sizes=ModelBytes((layer,), HEAD, 0, False, 0), frequency=(bits.mean(axis=0),), window=(0,),
              density=(None,))  # fmt: skip
    for hot in (0, 1, 7, 8, 9, 63, 64, 76, 77):
        found = one(m, placed(m, "keys", "exact", LayerPlacement(True, hot, True)), bits)
        assert found.waits.tolist() == (bits[:, hot:].any(axis=1)).astype(int).tolist(), hot


def test_drawn_neurons_fire_as_often_and_as_long_as_asked() -> None:
    f = np.array([1.0, 0.5, 0.2, 0.0])
    again = np.array([1.0, 0.9, 0.2, 0.0])
    bits = draw([f], [again], 20000, "drawn").bits(0)
    assert bits.mean(axis=0) == pytest.approx(f, abs=0.03)
    stays = (bits[1:] & bits[:-1]).sum(axis=0) / np.maximum(1, bits[:-1].sum(axis=0))
    assert stays == pytest.approx(again, abs=0.03)
    alone = draw([f], None, 20000, "drawn").bits(0)
    assert (alone[1:] & alone[:-1]).sum(axis=0) / np.maximum(1, alone[:-1].sum(axis=0)) == pytest.approx(f, abs=0.03)


def test_activations_of_another_model() -> None:
    with pytest.raises(HotcoldError, match="of another model"):
        replay(model(), [], pack([np.zeros((1, 3), bool)] * 2, "x", True))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, Activations]:
    path = counted(tmp_path / "m.gguf", SPECS["gated"])
    rng = np.random.default_rng(0)
    made = pack([rng.random((7, n)) < 0.2 for n in SPECS["gated"].neurons()], "a \x1b text", True)
    with open_gguf(path) as file:
        save_activations(tmp_path / "a.npz", made, file, ModelConfig.from_gguf(file), False)
    return path, tmp_path / "a.npz", made


def test_files_keep_everything(saved: tuple[Path, Path, Activations]) -> None:
    path, kept, made = saved
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        read = load_activations(kept, file, config)
        assert read.measured and read.n_ff == made.n_ff and "\x1b" not in read.source
        for a, b in zip(made.fired, read.fired, strict=True):
            np.testing.assert_array_equal(a, b)
        with pytest.raises(HotcoldError, match="already exists|exists"):
            save_activations(kept, made, file, config, False)


def test_bad_files_are_one_line(saved: tuple[Path, Path, Activations], tmp_path: Path) -> None:
    path, kept, _ = saved
    bad = tmp_path / "bad.npz"
    raw = dict(np.load(kept))

    def message(**changes: Any) -> str:
        np.savez(bad, **{k: v for k, v in (raw | changes).items() if v is not None})
        with open_gguf(path) as file, pytest.raises(HotcoldError) as e:
            load_activations(bad, file, ModelConfig.from_gguf(file))
        assert "bad.npz" in str(e.value) and "\n" not in str(e.value)
        return str(e.value)

    assert "version of another hotcold" in message(version=np.array([2]))
    assert "of another model" in message(model=np.zeros(64, np.uint8))
    assert "fired1: found nothing" in message(fired1=None)
    assert "fired0: found" in message(fired0=np.zeros((7, 65), np.uint8))
    assert "fired0: found" in message(fired0=np.zeros((7, 64), np.int8))
    assert "shape: found" in message(shape=np.zeros(100, np.int64))
    assert "tokens, allowed" in message(shape=np.array([0, *SPECS["gated"].neurons()]))
    assert "source: found" in message(source=np.zeros(100000, np.uint8))
    assert "cannot be read" in message(measured=np.array([{}], object)), "nothing is unpickled"
    bad.write_bytes(kept.read_bytes()[:200])
    with open_gguf(path) as file, pytest.raises(HotcoldError, match="cannot be read as recorded activations"):
        load_activations(bad, file, ModelConfig.from_gguf(file))
    with open_gguf(path) as file, pytest.raises(HotcoldError, match="cannot be read"):
        load_activations(tmp_path / "none.npz", file, ModelConfig.from_gguf(file))
    with open_gguf(path) as file, pytest.raises(HotcoldError, match="not a regular file"):
        load_activations(Path("/dev/zero"), file, ModelConfig.from_gguf(file))
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000,)}".ljust(117) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    for method, change in (
        (zipfile.ZIP_DEFLATED, lambda data: data.replace(data[60:80], b"\xff" * 20)),
        (zipfile.ZIP_LZMA, bytes),
        (zipfile.ZIP_STORED, bytes),  # claims more than any memory
    ):
        with zipfile.ZipFile(kept) as old, zipfile.ZipFile(bad, "w", method) as new:
            for name in old.namelist():
                new.writestr(name, huge if name == "source.npy" else old.read(name))
        bad.write_bytes(change(bad.read_bytes()))
        with open_gguf(path) as file, pytest.raises(HotcoldError, match="bad.npz: "):
            load_activations(bad, file, ModelConfig.from_gguf(file))


# ---- measured, and the command


TEXT = " ".join(f"The {i}th word of a text about {'sea' if i % 3 else 'land'} and {i * 7} ships." for i in range(90))


@pytest.fixture(scope="module")
def real(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("relu", outtype="q8_0", intermediate_size=96)


@pytest.fixture(scope="module")
def small_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card") / "card.json"
    path.write_text(to_json(MACHINE))
    return path


def test_what_is_recorded_is_what_a_profile_counts(real: Path, tmp_path: Path) -> None:
    corpus, n = Corpus("ships", "ab" * 32, (TEXT,)), 64
    found = record(real, corpus, n, threads=1)
    assert found.measured and found.source == "measured on 64 tokens of ships" and found.n_tokens == n
    profile = profile_model(real, corpus, tokens=n + n // 4 + 1, n_ctx=n // 4 + 1, samples=0, threads=1)
    with open_gguf(real) as file:
        positions = source_positions(file, ModelConfig.from_gguf(file))
    assert 0 <= profile.n_tokens - n < 32, "but for the end of the last passage"
    for layer, ids in enumerate(positions):
        counts = found.bits(layer).sum(axis=0)
        more = profile.fired[layer][ids] - counts
        assert (more >= 0).all() and (more <= profile.n_tokens - n).all() and counts.sum() > 0


def test_the_command_compares_plans_and_keeps_tokens(
    run: Callable[..., tuple[int, str, str]], real: Path, small_card: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    kept = tmp_path / "kept.npz"
    options = ("plan", real, "--simulate", f"{small_card},rtx-2080-ti", "--n-ctx", "32")
    code, out, err = run(*options, "--trace-text", tmp_path / "t.txt", "--tokens", "24", "--save-trace", kept)
    assert code == 0 and out.startswith("Simulated, not measured: measured on 24 tokens of t.txt, context 32"), err
    assert out.count("times llama.cpp") == 2 and "RTX 2080 Ti" in out and kept.exists()
    code, again, err = run(*options, "--trace", kept, "--tokens", "99")
    assert f"--tokens 99: {kept} holds 24, all are replayed" in " ".join(err.split())
    assert code == 0 and again.splitlines()[2:] == out.splitlines()[2:]
    code, text, _ = run(*options, "--trace", kept, "--json", "--vram-budget", "40MiB", "--vram-budget", "auto",
                        "--tokens", "8")  # fmt: skip
    found = json.loads(text)
    assert code == 0 and found["tokens"] == 8 and found["measured"]
    budgets = [[row["budget"] for row in card["budgets"]] for card in found["cards"]]
    assert budgets == [[40 << 20, MACHINE.vram], [40 << 20, PRESETS["rtx-2080-ti"].vram]]
    code, _, err = run(*options, "--trace", kept, "--vram-budget", "12GiB", "--vram-budget", "40MiB")
    assert code == 0 and err.count("--vram-budget 12.0 GiB: left out, more than the 11.0 GiB of RTX 2080 Ti") == 1
    code, _, err = run(*options, "--trace", kept, "--save-trace", tmp_path / "more.npz")
    assert code == 2 and "--save-trace keeps what is recorded now" in err
    code, _, err = run(*options, "--save-trace", tmp_path / "nowhere" / "t.npz")
    assert code == 1 and "recording" not in err and "no such folder" in err
    plans = found["cards"][0]["budgets"][1]["plans"]
    assert set(plans) == {"all", "keys", "layers", "cpu", LLAMA_CPP} and plans["all"]["skipped"] == 0


def test_tokens_drawn_from_a_profile_and_dense_models(
    run: Callable[..., tuple[int, str, str]], real: Path, small_card: Path, tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    profile_model(real, Corpus("ships", "ab" * 32, (TEXT,)), tokens=64, n_ctx=32, samples=0, threads=1,
                  out=tmp_path / "p.gguf")  # fmt: skip
    code, out, err = run("plan", real, "--simulate", small_card, "--profile", tmp_path / "p.gguf", "--tokens", "5")
    assert code == 0 and "5 tokens drawn from the counts and pairs of p.gguf" in out, err
    code, out, _ = run("plan", tiny_model("llama", outtype="q8_0"), "--simulate", small_card)
    assert code == 0 and "every neuron computed on every token" in out


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--tokens", "5"), 2, "--tokens is for --simulate"),
        (("--simulate", "rtx-4090", "--ops"), 2, "--ops is not for --simulate"),
        (("--simulate", "rtx-4090", "--gpu-plan", "all"), 2, "are not for --simulate"),
        (("--simulate", "rtx-4090,"), 2, "names of machines"),
        (("--simulate", "rtx-1"), 1, "neither a file nor a preset"),
        (("--simulate", "rtx-4090", "--trace", "none.npz"), 1, "cannot be read"),
        (("--simulate", "rtx-4090", "--trace", "a", "--profile", "b"), 2, "not allowed with"),
    ],
)
def test_wrong_options(
    run: Callable[..., tuple[int, str, str]], real: Path, options: tuple[str, ...], status: int, words: str
) -> None:
    code, out, err = run("plan", real, *options)
    assert code == status and words in err and not out
