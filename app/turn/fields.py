"""The fields of a request's body by which its turn is routed: as few as there are, and never judged.

A body is read twice at most. The first reading (`FieldReader.decode`) takes a microsecond or two, and knows strict JSON
with the types that are expected. What it cannot read may well be read by a worker, so `FieldReader.find` goes through
the body once more, for these fields alone: as Python's `json` it takes a byte-order mark, UTF-16, `NaN` and half a
surrogate pair; it looks at nothing else, goes however deep without recursion, and passes over what is of another type.
Of two equal names the last one counts, here as in both readers: which session a turn is of must never depend on the way
in which its body was read.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast

import msgspec

_STEPS = 100_000
"""Quotes, brackets and backslashes before quotes after which the second reading is given up: about 20 ms."""
_STEPS_OF_A_NAME = 10
_BETWEEN = 1024 * 1024
"""Bytes outside of strings after which it is given up, and bytes of the largest body in UTF-16 or UTF-32: about 10 ms.
What is in strings costs next to nothing, be it a picture of many megabytes."""
_QUOTE, _BACKSLASH = 0x22, 0x5C
_BEHIND = 4096
"""Bytes behind a value, its comma and blanks, of which more than that make it none."""
_NO_TEXT = object()
"""Stands for a value that is neither a text nor a number."""

_mark = re.compile(rb'["{}\[\]]').search
_colon = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+").match
_begin = re.compile(rb"[ \t\r\n]*+\{").match
_BLANK = b" \t\r\n"
_string = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL).match
_MAX_MODEL = 256


class BodyHints(msgspec.Struct):
    """Dynamo's extension of the request (`nvext`), as far as it places."""

    backend_instance_id: str | int | None = None
    decode_worker_id: str | int | None = None
    prefill_worker_id: str | int | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None


class Fields(msgspec.Struct):
    """What routing needs of a request body; everything else is skipped, and the bytes travel as they came."""

    model: str | None = None
    nvext: BodyHints | None = None

    @property
    def said(self) -> Mapping[str, msgspec.Raw]:
        """Of its prompt, by field; nothing, where nobody wants to know."""
        return {}


_ABSENT = msgspec.Raw()


class PromptFields(Fields):
    """Those that tell of its prompt as well, as they stand there."""

    tools: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT

    @property
    def said(self) -> Mapping[str, msgspec.Raw]:
        found = {}
        for name in self.__struct_fields__[_OTHERS:]:
            value = getattr(self, name)
            if value is not _ABSENT and isinstance(value, msgspec.Raw) and value != _NULL:
                found[name] = value
        return found


class ExactPromptFields(PromptFields):
    """Those that say how it is rendered, too."""

    add_generation_prompt: msgspec.Raw = _ABSENT
    continue_final_message: msgspec.Raw = _ABSENT
    add_special_tokens: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    reasoning_effort: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT
    response_format: msgspec.Raw = _ABSENT
    mm_processor_kwargs: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    truncate_prompt_tokens: msgspec.Raw = _ABSENT
    structured_outputs: msgspec.Raw = _ABSENT
    functions: msgspec.Raw = _ABSENT
    include_reasoning: msgspec.Raw = _ABSENT
    kv_transfer_params: msgspec.Raw = _ABSENT


Prompts = Literal["no", "yes", "exactly"]
"""Whether what tells of the prompt is read of a body, and how it is rendered."""
_FIELDS: dict[Prompts, type[Fields]] = {"no": Fields, "yes": PromptFields, "exactly": ExactPromptFields}
_OTHERS = len(Fields.__struct_fields__)
_NULL = msgspec.Raw(b"null")


class Found(msgspec.Struct):
    """What was found in a body at a second look."""

    fields: Fields
    ids: dict[str, str]
    misfits: int = 0
    """Hints of a type that no hint has: passed over."""


class TooLarge(Exception):
    """A body that was not gone through to its end."""


class FieldReader:
    """Reads the fields of bodies, and of these `ids`: paths like `metadata.session_id`, whose values are texts."""

    def __init__(self, ids: Iterable[str] = (), *, prompts: Prompts = "no") -> None:
        """`prompts`: what tells of the prompt is wanted."""
        self._ids = tuple(ids)
        fields = _FIELDS[prompts]
        self.names: frozenset[str] | None = None
        """Of the members that are read, where these are short; None: the prompt is one of them."""
        if prompts == "no":
            self.names = frozenset((*fields.__struct_fields__, *(path.partition(".")[0] for path in self._ids)))
        self.decode: Callable[[bytes], Fields] = msgspec.json.Decoder(fields).decode
        """Without ids. Raises msgspec.DecodeError or RecursionError, as `decode_with_ids`."""
        self.decode_with_ids: Callable[[bytes], Fields] = msgspec.json.Decoder(_with_ids(self._ids, fields)).decode

    def ids(self, decoded: Fields) -> dict[str, str]:
        """The ids that `decode_with_ids` has read, by their paths."""
        texts = {}
        for path in self._ids:
            value: Any = decoded
            for step in path.split("."):
                value = getattr(value, step, None)
            if value is not None:
                texts[path] = value
        return texts

    def find(self, body: bytes) -> Found | None:
        """The fields of a body that `decode` cannot read; None: it is no JSON object. Raises TooLarge."""
        text = _in_utf8(body)
        spans = None if text is None else _members(text)
        if text is None or spans is None:
            return None
        ids = {path: value for path in self._ids if isinstance(value := _at(text, spans, *path.split(".")), str)}
        model = _at(text, spans, "model")
        found = Found(Fields(model if isinstance(model, str) else None), ids)
        if "nvext" not in spans or (said := text[slice(*spans["nvext"])]) == b"null":
            return found
        hints = _members(said)
        if hints is None:
            found.misfits = 1
            return found
        found.fields.nvext = BodyHints()
        for name in BodyHints.__struct_fields__:
            value = _at(said, hints, name)
            if isinstance(value, int) or (isinstance(value, str) and name in _MAY_BE_TEXT):
                setattr(found.fields.nvext, name, value)
            elif value is not None:
                found.misfits += 1
        return found


def parse_aliases(texts: Iterable[str]) -> dict[str, str]:
    """Of words like `small=qwen3-8b`: what clients say → the model that is meant. Raises ValueError with the remedy."""
    aliases: dict[str, str] = {}
    for text in texts:
        alias, equals, model = text.partition("=")
        if not equals or not 0 < len(alias) <= _MAX_MODEL or not 0 < len(model) <= _MAX_MODEL:
            raise ValueError(f"{text!r} is no alias of a model; write ALIAS=MODEL, like small=qwen3-8b")
        if aliases.setdefault(alias, model) != model:
            raise ValueError(f"{alias!r} is given as an alias of {aliases[alias]!r} and of {model!r}; remove one")
    for alias, model in aliases.items():
        if model in aliases:
            raise ValueError(
                f"{alias!r} is an alias of {model!r}, which is an alias itself; name the model that is meant"
            )
    return aliases


def with_model(body: bytes, said: str, model: str) -> bytes | None:
    """`body`, whose top-level `model` is `said`, with `model` in that place and every other byte as it was. None: the
    place is not found. Of several the last one counts, as for the readers, and it alone is changed. Raises TooLarge."""
    text = _in_utf8(body)
    spans = None if text is None else _members(text)
    if text is None or spans is None or "model" not in spans:
        return None
    token = _string(text, spans["model"][0])
    if token is None or _value(token[0]) != said:
        return None
    encoding, mark = _encoding_of(body)
    written = json.dumps(model).encode(encoding)  # in ASCII, so that any encoding will do
    begin, end = token.span()
    if encoding == "utf-8":
        return body[: mark + begin] + written + body[mark + end :]
    begin, end = (
        mark + len(text[:at].decode("utf-8", "surrogatepass").encode(encoding, "surrogatepass")) for at in (begin, end)
    )
    return body[:begin] + written + body[end:]


def members(body: bytes) -> dict[str, msgspec.Raw] | None:
    """The values of the object that a body is, by their names, each as its bytes; None: it is none, or cannot be added
    to in place. Of equal names the last one counts."""
    usual = body[:1] == b"{" and body[1:2] not in (b"", b"\0")
    if not usual and json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
        return None
    try:
        return _decode_members(body)
    except (msgspec.DecodeError, RecursionError):
        pass
    text = body.removeprefix(codecs.BOM_UTF8)
    try:
        spans = _members(text)
    except TooLarge:
        return None
    if spans is None or len(text) > _BETWEEN:
        return None
    try:
        json.loads(text)  # what is no JSON at all is for whoever gets it whole to refuse
    except (ValueError, RecursionError):
        return None
    return {name: msgspec.Raw(text[slice(*span)]) for name, span in spans.items()}


def names(body: bytes) -> Iterable[str]:
    """Of the members of the object that a body is, to whoever reads it; none: it is none. Raises TooLarge."""
    try:
        return _decode_members(body)
    except (msgspec.DecodeError, RecursionError):
        text = _in_utf8(body)
        return (None if text is None else _members(text)) or ()


def with_member(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, which is `{}`, or in which `members` has found some, with one more behind them, and every other byte as
    it was."""
    end = body.rindex(b"}")
    return b"".join((memoryview(body)[:end], b'"' if body == b"{}" else b',"', name.encode(), b'":', value, body[end:]))


def strict_members(body: bytes) -> dict[str, msgspec.Raw] | None:
    """As `members`, of a body that can be read at once; None: `members` may know more."""
    if body[:1] != b"{":
        return None
    try:
        return _decode_members(body)
    except (msgspec.DecodeError, RecursionError):
        return None


_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _encoding_of(body: bytes) -> tuple[str, int]:
    """In which a body is written, and how long its byte-order mark is."""
    for mark, encoding in _MARKED.items():  # that of UTF-32 begins like that of UTF-16
        if body.startswith(mark):
            return encoding, len(mark)
    return json.detect_encoding(body), 0


_MARKED = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF8: "utf-8",
}
_MAY_BE_TEXT = ("backend_instance_id", "decode_worker_id", "prefill_worker_id")


def _with_ids(paths: Iterable[str], fields: type[Fields]) -> type[Fields]:
    """Fields, and a member for each of the paths."""
    inner: dict[str, list[Any]] = {}
    for path in paths:
        name, _, member = path.partition(".")
        inner.setdefault(name, []).extend([(member, str | None, None)] if member else [])
    kinds = {name: msgspec.defstruct(name, members) if members else str for name, members in inner.items()}
    members = [(name, kind | None, None) for name, kind in kinds.items()]
    return cast("type[Fields]", msgspec.defstruct("FieldsWithIds", members, bases=(fields,)))


def _in_utf8(body: bytes) -> bytes | None:
    """A body as Python's `json` would decode it; None: it cannot be decoded. Raises TooLarge."""
    encoding = json.detect_encoding(body)  # UTF-8, UTF-16 or UTF-32 (RFC 7159 8.1)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[3:]
    if len(body) > _BETWEEN:
        raise TooLarge
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


def _members(text: bytes) -> dict[str, tuple[int, int]] | None:
    """Where the values of the object that `text` is are in it; None: it is none, or not whole. Raises TooLarge."""
    begin = _begin(text)
    if begin is None:
        return None
    spans: dict[str, tuple[int, int]] = {}
    marks = _Marks(text, begin.end())
    name: str | None = None
    value_at, depth = 0, 1
    while (mark := marks.next()) is not None:
        if text[mark] in b"{[":
            depth += 1
            continue
        if text[mark] != _QUOTE:
            depth -= 1
            colon = None
            if depth:
                continue
        elif depth > 1 or (colon := _colon(text, marks.at)) is None:
            continue  # a text
        # The object's end, or a name: what stands before it is a value, and a comma.
        if name is not None:
            rest = text[max(value_at, mark - _BEHIND) : mark]
            spans[name] = (value_at, mark - len(rest) + len(rest.rstrip(_BLANK).removesuffix(b",").rstrip(_BLANK)))
        if colon is None:
            return spans
        marks.spend(_STEPS_OF_A_NAME)
        name, value_at = str(_value(text[mark : marks.at])), colon.end()
    return None


def _at(text: bytes, spans: dict[str, tuple[int, int]], name: str, inner: str = "") -> Any:
    """The value of one member, or of a member of it; None where there is none."""
    if name not in spans:
        return None
    value = text[slice(*spans[name])]
    if not inner:
        return _value(value)
    members = _members(value)
    return None if members is None else _at(value, members, inner)


def _value(text: bytes) -> Any:
    """What a text, a number or a word of JSON says; `_NO_TEXT` of what is none, or a truth."""
    if not text or text[0] in b"{[":
        return _NO_TEXT
    try:
        value = json.loads(text.decode("utf-8", "surrogatepass"))
    except ValueError:
        return _NO_TEXT
    return _NO_TEXT if isinstance(value, bool) else value


class _Marks:
    """Goes through a text of JSON from bracket to bracket, and from string to string."""

    def __init__(self, text: bytes, at: int) -> None:
        self.at = at
        """Behind the bracket, or the string, that came last."""
        self._text = text
        self._steps, self._between = _STEPS, _BETWEEN

    def next(self) -> int | None:
        """Where the next bracket is, or the next string begins; None: none, or the string has no end.
        Raises TooLarge."""
        mark = _mark(self._text, self.at, self.at + self._between)
        if mark is None:
            if self.at + self._between < len(self._text):
                raise TooLarge
            return None
        start = mark.start()
        self._between -= start - self.at
        self.at = start + 1
        self.spend()
        if self._text[start] == _QUOTE and not self._skip_string():
            return None
        return start

    def _skip_string(self) -> bool:
        text, at, steps = self._text, self.at, self._steps
        while (end := text.find(b'"', at)) >= 0:
            at = end + 1
            if text[end - 1] != _BACKSLASH:
                break
            before = end - 2
            while text[before] == _BACKSLASH:  # which ends at the string's own quote, if not earlier
                before -= 1
                steps -= 1
                if steps < 0:
                    raise TooLarge
            if (end - before) % 2:  # backslashes in pairs: the quote is none of the text's
                break
            steps -= 1
            if steps < 0:
                raise TooLarge
        self.at, self._steps = at, steps
        return end >= 0

    def spend(self, steps: int = 1) -> None:
        """Raises TooLarge."""
        self._steps -= steps
        if self._steps < 0:
            raise TooLarge
