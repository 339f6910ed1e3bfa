"""The configuration file as plain mappings: YAML, read so that nothing is lost or leaked on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from sidecar.config.problems import ConfigError
from sidecar.config.values import quoted

if TYPE_CHECKING:
    from collections.abc import Hashable
    from pathlib import Path

_LARGEST_FILE = 1 << 20


def read_bounded(path: Path, limit: int) -> str:
    """The text of a small file.

    Raises:
        ValueError: unreadable, larger than `limit` bytes, or not UTF-8; the text holds the path, no content.
    """
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise ValueError(f"cannot read {quoted(str(path))}: {reason}") from None
    if len(content) > limit:
        raise ValueError(f"cannot read {quoted(str(path))}: larger than {limit} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"cannot read {quoted(str(path))}: line {line} is not UTF-8") from None


def read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The file's top-level mapping ({} when it is empty), and the problems that do not stop the reading.

    Aliases give one shared object, so whoever changes a value copies what is around it.

    Raises:
        ConfigError: the file cannot be read, or is not YAML with a mapping at the top.
    """
    try:
        text = read_bounded(path, _LARGEST_FILE)
    except ValueError as error:
        raise ConfigError([f"{error}; check the path given with --config"]) from None
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([f"line {line}: control characters are not allowed in YAML; remove them"]) from None
    try:
        content = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_syntax_problem(error)]) from None
    except RecursionError:
        raise ConfigError(["nested too deeply; the configuration has at most five levels"]) from None
    except (ValueError, LookupError, AttributeError, TypeError):
        line = loader.get_mark().line + 1
        raise ConfigError(
            [f"before line {line}: a value does not fit its YAML type; put it in quotes"]
        ) from None
    finally:
        loader.dispose()
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(["the file must be a mapping at the top, such as `gateway: {address: ...}`"])
    # Mappings are built outside in; the reader goes from top to bottom.
    return content, [text for _, text in sorted(loader.problems)]


def _syntax_problem(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    text = str(error.problem or "")
    # The parser's own texts may repeat a value (`*token` is an alias to YAML), and a value may be a secret.
    if isinstance(error, yaml.composer.ComposerError):
        if "single document" in str(error.context):
            return f"{where}a second document starts here; use one file per configuration"
        return f"{where}an alias (*name) without its anchor; a value that starts with * needs quotes"
    if isinstance(error, yaml.constructor.ConstructorError) or "tag" in text:
        return f"{where}a tag that is not supported; a value that starts with ! needs quotes"
    return f"{where}not valid YAML: {text}"


class _Loader(yaml.SafeLoader):
    """Safe YAML that reports what YAML would silently drop."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[tuple[int, str]] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        first_seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                self._report(line, "keys must be plain text; merge keys (<<) are not supported")
                continue
            key = key_node.value
            if key in first_seen:
                self._report(
                    line, f"{quoted(key)} is already set in line {first_seen[key]}; remove one of them"
                )
            first_seen.setdefault(key, line)
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping

    def _report(self, line: int, text: str) -> None:
        self.problems.append((line, f"line {line}: {text}"))
