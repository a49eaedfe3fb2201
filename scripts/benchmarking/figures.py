"""Which figures there are: the models and runs that each needs, and what is to be reached.

In: nothing. Out: FIGURES. Next: runs.py carries them out, page.py writes them down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DEMO = "demo"  # the model that scripts/run makes
DEMO_STEM = "smollm2-135m-instruct"  # the name it has there


@dataclass(frozen=True)
class Model:
    """A synthetic model; its file's name tells everything."""

    shape: str
    kind: str  # type of its matrices
    sparsity: float | None = None  # None: a stock file, which both run
    predictor: bool = False
    layers: int | None = None
    n_ff: int | None = None
    n_ctx: int | None = None

    @property
    def name(self) -> str:
        parts = [self.shape]
        parts += [f"{self.layers}-layers"] * (self.layers is not None) + [f"{self.n_ff}-ff"] * (self.n_ff is not None)
        parts += [f"{self.n_ctx}-ctx"] * (self.n_ctx is not None)
        parts += [f"{self.sparsity:g}-off"] if self.sparsity is not None else []
        parts += ["predictor"] * self.predictor
        return "-".join(parts) + f".{self.kind}"

    @property
    def has_twin(self) -> bool:
        """Sparse models of llama shapes have a twin for llama.cpp, which knows no OPT."""
        return self.sparsity is not None and not self.shape.startswith("opt")

    def options(self) -> list[str]:
        """Of make_synthetic.py."""
        out = ["--shape", self.shape, "--type", self.kind]
        for option, value in (("--layers", self.layers), ("--n-ff", self.n_ff), ("--n-ctx", self.n_ctx),
                              ("--sparsity", self.sparsity)):  # fmt: skip
            out += [option, str(value)] if value is not None else []
        return out + (["--predictor", "lowrank"] if self.predictor else [])


@dataclass(frozen=True)
class Job:
    """One run. kind: compare (compare_llama_cpp.py), bench (hotcold bench), text (a script that prints Markdown), plan
    (hotcold plan)."""

    label: str
    kind: str
    model: Model | str | None  # a str: DEMO; None: the script needs none
    options: tuple[str, ...] = ()
    target: float | None = None  # of the ratio
    part: str = ""  # tells jobs apart that have the label and the model in common

    @property
    def key(self) -> str:
        """Names its result."""
        return " ".join(filter(None, [self.label, self.part, self.model.name if isinstance(self.model, Model) else ""]))


@dataclass(frozen=True)
class Figure:
    """A table of BENCHMARKS.md. `source`: names of figures whose results it shows in another way, without own runs."""

    name: str
    title: str
    text: str  # what is measured
    view: str  # of page.py: ratio, dense, bandwidth, linear, startup, judged, text
    jobs: tuple[Job, ...] = ()
    source: tuple[str, ...] = field(default=())
    anywhere: bool = False  # its results are the same on every machine


GEN, LARGE_GEN = "32", "16"  # generated tokens; of large models
REPACKED = ("--repack", "on")  # llama.cpp's default; as they lie in the file, its weights were slower wherever we tried
ONE_AND_TWO, TWO = ("--threads", "1,2"), ("--threads", "2")


def decode(model: Model, target: float, *options: str) -> Job:
    """Generation against llama.cpp."""
    large = "7b" in model.shape
    sizes = ("--prompt-tokens", "0", "--gen-tokens", LARGE_GEN if large else GEN)
    memory = () if large and model.kind == "f16" else ("--no-mmap",)  # 13 GB, and once more in the page cache
    options = (*sizes, *ONE_AND_TWO, *REPACKED, *memory, "--quality-tokens", "0", *options)
    return Job(f"{model.shape} {model.kind.upper()}", "compare", model, options, target)


def dense(kind: str, target: float, *shapes: str) -> Figure:
    jobs = tuple(decode(Model(shape, kind), target) for shape in shapes)
    return Figure(f"dense-{kind}", f"Dense decoding, {kind.upper()}",
                  "All neurons computed, the same file in both, generated tokens from an empty context.", "ratio",
                  jobs)  # fmt: skip


SPARSE = tuple(
    Model(shape, kind, 0.9, predictor=True)
    for shape, kind in (("llama-1.3b", "f16"), ("llama-1.3b", "q8_0"), ("llama-1.3b", "q4_0"), ("llama-7b", "q4_0"))
)
KINDS = ("f16", "q8_0", "q4_0", "q4_k")
WIDE, DEEP = (5632, 11264, 22528), (6, 12, 24)  # neurons per layer and layers: once, twice, four times
BENCH = ("-p", "0", "-n", GEN, "-t", "1,2", "-r", "3")
DEPTHS = (0, 2048, 4096, 8192, 16384, 32000)
RANDOM = ("--quality-tokens", "32", "--text", "random")  # quality of models that know no language: KL and top tokens

FIGURES = (
    dense("f16", 1.05, "llama-1.3b", "llama-7b"),
    dense("q8_0", 1.2, "llama-1.3b", "llama-7b"),
    dense("q4_0", 1.2, "llama-1.3b", "llama-7b"),
    dense("q4_k", 1.0, "llama-1.3b", "llama-7b"),
    Figure(
        "exact-gated", "Exact, gated, 10 % of the neurons active",
        "A ReLU model with 90 % of its neurons off, against its dense twin in llama.cpp: the same result.", "ratio",
        tuple(decode(model, 1.8, "--modes", "exact") for model in SPARSE),
    ),
    Figure(
        "exact-opt", "Exact, not gated, 5 % of the neurons active",
        "OPT's shape, which llama.cpp does not have: against our own dense mode on the same file.", "dense",
        (decode(Model("opt-1.3b", "q8_0", 0.95), 1.5, "--modes", "dense,exact"),),
    ),
    Figure(
        "predict", "Predict, 10 % of the neurons active",
        "The models of `exact-gated`, whose predictors cost at most 4 % of the FFN's bytes, against the same twins.",
        "ratio",
        tuple(decode(model, 2.4, "--modes", "predict", *(RANDOM if "1.3b" in model.shape else ())) for model in SPARSE),
    ),
    Figure(
        "relu-smollm2", "A real model: SmolLM2-135M, relufied",
        "The demo model of `scripts/run`, exact, against its twin in llama.cpp.", "ratio",
        (Job("SmolLM2-135M relufied", "compare", DEMO,
             ("--modes", "exact", *ONE_AND_TWO, *REPACKED, "--no-mmap", "--prompt-tokens", "0", "--gen-tokens", "64",
              "--quality-tokens", "256"), 1.2),),
    ),
    Figure(
        "prompt-512", "A prompt of 512 tokens", "All neurons computed, the same file in both.", "ratio",
        tuple(Job(f"{model.shape} {model.kind.upper()}", "compare", model,
                  ("--prompt-tokens", "512", "--gen-tokens", "0", *threads, *REPACKED, "--quality-tokens", "0"), 0.8)
              for model, threads in (*((Model("llama-1.3b", kind), ONE_AND_TWO) for kind in KINDS),
                                     (Model("llama-7b", "q4_0"), TWO))),
    ),
    Figure(
        "prompt-sparse", "Prompts of a sparse model, exact",
        "Blocks compute the neurons that fire for any of their tokens, or all where nearly all do; against dense "
        "blocks of the same file.", "dense",
        tuple(Job("llama-1.3b Q8_0", "compare", SPARSE[1],
                  ("--prompt-tokens", n, "--gen-tokens", "0", *TWO, *REPACKED, "--no-mmap", "--modes",
                   "dense,exact", "--quality-tokens", "0"), 0.98, part=f"pp{n}")
              for n in ("8", "32", "128", "512")),
    ),
    Figure(
        "bandwidth", "Share of the bound by memory",
        "Bytes read per token times tokens per second, as a share of a plain read of memory by as many threads, which "
        "was measured between the rounds of the same runs.", "bandwidth",
        source=("dense-f16", "dense-q8_0", "dense-q4_0", "dense-q4_k", "exact-gated", "exact-opt", "predict"),
    ),
    Figure(
        "scaling-ctx", "A longer context",
        "Time of a generated token and peak memory with so many tokens in a context of that size; two layers of "
        "llama-160m, where attention weighs most.", "linear",
        tuple(Job("tokens", "bench", Model("llama-160m", "q8_0", layers=2, n_ctx=32768),
                  ("-p", "0", "-n", LARGE_GEN, "-t", "2", "-r", "2", "-d", str(n)), part=str(n)) for n in DEPTHS),
    ),
    Figure(
        "scaling-ff", "More neurons per layer", "Six layers of llama-1.3b, 1, 2 and 4 times its neurons.", "linear",
        tuple(Job("neurons per layer", "bench", Model("llama-1.3b", "q8_0", layers=6, n_ff=n), BENCH) for n in WIDE),
    ),
    Figure(
        "scaling-layers", "More layers", "llama-1.3b with 6, 12 and 24 layers.", "linear",
        tuple(Job("layers", "bench", Model("llama-1.3b", "q8_0", layers=n), BENCH) for n in DEEP),
    ),
    Figure(
        "hybrid-simulated", "Simulated hybrid speed",
        "**Simulated, not measured**: no GPU was there. What the timing model of `hotcold plan --simulate` says, first "
        "of settings that PowerInfer's authors published, then of a synthetic model whose neurons were recorded while "
        "it read the bundled text: tokens per second of the four plans, the CPU alone and llama.cpp's layer split.",
        "text",
        (Job("published", "text", None, ("simulate_published.py", "--tokens", "24")),
         Job("recorded", "plan", SPARSE[2], ("--simulate", "rtx-2080-ti,rtx-3060-12g,rtx-4090", "--n-ctx", "4096",
                                             "--tokens", "128"))),
        anywhere=True,
    ),
    Figure(
        "lookup", "Prompt lookup", "Speculation without a draft model, `scripts/measure_lookup.py`.", "text",
        (Job("demo", "text", DEMO, ("measure_lookup.py", "--modes", "exact", "--threads", "2", "--rounds", "3",
                                    "--tokens", "96")),),
    ),
    Figure(
        "oversubscribed", "A machine that is busy",
        "Twice as many threads as cores, beside one process per core that never rests, "
        "`scripts/measure_oversubscribed.py`.",
        "judged", (Job("demo", "text", DEMO, ("measure_oversubscribed.py", "--tokens", "64", "--rounds", "3")),),
    ),
    Figure(
        "startup", "Start-up", "A file of 4 GB in the page cache, mapped; then read into memory instead.", "startup",
        tuple(Job(label, "bench", Model("llama-7b", "q4_0"),
                  ("-p", "0", "-n", "1", "-t", "2", "-r", "1", "--no-warmup", *options))
              for label, options in (("mapped", ()), ("--no-mmap", ("--no-mmap",)))),
    ),
)  # fmt: skip


def by_name(name: str) -> Figure | None:
    return next((figure for figure in FIGURES if figure.name == name), None)
