"""The Python interface: a model, opened.

In: the path of a GGUF file. Out: logits, text, tokenizer, configuration. Next: cli.py and repl.py, which use it too.

    from hotcold.runtime import Model
    with Model.open("model.gguf") as model:
        for piece in model.generate("Once upon a time", max_tokens=64, seed=1):
            print(piece, end="", flush=True)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotcold.runtime.chat import ChatTemplate
from hotcold.runtime.engine import Engine
from hotcold.runtime.errors import HotcoldError
from hotcold.runtime.generate import GenerationStats, Session, StopFilter
from hotcold.runtime.gpu.choose import GpuOptions
from hotcold.runtime.lookup import draft_limit
from hotcold.runtime.sampling import Sampler, SamplingOptions, SamplingParams
from hotcold.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's own from Python 3.11 on

    from hotcold.runtime.config import ModelConfig

_log = logging.getLogger("hotcold")


class Model:
    """A model in memory. Open it with Model.open; several may be open at once. After close() every use is an error.

    Calls may come from several Python threads; they take turns. `config` holds the file's numbers (layers, heads,
    vocabulary, ...), `stats` describes the last generation: tokens, seconds, why it ended.
    """

    config: ModelConfig
    stats: GenerationStats

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, notify: Callable[[str], None] = _log.info) -> None:
        """Take over an open engine, which close() closes. Model.open is the usual way in."""
        self._session: Session | None = Session(engine, tokenizer)
        self._notify = notify
        self.config = engine.config
        self.stats = GenerationStats()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        sparsity: str = "auto",
        threads: int | None = None,
        n_ctx: int | None = None,
        *,
        kv_type: str = "f16",
        mmap: bool = True,
        mlock: bool = False,
        notify: Callable[[str], None] = _log.info,
        gpu: str | GpuOptions | None = None,
    ) -> Model:
        """Open a GGUF file.

        sparsity: "exact" (skip neurons that are exactly off), "dense" (compute all), "predict" (look only at neurons
        that the file's predictors choose; not exact), "auto" (exact where neurons switch off). threads: None for what
        the machine gives this process. n_ctx: tokens of context; None for the smaller of 4096 and what the model was
        trained on. kv_type: "f16", "q8_0" or "f32". mmap: False reads the file into memory instead of mapping it.
        mlock: keep it in RAM, where the system allows that. notify: gets one line for each thing worth knowing
        (default: the logger "hotcold", level INFO). gpu: "off", "auto" (used if there is one, and `notify` is told if
        not), "required" (or an error), None (auto, and silent where there is none), or GpuOptions: how much
        VRAM, which plan. Without its `place`, whole layers are on the GPU.

        Raises HotcoldError if the file is not a model this program computes, or an option is out of range.
        """
        if gpu is not None and not isinstance(gpu, (str, GpuOptions)):
            raise HotcoldError("gpu must be off, auto, required, None or GpuOptions, as in GpuOptions(vram_budget=8 << "
                               f"30); got {gpu!r}")  # fmt: skip
        engine = Engine.open(
            path, sparsity=sparsity, threads=threads, n_ctx=n_ctx, kv_type=kv_type, mmap=mmap, mlock=mlock,
            notify=notify, gpu=GpuOptions(gpu) if gpu is None or isinstance(gpu, str) else gpu,
        )  # fmt: skip
        try:
            vocabulary = engine.file.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"
            tokenizer = Tokenizer.from_gguf(engine.file) if vocabulary else None
        except BaseException:
            engine.close()
            raise
        return cls(engine, tokenizer, notify)

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's vocabulary. Raises HotcoldError if it has none: then only logits() of token ids can be used."""
        return self.session.tokenizer

    @cached_property
    def template(self) -> ChatTemplate:
        """The file's chat template, or a built-in one if that is missing or broken (`notify` is told)."""
        return ChatTemplate.for_tokenizer(self.tokenizer, notify=self._notify)

    @property
    def session(self) -> Session:
        """The engine with its KV cache. Raises HotcoldError after close()."""
        if self._session is None:
            raise HotcoldError("this model is closed: open it again with Model.open(path)")
        return self._session

    @property
    def n_ctx(self) -> int:
        """Tokens the context holds."""
        return self.session.engine.n_ctx

    def logits(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """Logits after each token: float32 [n_tokens, n_vocab]. The text is exactly `token_ids`, nothing is added.

        A generation in progress goes on correctly afterwards (it evaluates its text again).
        Raises HotcoldError for an empty or too long text, or an id outside the vocabulary.
        """
        return self.session.all_logits(_token_list(token_ids))

    def generate(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.integer],
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        parse_special: bool = False,
        lookup: bool | int = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Continue a text; yields pieces of whole characters as they become certain.

        A prompt given as text is encoded with the model's own beginning-of-sequence token, and special tokens in it
        are plain text unless parse_special. Token ids are taken as they are. The text ends before the first of the
        `stop` strings, after max_tokens (None: no limit), when the context is full, or, unless ignore_eos, where the
        model ends it. lookup: draft from what the text said before, True or at most so many tokens; faster where the
        text repeats itself or its prompt, and never another text (lookup.py). sampling: temperature, top_k, top_p,
        min_p, repeat_penalty, repeat_last_n and seed, with the meaning and the defaults of SamplingParams. Raises
        HotcoldError at once for arguments out of range, and when iterated for a prompt that does not fit the context.
        """
        _ = self.session  # closed?
        params = SamplingParams(**sampling)
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_special=True, parse_special=parse_special)
        else:
            tokens = _token_list(prompt)
        return self._generate(tokens, params, max_tokens, stop, ignore_eos=ignore_eos, lookup=lookup)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        lookup: bool | int = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """The assistant's next message, in pieces. messages: [{"role": "user", "content": "..."}, ...].

        The model's chat template is applied; text in messages never becomes a special token. Only the part that is
        new since the last call is evaluated. Other arguments and errors as in generate.
        """
        params = SamplingParams(**sampling)
        return self._generate(self.encode_chat(messages), params, max_tokens, stop, continues=False, lookup=lookup)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer. messages: as for chat.

        Raises HotcoldError for messages that are not like that, or that the template refuses.
        """
        _ = self.session  # closed?
        return self.template.encode(self.tokenizer, [dict(m) for m in messages], add_generation_prompt=True)

    def _generate(
        self,
        tokens: list[int],
        params: SamplingParams,
        max_tokens: int | None,
        stop: str | Sequence[str],
        *,
        ignore_eos: bool = False,
        continues: bool = True,
        lookup: bool | int = False,
    ) -> Iterator[str]:
        if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, np.integer))):
            raise HotcoldError(f"max_tokens must be a whole number or None, got {max_tokens!r}")
        StopFilter([stop] if isinstance(stop, str) else stop)  # complain now, not at the first piece
        draft_limit(lookup)
        stats = self.stats = GenerationStats()  # a local name: another thread may put its own there at any moment
        _ = self.tokenizer  # complain now, too, if there is none
        pieces = self.session.generate(
            tokens,
            Sampler(params),
            max_tokens=max_tokens,
            stop=stop,
            ignore_eog=ignore_eos,
            continues=continues,
            lookup=lookup,
            stats=stats,
        )
        return self._while_open(pieces)

    def _while_open(self, pieces: Iterator[str]) -> Iterator[str]:
        while True:
            _ = self.session  # closed in the meantime?
            try:
                piece = next(pieces)
            except StopIteration:
                return
            yield piece

    def close(self) -> None:
        """Stop the workers and release the file. Harmless when already closed."""
        if self._session is not None:
            session, self._session = self._session, None
            session.engine.close()
            if "template" in self.__dict__:  # it was asked for
                self.template.close()

    def __enter__(self) -> Model:
        _ = self.session
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _token_list(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> list[int]:
    """Token ids as Python ints. Raises HotcoldError for anything that is not a flat sequence of whole numbers."""
    array = np.asarray(token_ids)
    if array.size and (array.ndim != 1 or not np.issubdtype(array.dtype, np.integer)):
        raise HotcoldError(f"token ids must be a flat list of whole numbers, got {array.dtype} of shape {array.shape}")
    return [int(t) for t in array.ravel()]
