"""YAML that others wrote: what its aliases and merges stand for is bounded before anything expands them."""

from typing import Any, Final

import yaml
from yaml.nodes import CollectionNode, Node

MAX_NODES: Final = 1_000_000
"""What a text may stand for. Nine lines of nine aliases each stand for 400 million, and took minutes and GB."""


class TooLarge(yaml.YAMLError):
    """It stands for more than `MAX_NODES`."""


def load(text: str) -> Any:
    """
    Return what *text* says, as `yaml.safe_load`.

    :raises yaml.YAMLError: it is not YAML, or stands for too much
    """
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
    """:raises TooLarge: with all aliases written out it would have more than `MAX_NODES` nodes"""
    if _count(root, {}) > MAX_NODES:
        raise TooLarge(f"its aliases (*) and merges (<<) stand for more than {MAX_NODES:,} values")


def _count(node: Node, known: dict[int, int]) -> int:
    if not isinstance(node, CollectionNode):
        return 1
    found = known.get(id(node))
    if found is None:
        known[id(node)] = 1  # of itself inside itself: readers refuse that
        parts = (part for each in node.value for part in (each if isinstance(each, tuple) else (each,)))
        found = known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return found
