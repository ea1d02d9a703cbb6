"""Text <-> token ids, and chat messages -> token ids, by tokenizer.json or a GGUF file's own vocabulary."""

import datetime
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specjax.loading import chat
from specjax.loading.checkpoint import Checkpoint, token_ids
from specjax.loading.gguf import GgufCheckpoint
from specjax.loading.huggingface import read_json

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_CONFIG = "tokenizer_config.json"
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched in text before any merging


@dataclass(frozen=True)
class _Settings:
    """What tokenizer_config.json or a GGUF file says besides the vocabulary.

    `special`: {"bos_token": "<s>", ...}; `add_bos`, `add_eos`: None leaves it to the post-processor.
    """

    special: Mapping[str, str]
    add_bos: bool | None
    add_eos: bool | None
    template: str | None


class Tokenizer:
    """A tokenizer with the model's end tokens and chat template. Made by `load_tokenizer`.

    `end_ids` is the union of what config.json, generation_config.json and the tokenizer name; `source` the path
    it was read from.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: _Settings,
        *,
        end_ids: Iterable[int],
        vocab_limit: int,
        source: str,
        date: datetime.datetime,
    ):
        self._backend, self._settings, self.source, self._date = backend, settings, source, date
        self._backend.no_truncation()
        self._backend.no_padding()
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > vocab_limit:
            raise ValueError(
                f"{source} has {self.vocab_size} tokens but the model only {vocab_limit}; use the model's own tokenizer"
            )
        self._bos, self._eos, pad = (self._special_id(name) for name in ("bos", "eos", "pad"))
        own = [] if self._eos is None else [self._eos]
        self.end_ids = tuple(sorted({*end_ids, *own}))
        for end in self.end_ids:
            if end >= vocab_limit:
                raise ValueError(f"end token id {end} of {source} is outside the vocabulary of {vocab_limit} tokens")
        # A post-processor that writes a beginning token writes it for the empty text too.
        written = self._bos is not None and backend.encode("").ids[:1] == [self._bos]
        self._adds_bos = written if settings.add_bos is None else settings.add_bos and self._bos is not None
        fallback = self.end_ids[0] if self.end_ids else 0
        self.pad_id = fallback if pad is None else pad

    def _special_id(self, name: str) -> int | None:
        text = self._settings.special.get(f"{name}_token")
        if text is None:
            return None
        found = self._backend.token_to_id(text)
        if found is None:
            raise ValueError(f"{name}_token {text!r} of {self.source} is not in its vocabulary")
        return found

    @property
    def has_chat_template(self) -> bool:
        return self._settings.template is not None

    def tokens(self) -> list[str | None]:
        """The token string of every id (None in a hole of the vocabulary), for comparing two tokenizers."""
        return [self._backend.id_to_token(i) for i in range(self.vocab_size)]

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits over all pairs of id and token string."""
        lines = "\n".join(f"{i} {token}" for i, token in enumerate(self.tokens()))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Plain text -> ids with the special tokens that this tokenizer adds by itself.

        A beginning token is there once, even if both the post-processor and the settings add it or the text
        already starts with it.
        """
        settings, bos, eos = self._settings, self._bos, self._eos
        ids = self._backend.encode(text, add_special_tokens=settings.add_bos is not False).ids
        if self._adds_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
        elif self._adds_bos and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if settings.add_eos and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Ids -> text, as it was written: spaces before punctuation are not cleaned up."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def render(
        self,
        messages: Sequence[Mapping],
        template_args: Mapping | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Messages ({"role", "content"}) -> the prompt text by the chat template.

        Raises ValueError if there is no template or it refuses the messages.
        """
        if self._settings.template is None:
            raise ValueError(f"{self.source} has no chat template; pass plain prompts, or a tokenizer that has one")
        return chat.render(
            self._settings.template,
            messages,
            special=self._settings.special,
            template_args=template_args or {},
            add_generation_prompt=add_generation_prompt,
            date=self._date,
        )

    def encode_chat(self, messages: Sequence[Mapping], template_args: Mapping | None = None) -> list[int]:
        """Messages -> prompt ids. The template alone writes special tokens; none is added to them.

        As in transformers, the text of a special token becomes that token wherever it stands, in the
        template and in a message alike: escape what untrusted users write.
        """
        return self.encode_rendered(self.render(messages, template_args))

    def encode_rendered(self, text: str) -> list[int]:
        """What `render` returned -> ids; nothing is added."""
        return self._backend.encode(text, add_special_tokens=False).ids


def load_tokenizer(
    checkpoint: Checkpoint,
    tokenizer_path: str | Path | None = None,
    *,
    date: datetime.datetime = chat.TEMPLATE_DATE,
) -> Tokenizer:
    """The checkpoint's tokenizer, or the one at `tokenizer_path` (a tokenizer.json or a folder that has one).

    A tokenizer.json given with a GGUF file and without a tokenizer_config.json beside it takes the special
    tokens and the chat template from the GGUF file. `date` is what templates print as the current one.
    Raises FileNotFoundError or ValueError if there is no tokenizer, a GGUF file's pre-tokenizer is not
    supported, or an end token is outside the vocabulary.
    """
    path = Path(tokenizer_path or checkpoint.path).expanduser()
    folder = path.parent if path.name == "tokenizer.json" else path
    own = isinstance(checkpoint, GgufCheckpoint) and tokenizer_path is None
    backend = _gguf_backend(checkpoint.metadata, str(path)) if own else _folder_backend(folder)
    ends = set(checkpoint.end_ids)
    if isinstance(checkpoint, GgufCheckpoint) and not (folder / _CONFIG).exists():
        settings = _gguf_settings(checkpoint.metadata, str(checkpoint.path))
    else:
        config = _optional_json(folder / _CONFIG)
        settings = _folder_settings(folder, config)
        ends |= set(token_ids(config.get("eos_token_id"), str(folder / _CONFIG)))
        _check_added_tokens(backend, config, folder)
    return Tokenizer(
        backend,
        settings,
        end_ids=ends,
        vocab_limit=checkpoint.config.vocab_size,
        source=str(path),
        date=date,
    )


def _optional_json(path: Path) -> dict:
    return read_json(path) if path.exists() else {}


def _folder_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; save the tokenizer in its fast form to get one")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is no valid tokenizer ({error}); download it again") from error


def _folder_settings(folder: Path, config: Mapping) -> _Settings:
    fields = _optional_json(folder / "special_tokens_map.json") | config
    special = {f"{name}_token": _text(fields.get(f"{name}_token")) for name in _SPECIAL}
    return _Settings(
        special={key: text for key, text in special.items() if text is not None},
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
        template=_folder_template(folder, config),
    )


def _check_added_tokens(backend: tokenizers.Tokenizer, config: Mapping, folder: Path) -> None:
    """tokenizer_config.json repeats the added tokens; one that tokenizer.json lacks would be split."""
    for i, entry in (config.get("added_tokens_decoder") or {}).items():
        if backend.token_to_id(entry["content"]) != int(i):
            raise ValueError(
                f"{folder} has added token {entry['content']!r} with id {i} in {_CONFIG} but not in "
                "tokenizer.json; save the tokenizer again"
            )


def _text(token: str | dict | None) -> str | None:
    """A special token is stored as its text or as an object with the text in `content`."""
    return token["content"] if isinstance(token, dict) else token


def _folder_template(folder: Path, config: Mapping) -> str | None:
    """The default chat template; a file of its own goes before the field of tokenizer_config.json."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if (folder / "chat_template.json").exists():
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(f"{folder} has chat templates {', '.join(named)} but none named default; name one so")
        return named["default"]
    return template


def _gguf_backend(metadata: Mapping, source: str) -> tokenizers.Tokenizer:
    """Byte-level BPE with single digits (pre-tokenizer `smollm`); other kinds need their tokenizer.json."""
    model, kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (model, kind) != ("gpt2", "smollm"):
        raise ValueError(
            f"{source} has tokenizer {model!r} with pre-tokenizer {kind!r}; give the model's tokenizer.json"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            added = AddedToken(token, normalized=False, special=special)
            (backend.add_special_tokens if special else backend.add_tokens)([added])
    return backend


def _gguf_settings(metadata: Mapping, source: str) -> _Settings:
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    outside = [i for i in ids.values() if i is not None and i >= len(tokens)]
    if outside:
        raise ValueError(f"{source} names special token id {outside[0]} but has {len(tokens)} tokens; use a whole file")
    return _Settings(
        special={f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
        add_bos=metadata.get("tokenizer.ggml.add_bos_token"),
        add_eos=metadata.get("tokenizer.ggml.add_eos_token"),
        template=metadata.get("tokenizer.chat_template"),
    )
