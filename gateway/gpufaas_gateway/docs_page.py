"""The page at ``/docs``: the OpenAPI document as HTML, without anything from other hosts."""

import re
from collections.abc import Mapping
from html import escape
from typing import Any, Final

from gpufaas_gateway.errors import METHODS

_HEAD: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>gpufaas: API</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
  table { border-collapse: collapse }
  th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0 }
  summary { cursor: pointer; border-bottom: 1px solid #ddd; padding: .3rem 0 }
  code { font-size: 14px }
  .method { display: inline-block; width: 5rem; font-weight: 600 }
  .public { color: #666 }
</style>
"""


def render(document: Mapping[str, Any]) -> str:
    """Return *document* (`openapi.describe`) as HTML."""
    info = document["info"]
    schemas = document["components"]["schemas"]
    parts = [
        _HEAD,
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>\n<p>{escape(info['description'])}\n",
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>.\n<h2>Routes</h2>\n',
    ]
    for path, item in document["paths"].items():
        parts += [_operation(method, path, item[method], item) for method in map(str.lower, METHODS) if method in item]
    parts.append("<h2>Schemas</h2>\n")
    parts += [f'<h3 id="{escape(name)}">{escape(name)}</h3>\n{_schema(schemas[name])}\n' for name in sorted(schemas)]
    return "".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    public = ' <span class="public">needs no password</span>' if operation.get("security") == [] else ""
    rows = []
    for each in [*item.get("parameters", ()), *operation.get("parameters", ())]:
        what = f"{each['in']}{'' if each.get('required') else ', optional'}"
        rows.append(_row(f"<code>{escape(each['name'])}</code>", f"{what} {escape(each.get('description', ''))}"))
    if body := operation.get("requestBody"):
        rows.append(_row("body", _content(body.get("content", {}))))
    for status, answer in operation["responses"].items():
        said = f"{escape(answer.get('description', ''))} {_content(answer.get('content', {}))}"
        rows.append(_row(escape(status), said))
    return (
        f'<details><summary><span class="method">{method.upper()}</span><code>{escape(path)}</code> '
        f"{escape(operation.get('summary', ''))}{public}</summary>\n<table>{''.join(rows)}</table></details>\n"
    )


def _row(name: str, text: str) -> str:
    return f"<tr><td>{name}<td>{text}"


def _content(content: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{escape(media)}: {_type(each.get('schema', {}))}".rstrip(": ") for media, each in content.items()
    )


def _schema(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        _row(f"<code>{escape(name)}</code>", f"{_type(each)}{'' if name in required else ', optional'}")
        for name, each in schema.get("properties", {}).items()
    ]
    said = f"<p>{escape(schema['description'])}" if "description" in schema else ""
    return said + (f"<table>{''.join(rows)}</table>" if rows else f"<p>{_type(schema)}")


def _type(schema: Any) -> str:
    """Return the type in a few words, with a link if it has a name, its format and its description."""
    if not isinstance(schema, Mapping) or not schema:
        return ""
    if name := str(schema.get("$ref", "")).rpartition("/")[2]:
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(filter(None, map(_type, schema[key])))
    found = schema.get("type", "")
    found = " or ".join(found) if isinstance(found, list) else str(found)
    if found == "array":
        found = f"list of {_type(schema.get('items')) or 'anything'}"
    elif found == "object" and _type(schema.get("additionalProperties")):
        found = f"map to {_type(schema['additionalProperties'])}"
    else:
        found = escape(found)
    more = [escape(str(schema[key])) for key in ("format", "description") if key in schema]
    if "enum" in schema:
        more.append("one of " + ", ".join(escape(str(each)) for each in schema["enum"]))
    return re.sub(r"\s+", " ", ", ".join([found, *more]) if found else ", ".join(more))
