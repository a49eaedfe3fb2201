#!/usr/bin/env python3
"""Profiles a model with a Ray cluster: the text in shards, one task each, whose counts add up.

In: a model that every node finds under the same path, text files on this machine. Out: the same profile that
`hotcold profile` makes on one machine. Next: `hotcold place MODEL --profile OUT`.

    pip install "hotcold[cluster]"            # on every node
    python scripts/profile_ray.py model.hotcold.gguf --text corpus.txt --all --shards 64 -o model.profile.gguf

Without --address Ray starts on this machine only. A shard whose node fails is tried again elsewhere. After Ctrl-C, or
when a shard fails for good, OUT holds the shards that are done: `hotcold profile MODEL ... --resume -o OUT` counts the
rest.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotcold.placement.profile import Profile, merge_profiles
from hotcold.placement.profile_file import State, write_profile
from hotcold.placement.profiling import TOKENS, count_contexts, print_summary, profile_model, progress_bar
from hotcold.runtime.arguments import count, whole
from hotcold.runtime.atomic import check_output
from hotcold.runtime.corpus import Corpus, read_corpus
from hotcold.runtime.errors import HotcoldError

TRIES = 3  # of a shard, beyond the first


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--outfile", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", default=[], help="may be given several times")
    parser.add_argument("--tokens", type=count, default=TOKENS)
    parser.add_argument("--all", action="store_true", help="count all of the text")
    parser.add_argument("-c", "--ctx", type=count)
    parser.add_argument("--samples", type=whole)
    parser.add_argument("--shards", type=count,
                        help="default: as many as tasks fit into the cluster at once; at most one per context")
    parser.add_argument("-t", "--threads", type=count, default=1, help="threads and CPUs per shard (default 1)")
    parser.add_argument("--address", help="of the cluster, for example auto (default: this machine)")
    parser.add_argument("--cpus", type=count, help="CPUs of a Ray on this machine (default: all)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    args = parser.parse_args(argv)
    try:
        import ray
    except ImportError:
        parser.error('Ray is not installed: pip install "hotcold[cluster]"')
    # Ray reports who uses it to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings = {"tokens": None if args.all else args.tokens, "n_ctx": args.ctx, "samples": args.samples,
                "threads": args.threads}  # fmt: skip

    def keep(profile: Profile, complete: bool) -> None:
        write_profile(args.outfile, profile, State(complete, profile.parts[0].total), args.force)

    try:
        check_output(args.outfile, args.force)
        corpus = read_corpus(args.text)
        ray.init(address=args.address, num_cpus=args.cpus, log_to_driver=False, include_dashboard=False)
        try:
            cpus = int(ray.cluster_resources().get("CPU", 1))
            if args.address is None and args.threads > cpus:  # the task would wait for ever
                raise HotcoldError(f"--threads {args.threads}: Ray has {cpus} CPUs here: use fewer threads, or --cpus")
            shards = args.shards or max(1, cpus // args.threads)
            profile = profile_on_cluster(ray, args.model.resolve(), corpus, shards, settings, keep)
        finally:
            ray.shutdown()
    except HotcoldError as e:
        print(f"profile_ray: error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_summary(profile)
    return 0


def profile_on_cluster(ray: Any, model: Path, corpus: Corpus, shards: int, settings: dict[str, int | None],
                       keep: Callable[[Profile, bool], None]) -> Profile:
    """All shards as tasks of a running Ray, merged. keep gets the whole, or what is done when something fails.

    There are at most as many shards as contexts.
    """
    count = ray.remote(num_cpus=settings["threads"], max_retries=TRIES)(count_shard)
    text = ray.put(corpus)
    # As a task, for the model is on the nodes.
    most = _result(ray, ray.remote(max_retries=TRIES)(count_contexts).remote(str(model), text, settings["tokens"],
                                                                             settings["n_ctx"]))  # fmt: skip
    shards = min(shards, most)
    waiting = [count.remote(str(model), text, i, shards, settings) for i in range(shards)]
    done: list[Profile] = []
    try:
        with progress_bar("shards") as progress:
            while waiting:
                finished, waiting = ray.wait(waiting, num_returns=1, timeout=1.0)
                for task in finished:
                    done.append(_result(ray, task))
                progress(len(done), shards)
    except BaseException:
        for task in waiting:
            ray.cancel(task)
        if done:
            keep(merge_profiles(done), False)
        raise
    profile = merge_profiles(done)
    keep(profile, True)
    return profile


def count_shard(model: str, corpus: Corpus, i: int, n: int, settings: dict[str, Any]) -> Profile:
    """One shard, on some node."""
    return profile_model(model, corpus, shard=(i, n), **settings)


def _result(ray: Any, task: Any) -> Any:
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as e:
        cause = e.cause
        raise HotcoldError(str(cause) if isinstance(cause, HotcoldError) else f"a shard failed: {cause!r}") from None
    except ray.exceptions.RayError as e:
        raise HotcoldError(f"a shard failed: {' '.join(str(e).split())[:300]}") from None


if __name__ == "__main__":
    sys.exit(main())
