"""Check conversations written for a persona before anything is trained on them.

A persona set is one or two JSON Lines files, `train.jsonl` and `test.jsonl`: rows with `messages`, and `kind` where it
is "identity". recipes/persona/README.md describes the format.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..tokenization.special import SPECIAL_TOKENS

ROLES = ("system", "user", "assistant")
IDENTITY = "identity"
LEAK_WORDS = 5  # so many words in a row of a test question must not occur in a training question
MAX_REPLY_WORDS = 60
MAX_CONVERSATION_WORDS = 180  # about 256 tokens of a small English vocabulary, headers included

# Where somebody says who they are; the group is what they say. A name begins with a capital letter.
_CLAIM = re.compile(r"\b(?:I am(?: called)?|I['’]m|[Mm]y name is|[Cc]all me)\s+(?:the\s+)?([^\W\d_][\w-]*)")


@dataclass(frozen=True)
class Row:
    """A conversation that could be read, with the place it stands at."""

    file: str
    line: int
    kind: str
    messages: list[dict[str, str]]

    def said_by(self, role: str) -> list[str]:
        """What `role` says, in order."""
        return [message["content"] for message in self.messages if message["role"] == role]


@dataclass(frozen=True)
class Problem:
    """What is wrong with one conversation; `kind` is format, role, length, duplicate, leak or identity."""

    file: str
    line: int
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.message}"


@dataclass
class PersonaReport:
    """What was read and every problem found; `identical_replies` are for information, they are no problem."""

    name: str | None
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    identical_replies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """There is no problem."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {"ok": self.ok, **asdict(self)}

    def lines(self) -> list[str]:
        """The report for people."""
        lines = [str(problem) for problem in self.problems]
        for path, counts in self.files.items():
            shown = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items())
            lines.append(f"{path}: {shown}")
        for same in self.identical_replies:
            lines.append(f"note: {same['places'][0]} replies the same as {same['places'][1]}: {same['reply']!r}")
        verdict = "no problem" if self.ok else f"{len(self.problems):,} problem{'s' * (len(self.problems) > 1)}"
        return [*lines, f"{verdict}; the assistant is {self.name or 'never named'}"]


def check_persona(paths: Sequence[str | Path], name: str | None = None) -> PersonaReport:
    """Check the persona set in a folder (`train.jsonl` and `test.jsonl`) or in the given files.

    Args:
        paths: one folder, or JSON Lines files; a file whose name begins with "test" is held out.
        name: the assistant's name; None takes the one that replies to identity questions claim most often.

    Raises:
        DataError: a path does not exist, or a folder holds neither file.
    """
    files = _files(paths)
    problems: list[Problem] = []
    rows = [row for path in files for row in _read_rows(path, problems)]
    name = name or _claimed_most(rows)
    report = PersonaReport(name, problems=problems)
    held_out = {str(path) for path in files if path.name.startswith("test")}
    train, test = ([row for row in rows if (row.file in held_out) is side] for side in (False, True))
    for row in rows:
        problems += _length_problems(row)
        problems += _identity_problems(row, name)
    problems += _duplicates(rows)
    problems += _leaks(train, test)
    report.identical_replies = _identical_replies(train, test)
    order = {str(path): place for place, path in enumerate(files)}
    problems.sort(key=lambda problem: (order[problem.file], problem.line))
    report.files = {str(path): _counts([row for row in rows if row.file == str(path)]) for path in files}
    return report


def words(text: str) -> list[str]:
    """The words of a text without case and punctuation: how texts are compared here."""
    return re.sub(r"[^\w\s]", "", text.casefold()).split()


def grams(text: str) -> set[tuple[str, ...]]:
    """Every `LEAK_WORDS` words in a row of a text; the whole text where it has fewer."""
    found = words(text)
    if len(found) < LEAK_WORDS:
        return {tuple(found)} - {()}
    return {tuple(found[start : start + LEAK_WORDS]) for start in range(len(found) - LEAK_WORDS + 1)}


def _files(paths: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [path / name for name in ("train.jsonl", "test.jsonl") if (path / name).is_file()]
            if not inside:
                raise DataError(f"{path} holds neither train.jsonl nor test.jsonl. Give their folder, or JSONL files.")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path} does not exist. Give a folder with train.jsonl and test.jsonl, or JSONL files.")
    return list(dict.fromkeys(found))


def _read_rows(path: Path, problems: list[Problem]) -> Iterator[Row]:
    """The conversations of a file; lines that are none are added to `problems`."""
    read = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        read += 1
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            problems.append(Problem(str(path), number, "format", f"not a line of UTF-8 JSON ({error})"))
            continue
        wrong = _format_problem(value)
        if wrong is not None:
            problems.append(Problem(str(path), number, "format", wrong))
            continue
        row = Row(str(path), number, value.get("kind", ""), value["messages"])
        roles = _role_problem([message["role"] for message in row.messages])
        if roles is not None:
            problems.append(Problem(str(path), number, "role", roles))
        yield row
    if not read:
        problems.append(Problem(str(path), 1, "format", "the file holds no conversation"))


def _format_problem(value: Any) -> str | None:
    """Why a JSON value is no conversation; None when it is one."""
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list) or not value["messages"]:
        return 'not an object with a list "messages"'
    if not isinstance(value.get("kind", ""), str):
        return f"kind is {value['kind']!r}, not text"
    for place, message in enumerate(value["messages"], 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return f'message {place} is not an object with the texts "role" and "content"'
        if not message["content"].strip():
            return f"message {place} ({message['role']}) is empty"
        control = [token for token in SPECIAL_TOKENS if token in message["content"]]
        if control:
            return f"message {place} ({message['role']}) spells the control token {control[0]}"
    return None


def _role_problem(roles: list[str]) -> str | None:
    """What is wrong with the order of the speakers; None when nothing is."""
    for place, role in enumerate(roles, 1):
        if role not in ROLES:
            return f"message {place} has the role {role!r}; {', '.join(ROLES)} are known"
        if role == "system" and place > 1:
            return f"message {place} is a system message; only the first may be one"
        if place > 1 and role == roles[place - 2]:
            return f"messages {place - 1} and {place} are both the {role}'s; they take turns"
    if roles[-1] != "assistant":
        return f"the last message is the {roles[-1]}'s; a conversation ends with a reply of the assistant"
    return None if "user" in roles else "no message is the user's"


def _length_problems(row: Row) -> Iterator[Problem]:
    for reply in row.said_by("assistant"):
        if len(words(reply)) > MAX_REPLY_WORDS:
            message = f"a reply has {len(words(reply)):,} words; {MAX_REPLY_WORDS} at most"
            yield Problem(row.file, row.line, "length", message)
    total = sum(len(words(message["content"])) for message in row.messages)
    if total > MAX_CONVERSATION_WORDS:
        message = f"the conversation has {total:,} words; {MAX_CONVERSATION_WORDS} at most"
        yield Problem(row.file, row.line, "length", message)


def _claims(text: str) -> list[str]:
    """The names that somebody gives themselves in a text."""
    return [claim for claim in _CLAIM.findall(text) if claim[0].isupper()]


def _claimed_most(rows: list[Row]) -> str | None:
    claims = (
        claim for row in rows if row.kind == IDENTITY for text in row.said_by("assistant") for claim in _claims(text)
    )
    most = Counter(claims).most_common(1)
    return most[0][0] if most else None


def _identity_problems(row: Row, name: str | None) -> Iterator[Problem]:
    replies = row.said_by("assistant")
    if row.kind == IDENTITY and not any(name is not None and re.search(rf"\b{re.escape(name)}\b", r) for r in replies):
        message = f"no reply names {name}" if name else "no reply says who the assistant is"
        yield Problem(row.file, row.line, "identity", message)
    for reply in replies:
        for claim in _claims(reply):
            if claim != name:
                yield Problem(row.file, row.line, "identity", f"a reply claims to be {claim}, not {name}: {reply!r}")


def _duplicates(rows: list[Row]) -> Iterator[Problem]:
    """Conversations in which user and system say what they say in an earlier one."""
    seen: dict[tuple[tuple[str, ...], ...], Row] = {}
    for row in rows:
        asked = tuple((m["role"], *words(m["content"])) for m in row.messages if m["role"] != "assistant")
        first = seen.setdefault(asked, row)
        if first is not row:
            same = [words(reply) for reply in row.said_by("assistant")] == [
                words(r) for r in first.said_by("assistant")
            ]
            message = f"asks the same as {first.file}:{first.line}, with {'the same' if same else 'another'} reply"
            yield Problem(row.file, row.line, "duplicate", message)


def _leaks(train: list[Row], test: list[Row]) -> Iterator[Problem]:
    """Test questions that share `LEAK_WORDS` words in a row, or all of their fewer words, with a training question."""
    home = {gram: row for row in reversed(train) for text in row.said_by("user") for gram in grams(text)}
    for row in test:
        shared = sorted(gram for text in row.said_by("user") for gram in grams(text) & home.keys())
        if shared:
            source = home[shared[0]]
            message = f"shares {' '.join(shared[0])!r} with the training question at {source.file}:{source.line}"
            yield Problem(row.file, row.line, "leak", message)


def _identical_replies(train: list[Row], test: list[Row]) -> list[dict[str, Any]]:
    home = {" ".join(words(reply)): row for row in reversed(train) for reply in row.said_by("assistant")}
    return [
        {"reply": reply, "places": [f"{row.file}:{row.line}", f"{home[same].file}:{home[same].line}"]}
        for row in test
        for reply in row.said_by("assistant")
        if (same := " ".join(words(reply))) in home
    ]


def _counts(rows: list[Row]) -> dict[str, int]:
    replies = [len(words(reply)) for row in rows for reply in row.said_by("assistant")]
    return {
        "conversations": len(rows),
        "with_several_rounds": sum(len(row.said_by("user")) > 1 for row in rows),
        "about_identity": sum(row.kind == IDENTITY for row in rows),
        "replies": len(replies),
        "words_in_the_longest_reply": max(replies, default=0),
    }
