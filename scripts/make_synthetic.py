"""Write a GGUF of real size with random weights: for speed, where no checkpoint is at hand.

In: a shape's name and a type. Out: a GGUF. Next: compare_llama_cpp.py, `hotcold bench`.

    python scripts/make_synthetic.py --shape llama-1.3b --type q8_0 -o dense-1.3b.gguf
    python scripts/make_synthetic.py --shape llama-1.3b --type q8_0 --sparsity 0.9 --predictor lowrank \\
        -o relu-1.3b.gguf --stock relu-1.3b.stock.gguf

Without --sparsity it is a stock file (SiLU for llama shapes), which hotcold and llama.cpp run. With it, it is a
neuron-split file whose neurons really are off that often, in every layer and for any tokens; some neurons are hot and
others cold (--skew). --stock writes the same weights for llama.cpp. The text such a model writes means nothing.
synthetic/planted.py says how it is done.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from synthetic.lowrank import check_rank
from synthetic.model import Assembly, predictor_share, twin_factors
from synthetic.planted import Plan, hottest_for, make_plan
from synthetic.shapes import ORDERS, PREDICTOR_TYPES, SHAPES, TYPES, PredictorRecipe, Recipe, Shape

from hotcold.convert.writer import write_target
from hotcold.placement.predictor import Quality
from hotcold.runtime import schema
from hotcold.runtime.arguments import count, whole
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError

ACTIVATIONS = ("silu", *schema.SPARSE_ACTIVATIONS)
SMALL = ("q4_0", "q4_k")  # types whose predictors are q4_0


def make(recipe: Recipe, out: Path, stock: Path | None = None) -> list[Quality]:
    """Write the model, and its stock twin; returns what its predictors find, per layer. Raises HotcoldError.

    A recipe without sparsity makes a stock file only.
    """
    plan = make_plan(recipe)
    k = twin_factors(recipe) if stock else 0
    assembly = Assembly(recipe, plan, split=recipe.sparsity is not None)
    _write(assembly, out)
    if stock:
        _write(Assembly(recipe, plan, split=False, k=k), stock)
    return [quality for _, quality in assembly.found]


def _write(assembly: Assembly, out: Path) -> None:
    start = time.monotonic()
    size = write_target(assembly.target(), out, lambda name, n_bytes: None, lambda: None, replace=True)
    print(f"{out}: {size / 1e9:.2f} GB in {time.monotonic() - start:.0f} s", flush=True)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Raises HotcoldError for options that do not go together."""
    shape: Shape = SHAPES[args.shape]
    changes = {"n_layer": args.layers, "n_ff": args.n_ff, "n_ctx": args.n_ctx}
    shape = replace(shape, **{name: value for name, value in changes.items() if value is not None})
    activation = args.activation or (shape.stock_activation if args.sparsity is None else shape.activation)
    if args.sparsity is None and (args.predictor or args.stock):
        raise HotcoldError("--predictor and --stock need --sparsity: without it the file is a stock file")
    if args.sparsity is not None and activation not in schema.SPARSE_ACTIVATIONS:
        raise HotcoldError(f"--sparsity with --activation {activation}: its neurons are never off")
    if activation != shape.activation and not shape.gated:
        raise HotcoldError(f"--activation {activation}: {args.shape} computes {shape.activation}")
    if activation == "fatrelu" and not shape.threshold:
        shape = replace(shape, threshold=0.01)
    predictor = None
    if args.predictor:
        kind = TYPES[args.predictor_type or ("q4_0" if args.type in SMALL else "q8_0")]
        predictor = PredictorRecipe(args.rank, kind, args.noise, args.recall)
        check_rank(predictor, shape.n_embd)
    name = f"synthetic {args.shape} {activation}" + (f" {args.sparsity:g}" if args.sparsity is not None else "")
    return Recipe(name, shape, TYPES[args.type], args.seed, activation, args.sparsity, args.skew, args.order, predictor)


def describe(recipe: Recipe, plan: Plan, found: list[Quality]) -> None:
    """What was planted, and what the predictors find of it."""
    if plan.probability is not None:
        hot = hottest_for(plan.probability, 0.8)
        print(f"planted: {1 - plan.probability.mean():.1%} of the neurons are off; the hottest {hot:.1%} of them make "
              "80 % of the activations")  # fmt: skip
    if recipe.activation == "fatrelu":
        print(f"a stock twin computes ReLU: neurons with keys from 0 to {recipe.threshold:g} are on there")
    if found:
        mean = {name: np.mean([getattr(q, name) for q in found]) for name in ("recall", "precision", "density")}
        print(f"predictor: recall {mean['recall']:.4f} (lowest of a layer {min(q.recall for q in found):.4f}), density "
              f"{mean['density']:.1%}, precision {mean['precision']:.2f}, {predictor_share(recipe):.2%} of the FFN's "
              "bytes")  # fmt: skip


def check(path: Path, n_tokens: int, recipe: Recipe) -> None:
    """Run random tokens, and print what really fires and what predictors find of it."""
    ids = np.random.default_rng(1).integers(3, recipe.shape.n_vocab, n_tokens)
    computed = {}
    for mode in ("exact", "predict") if recipe.predictor else ("exact",):
        with Engine.open(path, sparsity=mode, n_ctx=max(16, n_tokens)) as engine:
            for token in ids:
                engine.forward([token], logits="none")
            computed[mode] = engine.layer_stats().computed
    off = 1 - computed["exact"]
    print(f"measured with {n_tokens} random tokens: {off.mean():.1%} off, layers {off.min():.1%} to {off.max():.1%}")
    if recipe.predictor:
        share = computed["predict"] / computed["exact"]
        print(f"predict computes {share.mean():.2%} of the neurons that exact computes, layers {share.min():.2%} up")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a GGUF of real size with random weights and planted sparsity.",
        epilog="shapes: " + "; ".join(
            f"{name} {s.n_layer} layers, width {s.n_embd}, {s.n_ff} neurons, {s.n_head}/{s.n_head_kv} heads"
            for name, s in SHAPES.items()
        ),
    )  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--type", choices=TYPES, required=True, help="of all matrices; norms and biases are F32")
    parser.add_argument("--activation", choices=ACTIVATIONS, help="of llama shapes, in place of the usual one")
    parser.add_argument("--sparsity", type=float, help="share of neurons that are off; writes our layout")
    parser.add_argument("--skew", type=float, default=0.7,
                        help="a neuron of rank i fires in proportion to i^-SKEW (default 0.7; 0: all alike)")
    parser.add_argument("--order", choices=ORDERS, default=ORDERS[0], help="of the neurons in the file")
    parser.add_argument("--predictor", choices=["lowrank"], help="make keys of low rank and write a predictor of them")
    parser.add_argument("--rank", type=count, default=128)
    parser.add_argument("--predictor-type", choices=PREDICTOR_TYPES, help="default: q4_0 for 4-bit types, else q8_0")
    parser.add_argument("--noise", type=float, default=0.1, help="of a key row, relative to its part of low rank")
    parser.add_argument("--recall", type=float, default=0.995, help="wanted of the predictor (default 0.995)")
    parser.add_argument("--layers", type=count, help="in place of the shape's")
    parser.add_argument("--n-ff", type=count, help="neurons per layer, in place of the shape's")
    parser.add_argument("--n-ctx", type=count, help="context length, in place of the shape's")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--stock", metavar="FILE", type=Path, help="also the same weights as llama.cpp lays them out")
    parser.add_argument("--check", metavar="N", type=count, help="then run N random tokens and print what fires")
    return parser


def main() -> int:
    args = arguments().parse_args()
    try:
        recipe = recipe_of(args)
        found = make(recipe, args.out, args.stock)
        describe(recipe, make_plan(recipe), found)
        if args.check and recipe.sparsity is not None:
            check(args.out, args.check, recipe)
    except KeyboardInterrupt:
        print("make_synthetic: interrupted", file=sys.stderr)
        return 130
    except (OSError, HotcoldError) as error:
        print(f"make_synthetic: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
