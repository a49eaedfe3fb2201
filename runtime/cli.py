"""The command `hotcold`: the way in.

In: the command line. Out: an exit status. Next: convert/main.py for `convert`; api.py, generate.py and repl.py for
`run` and `chat`; inspect.py for `inspect`. Each is imported only by its own command.

Exit status: 0 done; 1 an error, one line on stderr; 2 wrong usage; 130 Ctrl-C; 141 the reader of our output went away.
A traceback is a bug.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from hotcold.runtime.arguments import add_gpu_options, add_memory_options, gpu_options
from hotcold.runtime.console import complain, discard, emit, end_notes, fill_streams, printable, read_input
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.lookup import MAX_DRAFT, draft_limit

if TYPE_CHECKING:
    from hotcold.runtime.api import Model
    from hotcold.runtime.generate import GenerationStats
    from hotcold.runtime.gpu.choose import Wanted
    from hotcold.runtime.gpu.placement import GpuPlacement
    from hotcold.runtime.repl import Repl
    from hotcold.runtime.sampling import Sampler, SamplingParams

WRONG_USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (argparse exits by itself with 0 or 2)."""
    with _ended_by_exception():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    began = time.perf_counter()
    collecting, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()  # modules and vocabularies are many objects that stay; each command enables it again when it has them
    argv = sys.argv[1:] if argv is None else argv
    fill_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 must not end the program
    try:
        try:
            args, unknown = build_parser(argv).parse_known_args(_lookup_alone(argv))
            if unknown:
                args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # the command's own usage
            args.began = began
            return int(args.run(args))
        finally:
            end_notes()
            emit(sys.stdout)
    except HotcoldError as error:
        complain(f"hotcold: error: {_one_line(error)}")
        return 1
    except MemoryError as error:
        complain(f"hotcold: error: not enough memory{': ' * bool(error.args)}{_one_line(error)}")
        return 1
    except KeyboardInterrupt as error:
        complain("")
        return 128 + getattr(error, "signum", signal.SIGINT)  # a command may have held back another signal
    except BrokenPipeError:
        discard(sys.stdout)
        return BROKEN_PIPE
    finally:
        if not frozen:
            gc.unfreeze()
        (gc.enable if collecting else gc.disable)()


@contextlib.contextmanager
def _ended_by_exception() -> Iterator[None]:
    """SIGTERM and a closed terminal end the program through its cleanup, as Ctrl-C does, and with the usual status."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {}
    for name in ("SIGTERM", "SIGHUP"):  # the latter is not there on Windows
        number = getattr(signal, name, None)
        in_main = threading.current_thread() is threading.main_thread()
        if number is not None and in_main and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores it
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Parser(argparse.ArgumentParser):
    """A wrong command line is two lines: how the command is used, and last what is wrong."""

    def error(self, message: str) -> NoReturn:
        # Not by argparse's own printing: before Python 3.11.3 it fails where stderr cannot be written.
        complain(self.format_usage().rstrip())
        complain(f"{self.prog}: error: {printable(' '.join(message.split()))}; see {self.prog} --help")
        raise SystemExit(WRONG_USAGE)


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `argv`: options of a command are added only if it is the one named."""
    from importlib.metadata import version

    parser = _Parser(
        prog="hotcold",
        description="Runs large language models by computing only the neurons that fire.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hotcold {version('hotcold')}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    wanted = next((a for a in argv if not a.startswith("-")), None)
    for name, usage, help_, add_arguments in (
        ("convert", "SRC", "make a neuron-split GGUF from a Hugging Face folder or a stock GGUF", "convert.main"),
        ("relufy", "SRC", "turn a SiLU or GELU model into one whose neurons switch off", "convert.relufy"),
        ("profile", "MODEL", "count over a text how often each neuron fires", "placement.profiling"),
        ("train-predictor", "MODEL", "add predictors of which neurons fire", "placement.train"),
        ("calibrate", "MODEL", "set thresholds that switch neurons off in a SiLU or GELU model", "placement.calibrate"),
        ("place", "MODEL", "sort neurons by how often they fire; divide them between GPU and CPU", "placement.place"),
        ("plan", "MODEL", "show how a budget of VRAM would be used, and how fast that is", "placement.plan_command"),
        ("run", "MODEL", "continue a text, or answer one prompt", _add_run),
        ("chat", "MODEL", "have a conversation", _add_chat),
        ("inspect", "FILE", "print what a GGUF file holds", _add_inspect),
        ("bench", "MODEL [MODEL ...]", "measure how fast models run", "runtime.bench"),
        ("perplexity", "MODEL", "measure how well a model predicts a text", "runtime.perplexity"),
        ("report", "MODEL", "draw what is known of a model's neurons", "placement.report"),
        ("compile", "", "compile the kernels for this CPU now, not at the first use", "runtime.compile"),
        ("doctor", "[MODEL]", "measure this machine and say what hotcold does on it", "placement.doctor"),
    ):
        command = commands.add_parser(
            name, usage=f"%(prog)s [options] {usage}", help=help_,
            description=help_[0].upper() + help_[1:] + ".",
            allow_abbrev=False,
        )  # fmt: skip
        command.set_defaults(parser=command)
        if name == wanted:
            (_module(command, add_arguments) if isinstance(add_arguments, str) else add_arguments(command))
    return parser


def _lookup_alone(argv: Sequence[str]) -> list[str]:
    """`--lookup MODEL` has no number: argparse would take the model's path for it."""
    number = re.compile(r"[+-]?[0-9]+")
    return [
        f"--lookup={MAX_DRAFT}" if this == "--lookup" and not number.fullmatch(following) else this
        for this, following in zip(argv, [*argv[1:], ""], strict=False)
    ]


def _module(parser: argparse.ArgumentParser, name: str) -> None:
    """A command that is a module of its own, with add_arguments() and run()."""
    module = importlib.import_module(f"hotcold.{name}")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run, place=_place)
    gc.enable()


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=_path, help="GGUF file")
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from hotcold.runtime.inspect import file_lines, print_file

    if sys.stdout.isatty():
        print_file(args.file, Console())
    else:
        for line in file_lines(args.file):
            emit(sys.stdout, line + "\n")
    return 0


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=_path, help="GGUF file")
    group = parser.add_argument_group("model")
    group.add_argument(
        "-c", "--ctx-size", type=_size, metavar="N",
        help="tokens of context; 0: what the model was trained on (default: that, at most 4096)",
    )  # fmt: skip
    group.add_argument("-t", "--threads", type=_count, metavar="N", help="default: what the machine gives this process")
    group.add_argument(
        "--sparsity", choices=("auto", "exact", "dense", "predict"), default="auto",
        help="exact: skip neurons that are off; dense: compute all; predict: let the file's predictors choose which "
             "neurons to look at, faster and not exact; auto: exact where neurons switch off (default)",
    )  # fmt: skip
    group.add_argument(
        "--kv-type", choices=("f16", "q8_0", "f32"), default="f16",
        help="type of the KV cache: q8_0 takes about half the memory of f16, and is less exact (default f16)",
    )  # fmt: skip
    add_memory_options(group)
    add_gpu_options(parser.add_argument_group("GPU"))


def _add_generation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "-n", "--predict", "--n-predict", type=_limit, default=-1, metavar="N",
        help="most tokens to generate; -1: until the model ends or the context is full (default)",
    )  # fmt: skip
    group.add_argument(
        "--temp", type=_number, default=0.8, metavar="T", help="temperature; 0: always the most likely (default 0.8)"
    )
    group.add_argument("--top-k", type=_whole, default=40, metavar="K", help="0: off (default 40)")
    group.add_argument("--top-p", type=_share, default=0.95, metavar="P", help="1: off (default 0.95)")
    group.add_argument("--min-p", type=_share, default=0.05, metavar="P", help="0: off (default 0.05)")
    group.add_argument("--repeat-penalty", type=_number, default=1.0, metavar="X", help="1: off (default 1)")
    group.add_argument(
        "--repeat-last-n", type=_whole, default=64, metavar="N",
        help="tokens it looks back; 0: off, -1: all (default 64)",
    )  # fmt: skip
    group.add_argument("-s", "--seed", type=_whole, default=-1, metavar="N", help="-1: random (default)")
    group.add_argument(
        "--lookup", type=_draft, nargs="?", const=MAX_DRAFT, default=0, metavar="N",
        help=f"draft up to N tokens (1 to {MAX_DRAFT}; default {MAX_DRAFT}) from what the text said before and check "
             "them in one run; the same text, sooner where it repeats itself or the prompt; 0: off (default)",
    )  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="never let the model end by itself")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    group = parser.add_argument_group("prompt (from standard input if neither -p nor -f is given)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT")
    source.add_argument("-f", "--file", type=_path, metavar="FILE", help="one newline at the end is dropped")
    group.add_argument(
        "-st", "--single-turn", action="store_true",
        help="the prompt is a message: apply the model's chat template and answer it (default: continue the text)",
    )  # fmt: skip
    group.add_argument("-sys", "--system-prompt", metavar="TEXT", help="with -st")
    group.add_argument(
        "--special", action="store_true", help="special tokens in the prompt are not plain text (not with -st)"
    )
    group.add_argument(
        "--display-prompt", action=argparse.BooleanOptionalAction, default=False, help="print the prompt first",
    )  # fmt: skip
    group.add_argument("--no-perf", action="store_true", help="no timings on standard error")
    _add_generation(parser)
    parser.set_defaults(run=_run)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    group = parser.add_argument_group("conversation (reads lines from standard input if that is not a terminal)")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="answer this and leave")
    group.add_argument("-sys", "--system-prompt", metavar="TEXT")
    _add_generation(parser)
    parser.set_defaults(run=_chat)


def _run(args: argparse.Namespace) -> int:
    from hotcold.runtime.console import TextOut, note, timing_summary
    from hotcold.runtime.generate import GenerationStats
    from hotcold.runtime.gguf_file import open_gguf
    from hotcold.runtime.sampling import Sampler

    sampler = Sampler(_sampling(args))
    if args.system_prompt is not None and not args.single_turn:
        args.parser.error("-sys needs -st: without it the prompt is a text to continue")
    if args.special and args.single_turn:
        args.parser.error("--special is not for -st: a message is always plain text")
    if args.prompt is None:
        open_gguf(args.model).close()  # a missing model is told before a missing prompt
    prompt = _prompt(args)
    out, stats, interrupted = TextOut(sys.stdout), GenerationStats(), False
    with _open(args) as model:
        loaded = time.perf_counter()
        try:
            if args.display_prompt:
                out.write(prompt + ("\n" if args.single_turn else ""))
            for piece in _pieces(args, model, sampler, prompt, stats):
                out.write(piece)
        except KeyboardInterrupt:
            interrupted = True
        out.end_line()
        if stats.stop_reason == "context":
            note(f"context full: all {model.n_ctx} tokens are used, so the text ends here; see --ctx-size")
    if not args.no_perf:
        total = time.perf_counter() - args.began
        for line in timing_summary(stats, loaded - args.began, total):
            note(line)
        if args.temp > 0:
            note(f"            seed = {sampler.seed}")
    return INTERRUPTED if interrupted else 0


def _pieces(
    args: argparse.Namespace, model: Model, sampler: Sampler, prompt: str, stats: GenerationStats
) -> Iterator[str]:
    """The text `run` generates."""
    if args.single_turn:
        head = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        tokens = model.encode_chat([*head, {"role": "user", "content": prompt}])
    else:
        tokens = model.tokenizer.encode(prompt, add_special=True, parse_special=args.special)
    return model.session.generate(
        tokens,
        sampler,
        max_tokens=args.predict,
        stop=args.stop,
        ignore_eog=args.ignore_eos,
        continues=not args.single_turn,
        lookup=args.lookup,
        stats=stats,
    )


def _chat(args: argparse.Namespace) -> int:
    from hotcold.runtime.console import TextOut, input_lines
    from hotcold.runtime.repl import Repl, ReplOptions, run_lines

    options = ReplOptions(_sampling(args), args.system_prompt, args.predict, args.ignore_eos, args.stop, args.lookup)
    for what, text in (("-sys", args.system_prompt), ("-p", args.prompt)):
        _check_text(what, text)
    out = TextOut(sys.stdout)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with _open(args) as model:
        _ = model.template  # says now if the file's own does not work
        if args.prompt is not None:
            repl = Repl(model, options, out)
            repl.send(args.prompt)
            _say_computed(repl)
            return 1 if repl.failed else 0
        if not terminal:
            return run_lines(Repl(model, options, out), input_lines(sys.stdin.buffer))

        from hotcold.runtime.terminal import Interrupts, run_terminal

        def say(line: str) -> None:
            print(printable(line), flush=True)

        say(f"{model.config.name or args.model.name}, {model.n_ctx} tokens of context. /help lists the commands.")
        with Interrupts() as interrupts:
            repl = Repl(model, options, out, say, interrupts.allowed)
            status = run_terminal(repl, interrupts, say)
        _say_computed(repl)
        return status


def _say_computed(repl: Repl) -> None:
    """What the last answer skipped, if it skipped anything."""
    from hotcold.runtime.console import note, share_line

    layers = repl.last_layers
    if layers is not None and layers.bytes_share < 1:
        note(f"neurons computed: {share_line(layers)}")


def _place(wanted: Wanted) -> tuple[GpuPlacement, str]:
    """Runtime knows nothing of placement; here it is asked for it, if there is a GPU."""
    from hotcold.placement.choose import placer
    from hotcold.runtime.console import note

    return placer(note)(wanted)


def _open(args: argparse.Namespace) -> Model:
    from hotcold.runtime.api import Model
    from hotcold.runtime.console import note

    model = Model.open(
        args.model,
        sparsity=args.sparsity,
        threads=args.threads,
        n_ctx=args.ctx_size,
        kv_type=args.kv_type,
        mmap=args.mmap,
        mlock=args.mlock,
        notify=note,
        gpu=gpu_options(args, _place),
    )
    gc.freeze()  # what is there now stays, and need not be looked at again
    gc.enable()
    return model


def _sampling(args: argparse.Namespace) -> SamplingParams:
    from hotcold.runtime.generate import StopFilter
    from hotcold.runtime.sampling import SamplingParams

    try:
        StopFilter(args.stop)
        return SamplingParams(
            args.temp, args.top_k, args.top_p, args.min_p, args.repeat_penalty, args.repeat_last_n, args.seed
        )
    except HotcoldError as error:
        parser: argparse.ArgumentParser = args.parser
        parser.error(str(error))


def _prompt(args: argparse.Namespace) -> str:
    """The prompt of `run`, from -p, -f or standard input. Exits with 2 if there is none."""
    _check_text("-sys", args.system_prompt)
    if args.prompt is not None:
        _check_text("-p", args.prompt)
        return str(args.prompt)
    if args.file is not None:
        name = str(args.file)
        raw = read_input(name, lambda: args.file.open("rb"))
    else:
        if sys.stdin.isatty():
            args.parser.error("no prompt: give -p TEXT or -f FILE, or pipe it in (hotcold chat has a conversation)")
        name = "standard input"
        raw = read_input(name, lambda: contextlib.nullcontext(sys.stdin.buffer))
        if not raw:
            args.parser.error("no prompt: standard input is empty; give -p TEXT or -f FILE")
    try:
        text: str = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HotcoldError(
            f"the prompt from {name} is not UTF-8: byte {error.start} is {raw[error.start]:#04x}"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def _check_text(option: str, text: str | None) -> None:
    """Arguments that are not UTF-8 reach Python as half surrogates, which no tokenizer can take."""
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError:
        raise HotcoldError(f"the text of {option} is not valid in this locale's encoding; use UTF-8") from None


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current folder
        raise HotcoldError("no such file: ''")
    return Path(text)


def _whole(text: str) -> int:
    """Plain digits only: int() also takes underscores, spaces and the digits of all scripts."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {_shown(text)}")
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"must be a number, got {_shown(text)}")
    return float(text)


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {value:g}")
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _count(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _size(text: str) -> int:
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 (the model's) or more, got {value}")
    return value


def _draft(text: str) -> int:
    try:
        return draft_limit(_whole(text))
    except HotcoldError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _limit(text: str) -> int:
    value = _whole(text)
    if value < -1:
        raise argparse.ArgumentTypeError(f"must be -1 (no limit) or more, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
