"""YAML of unknown authors: aliases and merges are counted before they are expanded."""

from typing import Any, Final

import yaml
from yaml.nodes import CollectionNode, Node

MAX_NODES: Final = 1_000_000
"""Nodes of one text, aliases expanded. Nine lines of nine aliases each are 400 million nodes: minutes and GB."""


class TooLarge(yaml.YAMLError):
    """The text has more than `MAX_NODES` nodes, aliases expanded."""


def load(text: str) -> Any:
    """Return the content of *text*, as `yaml.safe_load`. :raises yaml.YAMLError: it is not YAML, or too large"""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        check(root)
        return loader.construct_document(root)
    except RecursionError:
        raise TooLarge("it is nested too deeply") from None
    finally:
        loader.dispose()


def check(root: Node) -> None:
    """:raises TooLarge: it has more than `MAX_NODES` nodes, aliases expanded"""
    if _count(root, {}) > MAX_NODES:
        raise TooLarge(f"its aliases (*) and merges (<<) stand for more than {MAX_NODES:,} values")


def _count(node: Node, known: dict[int, int]) -> int:
    if not isinstance(node, CollectionNode):
        return 1
    found = known.get(id(node))
    if found is None:
        known[id(node)] = 1  # a node inside itself: readers refuse that
        parts = (part for each in node.value for part in (each if isinstance(each, tuple) else (each,)))
        found = known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return found
